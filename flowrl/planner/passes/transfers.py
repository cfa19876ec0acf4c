"""Pass: rows that go from the hosts of the mesh that made them to those of a mesh that reads them.

What one step made goes to another mesh in one step, once, as soon as it is made, and only the columns that are read there.
Inside a node they go through shared memory, between nodes over the network cards of the devices. What a data set brings is
loaded where it is read first.

Of rows that lie evenly over the nodes of both sides, `sum over shared nodes of min(1/nodes, 1/nodes')` stays on its node.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from flowrl.mesh import Cluster, Mesh
from flowrl.planner.draft import Draft
from flowrl.planner.rows import RowConstants
from flowrl.planner.steps import Predicted, Step
from flowrl.planner.tasks import Lane, StepKind

DATA = ""
"""Stands for what a data set brings."""


def transfers(draft: Draft) -> Draft:
    """A step for each mesh on which somebody reads what a step on another mesh made."""
    where = {step.name: step.mesh for step in draft.steps if step.kind is StepKind.COMPUTE}
    loaded: dict[str, Mesh] = {}
    moved: defaultdict[tuple[str, Mesh, Mesh], dict[str, float]] = defaultdict(dict)
    """(maker, from, to) -> bytes by column."""
    readers: defaultdict[tuple[str, Mesh, Mesh], list[str]] = defaultdict(list)
    work = {one.name: one for one in draft.rows if one.name in where}
    for name in _in_order(draft):
        for column in work[name].reads if name in work else ():
            makers = [maker for maker in column.makers if maker in where] or [DATA]
            for maker in makers:
                place = where[maker] if maker != DATA else loaded.setdefault(column.name, where[name])
                if place != where[name]:
                    key = (maker, place, where[name])
                    moved[key][column.name] = column.num_bytes / len(makers)
                    readers[key].append(name)
    nodes = {step.name: step.node for step in draft.steps}
    added: list[Step] = []
    waits: defaultdict[str, list[str]] = defaultdict(list)
    for (maker, source, mesh), columns in moved.items():
        step = _step(draft, maker, nodes[readers[maker, source, mesh][0]], source, mesh, columns)
        many = sum(one == maker for one, _, _ in moved) > 1
        step = replace(step, name=f"{step.name}.{mesh.first}-{mesh.devices[-1]}") if many else step
        added.append(step)
        for name in readers[maker, source, mesh]:
            waits[name].append(step.name)
    return draft.with_steps(added, waits)


def _in_order(draft: Draft) -> list[str]:
    """Names of the steps, each behind those it waits for; else as they are listed."""
    left = {step.name: step.after for step in draft.steps}
    found: dict[str, None] = {}
    while left:
        ready = [name for name, after in left.items() if all(one in found for one in after)]
        found |= dict.fromkeys(ready)
        for name in ready:
            del left[name]
    return list(found)


def _step(draft: Draft, maker: str, node: str, source: Mesh, mesh: Mesh, columns: dict[str, float]) -> Step:
    total = sum(columns.values())
    seconds, is_far = transfer_s(draft.problem.cluster, source, mesh, total, draft.problem.choices.rows)
    after = () if maker == DATA else (maker,)
    return Step(f"{maker or 'data'}.rows", node, StepKind.TRANSFER, mesh, (Lane.NIC,) if is_far else (Lane.HOST,),
                Predicted(seconds, num_bytes=round(total)), after, source, reads=tuple(sorted(columns)))  # fmt: skip


def transfer_s(
    cluster: Cluster, source: Mesh, mesh: Mesh, num_bytes: float, constants: RowConstants | None = None
) -> tuple[float, bool]:
    """(seconds of rows on their way from one mesh's hosts to another's, whether some go to another node)."""
    keep = constants or RowConstants()
    per_node = cluster.devices_per_node
    out, into = source.nodes(per_node), mesh.nodes(per_node)
    both = len(set(out) & set(into))
    near = both * min(1 / len(out), 1 / len(into))
    near_s = num_bytes * (near / both if both else 0.0) / keep.host_memory_bytes_s
    far = num_bytes * (1.0 - near)
    if far < 1:
        return near_s, False
    cards = min(source.size / len(out), mesh.size / len(into))  # each device's card carries its part
    far_s = far / min(len(out), len(into)) / (cards * cluster.across.bytes_s) + cluster.alpha_s
    return max(near_s, far_s), True
