"""What ranks on several hosts do in tests, with the null engine and without torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NULL = Path(__file__).parents[1] / "null" / "runtime"
sys.path.insert(0, str(NULL))

import failing_jobs  # noqa: E402
import rank_jobs  # noqa: E402

from flowrl.engines.launch.place import join  # noqa: E402
from flowrl.runtime.ranks.observe import RankObservation  # noqa: E402

every_flow, fails = rank_jobs.every_flow, failing_jobs.fails


def apart(said: dict[str, Any]) -> None:
    """A run whose folder the ranks of the other host do not see."""
    rank_jobs.without_math_verify()
    RankObservation._sees = lambda self, parts: False  # type: ignore[method-assign]
    with rank_jobs.on_ranks("grpo", "together", 2, out=said["folder"]) as run:
        if run.path is not None:
            Path(said["folder"], "where.json").write_text(json.dumps(str(run.path)))


def counts(said: dict[str, Any]) -> None:
    """What a rank brought over the network, and what lies in the memory of its host when all is read."""
    rank_jobs.without_math_verify()
    board = join(timeout_s=60.0)
    brought, bring = [], board.bring

    def counted(name: str, parts: Any, size: int, **options: Any) -> int:
        brought.append([sorted(parts), bring(name, parts, size, **options)])
        return int(brought[-1][1])

    board.bring = counted  # type: ignore[method-assign]
    with rank_jobs.on_ranks("grpo", "together", board.world):
        pass
    board.post(f"read/{board.rank}", b"")
    board.get([f"read/{rank}" for rank in range(board.world)], timeout_s=60.0, what=str)
    assert board.folder is not None
    left = sorted(path.name for path in board.folder.iterdir() if path.suffix in (".rows", ".brought"))
    found = {"brought": brought, "left": left, "folder": str(board.folder)}
    Path(said["folder"], f"{board.rank}.json").write_text(json.dumps(found))
