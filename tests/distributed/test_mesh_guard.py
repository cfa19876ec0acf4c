"""A rank that fails ends the others within seconds, and what they say names it."""

from __future__ import annotations

import json
from pathlib import Path

from flowrl.engines.calibrate.processes import run_processes
from flowrl.engines.mesh.guard import EXIT_CODE

DEADLINE_S = 60.0
"""Well below the wait for a collective, so that a rank which waits that out fails the test."""


def run(how: str, folder: Path) -> str:
    jobs = [json.dumps({"rank": rank, "how": how, "folder": str(folder)}) for rank in range(2)]
    return run_processes("tests.distributed.guard_worker", jobs, folder, DEADLINE_S)


def said(folder: Path, name: str) -> str:
    path = folder / name
    printed = (folder / f"{name[0]}.err").read_text()
    assert path.exists(), printed[-3000:]
    return path.read_text()


def test_the_first_error_is_what_all_ranks_say(tmp_path: Path) -> None:
    """Rank 0 waits in a collective that rank 1 never comes to, because it raised."""
    assert "ended with code" in run("raises", tmp_path)
    assert said(tmp_path, "1.txt") == "OperatorError: the loss divides by zero"  # its own error, as it was
    if (tmp_path / "0.txt").exists():  # woken when rank 1's process went
        text = said(tmp_path, "0.txt")
        assert text.startswith(
            "EngineError: rank 1 failed first, at gradients of step 3: OperatorError: the loss divides by zero; rank 0 was at "
            "the loss of step 3"
        )
    else:  # or ended by its own guard before
        assert "rank 1 failed first, at gradients of step 3" in (tmp_path / "0.err").read_text()
    assert "anything after cannot begin" in said(tmp_path, "1.later.txt")


def test_a_wait_that_ends_says_what_it_waited_for(tmp_path: Path) -> None:
    run("late", tmp_path)
    text = said(tmp_path, "0.txt")
    assert text.startswith(
        "WaitTimeout: rank 0 waited 2 s for the loss of step 3; rank 1 was last at rewards; all ranks must"
    )


def test_a_rank_that_cannot_be_woken_ends(tmp_path: Path) -> None:
    """Rank 1 has failed and lives on; rank 0's wait is not one that can be aborted."""
    ended = run("stuck", tmp_path)
    assert ended == f"process 0 ended with code {EXIT_CODE}"
    printed = (tmp_path / "0.err").read_text()
    assert "rank 1 failed first, at gradients of step 3: OperatorError: the loss divides by zero" in printed
    assert "rank 0 waits at the loss of step 3 and cannot be woken" in printed
