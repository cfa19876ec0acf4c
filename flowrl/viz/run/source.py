"""What a page of a run is made from: anything that reads like the folder of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from flowrl.store.rows import RowBatch
from flowrl.trace import Event


class RunFolder(Protocol):
    """The reading side of `flowrl.runtime.rundir.RunDir`. Pictures are beside the runtime, not above it, and do not import it."""

    path: Path

    @property
    def info(self) -> dict[str, Any]: ...
    @property
    def status(self) -> str: ...
    def graph_text(self) -> str: ...
    def metrics(self) -> list[dict[str, Any]]: ...
    def notes(self) -> list[tuple[int, str]]: ...
    def samples(self) -> list[dict[str, Any]]: ...
    def events(self) -> list[Event]: ...
    def edges(self) -> dict[int, list[str]]: ...
    def edge(self, step: int, node: str) -> RowBatch: ...


def stamp(folder: RunFolder) -> str:
    """Changes whenever the run has written something that a page shows."""
    sizes = []
    for name in ("run.json", "metrics.jsonl", "samples.jsonl"):
        try:
            found = (folder.path / name).stat()
            sizes.append(f"{found.st_size:x}.{found.st_mtime_ns:x}")
        except FileNotFoundError:
            sizes.append("-")
    return "_".join([*sizes, folder.status])
