"""The best placement of a flow's roles on a cluster: exhaustive, with branch and bound.

    for every way to split the roles into sets                       (sets stand on devices of their own)
        for every size of each set's mesh                            (buddy slices; the largest set first, at the lowest place)
            for every combination of options that fits               (flowrl.planner.cells)
                seconds of one step: the shortest order of its calls (flowrl.planner.orders)

A branch is left when a bound that no completion of it can go below is not below the best plan so far: the load of its busiest
set, and the longest chain of calls, each with its fastest option. What is found is the best of all these plans under the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from flowrl.mesh import Mesh
from flowrl.planner.cells import Combination, Limits, combine
from flowrl.planner.handover import Side, handover_s
from flowrl.planner.options import Option, all_options, pareto
from flowrl.planner.problem import INFINITE, Candidate, Found, Problem, host_bytes, place, shape_of, splits, work_of
from flowrl.planner.roles import Role


def search(problem: Problem, *, prune: bool = True, top: int = 5, slack: float = 0.1) -> Found:
    """The best plan of a problem. The same for every order of its roles; two calls give equal answers.

    Args:
        prune: False looks at everything: for tests.
        top: other candidates to keep.
        slack: look at what may be up to this part slower than the best, to have it among the others. The best is the same.
    """
    return _Search(problem, prune, top, slack).run()


@dataclass
class _Search:
    problem: Problem
    prune: bool
    top: int
    slack: float
    best: Candidate | None = None
    others: dict[tuple[int, ...], Candidate] = field(default_factory=dict)
    bound_s: float = INFINITE
    placements: int = 0
    simulated: int = 0
    pruned: int = 0
    unfit: int = 0

    def __post_init__(self) -> None:
        problem = self.problem
        self.roles = problem.roles
        self.cluster = problem.cluster
        self.sizes = [n for n in range(self.cluster.num_devices, 0, -1) if self.cluster.slices(n)]
        self.work = work_of(self.roles)
        self.index = {role.name: i for i, role in enumerate(self.roles)}
        self.edges = problem.edges
        self.limits = Limits(self.cluster.device.memory_bytes, problem.choices.memory.context_bytes)
        self._options: dict[tuple[int, int], tuple[Option, ...]] = {}
        self._cells: dict[tuple[tuple[int, ...], int], tuple[Combination, ...]] = {}
        self._least: dict[tuple[int, int], tuple[float, ...]] = {}
        self._handovers: dict[tuple[object, ...], float] = {}
        self._places: dict[tuple[int, ...], tuple[Mesh, ...] | None] = {}

    def run(self) -> Found:
        for split in sorted(filter(self.problem.allows, splits(len(self.roles))), key=len):
            self.shape = shape_of(self.work, self.roles, split)
            self._size(split, (), self.cluster.num_devices)
        others = sorted(self.others.values(), key=lambda one: one.rank)
        if self.best is not None:
            self.bound_s = min(self.bound_s, self.best.seconds)
            others = [one for one in others if one is not self.best]
        return Found(self.problem, self.best, tuple(others[: self.top]), self.bound_s, self.placements, self.simulated,
                     self.pruned, self.unfit)  # fmt: skip

    # ------------------------------------------------------------------------------------------------------- branches

    def _limit(self) -> float:
        return self.best.seconds * (1 + self.slack) if self.prune and self.best is not None else INFINITE

    def _size(self, split: tuple[tuple[int, ...], ...], chosen: tuple[int, ...], left: int) -> None:
        """Give the next set of a split every size that may be worth it."""
        at = len(chosen)
        if at == len(split):
            self._place(split, chosen)
            return
        asked = self.problem.asked_size(split[at])
        for size in self.sizes if asked is None else (asked,):
            if size > left - (len(split) - at - 1):
                continue
            load = sum(sum(self.least(role, size)) for role in split[at])
            if load >= self._limit() or load == INFINITE:
                self.pruned += 1
                continue
            self._size(split, (*chosen, size), left - size)

    def _place(self, split: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> None:
        meshes = self.meshes(sizes)
        if meshes is None:
            return
        self.placements += 1
        fastest = {i: self.least(i, size) for mine, size in zip(split, sizes, strict=True) for i in mine}
        least = [0.0 if call is None else fastest[role][call] for role, call, _ in self.work]
        bound = self.cost(least)
        if bound >= self._limit():
            self.pruned += 1
            self.bound_s = min(self.bound_s, bound)
            return
        cells = [self.cell(mine, size) for mine, size in zip(split, sizes, strict=True)]
        if not all(cells):
            self.unfit += 1
            return
        fits = False
        for combinations in product(*cells):
            if self._is_over_hosts(meshes, combinations):
                continue
            fits = True
            self._weigh(split, meshes, combinations)
        self.unfit += not fits

    def _weigh(
        self, split: tuple[tuple[int, ...], ...], meshes: tuple[Mesh, ...], combinations: tuple[Combination, ...]
    ) -> None:
        placed = {
            option.role: (mesh, option)
            for mesh, one in zip(meshes, combinations, strict=True)
            for option in one.options
        }
        seconds = [
            self.handover(self.roles[role], placed) if call is None else placed[self.roles[role].name][1].seconds[call]
            for role, call, _ in self.work
        ]
        bound = self.cost(seconds)
        self.bound_s = min(self.bound_s, bound)
        if bound > self._limit():
            self.pruned += 1
            return
        self.simulated += 1
        latency, order = self.shape.shortest(seconds)
        found = Candidate(self.cost(seconds, latency), meshes, combinations, tuple(self.shape.loads(seconds)), latency, order,
                          tuple(seconds))  # fmt: skip
        # of the sets, the one with the first role first: a key for what differs in more than sizes
        key = tuple(next(i for i, mine in enumerate(split) if role in mine) for role in range(len(self.roles)))
        if key not in self.others or found.rank < self.others[key].rank:
            self.others[key] = found
        if self.best is None or found.rank < self.best.rank:
            self.best = found

    def cost(self, seconds: Sequence[float], latency: float | None = None) -> float:
        """Seconds of a step from those of its parts; without a latency, a bound on them.

        Sync: the latency. Async: `max(load of a set, latency / (max_staleness + 1))`.
        """
        latency = self.shape.bound_s(seconds) if latency is None else latency
        staleness = self.problem.schedule.max_staleness
        return latency if not staleness else max([latency / (staleness + 1), *self.shape.loads(seconds)])

    # ---------------------------------------------------------------------------------------------------------- cached

    def options(self, role: int, size: int) -> tuple[Option, ...]:
        """Of a role on a mesh of a size."""
        key = (role, size)
        if key not in self._options:
            problem = self.problem
            mesh = Mesh(0, size)
            found = all_options(self.roles[role], self.cluster, mesh, problem.workload, problem.choices)
            found = tuple(filter(problem.takes, found))
            self._options[key] = pareto(found) if self.prune else found
        return self._options[key]

    def least(self, role: int, size: int) -> tuple[float, ...]:
        """Of each call of a role, the least seconds that any option has; infinite when none fits."""
        key = (role, size)
        if key not in self._least:
            options = self.options(role, size)
            times = zip(*(option.seconds for option in options), strict=True)
            self._least[key] = tuple(map(min, times)) if options else (INFINITE,) * len(self.roles[role].calls)
        return self._least[key]

    def cell(self, mine: tuple[int, ...], size: int) -> tuple[Combination, ...]:
        """What a set of roles can do on a mesh of a size."""
        key = (mine, size)
        if key not in self._cells:
            options = [self.options(role, size) for role in mine]
            self._cells[key] = combine(options, self.edges, self.limits, prune=self.prune)
        return self._cells[key]

    def meshes(self, sizes: tuple[int, ...]) -> tuple[Mesh, ...] | None:
        """Where sets of these sizes stand: the largest first, each at the lowest free place; None when they do not fit."""
        if sizes not in self._places:
            self._places[sizes] = place(self.cluster, sizes)
        return self._places[sizes]

    def handover(self, engine: Role, placed: Mapping[str, tuple[Mesh, Option]]) -> float:
        """Seconds of new weights on their way to an engine."""
        (source, giving), (target, taking) = placed[engine.weights_from], placed[engine.name]
        key = (engine.name, source, giving.layout, giving.is_on_host, target, taking.layout)
        if key not in self._handovers:
            self._handovers[key] = handover_s(
                engine.shape,
                self.cluster,
                Side(source, giving.layout),
                Side(target, taking.layout),
                is_on_host=giving.is_on_host,
            )
        return self._handovers[key]

    def _is_over_hosts(self, meshes: Sequence[Mesh], combinations: Sequence[Combination]) -> bool:
        """Whether some host lacks memory for what is kept there."""
        used = host_bytes(self.cluster, meshes, combinations)
        return max(used) > self.cluster.host.memory_bytes
