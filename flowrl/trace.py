"""What happened in a run: event records and the files of one JSON object per line they are written to.

A file of lines survives a kill: every line that ended with a newline is whole, and only the last one can be torn.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from flowrl.errors import RunError

NODE_KIND = "kind"
"""Attribute of an event: kind of its node."""
STEP = "plan_step"
"""Attribute of an event: the step of a plan that it is."""
MEMORY = ("device_bytes", "process_bytes")
"""Attributes of an event with the memory of its work: peak of the device, or what the whole process had resident."""
HOST_MEMORY = "host_bytes"
"""Attribute of an event: host memory that state of its process's models takes after it, parked or kept there."""
RANK = "rank"
"""Attribute of an event: the process of a run of several that it is of."""
WAITED = "waited_s"
"""Attribute of an event: seconds of it in which its rank waited for others."""
LENGTHS = "lengths"
"""Attribute of an event: histograms of the prompts and the responses that its node sampled (`flowrl.planner.recorded`)."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time.

    Example:
        Event("compute", "rollout", step=3, start_s=1767225600.25, end_s=1767225601.5, rows=64, bytes=81920)
    """

    what: str
    """`compute` for a node's work; other words for other things that take time (`save`, `load`)."""
    node: str = ""
    """Name of the node, with the path of the sub-graph it is in; empty when none."""
    step: int = -1
    """Step of the run, from 0; -1 outside of steps."""
    start_s: float = 0.0
    """Seconds since 1970, on a clock that never runs backwards within a process."""
    end_s: float = 0.0
    rows: int = 0
    """Rows given."""
    bytes: int = 0
    """Bytes of those rows."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Anything else worth keeping: plain values."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


_START = time.time() - time.perf_counter()


def now_s() -> float:
    """Seconds since 1970 for events: comparable between processes, never running backwards within one."""
    return _START + time.perf_counter()


def to_json(value: Any) -> Any:
    """`value` as legal JSON: NaN becomes null, infinities the strings "Infinity" and "-Infinity", arrays become lists.

    Anything unknown becomes its `repr`: what is written for people to read never ends a run.
    """
    if value is None or isinstance(value, bool | int | str):
        return value if not isinstance(value, int) or isinstance(value, bool) else int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(v) for v in (sorted(value, key=repr) if isinstance(value, set | frozenset) else value)]
    if hasattr(value, "tolist"):  # NumPy arrays and scalars, without importing NumPy
        return to_json(value.tolist())
    return str(value) if isinstance(value, os.PathLike) else repr(value)


class LineWriter:
    """Appends JSON objects to a file, one a line. What is written is in the file after `flush`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lines: list[str] = []
        _drop_torn_line(self.path)

    def write(self, row: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(to_json(row), ensure_ascii=False, allow_nan=False))

    def flush(self) -> None:
        """Hand everything written to the operating system: a killed process loses none of it."""
        if self._lines:
            # one write of whole lines; surrogates that a tokenizer may leave in text are escaped, not fatal
            data = ("\n".join(self._lines) + "\n").encode("utf-8", "backslashreplace")
            with open(self.path, "ab", buffering=0) as file:
                while data:  # a disk that is nearly full takes a part, and refuses the next
                    data = data[file.write(data) :]
            self._lines = []

    def close(self) -> None:
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line without its newline, so that the next line does not join it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        block = 1 << 16
        keep = 0
        while end > 0:
            start = max(0, end - block)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                keep = start + found + 1
                break
            end = start
        file.truncate(keep)


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of lines; a torn last line is left out, a missing file has none.

    Errors: RunError for a line that is not JSON anywhere else.
    """
    path = Path(path)
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # torn by a kill
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise RunError(
                    f"{path}:{number} is not a line of JSON ({error}); the file was changed by something else"
                ) from error
            if not isinstance(row, dict):
                raise RunError(f"{path}:{number} holds {type(row).__name__}; each line is a JSON object")
            yield row


class TraceWriter:
    """Writes events; they are in the file after `flush`, which the runtime calls once a step.

    Example:
        with TraceWriter(folder / "trace.jsonl") as trace, trace.span("compute", "rollout", step=0) as attributes:
            attributes["rows"] = 8
    """

    def __init__(self, path: str | Path) -> None:
        self._lines = LineWriter(path)

    @property
    def path(self) -> Path:
        return self._lines.path

    def add(self, event: Event) -> None:
        row: dict[str, Any] = {
            "what": event.what,
            "node": event.node,
            "step": event.step,
            "start_s": event.start_s,
            "end_s": event.end_s,
            "rows": event.rows,
            "bytes": event.bytes,
        }
        if event.attributes:
            row["attributes"] = event.attributes
        self._lines.write(row)

    @contextmanager
    def span(self, what: str, node: str = "", *, step: int = -1) -> Iterator[dict[str, Any]]:
        """Time a block. The dict it gives takes `rows`, `bytes` and other attributes; a block that raises is recorded
        with the error."""
        found: dict[str, Any] = {}
        start = now_s()
        try:
            yield found
        except BaseException as error:
            found["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            rows, size = int(found.pop("rows", 0)), int(found.pop("bytes", 0))
            self.add(Event(what, node, step, start, now_s(), rows, size, found))

    def flush(self) -> None:
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_trace(path: str | Path) -> list[Event]:
    """The events of a file, in the order they were written; a torn last line is left out. Unknown fields are ignored."""
    events = []
    for row in read_lines(path):
        try:
            events.append(
                Event(
                    what=str(row["what"]),
                    node=str(row.get("node", "")),
                    step=int(row.get("step", -1)),
                    start_s=float(row["start_s"]),
                    end_s=float(row["end_s"]),
                    rows=int(row.get("rows", 0)),
                    bytes=int(row.get("bytes", 0)),
                    attributes=dict(row.get("attributes", {})),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{path} holds a line that is no event ({error!r}): {row}") from error
    return events
