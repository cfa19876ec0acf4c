"""What each rank writes of a run: rank 0 its folder, the others a trace beside it, and all of them as one in the end.

runs/grpo-1/trace.jsonl             rank 0 while it runs; in the end all ranks, each event with its rank
runs/grpo-1/ranks/trace.1.jsonl     another rank, until then
a temporary file                    a rank of a host that does not see this folder; rank 0 gets the events in the end
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.runtime.context import StepLog
from flowrl.runtime.observe import Observation, Observed, Resumed
from flowrl.runtime.options import Options
from flowrl.runtime.planned import Bound
from flowrl.runtime.ranks.exchange import Exchange
from flowrl.trace import RANK, WAITED, Event, TraceWriter, read_trace

FOLDER = "ranks"
"""In the folder of a run: what its other ranks have written."""


class RankObservation(Observation):
    """One rank's view of a run; only rank 0 has metrics, samples and a live view."""

    def __init__(
        self,
        run: Observed,
        options: Options,
        info: Mapping[str, Any],
        *,
        steps: int,
        bound: Bound,
        exchange: Exchange,
        resumed: Resumed | None = None,
    ) -> None:
        self._exchange = exchange
        self._trace_file: TraceWriter | None = None
        own = (
            options
            if exchange.rank == 0
            else replace(options, out=None, checkpoint_every=None, progress="off", record=(), log_samples=0)
        )
        super().__init__(run, own, info, steps=steps, bound=bound, resumed=resumed if exchange.rank == 0 else None)
        here = None if run.path is None else (str(Path(run.path).absolute()), f".{secrets.token_hex(8)}")
        told = exchange.tell("-1/folder", 0, here and self._marked(*here), "the folder of the run")
        self._parts = None if told is None else Path(told[0]) / FOLDER
        self._mark = "" if told is None else told[1]
        self._apart: tempfile.TemporaryDirectory[str] | None = None
        """Of this rank's events, where it does not see the folder."""
        if self._parts is not None and exchange.rank != 0:
            if not self._sees(self._parts):
                self._apart = tempfile.TemporaryDirectory(prefix="flowrl-trace-")
                self._parts = Path(self._apart.name)
            self._parts.mkdir(exist_ok=True)
            self._trace_file = TraceWriter(self._parts / f"trace.{exchange.rank}.jsonl")

    def _marked(self, path: str, mark: str) -> tuple[str, str]:
        """A folder that ranks of other hosts know by a file in it, if they see it at all."""
        if len(set(self._exchange.board.host_of)) > 1:
            parts = Path(path, FOLDER)
            parts.mkdir(exist_ok=True)
            (parts / mark).touch()
        return path, mark

    def _sees(self, parts: Path) -> bool:
        """Whether the folder of that name here is the one of rank 0."""
        host_of = self._exchange.board.host_of
        return host_of[self._exchange.rank] == host_of[0] or (parts / self._mark).exists()

    def _keep(self, event: Event) -> None:
        waited = {WAITED: round(self._exchange.waited_s, 6)} if self._exchange.waited_s else {}
        event = replace(event, attributes={**event.attributes, RANK: self._exchange.rank, **waited})
        if self._trace_file is None:
            super()._keep(event)
        else:
            self._trace_file.add(event)

    def step_done(self, step: int, log: StepLog) -> None:
        if self._exchange.rank == 0:
            super().step_done(step, log)
        elif self._trace_file is not None:
            self._trace_file.flush()

    def close_traces(self) -> None:
        """Every rank calls this after the last step; then rank 0 puts the events of all into one file, and removes the parts."""
        exchange = self._exchange
        if self._trace_file is not None:
            self._trace_file.close()
        others = range(1, exchange.board.world)
        for rank in others:
            mine = self._own_events() if exchange.rank == rank else None
            told = exchange.tell(f"-1/events/{rank}", rank, mine, "the trace")
            if exchange.rank == 0 and told:
                self._take(told)
        if exchange.rank == 0 and self._parts is not None and self.folder is not None:
            for rank in others:
                path = self._parts / f"trace.{rank}.jsonl"
                if path.exists():
                    self._take(read_trace(path))
                path.unlink(missing_ok=True)
            (self._parts / self._mark).unlink(missing_ok=True)
            self.folder.flush()
            if self._parts.exists():
                self._parts.rmdir()

    def _own_events(self) -> list[Event] | None:
        """What rank 0 cannot read by itself."""
        if self._parts is None:
            return self.run.events
        if self._apart is None:
            return None
        found = list(read_trace(Path(self._apart.name, f"trace.{self._exchange.rank}.jsonl")))
        self._apart.cleanup()
        return found

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if self.folder is not None:
                self.folder.trace.add(event)
            else:
                self.run.events.append(event)
