"""Pass: a step on the hosts for each operator, and the columns that each step reads.

An operator runs on the hosts of the mesh that made most of the bytes it reads. One that sees rows or groups works on all of its
hosts at once; one that must see all rows of an iteration on the first. Its seconds are assumed (`RowConstants`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from flowrl.mesh import Mesh
from flowrl.planner.draft import Draft
from flowrl.planner.rows import RowWork, row_work
from flowrl.planner.steps import Predicted, Step
from flowrl.planner.tasks import ASSUMED, Lane, StepKind


def operators(draft: Draft) -> Draft:
    """A step for each operator of the graph, and `reads` of the calls."""
    work = row_work(draft.graph, draft.problem.workload, draft.problem.choices.rows)
    known = {step.name: step for step in draft.steps}
    where = {step.name: step.mesh for step in draft.steps if step.kind is StepKind.COMPUTE}
    added: list[Step] = []
    waits: dict[str, tuple[str, ...]] = {}
    reads: dict[str, tuple[str, ...]] = {}
    for one in work:
        after = tuple(name for name in one.after if name in where)
        if one.is_call:
            if one.name in known:
                waits[one.name] = after
                reads[one.name] = tuple(column.name for column in one.reads)
            continue
        home = _home(draft, one, where)
        step = _step(draft, one, home, after)
        where[one.name] = step.mesh
        added.append(step)
    steps = tuple(replace(step, reads=reads.get(step.name, step.reads)) for step in draft.steps)
    return replace(draft, steps=steps, rows=work).with_steps(added, waits)


def _home(draft: Draft, work: RowWork, where: dict[str, Mesh]) -> Mesh:
    """The mesh whose hosts have most of what an operator reads; without any, that of the first step."""
    held: defaultdict[Mesh, int] = defaultdict(int)
    for column in work.reads:
        for maker in column.makers:
            if maker in where:
                held[where[maker]] += column.num_bytes
    for name in work.after:
        if name in where:
            held[where[name]] += 0
    if not held:
        return draft.steps[0].mesh
    return min(held, key=lambda mesh: (-held[mesh], mesh.first, mesh.size))


def _step(draft: Draft, work: RowWork, home: Mesh, after: tuple[str, ...]) -> Step:
    per_node = draft.problem.cluster.devices_per_node
    nodes = home.nodes(per_node)
    mesh, seconds = home, work.seconds / len(nodes)
    if work.is_whole and len(nodes) > 1:
        mesh, seconds = Mesh(home.first, min(home.size, (nodes[0] + 1) * per_node - home.first)), work.seconds
    return Step(work.name, work.name, StepKind.COMPUTE, mesh, (Lane.HOST,), Predicted(seconds), after,
                reads=tuple(column.name for column in work.reads), settings=(ASSUMED,))  # fmt: skip
