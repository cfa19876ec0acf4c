"""Pass: a step for each call of a model and for each handover of weights, in the order that the search found.

Each step waits for those before it in the candidate's order on the same devices, so that every schedule of the plan keeps that
order. Seconds of a call are without the copies of parked state: these are steps of their own (`offload`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from flowrl.cost.offload import Offload
from flowrl.mesh import Mesh
from flowrl.planner.draft import Draft, Parked
from flowrl.planner.handover import Side, received_bytes
from flowrl.planner.holds import Held, held, moves_s
from flowrl.planner.options import Option
from flowrl.planner.problem import shape_of, work_of
from flowrl.planner.roles import Call, Role
from flowrl.planner.steps import Predicted, Step
from flowrl.planner.tasks import Edge, Hold, Lane, StepKind

STREAMING = frozenset({Offload.STREAM_ALL.value, Offload.CPU_OPTIMIZER.value, Offload.STREAM_OPTIMIZER.value})
"""Classes of offload that copy during a call: nothing else is to be copied meanwhile."""


def handover_name(engine: str) -> str:
    """Of the step that brings an engine its new weights."""
    return f"{engine}.weights"


def calls(draft: Draft) -> Draft:
    """The steps that occupy meshes, and what they hold."""
    problem, candidate = draft.problem, draft.candidate
    roles, work, placed = problem.roles, work_of(problem.roles), draft.placed
    split = [[i for i, role in enumerate(roles) if placed[role.name][0] == mesh] for mesh in candidate.meshes]
    names = [handover_name(roles[r].name) if call is None else roles[r].calls[call].node for r, call, _ in work]
    after = shape_of(work, roles, split).neighbours(candidate.order)
    holding = {role.name: held(problem, role, *placed[role.name]) for role in roles}
    steps: list[Step] = []
    for at in candidate.order:
        role, call, _ = work[at]
        waits, seconds = tuple(names[one] for one in after[at]), candidate.work_s[at]
        if call is None:
            steps.append(_handover(draft, roles[role], seconds, waits))
            continue
        mesh, option = placed[roles[role].name]
        own = roles[role].calls[call]
        seconds = max(0.0, seconds - moves_s(problem, roles[role], option, own))
        step = _compute(own, mesh, option, seconds, waits, holding[roles[role].name])
        if option.slot_utilization:
            step = replace(step, predicted=replace(step.predicted, slot_utilization=option.slot_utilization[call]))
        steps.append(step)
    resident = (*_residents(draft, holding), *_waiting(draft, steps))
    return replace(draft, steps=tuple(steps), resident=resident, parked=_parked(draft, holding))


def _compute(call: Call, mesh: Mesh, option: Option, seconds: float, waits: tuple[str, ...], holding: Held) -> Step:
    streams = dict(option.settings).get("offload") in STREAMING and (call.work == "train" or option.is_on_host)
    lanes = (Lane.COMPUTE, Lane.H2D, Lane.D2H) if streams else (Lane.COMPUTE,)
    holds = tuple(Hold(f"{option.role} {name}", count) for name, count in sorted(holding.during(call.work).items()))
    return Step(call.node, call.node, StepKind.COMPUTE, mesh, lanes, Predicted(seconds, holds=holds), waits,
                layout=option.layout, settings=(("role", option.role), *option.settings))  # fmt: skip


def _handover(draft: Draft, role: Role, seconds: float, waits: tuple[str, ...]) -> Step:
    (source, giving), (mesh, option) = draft.placed[role.weights_from], draft.placed[role.name]
    received = received_bytes(role.shape, Side(source, giving.layout), Side(mesh, option.layout))
    holds = (Hold(f"{role.name} weights", option.handover_bytes, devices=tuple(mesh.devices)),)
    moved = Predicted(seconds, num_bytes=round(received * mesh.size), holds=holds)
    return Step(handover_name(role.name), giving.role, StepKind.RESHARD, mesh, (Lane.COMPUTE, Lane.NVLINK), moved, waits,
                source, option.layout, (role.model,), (("role", role.name), ("from", giving.role)))  # fmt: skip


def _residents(draft: Draft, holding: dict[str, Held]) -> list[Hold]:
    """What each role keeps between its calls, and a device context where there are trainers or scorers."""
    found: list[Hold] = []
    for mesh, one in zip(draft.candidate.meshes, draft.candidate.combinations, strict=True):
        devices = tuple(mesh.devices)
        if any(option.has_context for option in one.options):
            found.append(Hold("device context", draft.problem.choices.memory.context_bytes, devices=devices))
        for option in one.options:
            mine = holding[option.role]
            for name, count in sorted(mine.at_rest.items()):
                found.append(Hold(f"{option.role} {name}", count, devices=devices))
            for name, count in sorted(mine.on_host.items()):
                found.append(Hold(f"{option.role} {name}", 0, count, devices=devices))
    return found


def _waiting(draft: Draft, steps: list[Step]) -> list[Hold]:
    """Engine weights while the engine does not sample: from the handover to the last sample with them, over the end of the
    iteration too."""
    found: list[Hold] = []
    order = [step.name for step in steps]
    for role in draft.problem.roles:
        if not role.weights_from:
            continue
        mesh, option = draft.placed[role.name]
        moved = order.index(handover_name(role.name))
        samples = sorted(order.index(call.node) for call in role.calls)
        first = [at for at in samples if at < moved]
        spans: list[tuple[int, int | None]] = list(pairwise(first))
        marks = [moved, *(at for at in samples if at > moved)]
        spans += zip(marks, [*marks[1:], None], strict=True)
        what, devices = f"{role.name} weights", tuple(mesh.devices)
        if first and steps[first[0]].after:  # else it samples from the beginning on
            found.append(
                Hold(what, option.handover_bytes, until_task=order[first[0]], until_edge=Edge.START, devices=devices)
            )
        for at, following in spans:
            until = "" if following is None else order[following]
            edge = Edge.END if following is None else Edge.START
            found.append(Hold(what, option.handover_bytes, from_task=order[at], from_edge=Edge.END, until_task=until,
                              until_edge=edge, devices=devices))  # fmt: skip
    return found


def _parked(draft: Draft, holding: dict[str, Held]) -> tuple[Parked, ...]:
    found: list[Parked] = []
    for role in draft.problem.roles:
        mesh, _ = draft.placed[role.name]
        takers = [handover_name(one.name) for one in draft.problem.roles if one.weights_from == role.name]
        for state in holding[role.name].states:
            uses = (*state.calls, *(takers if state.is_handed_over else ()))
            found.append(Parked(state, mesh, uses))
    return tuple(found)
