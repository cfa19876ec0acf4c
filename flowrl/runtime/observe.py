"""Everything a local run shows and writes, in one place beside the loop: run folder, metrics, trace, live view."""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from flowrl.engines import REMARKS
from flowrl.engines.meter import open_meter
from flowrl.engines.protocol import Host
from flowrl.errors import RunError
from flowrl.graph import packs
from flowrl.graph.kinds import KINDS
from flowrl.graph.losses import Loss
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.operators import OperatorCall
from flowrl.model import Model
from flowrl.planner.recorded import recorded
from flowrl.runtime.context import StepLog, Table, Value
from flowrl.runtime.data import Data
from flowrl.runtime.metrics import step_metrics, trained_writers
from flowrl.runtime.options import Options
from flowrl.runtime.progress import open_progress
from flowrl.runtime.rundir import RunDir
from flowrl.runtime.trackers import Session, check_installed
from flowrl.runtime.trackers.following import Trackers
from flowrl.store.rows import RowBatch
from flowrl.trace import HOST_MEMORY, LENGTHS, NODE_KIND, STEP, Event

if TYPE_CHECKING:
    from flowrl.planner.steps import Step
    from flowrl.runtime.planned import Bound, Moved

SAMPLE_COLUMNS = ("prompt_id", "prompt", "response", "answer", "reward", "finish_reason", "row_error")
"""What is kept of a sampled row for people, where it is there."""


class Observed(Protocol):
    """What is observed: a run."""

    graph: Graph
    events: list[Event]
    notes: tuple[str, ...]
    path: Any
    metrics: list[dict[str, float]]
    status: str
    hosts: dict[str, Host]


class Resumed(Protocol):
    """Where a run goes on; see `flowrl.runtime.checkpoints.Checkpoint`."""

    @property
    def run(self) -> Path: ...

    @property
    def step(self) -> int: ...


