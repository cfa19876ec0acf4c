"""From what a search found to a plan: steps with their meshes, their order and the memory they hold."""

from __future__ import annotations

from flowrl.graph.nodes import Graph
from flowrl.mesh import Mesh
from flowrl.planner.handover import Side, received_bytes
from flowrl.planner.options import Option
from flowrl.planner.problem import Candidate, Problem, shape_of, work_of
from flowrl.planner.steps import Plan, Predicted, Step
from flowrl.planner.tasks import Edge, Hold, Lane, StepKind


def handover_name(engine: str) -> str:
    """Of the step that brings an engine its new weights."""
    return f"{engine}.weights"


def plan_of(problem: Problem, candidate: Candidate, graph: Graph) -> Plan:
    """The plan of a candidate: a step for each call and for each handover of weights.

    Each step waits for those before it in the candidate's order on the same devices, so that every schedule of the plan is the
    one that the search counted. Rows that go from mesh to mesh are no steps yet: they take milliseconds.
    """
    steps, resident = steps_of(problem, candidate)
    return Plan.of(
        graph.name,
        graph.hash,
        problem.cluster,
        steps,
        resident=resident,
        max_staleness=problem.schedule.max_staleness,
        meshes=tuple((chr(ord("A") + index), mesh) for index, mesh in enumerate(candidate.meshes)),
        workload=problem.workload,
    )


def steps_of(problem: Problem, candidate: Candidate) -> tuple[tuple[Step, ...], tuple[Hold, ...]]:
    """Steps in the order in which they start, and memory that is taken all the time."""
    roles, work = problem.roles, work_of(problem.roles)
    placed = {
        option.role: (mesh, option)
        for mesh, one in zip(candidate.meshes, candidate.combinations, strict=True)
        for option in one.options
    }
    split = [[i for i, role in enumerate(roles) if placed[role.name][0] == mesh] for mesh in candidate.meshes]
    names = [handover_name(roles[r].name) if call is None else roles[r].calls[call].node for r, call, _ in work]
    after = shape_of(work, roles, split).neighbours(candidate.order)
    steps: list[Step] = []
    for at in candidate.order:
        role, call, _ = work[at]
        waits = tuple(names[one] for one in after[at])
        mesh, option = placed[roles[role].name]
        seconds = candidate.work_s[at]
        if call is not None:
            steps.append(_compute(names[at], mesh, option, seconds, waits))
            continue
        source, giving = placed[roles[role].weights_from]
        updates = [c.node for r in roles if r.name == giving.role for c in r.calls if c.work == "train"]
        update = max(updates, key=lambda name: candidate.order.index(names.index(name)))
        received = received_bytes(roles[role].shape, Side(source, giving.layout), Side(mesh, option.layout))
        moved = round(received * mesh.size)
        holds = (
            Hold(f"{giving.role} weights to hand over", giving.handover_bytes, from_task=update, from_edge=Edge.END,
                 devices=tuple(source.devices)),
            Hold(f"{option.role} weights", option.handover_bytes, devices=tuple(mesh.devices)),
        )  # fmt: skip
        steps.append(
            Step(names[at], giving.role, StepKind.RESHARD, mesh, (Lane.COMPUTE, Lane.NVLINK),
                 Predicted(seconds, num_bytes=moved, holds=holds), waits, source, option.layout, (roles[role].model,))
        )  # fmt: skip
    return tuple(steps), (*_residents(problem, candidate), *_waiting(problem, candidate, placed, steps))


def _compute(name: str, mesh: Mesh, option: Option, seconds: float, waits: tuple[str, ...]) -> Step:
    holds = (Hold(f"{option.role} working", option.dynamic_bytes),)
    return Step(name, name, StepKind.COMPUTE, mesh, (Lane.COMPUTE,), Predicted(seconds, holds=holds), waits,
                layout=option.layout, settings=(("role", option.role), *option.settings))  # fmt: skip


def _residents(problem: Problem, candidate: Candidate) -> list[Hold]:
    """What each role keeps between its calls, and a device context where there are trainers or scorers."""
    found: list[Hold] = []
    for mesh, one in zip(candidate.meshes, candidate.combinations, strict=True):
        devices = tuple(mesh.devices)
        if any(option.has_context for option in one.options):
            found.append(Hold("device context", problem.choices.memory.context_bytes, devices=devices))
        for option in one.options:
            if option.static_bytes or option.host_bytes:
                found.append(Hold(f"{option.role} at rest", option.static_bytes, option.host_bytes, devices=devices))
    return found


def _waiting(
    problem: Problem, candidate: Candidate, placed: dict[str, tuple[Mesh, Option]], steps: list[Step]
) -> list[Hold]:
    """Engine weights while the engine does not sample: from the handover to the next sample, over the end of the step too."""
    found: list[Hold] = []
    order = [step.name for step in steps]
    for role in problem.roles:
        if not role.weights_from:
            continue
        mesh, option = placed[role.name]
        moved = order.index(handover_name(role.name))
        samples = sorted(order.index(call.node) for call in role.calls)
        first = [at for at in samples if at < moved]
        marks = [moved, *(at for at in samples if at > moved)]
        what, devices = f"{role.name} weights", tuple(mesh.devices)
        if first and steps[first[0]].after:  # else it samples from the beginning on
            found.append(
                Hold(what, option.handover_bytes, until_task=order[first[0]], until_edge=Edge.START, devices=devices)
            )
        for at, following in zip(marks, [*marks[1:], None], strict=True):
            until = "" if following is None else order[following]
            edge = Edge.END if following is None else Edge.START
            found.append(Hold(what, option.handover_bytes, from_task=order[at], from_edge=Edge.END, until_task=until,
                              until_edge=edge, devices=devices))  # fmt: skip
    return found
