"""Run a flow in this process: eager, one step after the other, every operator open to pdb, print and pytest.

Example:
    run = fr.run_local(grpo(group_size=4), steps=100, prompts=data, policy=fr.Model("path"), ref=fr.Model("path"))
    run.metrics[-1]["reward/mean"], run.path, run.model("policy")
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.engines import open_engine
from flowrl.engines.protocol import Host
from flowrl.errors import CheckError, ConfigError, DataError, RunError
from flowrl.graph.checks import find_problems
from flowrl.graph.drift import Drift, without_drift
from flowrl.graph.flows import Flow
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.passes import optimise
from flowrl.model import Model
from flowrl.runtime.checkpoints import Alone, Checkpoint, Live, Saver, Together
from flowrl.runtime.context import Memory, Table, Value
from flowrl.runtime.data import Data
from flowrl.runtime.executor import Executor
from flowrl.runtime.observe import Observation, describe
from flowrl.runtime.options import OPTION_NAMES, Options
from flowrl.runtime.rundir import RunDir
from flowrl.schema.columns import nearest
from flowrl.shown import shown
from flowrl.store.rows import RowBatch
from flowrl.trace import Event

if TYPE_CHECKING:
    from flowrl.planner.measured import Comparison
    from flowrl.planner.steps import Plan
    from flowrl.runtime.planned import Bound

USE_OF = {
    "rollout": "generate",
    "logprobs": "logprobs",
    "top_logprobs": "top_logprobs",
    "values": "values",
    "score": "score",
    "update": "update",
}
"""Kind of node to what it does with the model on its port `model`."""


@dataclass
class Run:
    """What a run was and gave. Keeps its models open until `close` (or the end of a `with` block)."""

    graph: Graph
    """The graph that ran, after pruning and merging."""
    notes: tuple[str, ...]
    """What pruning and merging did."""
    path: Path | None
    """Folder of the run, or None when nothing was written."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """One dict of numbers per step."""
    status: str = "running"
    """`running`, `finished`, `interrupted` or `failed`."""
    hosts: dict[str, Host] = field(default_factory=dict)
    last: dict[str, Value] = field(default_factory=dict)
    """Values of the last step by node name."""
    plan: Plan | None = None
    """The plan that was executed."""
    events: list[Event] = field(default_factory=list)
    """What a planned run measured, where it has no folder to write it to (else see its `trace.jsonl`)."""

    def rows(self, node: str | None = None) -> RowBatch:
        """Rows a node gave in the last step; without a name, those of the flow's first output that is a table."""
        if node is None:
            tables = [name for name in self.graph.outputs if isinstance(self.last.get(name), Table)]
            if not tables:
                raise RunError(f"flow '{self.graph.name}' returns no rows; name a node: {nearest('', self.last)}")
            node = tables[0]
        found = self.last.get(node)
        if not isinstance(found, Table):
            raise RunError(f"the last step has no rows of node '{node}'; {nearest(node, self.last)}")
        return found.batch

    def model(self, name: str) -> Model:
        """A model as it is now, to give to another run (its weights are shared, not copied)."""
        return self._host(name).model()

    def save(self, name: str, path: str | Path) -> None:
        """Write a model's weights where Transformers can load them."""
        self._host(name).save(str(path))

    def _host(self, name: str) -> Host:
        if name not in self.hosts:
            raise RunError(f"the run has no model '{name}'; {nearest(name, self.hosts)}")
        return self.hosts[name]

    def history(self, metric: str) -> list[float]:
        """One metric over the steps that have it."""
        found = [step[metric] for step in self.metrics if metric in step]
        if not found and self.metrics:
            raise RunError(f"no step has a metric '{metric}'; {nearest(metric, self.metrics[-1])}")
        return found

    def compare(self) -> Comparison:
        """What the plan predicted beside what the run measured, step by step; `print` it. The first iteration does not count.

        Errors: RunError for a run without a plan.
        """
        from flowrl.planner.measured import compare, compare_run

        if self.plan is None:
            raise RunError(
                f"the run of '{self.graph.name}' had no plan to compare with; give one: run_local(..., plan=plan)"
            )
        return compare(self.plan, self.events) if self.path is None else compare_run(self.path)

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        if self.path is not None and (self.path / "run.json").is_file():
            return shown("run", RunDir.open(self.path))
        return shown("metrics", self.metrics)

    def __repr__(self) -> str:
        where = f" in {self.path}" if self.path else ""
        return f"<run of '{self.graph.name}', {len(self.metrics)} steps, {self.status}{where}>"