class Observation:
    """Context manager around the steps of a run: opens the files, follows every node and step, closes the files."""

    def __init__(
        self,
        run: Observed,
        options: Options,
        info: Mapping[str, Any],
        *,
        steps: int,
        bound: Bound | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        """Args:
        bound: the plan that is executed; its steps are measured, and kept in the run where there is no folder for them.
        resumed: where the run goes on; None: it begins.
        """
        self.run = run
        self.options = options
        self.step = 0
        self.started = 0.0
        self.planned = {} if bound is None else bound.program.steps
        self.keeps_events = bound is not None and options.out is None and resumed is None
        self.meter = open_meter(host.device for host in run.hosts.values())
        self.writers = trained_writers(run.graph)
        self.folder: RunDir | None = None
        check_installed(options.trackers)  # a run that cannot be followed as asked leaves no folder behind
        name = options.name or (run.graph.name if run.graph.name.isidentifier() else "run")  # a lambda has no name
        if resumed is not None:
            self.folder = RunDir.resume(resumed.run, resumed.step)
            run.metrics.extend(
                {key: value for key, value in row.items() if key != "step"}
                for row in self.folder.metrics()
                if row["step"] < resumed.step
            )
        elif options.out is not None:
            self.folder = RunDir.create(options.out, name)
        if self.folder is not None:
            run.path = self.folder.path
            self.folder.write_graph(str(run.graph))
            self.folder.write_info(info)
            if bound is not None:
                self.folder.write_plan(bound.plan.to_json())
        called = name if run.path is None else run.path.name
        self.trackers = Trackers.open(options.trackers, Session(called, run.graph.name, run.path, info))
        self.progress = open_progress(
            options.progress, name=name, steps=steps, path=run.path, remark=REMARKS.get(info.get("engine", ""), "")
        )

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.__exit__(kind, error, trace)
        if error is None:
            self.run.status = "finished"
        else:
            self.run.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self._say(self.trackers.close(self.run.status))
        if self.folder is None:
            return
        failure = error if self.run.status == "failed" else None
        if error is None:
            with self._writing(self.folder):
                self.folder.finish(self.run.status, failure)
            return
        try:
            self.folder.finish(self.run.status, failure)
        except (OSError, RunError) as second:  # what ended the run is what must be seen
            error.add_note(f"and the end of run '{self.folder.path}' could not be written: {second}")

    @contextmanager
    def _writing(self, folder: RunDir) -> Iterator[None]:
        """Errors: RunError when the folder of the run has gone, or takes no more."""
        try:
            if not folder.is_there:
                raise FileNotFoundError("its folder was removed or renamed while it ran, and what was in it is gone")
            yield
        except OSError as error:
            raise RunError(
                f"run '{folder.path}' cannot be written in step {self.step}: {error}; run again with room on the disk, or "
                "elsewhere with out="
            ) from error

    def step_begins(self, step: int) -> None:
        self.step = step
        self.started = time.perf_counter()

    def node_begins(self, node: Node, path: str) -> None:
        self.progress.phase(path + node.name)
        if path + node.name in self.planned:
            self.meter.begin()

    def node_done(self, node: Node, value: Value, start: float, end: float, path: str) -> None:
        """Trace one node's work and record its rows where asked."""
        self._trace(node, value, start, end, path)
        self._record(node, value, path)

    def node_ahead(self, node: Node, value: Value, start: float, end: float) -> None:
        """Trace a node that a plan has computed on an earlier table; its rows are those of `node_joined`."""
        self._trace(node, value, start, end, "")

    def node_joined(self, node: Node, value: Value) -> None:
        self._record(node, value, "")

    def move_begins(self, step: Step) -> None:
        self.progress.phase(step.name)
        self.meter.begin()

    def move_done(self, step: Step, moved: Moved, start: float) -> None:
        """Trace a step of a plan that computes nothing."""
        attributes = {STEP: step.name, "did": moved.did, **self._memory()}
        end = time.perf_counter()  # the meter has waited for the device
        self._add(Event(str(step.kind), step.node, self.step, start, end, 0, moved.num_bytes, attributes))

    def _trace(self, node: Node, value: Value, start: float, end: float, path: str) -> None:
        if self.folder is None and not self.keeps_events:
            return
        batch = value.batch if isinstance(value, Table) else None
        attributes: dict[str, Any] = {NODE_KIND: node.kind}
        if path + node.name in self.planned:
            # the meter waits for the device, which a step's time must cover: what it launched is its own
            attributes |= {STEP: self.planned[path + node.name], **self._memory()}
            end = time.perf_counter()
        if batch is not None and KINDS[node.kind].samples:
            prompt_ids, response_ids = batch["prompt_ids"], batch["response_ids"]
            attributes[LENGTHS] = recorded(prompt_ids.lengths, response_ids.lengths)
        self._add(
            Event(
                "compute", path + node.name, self.step, start, end,
                len(batch) if batch is not None else 0, batch.nbytes if batch is not None and node.kind != "input" else 0,
                attributes,
            )
        )  # fmt: skip

    def _memory(self) -> dict[str, int]:
        """What the work since `begin` of the meter took, and what lies on the host."""
        found = {f"{self.meter.what}_bytes": self.meter.end()}
        on_host = sum(int(getattr(host, "host_bytes", 0)) for host in self.run.hosts.values())
        return {**found, HOST_MEMORY: on_host} if on_host else found

    def _add(self, event: Event) -> None:
        """Keep an event, whose times are those of `time.perf_counter`."""
        offset = time.time() - time.perf_counter()
        self._keep(replace(event, start_s=event.start_s + offset, end_s=event.end_s + offset))

    def _keep(self, event: Event) -> None:
        """Keep an event, whose times are those of the clock."""
        if self.folder is not None:
            self.folder.trace.add(event)
        elif self.keeps_events:
            self.run.events.append(event)

    def _record(self, node: Node, value: Value, path: str) -> None:
        name = path + node.name
        if self.folder is None or not isinstance(value, Table):
            return
        if "*" in self.options.record or name in self.options.record:
            with self._writing(self.folder):
                self.folder.write_edge(self.step, name, value.batch)

    def step_done(self, step: int, log: StepLog) -> None:
        """Turn what the step logged into metrics, and show and write them."""
        numbers = step_metrics(
            written=log.written,
            updates=log.updates,
            seconds=log.seconds,
            step_s=time.perf_counter() - self.started,
            extra=log.extra,
            writers=self.writers,
        )
        self.run.metrics.append(numbers)
        self.trackers.log(step, numbers)
        notes = (*log.notes, *self.trackers.notes())
        samples = list(pick_samples(log, self.options.log_samples))
        if self.folder is not None:
            with self._writing(self.folder):
                self.folder.write_metrics(step, numbers, notes=notes)
                self.folder.write_samples(step, samples)
                self.folder.flush()
        self.progress.step(step, numbers, sample=samples[0] if samples else None, notes=notes)

    def save(self, step: int, write: Callable[[], int]) -> None:
        """Trace a checkpoint, whose bytes `write` gives."""
        self.progress.phase("checkpoint")
        start = time.perf_counter()
        num_bytes = write()
        self._add(Event("save", "checkpoint", step, start, time.perf_counter(), 0, num_bytes))
        if self.folder is not None:
            self.folder.flush()

    def _say(self, notes: tuple[str, ...]) -> None:
        """What became known after the last step: as a note of that step, and on stderr."""
        if not notes:
            return
        with suppress(OSError, ValueError):  # stderr is closed: nobody is left to tell
            print(*notes, sep="\n", file=sys.stderr)
        if self.folder is not None:
            with suppress(OSError, RunError):  # what the run itself could not write is told by its own end
                self.folder.write_metrics(self.step, {}, notes=notes)


def pick_samples(log: StepLog, count: int) -> Iterator[dict[str, Any]]:
    """A few rows of the step, spread over the table with most of the columns people look at."""
    best: RowBatch | None = None
    for _, rows, _ in log.written:
        if "response" in rows and len(rows) and (best is None or _shown(rows) >= _shown(best)):
            best = rows
    if best is None:
        return
    picks = sorted({i * len(best) // max(count, 1) for i in range(count)})
    for index in picks:
        yield {name: _plain(best[name][index]) for name in SAMPLE_COLUMNS if name in best}


def _shown(rows: RowBatch) -> int:
    return sum(1 for name in SAMPLE_COLUMNS if name in rows)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def describe(
    graph: Graph,
    notes: tuple[str, ...],
    models: Mapping[str, Model],
    data: Mapping[str, Data],
    options: Options,
    **run: Any,
) -> dict[str, Any]:
    """What `run.json` says of a run: enough to know what ran, with what, on what."""
    return {
        **run,
        "flow": graph.name,
        "graph_hash": graph.hash,
        "notes": list(notes),
        "operators": dict(sorted(_specs(graph))),
        "models": {name: _model(model) for name, model in models.items()},
        "data": {name: {"rows": len(d), "columns": list(d.schema.names), "batch": d.batch} for name, d in data.items()},
        "options": {**asdict(options), "schedule": repr(options.schedule)},
        "versions": {
            "python": platform.python_version(),
            **{p: _version(p) for p in ("flowrl", "numpy", "pyarrow", "torch", "transformers", "vllm")},
            **_pack_versions(graph),
        },
    }


NAME = re.compile(r"[\w.-]+")


def _specs(graph: Graph) -> Iterator[tuple[str, str]]:
    """(name, spec hash) of every operator and loss in a graph and its sub-graphs."""
    for node in graph:
        for _, value in node.params:
            if isinstance(value, OperatorCall):
                yield value.name, value.hash
            elif isinstance(value, Loss):
                yield from ((term.name, term.hash) for term in value.terms())
        if node.body is not None:
            yield from _specs(node.body)


def _pack_versions(graph: Graph) -> dict[str, str | None]:
    """Versions of the distributions whose operators a graph holds, and of what these are installed with.

    A hash covers the code of an operator's own package; what it imports may change under it (math-verify, say).
    """
    tops = {name.partition(":")[0].partition(".")[0] for name, _ in _specs(graph)}
    own = sorted(pack.distribution for pack in packs.packs() if pack.module.partition(".")[0] in tops)
    texts = [text for dist in own for text in metadata.requires(dist) or ()]
    below = sorted({match[0] for text in texts if (match := NAME.match(text))})
    found = {dist: _version(dist) for dist in (*own, *below)}
    return {dist: version for dist, version in found.items() if version is not None}


def _model(model: Model) -> dict[str, Any]:
    source = model.source if isinstance(model.source, str) else type(model.source).__name__
    return {
        "source": source, "head": model.head, "precision": model.precision, "sampler": model.sampler,
        "optimizer": asdict(model.optimizer), "micro_batch_tokens": model.micro_batch_tokens,
        "compile": model.compile,
    }  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
