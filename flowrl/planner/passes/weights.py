"""Pass: what moves when weights change their layout, to the byte, and the waits before that.

Bytes are those of the boxes of `flowrl.planner.reshard`. Where engine and trainer share a mesh of one node, the order of the
engine's ranks is the one under which the busiest device receives least; an order that takes a tensor-parallel group across nodes
is never taken. On more than `MOST_DEVICES` the closed form of `flowrl.planner.handover` stands; a setting of the step says so.

Weights change in place, so that all devices of both sides meet first: a step of kind sync, which takes a message's time for each
doubling of the devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.boxes import holding_of
from flowrl.planner.draft import Draft
from flowrl.planner.passes.calls import handover_name
from flowrl.planner.problem import Problem
from flowrl.planner.reshard import BUCKET_BYTES, traffic_of, wire_s
from flowrl.planner.roles import Role, model_of
from flowrl.planner.steps import Predicted, Step
from flowrl.planner.tasks import Lane, StepKind

MOST_DEVICES = 96
"""For which boxes are counted: some tenths of a second, and more beyond."""


@dataclass(frozen=True, slots=True)
class Exact:
    """A reshard counted box by box."""

    layout: Layout
    """Of the target, with the order of its ranks."""
    seconds: float
    total_bytes: int
    """Received by all devices together."""
    across_bytes: int
    received_bytes: int
    """By the busiest device."""


def weights(draft: Draft) -> Draft:
    """Exact handovers, assignments of weights, and the waits before them."""
    return _synced(_assigned(_exact(draft) if draft.is_exact else draft))


# ----------------------------------------------------------------------------------------------------------- handovers


def _exact(draft: Draft) -> Draft:
    """Handovers counted box by box; the engine's steps get the layout with the order of its ranks."""
    problem, placed = draft.problem, draft.placed
    layouts: dict[str, Layout] = {}
    changed: dict[str, Step] = {}
    for role in problem.roles:
        if not role.weights_from:
            continue
        step = draft.step(handover_name(role.name))
        (source, giving), (mesh, option) = placed[role.weights_from], placed[role.name]
        found = exact(role.shape, problem.cluster, source, giving.layout, mesh, option.layout, giving.is_on_host)
        if found is None:
            changed[step.name] = replace(step, settings=(*step.settings, ("bytes", "closed form")))
            continue
        layouts[role.name] = found.layout
        changed[step.name] = _moved(problem, step, found)
    steps = []
    for step in draft.steps:
        step = changed.get(step.name, step)
        layout = layouts.get(str(dict(step.settings).get("role", "")))
        steps.append(step if layout is None or step.layout is None else replace(step, layout=layout))
    return replace(draft, steps=tuple(steps))


def _moved(problem: Problem, step: Step, found: Exact) -> Step:
    lanes = (Lane.COMPUTE, Lane.NVLINK, *((Lane.NIC,) if found.across_bytes else ()))
    buckets = math.ceil(found.received_bytes / BUCKET_BYTES)
    settings = (*step.settings, ("buckets", buckets), ("bucket_bytes", BUCKET_BYTES))
    predicted = replace(step.predicted, seconds=found.seconds, num_bytes=found.total_bytes)
    return replace(step, lanes=lanes, predicted=predicted, layout=found.layout, settings=settings)