def run_local(
    flow: Flow | Graph,
    *,
    steps: int = 1,
    seed: int = 0,
    engine: str = "torch",
    options: Options | None = None,
    plan: Plan | None = None,
    **inputs: Any,
) -> Run:
    """Run `flow` for `steps` iterations in this process.

    Args:
        flow: a flow (its default configuration) or a graph: `grpo(group_size=4)`.
        steps: iterations.
        seed: of sampling, shuffling and new weights. Equal seeds give equal runs.
        engine: `torch` (real models) or `null` (no models at all: a dry run in milliseconds).
        options: an `Options`; single options may also be given by name (`batch=8, max_tokens=64, progress="off"`).
        inputs: one value for each input of the flow: data (list of dicts, Arrow table, Hugging Face data set, JSONL path, or
            `fr.Data`) for tables, `fr.Model` (or a Hugging Face name or path) for models.
        resume: an option: the folder of a run, which goes on from its newest checkpoint (`checkpoint_every=10` writes one every
            ten steps) as if it had never stopped; everything else as it was given then, and `steps` counted from its beginning.
        plan: executed step by step, with its settings on the models; the numbers are those of a run without it and with these
            settings. `run.compare()` tells predicted from measured.

    Errors: CheckError with all problems of the flow, before any model is loaded; TraceError for a graph's text, or a plan, whose
    operators have changed, unless `allow_drift=True`; ConfigError for inputs that are missing or unknown, and for a plan of
    another graph or of several devices; DataError for data that does not fit. Ctrl-C marks the run interrupted, closes its files
    and goes on up.
    """
    given = {name: inputs.pop(name) for name in list(inputs) if name in OPTION_NAMES and name not in input_names(flow)}
    if options is not None and not isinstance(options, Options):
        raise ConfigError(f"run_local needs an fr.Options in 'options'; found {type(options).__name__}")
    settings = (options or Options()).updated(given)
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise ConfigError(f"run_local needs a whole number as seed; found {seed!r}")
    seed = int(seed)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ConfigError(f"run_local needs a whole number of steps; found {steps!r}")
    graph = flow.graph() if isinstance(flow, Flow) else flow
    if not isinstance(graph, Graph):
        raise ConfigError(f"run_local needs a flow (@fr.flow) or a graph; found {type(graph).__name__}")
    graph, drift = without_drift(graph, allowed=settings.allow_drift)
    prepared = prepare(graph, inputs, settings, seed)
    bound: Bound | None = None
    if plan is not None:
        prepared, bound = _bound(plan, prepared, settings)
    checkpoint = find_checkpoint(prepared.graph, settings, steps=steps, seed=seed, engine=engine)
    hosts = open_hosts(prepared.graph, prepared.models, engine, seed)
    if bound is not None:
        bound.check_hosts(hosts)
    live = Live(prepared.graph, hosts, prepared.data, Memory())
    if checkpoint is not None:
        _read(checkpoint, live, hosts)
    run = Run(prepared.graph, prepared.notes, None, hosts=hosts, plan=plan)
    about = describe_run(prepared, settings, bound, drift, steps=steps, seed=seed, engine=engine)
    with Observation(run, settings, about, steps=steps, bound=bound, resumed=checkpoint) as observation:
        executor = _executor(prepared, live, seed, settings, observation, bound)
        saver = saver_of(run.path, settings, about)
        for step in range(0 if checkpoint is None else checkpoint.step, steps):
            observation.step_begins(step)
            run.last, log = executor.step(step)
            observation.step_done(step, log)
            if saver.is_due(step + 1, steps):
                observation.save(step, partial(saver.write, step + 1, live))
    return run


def find_checkpoint(graph: Graph, settings: Options, *, steps: int, seed: int, engine: str) -> Checkpoint | None:
    """The one that the options ask to resume from. Errors: as of `Checkpoint.find` and `Checkpoint.check`."""
    if settings.resume is None:
        return None
    found = Checkpoint.find(settings.resume)
    found.check(graph, steps=steps, seed=seed, engine=engine, allow_drift=settings.allow_drift)
    return found


