"""Options for every role of one placement: the fastest that fit, or the simplest that fit and are fast enough.

A depth-first walk over the roles. A branch is left when the least that the rest needs of memory does not fit any more, or when a
bound on its seconds, with the least of each call of the rest, is not below the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import le

from flowrl.mesh import Mesh
from flowrl.planner.cells import Combination, Limits, made
from flowrl.planner.options import Option, likely
from flowrl.planner.problem import INFINITE, Candidate, host_bytes
from flowrl.planner.space import Space, Split
from flowrl.planner.ties import Simplicity, burden, layout_changes, simplicity, splitting, whole_gib
from flowrl.planner.waiting import rule_of

SAME = 1 + 1e-12
"""Seconds that differ by less differ by rounding."""

MOST_FAILED = 64
"""To keep the comparisons few."""


class Spent(Exception):
    """The budget of branches is used up."""


@dataclass
class Budget:
    """Branches that may still be looked at."""

    branches: int

    def spend(self) -> None:
        """One branch. Raises `Spent` when none is left."""
        if self.branches <= 0:
            raise Spent
        self.branches -= 1


@dataclass
class Least:
    """What the roles after some place in the walk need at least, of each set."""

    static: list[float]
    dynamic: list[float]
    host: list[float]
    burden: int


class Fill:
    """One placement. `bound_s` is what no choice of its options goes below."""

    def __init__(
        self,
        space: Space,
        split: Split,
        meshes: tuple[Mesh, ...],
        budget: Budget,
        takes: Callable[[Option], bool] | None = None,
    ) -> None:
        self.space, self.split, self.meshes, self.budget = space, split, meshes, budget
        self.shape = space.shape(split)
        self.set_of = {role: at for at, mine in enumerate(split) for role in mine}
        self.choices: dict[int, tuple[Option, ...]] = {}
        for role, at in self.set_of.items():
            options = space.options(role, meshes[at].size)
            self.choices[role] = options if takes is None else tuple(filter(takes, options))
        self.calls: dict[int, list[tuple[int, int]]] = {role: [] for role in self.set_of}
        self.moves: list[tuple[int, int]] = []
        for index, (role, call, _) in enumerate(space.work):
            if call is None:
                self.moves.append((index, role))
            else:
                self.calls[role].append((index, call))
        self.limits = Limits(space.problem.room_bytes, space.problem.choices.memory.context_bytes)
        nodes = [len(mesh.nodes(space.cluster.devices_per_node)) for mesh in meshes]
        self.host_limits = [space.cluster.host.memory_bytes * count for count in nodes]
        self.simulated = 0
        self.best: Candidate | None = None
        """Of the last walk, also of one that was cut short."""
        self.failed: list[tuple[float, ...]] = []
        """Seconds of the work of plans that are not below the limit of the walk."""
        self.fits = False
        """Whether anything that was looked at fits."""
        self.bound_s = self._bound()

    # ------------------------------------------------------------------------------------------------------- two goals

    def fastest(self, limit_s: float) -> Candidate | None:
        """The fastest plan below a limit, if there is one."""
        if self.soon(limit_s):
            limit_s = limit_s if self.best is None else self.best.seconds
            _Fastest(self, self.viable(limit_s), limit_s).down(0)
        return self.best

    def soon(self, limit_s: float) -> bool:
        """The fastest plan of few options; whether there are more with which one may be faster. A limit from few options leaves
        little of all of them."""
        self.best, self.failed = None, []
        if self.bound_s >= limit_s:
            return False
        viable = self.viable(limit_s)
        few = {role: likely(mine) for role, mine in viable.items()}
        _Fastest(self, few, limit_s).down(0)
        return few != viable

    def simplest(self, limit_s: float, numerics: int, below: Simplicity | None) -> Candidate | None:
        """The simplest plan of at most `limit_s`, with options of at most a rank of numerics; only if simpler than `below`."""
        self.best, self.failed = None, []
        if self.bound_s >= limit_s * SAME:
            return None
        viable = {
            role: tuple(sorted((one for one in mine if one.numerics <= numerics), key=_simple_first))
            for role, mine in self.viable(limit_s * SAME).items()
        }
        _Simplest(self, viable, limit_s * SAME, below).down(0)
        return self.best

    # ---------------------------------------------------------------------------------------------------------- bounds

    def _bound(self) -> float:
        self.least_s = [0.0] * len(self.space.work)
        if not all(self.choices.values()):
            return INFINITE
        for role, calls in self.calls.items():
            for index, call in calls:
                self.least_s[index] = min(option.seconds[call] for option in self.choices[role])
        for index, role in self.moves:
            self.least_s[index] = self._least_handover(role)
        return self.space.cost(self.shape, self.least_s)

    def _least_handover(self, engine: int) -> float:
        """The shortest that any of the layouts allows."""
        space = self.space
        giver = space.index[space.roles[engine].weights_from]
        source, target = self.meshes[self.set_of[giver]], self.meshes[self.set_of[engine]]
        giving = {(one.layout, one.is_on_host): one for one in self.choices[giver]}.values()
        taking = {one.layout: one for one in self.choices[engine]}.values()
        return min(space.handover(space.roles[engine], (source, a), (target, b)) for a in giving for b in taking)

    def viable(self, limit_s: float) -> dict[int, tuple[Option, ...]]:
        """Of each role, the options with which a plan may be below a limit."""
        if limit_s == INFINITE:
            return self.choices
        found: dict[int, tuple[Option, ...]] = {}
        for role, mine in self.choices.items():
            seconds = list(self.least_s)
            kept: list[Option] = []
            for option in mine:
                for index, call in self.calls[role]:
                    seconds[index] = option.seconds[call]
                if self.space.cost(self.shape, seconds) < limit_s:
                    kept.append(option)
            found[role] = tuple(kept)
        return found

    # ------------------------------------------------------------------------------------------------------- candidates

    def candidate(self, chosen: dict[int, Option], seconds: list[float], limit_s: float) -> Candidate | None:
        """The plan of a choice, its handovers and its order with it; None when it does not fit or is not below the limit."""
        combinations: list[Combination] = []
        for mine in self.split:
            one = made(tuple(chosen[role] for role in mine), self.space.edges, self.limits)
            if one is None:
                return None
            combinations.append(one)
        if max(host_bytes(self.space.cluster, self.meshes, combinations)) > self.space.cluster.host.memory_bytes:
            return None
        rule = rule_of(self.space.work, self.space.roles, self.space.handovers, combinations, self.limits)
        self.fits |= rule is None
        placed = {self.space.roles[role].name: (self.meshes[self.set_of[role]], one) for role, one in chosen.items()}
        for index, role in self.moves:
            seconds[index] = self.space.handover_of(role, placed)
        if self.space.cost(self.shape, seconds) >= limit_s:
            return None
        if any(all(map(le, one, seconds)) for one in self.failed):
            return None  # nowhere faster than what was too slow: no order makes it faster either
        self.simulated += 1
        enough_s = limit_s * (self.space.problem.schedule.max_staleness + 1)
        latency_s, order = self.shape.shortest(seconds, enough_s, rule)
        total_s = self.space.cost(self.shape, seconds, latency_s)
        if total_s >= limit_s:
            if rule is None:  # else one that fits in every order may take no more in each part, and less in all
                self.fail(seconds)
            return None
        self.fits = True
        loads = tuple(self.shape.loads(seconds))
        per_node = self.space.cluster.devices_per_node
        return Candidate(total_s, self.meshes, tuple(combinations), loads, latency_s, order, tuple(seconds), per_node)

    def fail(self, seconds: Sequence[float]) -> None:
        """What takes these seconds is not below the limit."""
        if len(self.failed) < MOST_FAILED:
            self.failed.append(tuple(seconds))


class Walk:
    """The walk; what is a better plan is for its kinds to say."""

    def __init__(self, fill: Fill, viable: dict[int, tuple[Option, ...]], limit_s: float) -> None:
        self.fill, self.limit_s = fill, limit_s
        self.viable = viable
        count = len(fill.split)
        # those that can take most memory first: what does not fit is seen early
        self.order = sorted(viable, key=lambda role: (-max((o.peak_bytes for o in viable[role]), default=0.0), role))
        self.rest = [Least([0.0] * count, [0.0] * count, [0.0] * count, 0)]
        for role in reversed(self.order):
            last, at, mine = self.rest[-1], fill.set_of[role], viable[role]
            static, dynamic, host = list(last.static), list(last.dynamic), list(last.host)
            static[at] += min((o.static_bytes for o in mine), default=0.0)
            dynamic[at] = max(dynamic[at], min((o.dynamic_bytes for o in mine), default=0.0))
            host[at] += min((o.host_bytes for o in mine), default=0.0)
            self.rest.append(Least(static, dynamic, host, last.burden + min(map(burden, mine), default=0)))
        self.rest.reverse()
        self.chosen: dict[int, Option] = {}
        self.seconds = list(fill.least_s)
        self.static, self.dynamic, self.host = [0.0] * count, [0.0] * count, [0.0] * count
        self.contexts = [0] * count

    def down(self, at: int) -> None:
        """Choose for the role at a place in the order, and for those after it."""
        fill = self.fill
        if at == len(self.order):
            self.complete()
            return
        role = self.order[at]
        one, rest = fill.set_of[role], self.rest[at + 1]
        before = (self.static[one], self.dynamic[one], self.host[one], self.contexts[one])
        for option in self.viable[role]:
            fill.budget.spend()
            self.chosen[role] = option
            self.static[one] = before[0] + option.static_bytes
            self.dynamic[one] = max(before[1], option.dynamic_bytes)
            self.host[one] = before[2] + option.host_bytes
            self.contexts[one] = before[3] + option.has_context
            for index, call in fill.calls[role]:
                self.seconds[index] = option.seconds[call]
            if (
                self._fits(one, rest)
                and not self.is_pruned(fill.space.cost(fill.shape, self.seconds), rest)
            ):  # fmt: skip
                self.down(at + 1)
        self.chosen.pop(role, None)
        self.static[one], self.dynamic[one], self.host[one], self.contexts[one] = before
        for index, _ in fill.calls[role]:
            self.seconds[index] = fill.least_s[index]

    def _fits(self, one: int, rest: Least) -> bool:
        fill = self.fill
        context = fill.limits.context_bytes if self.contexts[one] else 0.0
        held = context + self.static[one] + rest.static[one]
        if held + max(self.dynamic[one], rest.dynamic[one]) > fill.limits.device_bytes:
            return False
        if self.host[one] + rest.host[one] > fill.host_limits[one]:
            return False
        chosen = [self.chosen[role] for role in fill.split[one] if role in self.chosen]
        return all(held + edge.handed_bytes(chosen) <= fill.limits.device_bytes for edge in fill.space.edges)

    def is_pruned(self, bound_s: float, rest: Least) -> bool:
        """Whether no completion of what is chosen is wanted: none is below the bound, and the rest needs what it needs."""
        raise NotImplementedError

    def complete(self) -> None:
        """All is chosen."""
        raise NotImplementedError


class _Fastest(Walk):
    def is_pruned(self, bound_s: float, rest: Least) -> bool:
        return bound_s >= self.limit_s

    def complete(self) -> None:
        found = self.fill.candidate(self.chosen, list(self.seconds), self.limit_s)
        if found is not None:
            self.fill.best, self.limit_s = found, found.seconds
            if not any(one.is_ordered for one in found.combinations):
                self.fill.fail(found.work_s)


class _Simplest(Walk):
    def __init__(
        self, fill: Fill, viable: dict[int, tuple[Option, ...]], limit_s: float, below: Simplicity | None
    ) -> None:
        super().__init__(fill, viable, limit_s)
        self.below = below
        self.models = {role.name: role.model for role in fill.space.roles}

    def is_pruned(self, bound_s: float, rest: Least) -> bool:
        if bound_s >= self.limit_s:
            return True
        if self.below is None:
            return False
        numerics = max(option.numerics for option in self.chosen.values())
        changes = layout_changes((self.models[option.role], option.layout) for option in self.chosen.values())
        burdens = rest.burden + sum(map(burden, self.chosen.values()))
        held = max(static + dynamic for static, dynamic in zip(self.static, self.dynamic, strict=True))
        cuts = sum(map(splitting, self.chosen.values()))
        key = (numerics, self.fill.space.idle, len(self.fill.split), cuts, changes, burdens, whole_gib(held), bound_s)
        return key >= self.below

    def complete(self) -> None:
        found = self.fill.candidate(self.chosen, list(self.seconds), self.limit_s)
        if found is not None:
            rank = simplicity(self.fill.space.whole, found)
            if self.below is None or rank < self.below:
                self.fill.best, self.below = found, rank


def _simple_first(option: Option) -> tuple[float, ...]:
    return (option.numerics, splitting(option), burden(option), option.peak_bytes, *option.seconds)
