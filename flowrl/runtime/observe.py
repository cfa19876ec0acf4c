"""Everything a local run shows and writes, in one place beside the loop: run folder, metrics, trace, live view."""

from __future__ import annotations

import time
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flowrl.graph.code import digest
from flowrl.graph.nodes import Node
from flowrl.graph.operators import OperatorCall
from flowrl.runtime.context import StepLog, Table, Value
from flowrl.runtime.metrics import step_metrics
from flowrl.runtime.options import Options
from flowrl.runtime.progress import open_progress
from flowrl.runtime.rundir import RunDir
from flowrl.trace import Event

if TYPE_CHECKING:
    from flowrl.runtime.local import Prepared, Run


class Observation:
    """Context manager around the steps of a run."""

    def __init__(self, run: Run, *, steps: int, seed: int, engine: str, options: Options, prepared: Prepared) -> None:
        self.run = run
        self.steps = steps
        self.options = options
        self.step = 0
        self.started = time.perf_counter()
        self.step_started = self.started
        self.folder: RunDir | None = None
        if options.out is not None:
            self.folder = RunDir.create(options.out, options.name or run.graph.name)
            run.path = self.folder.path
            self.folder.write_graph(str(run.graph))
            self.folder.write_info(describe(run, steps=steps, seed=seed, engine=engine, options=options, prepared=prepared))
        self.progress = open_progress(options.progress, name=options.name or run.graph.name, steps=steps, path=run.path)