def saver_of(path: Path | None, settings: Options, about: Mapping[str, Any], together: Together | None = None) -> Saver:
    """What writes the checkpoints of a run in this folder."""
    said = {"seed": about["seed"], "engine": about["engine"], "plan": about.get("plan", {}).get("hash")}
    return Saver(path, settings.checkpoint_every, settings.checkpoint_keep, said, together or Alone())


def _read(checkpoint: Checkpoint, live: Live, hosts: Mapping[str, Host]) -> None:
    try:
        checkpoint.read(live)
    except BaseException:
        for host in hosts.values():
            host.close()
        raise


def _bound(plan: Plan, prepared: Prepared, settings: Options) -> tuple[Prepared, Bound]:
    from flowrl.runtime.planned import bind

    bound = bind(plan, prepared.graph, prepared.models, allow_drift=settings.allow_drift)
    return prepared.planned(bound), bound


def _executor(
    prepared: Prepared,
    live: Live,
    seed: int,
    settings: Options,
    observation: Observation,
    bound: Bound | None,
) -> Executor:
    shared: dict[str, Any] = {
        "graph": prepared.graph,
        "hosts": live.models,
        "data": live.data,
        "memory": live.memory,
        "seed": seed,
        "max_tokens": settings.max_tokens,
        "before": observation.node_begins,
        "after": observation.node_done,
        "reward_workers": settings.reward_workers,
    }
    if bound is None:
        return Executor(**shared)
    from flowrl.runtime.planned import PlannedExecutor

    return PlannedExecutor(**shared, program=bound.program, observer=observation)


@dataclass(frozen=True)
class Prepared:
    """A checked graph with its inputs sorted into models and data."""

    graph: Graph
    notes: tuple[str, ...]
    models: dict[str, Model]
    data: dict[str, Data]

    def planned(self, bound: Bound) -> Prepared:
        """The same with the plan's settings on the models."""
        return replace(self, models=bound.applied.models, notes=(*self.notes, *bound.notes))


def describe_run(
    prepared: Prepared, settings: Options, bound: Bound | None, drift: tuple[Drift, ...], **run: Any
) -> dict[str, Any]:
    """What `run.json` says of a run, with its plan and what has changed since graph (`drift`) and plan were written."""
    about = describe(prepared.graph, prepared.notes, prepared.models, prepared.data, settings, **run)
    if bound is not None:
        about["plan"] = bound.about
        drift = (*drift, *bound.drift)
    if drift:
        about["drift"] = {change.name: {"then": change.then, "now": change.now} for change in drift}
    return about


def prepare(graph: Graph, inputs: Mapping[str, Any], settings: Options, seed: int = 0) -> Prepared:
    """Bind inputs, check the graph against them, prune and merge."""
    nodes = {node.name: node for node in graph.inputs}
    for name in inputs:
        if name not in nodes:
            known = (*nodes, *OPTION_NAMES, *inspect.getfullargspec(run_local).kwonlyargs)
            raise ConfigError(f"flow '{graph.name}' has no input '{name}'; {nearest(name, known)}")
    missing = [name for name, node in nodes.items() if name not in inputs and node["kind"] != "unused"]
    optimised, notes = optimise(graph)
    _refuse_unknown_nodes(optimised, settings.record)
    _refuse_idle(optimised)
    still_missing = [name for name in missing if name in optimised]
    if still_missing:
        what = ", ".join(
            f"{name}= ({'a model' if nodes[name]['kind'] == 'weights' else 'data'})" for name in still_missing
        )
        raise ConfigError(f"flow '{graph.name}' needs {what}")
    models = {n: _as_model(n, inputs[n]) for n, node in nodes.items() if n in inputs and node["kind"] == "weights"}
    data = {
        n: _as_data(n, inputs[n], settings, seed) for n, node in nodes.items() if n in inputs and node["kind"] == "rows"
    }
    if settings.checks:
        problems = find_problems(
            graph, schedule=settings.schedule, models=models, data={n: d.schema for n, d in data.items()}
        )
        if problems:
            raise CheckError(graph.name, problems)
    kept = {node.name for node in optimised.inputs}
    return Prepared(
        optimised,
        tuple(str(note) for note in notes),
        {n: m for n, m in models.items() if n in kept},
        {n: d for n, d in data.items() if n in kept},
    )


