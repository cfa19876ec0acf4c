"""Run a plan in this process: what it asks of the run, and the executor that walks its steps.

    bind     plan + graph + models  ->  refused, or a program and models with the plan's settings
    step     the program's actions in order: nodes are computed, weights published, other moves recorded for what they are

A plan is executed as it is or refused; where there is less to do than it says (one memory, nothing to move), the trace says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from flowrl.engines.protocol import Host, Parks
from flowrl.errors import ConfigError, RunError, TraceError
from flowrl.graph.code import digest
from flowrl.graph.drift import Drift, code_in
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.written import written_by
from flowrl.model import Model
from flowrl.planner.shapes import shape_of
from flowrl.planner.steps import Plan, Step
from flowrl.planner.tasks import StepKind
from flowrl.runtime.applied import Applied, apply_offload, apply_settings, calls_of
from flowrl.runtime.complete import check_complete
from flowrl.runtime.context import Context, StepLog, Table, Value
from flowrl.runtime.executor import Executor, needed
from flowrl.runtime.program import Act, Action, Program, paths_of, program_of
from flowrl.store.rows import RowBatch

ON_DEVICE = ("", "none", False)
"""Values of the settings `offload` and `park_weights` with which everything stays on the device."""

IN_HOST_MEMORY = frozenset({"", "cpu"})
"""Devices of models from which nothing is to be moved to the host."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A plan that fits a run."""

    plan: Plan
    program: Program
    applied: Applied
    drift: tuple[Drift, ...]
    """Operators whose code has changed since the plan was made."""
    others: tuple[str, ...] = ()
    """Models that are not those of the plan, in words."""

    @property
    def about(self) -> dict[str, Any]:
        """What `run.json` says of it."""
        return {"hash": self.plan.hash, "settings": self.applied.settings, "not_applied": list(self.applied.left)}

    @property
    def notes(self) -> tuple[str, ...]:
        stale = self.plan.max_staleness
        late = f"plan: allows a staleness of {stale}; one process is always synchronous, so it is 0"
        return (*self.program.notes, *self.others, *self.applied.notes, *((late,) if stale else ()))

    def check_hosts(self, hosts: Mapping[str, Host]) -> None:
        """Errors: ConfigError where the plan keeps state off a device that the engine would leave on it; all hosts are closed."""
        why = kept_on_device(self.plan, {host.device for host in hosts.values() if not isinstance(host, Parks)})
        why = why or weights_streamed(self.plan, {host.device for host in hosts.values()})
        if why:
            for host in hosts.values():
                host.close()
            raise ConfigError(why)


def bind(plan: Plan, graph: Graph, models: Mapping[str, Model], *, allow_drift: bool) -> Bound:
    """Check that a plan is for this graph (pruned and merged) and this process, and apply its settings to the models.

    Errors: ConfigError for a plan of another graph, of several devices or with numerics that no engine has; TraceError for
    operators that have changed since it was made, unless that is allowed.
    """
    if not isinstance(plan, Plan):
        raise ConfigError(f"plan is an fr.Plan (fr.plan(...), fr.Plan.load(path)); found {type(plan).__name__}")
    device = _only_device(plan)
    bound = bound_of(plan, graph, models, lambda: program_of(plan, graph, device), allow_drift=allow_drift)
    return replace(bound, applied=apply_offload(plan, graph, bound.applied))


def bound_of(
    plan: Plan, graph: Graph, models: Mapping[str, Model], compile_program: Callable[[], Program], *, allow_drift: bool
) -> Bound:
    """A plan on as many devices as the program is for. Errors: as of `bind`, except for the number of devices."""
    drift = _drift(plan, graph, allowed=allow_drift)
    program = compile_program()
    check_complete(plan, graph)
    applied = apply_settings(plan, graph, models)
    return Bound(plan, program, applied, drift, tuple(_other_models(plan, models)))