@lru_cache(maxsize=512)
def exact(
    shape: ModelShape, cluster: Cluster, source: Mesh, giving: Layout, target: Mesh, taking: Layout, is_on_host: bool
) -> Exact | None:
    """A reshard counted box by box, in the order of the target's ranks that moves least; None where that would take too long,
    or where the layouts do not cut the model evenly."""
    if len({*source.devices, *target.devices}) > MOST_DEVICES:
        return None
    per_node = cluster.devices_per_node
    orders = [taking]
    if taking.tp > 1 and source == target and not target.spans_nodes(per_node):
        orders = [taking.ordered("mod"), taking.ordered("div")]
    found: list[Exact] = []
    tensors = tuple(shape.modules())
    try:
        before = holding_of(shape, giving, source.devices)
        for layout in orders:
            traffic = traffic_of(tensors, before, holding_of(shape, layout, target.devices), devices_per_node=per_node)
            seconds = wire_s(traffic, cluster, host_bytes_per_element=4 if is_on_host else 0, is_copied=True)
            found.append(
                Exact(
                    layout,
                    seconds,
                    sum(one.received_bytes for one in traffic.values()),
                    sum(one.received_across_bytes for one in traffic.values()),
                    max(one.received_bytes for one in traffic.values()),
                )
            )
    except ConfigError:
        return None
    return min(found, key=lambda one: (one.received_bytes, one.total_bytes))


# --------------------------------------------------------------------------------------------------------- assignments


def _assigned(draft: Draft) -> Draft:
    """A step for each node that gives one model the weights of another (`assign`, `ema`), behind all else on both meshes."""
    for node in draft.graph:
        if node.kind not in ("assign", "ema"):
            continue
        target = _role(draft, node.source("model"))
        source = _role(draft, node.source("source"))
        if target is None or source is None:
            continue
        (mesh, taking), (origin, giving) = draft.placed[target.name], draft.placed[source.name]
        found = exact(
            target.shape, draft.problem.cluster, origin, giving.layout, mesh, taking.layout, giving.is_on_host
        )
        if found is None:
            continue
        every = int(node.get("every", 1) or 1)
        last = [slots[-1].name for one in (mesh, origin) if (slots := draft.slots(one))]
        step = Step(node.name, node.name, StepKind.RESHARD, mesh, (), Predicted(0.0), tuple(dict.fromkeys(last)), origin,
                    taking.layout, (target.model,), (("role", target.name), ("from", source.name)))  # fmt: skip
        lanes, seconds = _through_hosts(draft, source.name, target.name)
        found = replace(found, layout=taking.layout, seconds=(found.seconds + seconds) / every)
        step = _moved(draft.problem, step, found)
        draft = draft.with_steps([replace(step, lanes=(*step.lanes, *lanes))])
    return draft


def _through_hosts(draft: Draft, source: str, target: str) -> tuple[tuple[Lane, ...], float]:
    """Lanes and seconds of an assignment between models of which one is parked: it goes bucket by bucket from or to the copy on
    the hosts, so that neither model has to come in as a whole."""
    lanes: list[Lane] = []
    seconds = 0.0
    for one in draft.parked:
        if one.state.name == "parameters" and one.state.role in (source, target):
            lanes.append(Lane.H2D if one.state.role == source else Lane.D2H)
            seconds += one.state.moved_bytes / draft.problem.cluster.host_link.bytes_s
    return tuple(lanes), seconds


def _role(draft: Draft, name: str) -> Role | None:
    """The role that keeps the weights of a node that gives some: the trainer or scorer, not the engine."""
    model = model_of(draft.graph, name)
    return next((role for role in draft.problem.roles if role.model == model and not role.is_engine), None)


# --------------------------------------------------------------------------------------------------------------- waits


def _synced(draft: Draft) -> Draft:
    """In front of each change of weights, a wait that all devices of both sides share."""
    added: list[Step] = []
    changed: list[Step] = []
    for step in draft.steps:
        if step.kind is StepKind.RESHARD:
            size = len(step.devices)
            seconds = draft.problem.cluster.alpha_s * math.ceil(math.log2(size)) if size > 1 else 0.0
            wait = Step(
                f"{step.name}.sync",
                step.node,
                StepKind.SYNC,
                step.mesh,
                (),
                Predicted(seconds),
                step.after,
                step.source,
            )
            added.append(wait)
            step = replace(step, after=(wait.name,))
        changed.append(step)
    return replace(draft, steps=tuple(changed)).with_steps(added)