def _refuse_idle(graph: Graph) -> None:
    """Refuse a flow that would run for nothing, and outputs that nobody can tell to be rows or a model."""
    for node in graph.inputs:
        if node["kind"] == "unused":
            raise ConfigError(
                f"flow '{graph.name}' ({node.place}) returns its input '{node.name}', which it uses nowhere; leave it out"
            )
    if all(graph[name].kind == "input" for name in graph.roots):
        returned = (
            f"returns only what it was given ({', '.join(graph.outputs)})" if graph.outputs else "returns nothing"
        )
        raise ConfigError(
            f"flow '{graph.name}' {returned}, so there is nothing to run; return the rows it makes, or what fr.update gave"
        )


def _refuse_unknown_nodes(graph: Graph, record: tuple[str, ...]) -> None:
    known = list(_paths(graph))
    for name in record:
        if name != "*" and name not in known:
            raise ConfigError(
                f"option 'record' names '{name}', which is no node of flow '{graph.name}' as it runs; {nearest(name, known)}"
            )


def _paths(graph: Graph, prefix: str = "") -> Iterator[str]:
    """Names of all nodes; those of a sub-graph after the name of the node that holds it."""
    for node in graph:
        yield prefix + node.name
        if node.body is not None:
            yield from _paths(node.body, f"{prefix}{node.name}/")


def input_names(flow: Flow | Graph) -> frozenset[str]:
    """What a flow is given by name, which no option may shadow."""
    if isinstance(flow, Flow):
        return frozenset(flow.parameters)
    return frozenset(node.name for node in flow.inputs) if isinstance(flow, Graph) else frozenset()


def _as_model(name: str, value: Any) -> Model:
    if isinstance(value, Model):
        return value
    if isinstance(value, str | Path):
        return Model(str(value))
    raise ConfigError(
        f"input '{name}' is a model: fr.Model(...), or a Hugging Face name or path; found {type(value).__name__}"
    )


def _as_data(name: str, value: Any, settings: Options, seed: int) -> Data:
    if isinstance(value, Model):
        raise ConfigError(f"input '{name}' is a table; found a model")
    try:
        data = value if isinstance(value, Data) else Data(value, name=name)
    except DataError as error:
        raise DataError(f"input '{name}': {error}") from error
    return data.opened(seed=seed, name=name).with_default_batch(settings.batch)


def uses_of(graph: Graph) -> dict[str, frozenset[str]]:
    """What the graph does with each model: input name to uses."""
    found: dict[str, set[str]] = {node.name: set() for node in graph.inputs if node["kind"] == "weights"}

    def visit(part: Graph, outer: dict[str, str]) -> None:
        for node in part:
            for port, source in node.inputs:
                if port not in ("model", "source"):
                    continue
                model = root_model(part, source)
                name = outer.get(model, model)
                use = USE_OF.get(node.kind, "source") if port == "model" else "source"
                if name in found and node.body is None:
                    found[name].add(use)
            if node.body is not None:
                captured = {
                    s: outer.get(root_model(part, s), root_model(part, s)) for p, s in node.inputs if p != "rows"
                }
                visit(node.body, captured)

    visit(graph, {})
    return {name: frozenset(uses) for name, uses in found.items()}


def root_model(graph: Graph, name: str) -> str:
    node: Node = graph[name]
    while node.kind != "input":
        node = graph[node.source("then" if node.kind == "after" else "model")]
    return node.name


def open_hosts(graph: Graph, models: Mapping[str, Model], engine: str, seed: int) -> dict[str, Host]:
    """Open every model the graph still uses; what was opened is closed again when a later one fails."""
    opened: dict[str, Host] = {}
    used = open_engine(engine)
    try:
        for name, uses in uses_of(graph).items():
            opened[name] = used.open(name, models[name], uses, seed=seed)
    except BaseException:
        for host in opened.values():
            host.close()
        raise
    return opened
