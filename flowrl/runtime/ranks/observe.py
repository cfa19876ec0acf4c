"""What each rank writes of a run: rank 0 its folder, the others a trace beside it, and all of them as one in the end.

runs/grpo-1/trace.jsonl             rank 0 while it runs; in the end all ranks, each event with its rank
runs/grpo-1/ranks/trace.1.jsonl     another rank, until then
"""

from __future__ import annotations

from collections.abc import Mapping
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
        path = exchange.tell(
            "-1/folder", 0, None if run.path is None else str(Path(run.path).absolute()), "the folder of the run"
        )
        self._parts = None if path is None else Path(path) / FOLDER
        if self._parts is not None and exchange.rank != 0:
            self._parts.mkdir(exist_ok=True)
            self._trace_file = TraceWriter(self._parts / f"trace.{exchange.rank}.jsonl")

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
            mine = self.run.events if self._parts is None and exchange.rank == rank else None
            told = exchange.tell(f"-1/events/{rank}", rank, mine, "the trace")
            if exchange.rank == 0 and told:
                self.run.events.extend(told)
        if exchange.rank == 0 and self._parts is not None and self.folder is not None:
            for rank in others:
                path = self._parts / f"trace.{rank}.jsonl"
                for event in read_trace(path):
                    self.folder.trace.add(event)
                path.unlink(missing_ok=True)
            self.folder.flush()
            if self._parts.exists():
                self._parts.rmdir()
