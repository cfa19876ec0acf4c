"""Why a plan is as it is: what binds, and what the next best choice for each role would cost, found by planning without it.

Everything here is predicted. The functions return values; `str` of them is text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowrl.cost.text import change_text, size_text, time_text
from flowrl.graph.nodes import Graph
from flowrl.mesh import Layout, Mesh
from flowrl.mesh.placement import Group, Placement, Role as Placed
from flowrl.planner.context import context_lines
from flowrl.planner.figures import (
    UNSAID,
    Chosen,
    Summary,
    alternative_lines,
    binding_lines,
    chosen,
    full_line,
    idle_line,
    overlap_line,
    placement_of,
    role_lines,
    setting_text,
    summary,
    tail_lines,
    tie_line,
)
from flowrl.planner.options import Setting, all_options, likely
from flowrl.planner.planning import plan_found
from flowrl.planner.problem import LEAST_CHANGE, Found, Problem, digits
from flowrl.planner.roles import Role
from flowrl.planner.search import search
from flowrl.planner.steps import Plan
from flowrl.planner.train_options import micro_batches
from flowrl.schema.escaped import escaped

NO_OTHER = "there is no other"
TELLING = frozenset({"layout", "offload", "recompute", "optimizer"})
"""Settings of other roles that are named when they change too."""
OTHERS = 3
"""That a reason tells the price of."""


@dataclass(frozen=True, slots=True)
class Other:
    """What else could have been chosen, with the best that the rest makes of it."""

    what: str
    seconds: float | None
    """Predicted; None where nothing fits then."""
    device_bytes: int = 0
    host_bytes: int = 0
    changes: tuple[str, ...] = ()
    """What the best plan does otherwise with it, besides."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One choice for a role, and what the others would cost."""

    role: str
    choice: str
    """`mesh`, `layout`, `offload`, or a setting: `recompute`, `micro_batch_tokens`, `utilization`."""
    chosen: str
    seconds: float
    """Predicted, of the plan with what was chosen."""
    others: tuple[Other, ...]
    """The best first; those that do not fit last."""
    is_asked: bool = False
    """Whether the placement asked for it."""
    tie: float = 0.0
    """Part by which another may be faster and still count as equal."""
    device_bytes: int = 0
    """Of the plan with what was chosen."""
    host_bytes: int = 0
    if_none: str = NO_OTHER

    def __str__(self) -> str:
        if self.is_asked:
            return f"{self.choice} {self.chosen}: asked for"
        fitting = [one for one in self.others if one.seconds is not None]
        unfit = [one.what for one in self.others if one.seconds is None]
        shown = [f"{self.choice} {self.chosen}"]
        if fitting:
            shown.append(f"next best {'; '.join(self._costs(fitting[:OTHERS]))}")
        elif not unfit:
            shown.append(self.if_none)
        if unfit:
            shown.append(f"do not fit: {', '.join(unfit)}" if len(unfit) > 1 else f"does not fit: {unfit[0]}")
        return "; ".join(shown)

    def _costs(self, others: Sequence[Other]) -> list[str]:
        """What each costs; those that change nothing together."""
        alike = [one.what for one in others if self._is_alike(one)]
        said = [self._cost(one) for one in others if not self._is_alike(one)]
        return [f"{', '.join(alike)}, as fast and no less memory", *said] if alike else said

    def _is_alike(self, other: Other) -> bool:
        assert other.seconds is not None
        as_fast = abs(other.seconds - self.seconds) <= LEAST_CHANGE * self.seconds
        return as_fast and (other.device_bytes, other.host_bytes) == (self.device_bytes, self.host_bytes)

    def _cost(self, other: Other) -> str:
        assert other.seconds is not None
        more = other.seconds - self.seconds
        if abs(more) <= LEAST_CHANGE * self.seconds:
            return f"{other.what}, as fast ({size_text(other.device_bytes)} per device, {size_text(other.host_bytes)} per host)"
        said = f"{other.what}, {'+' if more >= 0 else '-'}{time_text(abs(more))} ({change_text(other.seconds, self.seconds)})"
        if other.changes:
            said += f", with {', '.join(other.changes)}"
        if more > 0:
            return said
        return (
            f"{said}, a tie"
            if self.seconds <= other.seconds * (1 + self.tie)
            else f"{said}, which the search passed over"
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a plan is as it is. `str` is text for people; all figures are predicted."""

    plan: Plan
    summary: Summary
    placement: str = ""
    reasons: tuple[Reason, ...] = ()
    """Role by role. None for a plan read from a file: what it was made from is not there."""
    relief: tuple[Other, ...] = ()
    """The best with more of one thing that might bind; its seconds tell whether it does."""

    def __str__(self) -> str:
        shown = f"placement {self.placement}: " if self.placement else ""
        lines = [f"{shown}predicted {time_text(self.summary.seconds)} per iteration", ""]
        lines += [*(f"  {line}" for line in role_lines(self.plan))]
        lines += ["", "what binds (predicted):", *(f"  {line}" for line in binding_lines(self.summary, self.plan))]
        lines += [f"  idle: {line}" for line in (idle_line(self.plan),) if line]
        lines += [f"  warning: {line}" for line in (full_line(self.plan),) if line]
        lines += [f"  warning: {line}" for line in context_lines(self.plan)]
        lines += [f"  tail: {line}" for line in tail_lines(self.plan)]
        lines += [f"  overlap: {line}" for line in (overlap_line(self.plan),) if line]
        lines += [f"  a tie: {line}" for line in (tie_line(self.plan),) if line]
        lines += [f"  {_relief(one, self.summary.seconds)}" for one in self.relief]
        if self.reasons:
            lines += ["", *_reason_lines(self.reasons)]
        elif self.plan.searched is not None:
            lines += [
                "",
                "other plans, and why each lost (predicted):",
                *(f"  {line}" for line in alternative_lines(self.plan)),
            ]
        return escaped("\n".join(lines).lstrip("\n"), keep="\n")


def _reason_lines(reasons: Sequence[Reason]) -> Iterator[str]:
    part = reasons[0].tie
    rule = f", and of plans within {part:.1%} the simplest is taken" if part else ""
    yield f"why each choice (predicted; the rest is planned anew for each{rule}):"
    for role in dict.fromkeys(reason.role for reason in reasons):
        yield f"  {role}"
        yield from (f"    {reason}" for reason in reasons if reason.role == role)


def _relief(other: Other, seconds: float) -> str:
    if other.seconds is None:
        return f"with {other.what}: nothing fits"
    less = seconds - other.seconds
    if less <= LEAST_CHANGE * seconds:
        return f"with {other.what}: no faster"
    return (
        f"with {other.what}: {time_text(other.seconds)}, {time_text(less)} less ({change_text(other.seconds, seconds)})"
    )


def explain_plan(plan: Plan) -> Explanation:
    """What a plan says of itself, without what it was made from."""
    return Explanation(plan, summary(plan), str(placement_of(plan)))


def explain(problem: Problem, graph: Graph, found: Found | None = None) -> Explanation:
    """Why the best plan of a problem is the best, found by planning again without each of its choices.

    Args:
        graph: as `problem_of` gives it.
        found: what a search has found, if there was one already.

    Raises `PlanError` when nothing fits; `flowrl.planner.relax.explain` says why.
    """
    plan = plan_found(found or search(problem), graph)
    asking = _Asking(problem, graph, plan, chosen(plan))
    reasons = [reason for role in problem.roles for reason in asking.reasons(role)]
    return Explanation(plan, summary(plan, problem), str(placement_of(plan)), tuple(reasons), asking.relief())


@dataclass(frozen=True, slots=True)
class _Asking:
    """What-if questions to the planner about one plan."""

    problem: Problem
    graph: Graph
    plan: Plan
    chosen: dict[str, Chosen]

    def reasons(self, role: Role) -> tuple[Reason, ...]:
        return (self._mesh(role), self._layout(role), *self._offload(role), *self._settings(role))

    def relief(self) -> tuple[Other, ...]:
        """The best with twice the memory."""
        cluster = self.problem.cluster
        twice = {
            "twice the device memory": cluster.with_memory(device_bytes=2 * cluster.device.memory_bytes),
            "twice the host memory": cluster.with_memory(host_bytes=2 * cluster.host.memory_bytes),
        }
        return tuple(self._best(replace(self.problem, cluster=larger), what) for what, larger in twice.items())

    def _best(self, problem: Problem, what: str, asked: tuple[str, str] | None = None) -> Other:
        found = search(replace(problem, effort=replace(problem.effort, alternatives=0)))
        if found.best is None:
            return Other(what, None)
        made = plan_found(found, self.graph)
        predicted = made.predicted
        changes = () if asked is None else tuple(self._changes(chosen(made), asked))
        return Other(what, predicted.seconds, predicted.device_bytes, predicted.host_bytes, changes)

    def _changes(self, theirs: dict[str, Chosen], asked: tuple[str, str]) -> Iterator[str]:
        """Settings that change with the one that was asked for, the role's own first."""
        for name in sorted(theirs, key=lambda one: (one != asked[0], one)):
            mine, other = self.chosen[name], theirs[name]
            before, after = (
                {"layout": str(mine.layout), **dict(mine.settings)},
                {"layout": str(other.layout), **dict(other.settings)},
            )
            owner = "" if name == asked[0] else f"'{name}' "
            for key, value in after.items():
                is_said = (name, key) == asked or (key, value) in UNSAID or (key == "layout" and asked[1] == "layout")
                if not is_said and before.get(key, value) != value and (key in TELLING or not owner):
                    yield f"{owner}{key} {setting_text(value)}"

    def _reason(self, role: Role, choice: str, what: str, others: Sequence[Other], **said: Any) -> Reason:
        fitting = sorted(
            (o for o in others if o.seconds is not None), key=lambda other: (digits(other.seconds or 0.0), other.what)
        )
        unfit = [other for other in others if other.seconds is None]
        mine = self.plan.predicted
        return Reason(role.name, choice, what, mine.seconds, (*fitting, *unfit), tie=self.problem.tie,
                      device_bytes=mine.device_bytes, host_bytes=mine.host_bytes, **said)  # fmt: skip

    def _mesh(self, role: Role) -> Reason:
        """The role alone, or with the roles of another mesh; the planner chooses all sizes and layouts anew."""
        sets = [[placed.name for placed in group.roles] for group in placement_of(self.plan).groups]
        home = next(names for names in sets if role.name in names)
        beside = [name for name in home if name != role.name]
        size = self.chosen[role.name].mesh.size
        what = f"of {size} device{'' if size == 1 else 's'}, {f'shared with {_listed(beside)}' if beside else 'alone'}"
        if self.problem.placement is not None and self.problem.placement.role(role.name) is not None:
            return self._reason(role, "mesh", what, (), is_asked=True)
        apart = [names for names in sets if names is not home]
        mine = [beside] if beside else []
        others = [self._best(self._split([*apart, *mine, [role.name]]), "alone")] if beside else []
        for names in apart:
            rest = [one for one in apart if one is not names]
            others.append(self._best(self._split([*rest, *mine, [*names, role.name]]), f"with {_listed(names)}"))
        return self._reason(role, "mesh", what, others)

    def _layout(self, role: Role) -> Reason:
        """The same split with each other layout of the role on as many devices."""
        layout = self.chosen[role.name].layout
        if self.problem.asked_layout(role.name) is not None:
            return self._reason(role, "layout", str(layout), (), is_asked=True)
        mesh, keep = Mesh(0, layout.size), self.problem
        options = all_options(role, self.plan.cluster, mesh, keep.workload, keep.choices)
        is_cut = not role.is_engine and any(option.layout.tp > 1 for option in options)
        if not role.is_engine and mesh.spans_nodes(self.plan.cluster.devices_per_node):
            options = likely(options)  # each is planned for: over nodes only those that may be as fast
        layouts = dict.fromkeys(option.layout for option in options if option.layout != layout.ordered("mod"))
        others = [self._best(self._fixed(role, one), str(one)) for one in layouts]
        if_none = "cut by tensor parallelism too it would be no faster" if is_cut else NO_OTHER
        return self._reason(role, "layout", str(layout), others, if_none=if_none)

    def _offload(self, role: Role) -> tuple[Reason, ...]:
        """The same split with each other class of offload; nothing for a role that has none."""
        mine, keep = self.chosen[role.name], self.problem
        if mine.offload is None:
            return ()
        if any((name, key) == (role.name, "offload") for name, key, _ in keep.only):
            return (self._reason(role, "offload", mine.offload, (), is_asked=True),)
        classes = [one.value for one in keep.choices.offload] if role.is_trained else ["none", "park"]
        split = self._fixed(role, keep.asked_layout(role.name))
        others = [
            self._best(replace(split, only=(*keep.only, (role.name, "offload", one))), one, (role.name, "offload"))
            for one in classes
            if one != mine.offload
        ]
        return (self._reason(role, "offload", mine.offload, others),)

    def _settings(self, role: Role) -> Iterator[Reason]:
        """Where all stands as it does, and in these layouts: each other value of what an engine or a trainer may be set to."""
        mine, keep = self.chosen[role.name], self.problem
        may: dict[str, Sequence[Setting]] = {}
        if role.is_engine:
            may["utilization"] = keep.choices.utilization
        elif role.is_trained:
            may["recompute"] = keep.choices.recompute
            may["micro_batch_tokens"] = micro_batches(keep.choices, keep.workload, mine.layout.tp)
        placed = replace(keep, placement=placement_of(self.plan))
        said = dict(mine.settings)
        asked = {key for name, key, _ in keep.only if name == role.name}
        for key, values in may.items():
            if key in said and len(set(values)) > 1:
                others = [
                    self._best(
                        replace(placed, only=(*keep.only, (role.name, key, one))), setting_text(one), (role.name, key)
                    )
                    for one in dict.fromkeys(values)
                    if one != said[key] and key not in asked
                ]
                yield self._reason(role, key, setting_text(said[key]), others, is_asked=key in asked)

    def _split(self, sets: Sequence[Sequence[str]]) -> Problem:
        """The same problem with roles in these sets, and the layouts that were asked for."""
        asked = self.problem.asked_layout
        groups = (Group(tuple(Placed(name, asked(name)) for name in names)) for names in sets)
        return replace(self.problem, placement=Placement(tuple(groups)))

    def _fixed(self, role: Role, layout: Layout | None) -> Problem:
        """The same split, with a layout of one role; the planner chooses the others, unless they were asked for."""
        groups = []
        for group in placement_of(self.plan).groups:
            named = (Placed(one.name, self.problem.asked_layout(one.name)) for one in group.roles)
            groups.append(Group(tuple(Placed(one.name, layout) if one.name == role.name else one for one in named)))
        return replace(self.problem, placement=Placement(tuple(groups)))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(sorted(names))