def _only_device(plan: Plan) -> int:
    devices = sorted({device for step in plan.steps for device in step.devices})
    if not devices:
        raise ConfigError(f"plan '{plan.name}' has no steps; make one with fr.plan(...)")
    if len(devices) > 1:
        meshes = sorted({(step.mesh.first, step.mesh.size) for step in plan.steps})
        named = ", ".join(f"{first} to {first + size - 1}" if size > 1 else str(first) for first, size in meshes)
        layouts = sorted(
            {f"'{s.name}' has {s.layout}" for s in plan.steps if s.layout is not None and s.layout.size > 1}
        )
        more = f"; of its steps {', '.join(layouts[:3])}" if layouts else ""
        raise ConfigError(
            f"plan '{plan.name}' uses {len(devices)} devices, on the meshes {named}{more}. run_local is one process on one "
            f"device: start {devices[-1] + 1} ranks (flowrl run --plan plan.json --nproc {devices[-1] + 1} ..., or torchrun and "
            'run_ranks), plan for one device (cluster="1xA100-80G", or "cpu"), or run without a plan'
        )
    return devices[0]


def _drift(plan: Plan, graph: Graph, *, allowed: bool) -> tuple[Drift, ...]:
    """Operators that have changed since the plan was made. Errors: see `bind`."""
    now = dict(code_in(graph))
    then = dict(plan.operator_hashes)
    found = tuple(Drift(name, then[name], now[name]) for name in now if then.get(name, now[name]) != now[name])
    text = str(graph)
    for one in found:  # the graph as it was, if nothing but its code has changed
        text = text.replace(f'"{one.now}"', f'"{one.then}"')
    if plan.graph_hash not in (
        digest(text),
        graph.hash,
    ):  # the latter: only the plan's list of operators is another one
        raise ConfigError(
            f"plan '{plan.name}' is for another graph: its hash is {plan.graph_hash}, and that of flow '{graph.name}' after "
            f"pruning and merging {graph.hash}; {_difference(plan, graph, then, now)}. Plan this flow with this configuration"
        )
    if found and not allowed:
        raise TraceError(
            f"{', '.join(map(str, found))} {'has' if len(found) == 1 else 'have'} changed since the plan was made; plan again, "
            "or run with allow_drift=True, which run.json then says"
        )
    return found


