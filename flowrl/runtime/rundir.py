"""The folder of a run: everything it writes, readable while it runs and after it was killed.

    runs/grpo-3/
      graph.txt                         the flow as it ran
      plan.json                         the plan, of a run that was given one
      run.json                          configuration, seed, versions, operators, models, status
      metrics.jsonl                     one object per step
      samples.jsonl                     sampled responses with what was made of them
      trace.jsonl                       what took how long
      edges/step_000012/rollout.arrow   recorded rows: an Arrow IPC stream per node
      weights/

Small files are written aside and renamed; growing ones are appended in whole lines or whole record batches.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote

import pyarrow as pa

from flowrl.errors import ConfigError, RunError
from flowrl.schema.columns import nearest
from flowrl.store.rows import RowBatch
from flowrl.trace import Event, LineWriter, TraceWriter, now_s, read_lines, read_trace, to_json

STATUSES = ("running", "finished", "interrupted", "failed")
RESERVED = ("step", "time_s", "notes", "resumed_at")
"""Keys of a line of metrics that are no metrics."""
_BATCH_ROWS = 256
"""Rows of one record batch of an edge: the most a kill can lose of it."""


class RunDir:
    """Folder of one run.

    Example:
        folder = RunDir.create("runs", "grpo")
        folder.write_info({"seed": 0})
        folder.write_metrics(0, {"reward/mean": 0.25})
        folder.finish()

        RunDir.open("runs/grpo-1").metrics()[-1]["reward/mean"]
    """

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path = path
        self._writes = writes
        self._info: dict[str, Any] = {}
        if writes:
            self._metrics = LineWriter(path / "metrics.jsonl")
            self._samples = LineWriter(path / "samples.jsonl")
            self.trace = TraceWriter(path / "trace.jsonl")

    def __repr__(self) -> str:
        return f"RunDir('{self.path}', {self.status})"

    # ------------------------------------------------------------------------------------------------------- opening

    @classmethod
    def create(cls, root: str | Path = "runs", name: str | None = None) -> RunDir:
        """Make `root/name-n` with the first number that no run has taken, and open it for writing.

        Errors: ConfigError for a name that is no name of a folder; RunError when the folder cannot be made.
        """
        name = "run" if name is None else name
        if not re.fullmatch(r"[\w][\w.\- ]*", name):
            raise ConfigError(f"a run's name is made of letters, digits, '_', '-' and '.'; found {name!r}")
        root = Path(root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            taken = [int(m[1]) for p in root.iterdir() if (m := re.fullmatch(re.escape(name) + r"-(\d+)", p.name))]
            number = max(taken, default=0) + 1
            while True:
                path = root / f"{name}-{number}"
                try:
                    path.mkdir()  # fails when another run was quicker: taking a number is one atomic step
                    break
                except FileExistsError:
                    number += 1
        except OSError as error:
            raise RunError(
                f"the folder of the run cannot be made in '{root}': {error}; choose another with out="
            ) from error
        (path / "edges").mkdir()
        (path / "weights").mkdir()
        folder = cls(path, writes=True)
        folder._save({"name": path.name, "status": "running", "started_s": time.time(), **_process()})
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """Open for reading. Errors: RunError when there is no run, with the runs that are beside it."""
        path = Path(path)
        if not (path / "run.json").is_file():
            beside = sorted(p.parent.name for p in path.parent.glob("*/run.json")) if path.parent.is_dir() else []
            inside = sorted(p.parent.name for p in path.glob("*/run.json")) if path.is_dir() else []
            usual = path.parent / "runs" / path.name
            if inside:
                hint = f"it holds the runs {', '.join(inside)}"
            elif (usual / "run.json").is_file():
                hint = f"did you mean '{usual}'?"
            else:
                hint = f"beside it: {nearest(path.name, beside)}" if beside else "there is no run beside it"
            raise RunError(f"'{path}' is not the folder of a run (no run.json); {hint}")
        return cls(path, writes=False)

    @classmethod
    def resume(cls, path: str | Path, step: int) -> RunDir:
        """Open for writing again, to go on with `step`. What was logged for that step and later ones before is
        superseded, metric by metric, once the resumed run logs it."""
        folder = cls.open(path)
        if folder.status == "running":
            raise RunError(f"run '{path}' is still running (process {folder.info.get('pid')}); stop it first")
        folder = cls(Path(path), writes=True)
        folder._info = folder._read_info()
        for lines in (folder._metrics, folder._samples):
            lines.write({"resumed_at": step, "time_s": time.time()})
            lines.flush()
        folder._save({"status": "running", "error": None, "resumed_at": step, **_process()})
        return folder

    # ------------------------------------------------------------------------------------------------------- writing

    def write_graph(self, text: str) -> None:
        _replace(self.path / "graph.txt", text if text.endswith("\n") else text + "\n")

    def write_plan(self, text: str) -> None:
        """`plan.json`, which `flowrl.planner.measured` reads beside the trace."""
        self._must_write()
        _replace(self.path / "plan.json", text)

    def write_info(self, info: Mapping[str, Any]) -> None:
        """Add to `run.json`. `status` and the like are kept by `finish`."""
        self._save(dict(info))

    def _save(self, info: Mapping[str, Any]) -> None:
        self._must_write()
        self._info = {**self._info, **to_json(info)}
        _replace(self.path / "run.json", json.dumps(self._info, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def _must_write(self) -> None:
        if not self._writes:
            raise RunError(
                f"run '{self.path}' was opened for reading; RunDir.create or RunDir.resume opens one for writing"
            )

    def write_metrics(self, step: int, metrics: Mapping[str, float], *, notes: Sequence[str] = ()) -> None:
        """Log numbers of a step, and what a person should know about it.

        A step may be logged in parts and in any order; they are put together on reading.
        """
        self._must_write()
        for name in metrics:
            if name in RESERVED:
                raise RunError(f"'{name}' cannot be the name of a metric; choose another")
        more = {"notes": list(notes)} if notes else {}
        self._metrics.write({"step": step, "time_s": now_s(), **metrics, **more})
        self._metrics.flush()

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Keep some rows for people: prompt, response, reward and whatever else is in them."""
        self._must_write()
        for sample in samples:
            self._samples.write({"step": step, **sample})
        self._samples.flush()

    def write_edge(self, step: int, node: str, rows: RowBatch) -> Path:
        """Record the rows a node gave at a step; recording them again replaces them."""
        self._must_write()
        path = self._edge_path(step, node)
        path.parent.mkdir(parents=True, exist_ok=True)
        table = rows.to_arrow()
        # a stream, not a file: it needs no footer, so a kill leaves it readable to the last whole batch
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=_BATCH_ROWS)
        return path

    def weights_path(self, name: str) -> Path:
        """Where the weights of a model go."""
        return self.path / "weights" / _file_name(name)

    def flush(self) -> None:
        """Bring everything buffered to the files; call it once a step."""
        if self._writes:
            self._metrics.flush()
            self._samples.flush()
            self.trace.flush()

    def finish(self, status: str = "finished", error: BaseException | str | None = None) -> None:
        """Note how the run ended and close its files. Errors: ConfigError for an unknown status."""
        if status not in STATUSES:
            raise ConfigError(f"status is one of {', '.join(STATUSES)}; found {status!r}")
        self.flush()
        text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        self._save({"status": status, "ended_s": time.time(), "error": text})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._writes and self._info.get("status") == "running":
            if error is None:
                self.finish()
            else:
                self.finish("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def is_there(self) -> bool:
        """Whether the folder still is where it was made."""
        return (self.path / "run.json").is_file()

    @property
    def info(self) -> dict[str, Any]:
        """What `run.json` holds."""
        return dict(self._info) if self._writes else self._read_info()

    def _read_info(self) -> dict[str, Any]:
        try:
            found = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"'{self.path / 'run.json'}' cannot be read: {error}") from error
        return dict(found)

    @property
    def status(self) -> str:
        """`running`, `finished`, `interrupted` or `failed`. A run whose process is gone without a word was interrupted."""
        info = self.info
        status = str(info.get("status", "running"))
        if status == "running" and info.get("host") == socket.gethostname() and not _is_alive(info.get("pid")):
            return "interrupted"
        return status

    def graph_text(self) -> str:
        path = self.path / "graph.txt"
        if not path.is_file():
            raise RunError(f"run '{self.path}' has no graph.txt")
        return path.read_text(encoding="utf-8")

    def metrics(self) -> list[dict[str, Any]]:
        """One dict per step, in order of steps: `step` and every metric logged for it, the newest value of each.

        After a resume at step k, points of a metric at k and later from before it are gone once the resumed run has logged
        that metric.
        """
        points: dict[str, dict[int, float]] = {}
        before: dict[str, dict[int, float]] = {}
        for line in read_lines(self.path / "metrics.jsonl"):
            if "resumed_at" in line:
                # what the resumed run does not log again stays; the rest loses its points from that step on
                before = {name: {s: v for s, v in p.items() if s < line["resumed_at"]} for name, p in points.items()}
                continue
            for name, value in line.items():
                if name in RESERVED:
                    continue
                if name in before:
                    points[name] = before.pop(name)
                points.setdefault(name, {})[int(line["step"])] = _number(value)
        steps: dict[int, dict[str, Any]] = {}
        for name, found in points.items():
            for step, value in found.items():
                steps.setdefault(step, {"step": step})[name] = value
        return [steps[step] for step in sorted(steps)]

    def metric(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one metric. Errors: RunError with the names there are."""
        rows = self.metrics()
        found = [(row["step"], row[name]) for row in rows if name in row]
        if not found:
            known = sorted({key for row in rows for key in row if key != "step"})
            raise RunError(f"run '{self.path}' has no metric '{name}'; {nearest(name, known)}")
        return found

    def notes(self) -> list[tuple[int, str]]:
        """(step, note) of everything a person should know about the steps."""
        kept: list[tuple[int, str]] = []
        for line in read_lines(self.path / "metrics.jsonl"):
            if "resumed_at" in line:
                kept = [(step, note) for step, note in kept if step < line["resumed_at"]]
            else:
                kept += [(int(line["step"]), str(note)) for note in line.get("notes", ())]
        return sorted(kept, key=lambda item: item[0])

    def samples(self) -> list[dict[str, Any]]:
        """The samples kept, in order of steps; those of steps that a resumed run took again are left out."""
        kept: list[dict[str, Any]] = []
        for line in read_lines(self.path / "samples.jsonl"):
            if "resumed_at" in line:
                kept = [sample for sample in kept if sample["step"] < line["resumed_at"]]
            else:
                kept.append(line)
        return sorted(kept, key=lambda sample: int(sample["step"]))

    def events(self) -> list[Event]:
        """The trace."""
        return read_trace(self.path / "trace.jsonl")

    def edges(self) -> dict[int, list[str]]:
        """Recorded steps and their nodes."""
        found: dict[int, list[str]] = {}
        for path in sorted(self.path.glob("edges/step_*/*.arrow")):
            found.setdefault(int(path.parent.name.removeprefix("step_")), []).append(unquote(path.stem))
        return found

    def has_edge(self, step: int, node: str) -> bool:
        return self._edge_path(step, node).is_file()

    def edge(self, step: int, node: str) -> RowBatch:
        """Rows a node gave at a step; of a recording cut off by a kill, the whole batches.

        Errors: RunError with the steps and nodes that were recorded.
        """
        path = self._edge_path(step, node)
        if not path.is_file():
            recorded = self.edges()
            if step in recorded:
                raise RunError(
                    f"step {step} of run '{self.path}' has no rows of node '{node}'; {nearest(node, recorded[step])}"
                )
            steps = (
                f"recorded steps are {_spans(recorded)}" if recorded else "nothing was recorded: run with record=('*',)"
            )
            raise RunError(f"run '{self.path}' has no rows of step {step}; {steps}")
        return _read_stream(path)

    def _edge_path(self, step: int, node: str) -> Path:
        return self.path / "edges" / f"step_{step:06d}" / f"{_file_name(node)}.arrow"


def _file_name(name: str) -> str:
    # node paths hold '/'; quoting keeps every name apart from every other, and no name is that of a folder above
    quoted = quote(name, safe=" ")
    return quoted if quoted.strip(".") else quoted.replace(".", "%2E")


def _process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname()}


def _is_alive(pid: Any) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _replace(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old text or the new one, never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(aside, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _read_stream(path: Path) -> RowBatch:
    batches: list[pa.RecordBatch] = []
    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_stream(source)
        except pa.ArrowInvalid as error:
            raise RunError(
                f"the recording '{path}' was cut off before its first row ({error}); record the step again"
            ) from error
        batches.extend(_whole_batches(reader))
        return RowBatch.from_arrow(pa.Table.from_batches(batches, reader.schema))


def _whole_batches(reader: pa.RecordBatchStreamReader) -> Iterator[pa.RecordBatch]:
    while True:
        try:
            yield reader.read_next_batch()
        except StopIteration:
            return
        except (pa.ArrowInvalid, OSError):  # the rest of a recording that a kill cut off
            return


def _number(value: Any) -> Any:
    """Back from JSON: null was NaN, and infinities were strings."""
    if value is None:
        return math.nan
    return float(value) if value in ("Infinity", "-Infinity") else value


def _spans(steps: Iterable[int]) -> str:
    """E.g. `0 to 9, 20`."""
    spans: list[list[int]] = []
    for step in sorted(steps):
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)
