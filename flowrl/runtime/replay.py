"""Run one node again from a recording: look at a step after the fact, with a breakpoint if you like.

Example:
    run = fr.run_local(flow, steps=20, record=("*",), ...)
    again = fr.replay(run, step=12, node="group_norm")
    again.rows["advantage"], again.is_equal
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.engines import open_engine
from flowrl.errors import ConfigError, RunError
from flowrl.graph.drift import Drift, without_drift
from flowrl.graph.flows import Flow
from flowrl.graph.kinds import KINDS
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.text import from_text
from flowrl.model import Model
from flowrl.runtime.context import Context, Memory, StepLog, Table, Value, Version
from flowrl.runtime.executor import HANDLERS
from flowrl.runtime.local import USE_OF, Run, root_model
from flowrl.runtime.rundir import RunDir
from flowrl.schema.columns import nearest
from flowrl.store.rows import RowBatch


@dataclass(frozen=True, slots=True)
class Replayed:
    """A node run again."""

    rows: RowBatch
    """What it gives now."""
    recorded: RowBatch | None
    """What it gave then; None when its own rows were not recorded."""
    drift: tuple[Drift, ...] = ()
    """What of the graph's text has changed since; only with `allow_drift=True`."""

    @property
    def is_equal(self) -> bool:
        """Whether now and then agree, value for value."""
        return self.recorded is not None and self.rows.equals(self.recorded)

    def __str__(self) -> str:
        if self.recorded is None:
            then = "what it gave then was not recorded"
        else:
            then = "equal to the recorded ones" if self.is_equal else "not equal to the recorded ones"
        changed = f", with {', '.join(map(str, self.drift))} changed" if self.drift else ""
        return f"<{len(self.rows)} rows, {then}{changed}>"


def replay(
    run: Run | str | Path,
    step: int,
    node: str,
    *,
    flow: Flow | Graph | None = None,
    models: Mapping[str, Model | str] | None = None,
    engine: str = "torch",
    seed: int | None = None,
    allow_drift: bool = False,
) -> Replayed:
    """Run `node` of a recorded run again, on the rows it was given at `step`.

    Args:
        run: a run, or its folder.
        step: which step, from 0.
        node: name of a node as printed in `graph.txt`; its input rows must have been recorded (`record=("*",)`).
        flow: the flow as it is now, to replay changed code on old rows, or when operators were defined in a script.
        models: for nodes that run one: input name to model. Their weights are those given, not those of the step.
        engine, seed: as in `run_local`; the seed is the run's unless given.
        allow_drift: replay the run's text with operators as they are now, though they have changed; the answer says which.

    Errors: RunError when something was not recorded, with what was; ConfigError when a model is needed.
    """
    path = run.path if isinstance(run, Run) else Path(run)
    if path is None:
        raise RunError("this run wrote nothing (out=None), so there is nothing to replay; run it with out= and record=")
    folder = RunDir.open(path)
    graph = _graph_of(run, folder, flow)
    drift: tuple[Drift, ...] = ()
    if allow_drift:
        graph, drift = without_drift(graph, allowed=True)
    if node not in graph:
        raise RunError(f"the run's graph has no node '{node}'; {nearest(node, [n.name for n in graph])}")
    found = graph[node]
    handler = HANDLERS.get(found.kind)
    if handler is None or found.body is not None:
        raise RunError(f"node '{node}' is of kind '{found.kind}', which cannot be replayed alone")
    if isinstance(step, bool) or not isinstance(step, int):
        raise ConfigError(f"replay needs the number of a step; found {step!r}")
    if KINDS[found.kind].gives == "weights":
        raise RunError(f"node '{node}' changes weights; only nodes that give rows can be replayed")
    is_stateful = KINDS[found.kind].has_state or (found.kind == "apply" and found["operator"].state_param)
    if is_stateful and step > 0:
        raise RunError(
            f"node '{node}' remembers earlier steps, and what it remembered at step {step} was not recorded; it can be "
            "replayed at step 0 only"
        )
    values: dict[str, Value] = {}
    for port, source in found.inputs:
        if port in ("model", "source"):
            values[source] = Version(_host(graph, found, source, models or {}, engine, folder))
        else:
            values[source] = Table(folder.edge(step, source))
    chosen_seed = seed if seed is not None else int(folder.info.get("seed", 0))
    max_tokens = int(folder.info.get("options", {}).get("max_tokens", 256))
    context = Context(graph, step, chosen_seed, max_tokens, Memory(), StepLog(), {}, values)
    value = handler(found, context)
    if not isinstance(value, Table):
        raise RunError(f"node '{node}' changes weights; only nodes that give rows can be replayed")
    recorded = folder.edge(step, node) if folder.has_edge(step, node) else None
    return Replayed(value.batch, recorded, drift)


def _graph_of(run: Run | str | Path, folder: RunDir, flow: Flow | Graph | None) -> Graph:
    if flow is not None:
        return flow.graph() if isinstance(flow, Flow) else flow
    return run.graph if isinstance(run, Run) else from_text(folder.graph_text())


def _host(graph: Graph, node: Node, source: str, models: Mapping[str, Any], engine: str, folder: RunDir) -> Any:
    name = root_model(graph, source)
    if name not in models:
        raise ConfigError(
            f"node '{node.name}' runs model '{name}'; give it: replay(..., models={{'{name}': fr.Model(...)}})"
        )
    value = models[name]
    model = value if isinstance(value, Model) else Model(str(value))
    use = USE_OF.get(node.kind, "source")
    return open_engine(engine).open(name, model, frozenset({use}), seed=int(folder.info.get("seed", 0)))