def _difference(plan: Plan, graph: Graph, then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What is known of where two graphs differ: a plan keeps names and hashes only."""
    planned = {step.node for step in plan.steps if step.kind is StepKind.COMPUTE}
    here = {name for name, _ in paths_of(graph)}
    parts = [
        *(f"the plan computes '{name}', which the flow lacks" for name in sorted(planned - here)),
        *(f"the plan knows '{name}', which the flow does not use" for name in sorted(then.keys() - now.keys())),
        *(f"the flow uses '{name}', which the plan does not know" for name in sorted(now.keys() - then.keys()) if then),
    ]
    return (
        "; ".join(parts)
        or "nodes and operators have the same names, so a number or an input of the flow is another one"
    )


def _other_models(plan: Plan, models: Mapping[str, Model]) -> Iterator[str]:
    """A line for each model that has another shape than the plan was made for: it runs, and its predictions are of that one."""
    for name, planned in plan.models:
        try:
            found = shape_of(models[name], name)
        except (ConfigError, KeyError):  # built by a function, a table of the null engine: nothing tells its shape
            continue
        if found != planned:
            sizes = f"{planned.params():,} parameters, and this one {found.params():,}"
            yield f"plan: was made for another '{name}', with {sizes}; what it predicts is of that one"


def kept_on_device(plan: Plan, devices: Iterable[str]) -> str:
    """Why models on these devices cannot do what a plan says of state on the hosts; empty when they can.

    Where models are in the host's own memory, nothing is to be moved and every plan is fine.
    """
    apart = sorted(set(devices) - IN_HOST_MEMORY)
    asked = [
        f"'{step.name}' has {name}={value}"
        for step in plan.steps
        for name, value in step.settings
        if name in ("offload", "park_weights") and value not in ON_DEVICE
    ]
    asked += [
        f"'{step.name}' is an {step.kind}" for step in plan.steps if step.kind in (StepKind.OFFLOAD, StepKind.ONLOAD)
    ]
    if not apart or not asked:
        return ""
    return (
        f"the plan moves state between {', '.join(apart)} and the host ({'; '.join(asked[:3])}"
        f"{', ...' if len(asked) > 3 else ''}), and this version's engines keep theirs on the device; plan with "
        "choices=Choices(offload=(Offload.NONE,)) and memory for all of it"
    )


def weights_streamed(plan: Plan, devices: Iterable[str]) -> str:
    """Why models on these devices cannot train as a plan says, layer by layer from the host; empty when they can."""
    apart = sorted(set(devices) - IN_HOST_MEMORY)
    asked = [step.name for step in plan.steps if dict(step.settings).get("offload") == "all"]
    if not apart or not asked:
        return ""
    return (
        f"'{asked[0]}' of the plan has offload=all, weights that stream to {', '.join(apart)} layer by layer, which this "
        "version's engines do not do; plan with choices=Choices(offload=(Offload.NONE, Offload.PARK, Offload.CPU_OPTIMIZER, "
        "Offload.STREAM_OPTIMIZER))"
    )


# ------------------------------------------------------------------------------------------------------------ executing


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of a step that computes nothing."""

    num_bytes: int
    did: str
    """In words, for the trace."""


class Observer(Protocol):
    """Told of what only a planned run has; nodes are told of by `Executor.before` and `after`."""

    def node_ahead(self, node: Node, value: Value, start: float, end: float) -> None:
        """A node was computed on an earlier table than its own."""

    def node_joined(self, node: Node, value: Value) -> None:
        """Its columns are in its own table now."""

    def move_begins(self, step: Step) -> None:
        """A step that computes nothing begins."""

    def move_done(self, step: Step, moved: Moved, start: float) -> None:
        """It was done, but for what it launched on a device."""


@dataclass(kw_only=True)
class PlannedExecutor(Executor):
    """Walks a program. Which nodes an iteration needs (`every`, `after`) is asked of the graph, as without a plan.

    Example:
        PlannedExecutor(graph, hosts, data, program=program, observer=observation).step(0)
    """

    program: Program
    observer: Observer

    def step(self, number: int) -> tuple[dict[str, Value], StepLog]:
        """One iteration; values and log are those of `Executor.step`, in the graph's order whatever the plan's is."""
        context = self._context(number)
        asked = needed(self.graph, number)
        logs: dict[str, StepLog] = {}
        ahead: dict[str, Value] = {}
        for action in self.program.actions:
            if action.node in self.graph and action.node not in asked:
                continue
            if action.step is not None:
                self._move(action.step)
            else:
                self._act(action, context, logs, ahead)
        self._complete(context, asked, logs)
        order = [node.name for node in self.graph]
        values = {name: context.values[name] for name in order if name in context.values}
        return values, StepLog.joined(logs[name] for name in order if name in logs)

    def _act(self, action: Action, context: Context, logs: dict[str, StepLog], ahead: dict[str, Value]) -> None:
        """Do what an action does with its node; `ahead` are values that have not joined their table."""
        context.log = logs.setdefault(action.node, StepLog())
        node = self.graph[action.node]
        match action.act:
            case Act.RUN:
                self._run(node, context)
            case Act.AHEAD:
                ahead[node.name] = self._ahead(node, action, context)
            case Act.JOIN:
                self._join(node, ahead[node.name], context)

    def _complete(self, context: Context, asked: frozenset[str], logs: dict[str, StepLog]) -> None:
        """After the last action. Here nothing is left to do: every node has one."""

    def _ahead(self, node: Node, action: Action, context: Context) -> Value:
        seen = {**context.values, node.source("rows"): context.values[action.base]}
        value, start, end = self._timed(node, replace(context, values=seen))
        self.observer.node_ahead(node, value, start, end)
        return value

    def _join(self, node: Node, early: Value, context: Context) -> None:
        table = context.table(node)
        assert isinstance(early, Table)
        batch = _with_columns_of(early.batch, table.batch, written_by(node))
        context.log.written = [(n, batch if n is node else rows, columns) for n, rows, columns in context.log.written]
        context.values[node.name] = table.with_batch(batch)
        self.observer.node_joined(node, context.values[node.name])

    def _move(self, step: Step) -> None:
        self.observer.move_begins(step)
        start = time.perf_counter()
        moved = MOVES[step.kind](self, step)
        self.observer.move_done(step, moved, start)

    def publish(self, step: Step) -> Moved:
        """New weights to the samplers of the models that a reshard names."""
        num_bytes = sum(self.hosts[name].publish() for name in self._handed_over(step))
        return Moved(num_bytes, "copied to the sampler" if num_bytes else "the sampler has these weights already")

    def _handed_over(self, step: Step) -> tuple[str, ...]:
        """Models that a reshard names. Errors: RunError where that is none, or none of the run."""
        unknown = [name for name in step.reads if name not in self.hosts]
        if unknown or not step.reads:
            raise RunError(
                f"step '{step.name}' of the plan hands over the weights of {', '.join(unknown) or 'no model'}; the run has "
                f"{', '.join(self.hosts)}"
            )
        return step.reads

    def park(self, step: Step) -> Moved:
        """State of the model that a step names to host memory."""
        host = self._parks(step)
        if host is None:
            return stays(self, step)
        writes = bool(dict(step.settings).get("writes", True))
        num_bytes = host.offload(writes=writes)
        return Moved(num_bytes, "copied to the host" if num_bytes else "nothing copied: what the host has is good")

    def bring(self, step: Step) -> Moved:
        """State of the model that a step names back to its device."""
        host = self._parks(step)
        if host is None:
            return stays(self, step)
        num_bytes = host.onload()
        return Moved(num_bytes, "copied to the device" if num_bytes else "nothing to move: it is on the device")

    def _parks(self, step: Step) -> Parks | None:
        """The host of the model that a step moves; None where that is in host memory anyway."""
        models = {name: model for name, _, model in calls_of(self.graph)}
        name = models.get(step.node, step.node)
        if name not in self.hosts:
            if all(host.device in IN_HOST_MEMORY for host in self.hosts.values()):
                return None
            raise unknown_state(step, self.hosts)
        host = self.hosts[name]
        return host if isinstance(host, Parks) and host.device not in IN_HOST_MEMORY else None


def unknown_state(step: Step, hosts: Iterable[str]) -> RunError:
    """What to raise for a move of nothing that there is."""
    return RunError(
        f"step '{step.name}' of the plan moves the state of '{step.node}', which is neither a model of the run "
        f"({', '.join(hosts)}) nor a node that uses one"
    )


def _in_place(executor: PlannedExecutor, step: Step) -> Moved:
    return Moved(0, "nothing to move: one process has one memory")


def _one_order(executor: PlannedExecutor, step: Step) -> Moved:
    return Moved(0, "nothing to wait for: one process does one thing at a time")


def stays(executor: PlannedExecutor, step: Step) -> Moved:
    """Where state is in host memory anyway."""
    # with models on a device of their own that cannot leave it, the plan was refused before the run began
    return Moved(0, "nothing to move: the models are in the host's memory")


MOVES: dict[StepKind, Callable[[PlannedExecutor, Step], Moved]] = {
    StepKind.RESHARD: PlannedExecutor.publish,
    StepKind.TRANSFER: _in_place,
    StepKind.SYNC: _one_order,
    StepKind.OFFLOAD: PlannedExecutor.park,
    StepKind.ONLOAD: PlannedExecutor.bring,
}
"""Kind of step to what does it in one process on one device."""


def _with_columns_of(early: RowBatch, batch: RowBatch, written: tuple[str, ...]) -> RowBatch:
    """`batch` with what a node made of an earlier table: its own columns, and tokens where the data brought text."""
    for name in early.names:
        if name in written or name not in batch:
            batch = batch.with_column(name, early[name], early.types[name])
    return batch
