"""What a search looks things up in: the options of each role on each size of mesh, where sets stand, seconds of handovers.

Everything here is a fact about a problem, made when it is first asked for and kept; nothing depends on what a search has seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache

from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.cells import undominated
from flowrl.planner.floors import floors
from flowrl.planner.handover import Side, handover_s
from flowrl.planner.options import Choices, Option, all_options
from flowrl.planner.orders import Shape
from flowrl.planner.problem import INFINITE, Candidate, Problem, place, shape_of, slice_sizes, splits, work_of
from flowrl.planner.roles import Role
from flowrl.planner.ties import burden, splitting
from flowrl.planner.waiting import handovers_of
from flowrl.planner.workload import Workload

PLENTY = 2**60
"""Bytes that are never short."""

Split = tuple[tuple[int, ...], ...]
"""Sets of roles, each by its index."""
Calls = tuple[float, ...]
"""Seconds of each call of a role."""


class Space:
    """Facts about a problem.

    Example:
        space = Space(problem)
        space.options(0, 8)          # of the first role on eight devices

    `whole`: the problem on all devices of each node, where `problem` is that on a part of them.
    """

    def __init__(self, problem: Problem, whole: Problem | None = None) -> None:
        self.problem, self.whole = problem, whole or problem
        self.idle = self.whole.cluster.devices_per_node - problem.cluster.devices_per_node
        """Devices of each node that no mesh has."""
        self.roles = problem.roles
        self.cluster = problem.cluster
        self.sizes = slice_sizes(problem.cluster)
        self.work = work_of(problem.roles)
        self.handovers = handovers_of(self.work, problem.roles)
        self.edges = tuple(one.edge for one in self.handovers)
        self.index = {role.name: index for index, role in enumerate(problem.roles)}
        models = [role.model for role in problem.roles]
        ends = {name for edge in self.edges for name in (edge.giver, edge.taker)}
        self.layout_counts = tuple(role.name in ends or models.count(role.model) > 1 for role in problem.roles)
        self.made = 0
        """How many times options were made."""
        self._floors = [
            floors(role, self.cluster, problem.workload, problem.choices, problem.asked_layout(role.name))
            for role in problem.roles
        ]
        self._options: dict[tuple[int, int], tuple[Option, ...]] = {}
        self._least: list[dict[int, Calls]] = [
            {size: tuple(floor.seconds(size) for floor in mine) for size in self.sizes} for mine in self._floors
        ]
        self._upto: list[dict[int, tuple[Calls, float]]] = [{} for _ in self.roles]
        self._areas: list[dict[int, float]] = [{} for _ in self.roles]
        self._shapes: dict[Split, Shape] = {}
        self._places: dict[tuple[int, ...], tuple[Mesh, ...] | None] = {}
        self._handovers: dict[tuple[object, ...], float] = {}

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """Every split that the problem allows, those with fewer sets first."""
        return tuple(sorted(filter(self.problem.allows, splits(len(self.roles))), key=len))

    # -------------------------------------------------------------------------------------------------------- options

    def options(self, role: int, size: int) -> tuple[Option, ...]:
        """Of a role on a mesh of a size: those asked for, without those that another one beats in everything: seconds, memory,
        what is handed over, and what makes a plan simpler. What a handover takes depends on layouts: where a role has one, only
        options of the same layout are compared. Nothing of this depends on what fits."""
        found = self._options.get((role, size))
        if found is None:
            every = (one for one in self.every_option(role, size) if self.problem.takes(one))
            found = self._options[role, size] = undominated(tuple(every), self.costs,
                                                            with_layout=self.layout_counts[role])  # fmt: skip
            calls = zip(*(option.seconds for option in found), strict=True)
            self._least[role][size] = tuple(map(min, calls)) if found else (INFINITE,) * len(self.roles[role].calls)
            self._upto[role].clear()
            self.made += 1
        return found

    def costs(self, option: Option) -> tuple[float, ...]:
        """By which an option is compared with others."""
        return (*option.costs, burden(option), splitting(option))

    def every_option(self, role: int, size: int) -> tuple[Option, ...]:
        """Also those that others beat."""
        return self._all_options(role, size, self.cluster.with_memory(host_bytes=PLENTY))

    def roomy_options(self, role: int, size: int) -> tuple[Option, ...]:
        """Also those that no device holds. Of an engine, which takes a share of what there is, those that there are."""
        if self.roles[role].is_engine:
            return self.every_option(role, size)
        return self._all_options(role, size, self.cluster.with_memory(device_bytes=PLENTY, host_bytes=PLENTY))

    def _all_options(self, role: int, size: int, cluster: Cluster) -> tuple[Option, ...]:
        """Of the layout that is asked for, if one is: also one that the planner would not offer by itself."""
        problem, one = self.problem, self.roles[role]
        return _options(one, cluster, size, problem.workload, problem.choices, problem.asked_layout(one.name))

    def is_made(self, role: int, size: int) -> bool:
        """Whether `least` is what options have, and no floor."""
        return (role, size) in self._options

    def least(self, role: int, size: int) -> Calls:
        """Of each call of a role, seconds that no option of that size goes below; infinite where none fits."""
        return self._least[role].get(size) or self._elsewhere(role, size)

    def upto(self, role: int, size: int) -> tuple[Calls, float]:
        """Of each call, seconds that no option of that size or a smaller one goes below; and of their sum times the devices."""
        known = self._upto[role] or self._fill_tables(role)
        return known[size] if size in known else known[max(one for one in self.sizes if one <= size)]

    def area_from(self, role: int, size: int) -> float:
        """Devices times seconds of all calls that no option of that size or a larger one goes below."""
        if not self._upto[role]:
            self._fill_tables(role)
        return self._areas[role].get(size, INFINITE)

    def _fill_tables(self, role: int) -> dict[int, tuple[Calls, float]]:
        known, areas, least = self._upto[role], self._areas[role], self._least[role]
        calls: Calls = (INFINITE,) * len(self.roles[role].calls)
        area = INFINITE
        for one in self.sizes:
            calls = tuple(map(min, calls, least[one]))
            area = min(area, one * sum(least[one]))
            known[one] = (calls, area)
        area = INFINITE
        for one in reversed(self.sizes):
            area = areas[one] = min(area, one * sum(least[one]))
        return known

    def _elsewhere(self, role: int, size: int) -> Calls:
        """A size of which there is no slice."""
        return (INFINITE,) * len(self.roles[role].calls)

    # -------------------------------------------------------------------------------------------------------- seconds

    def shape(self, split: Split) -> Shape:
        """Which sets each piece of work occupies."""
        if split not in self._shapes:
            self._shapes[split] = shape_of(self.work, self.roles, split)
        return self._shapes[split]

    def cost(self, shape: Shape, seconds: Sequence[float], latency_s: float | None = None) -> float:
        """Seconds of an iteration from those of its parts; without a latency, a bound on them.

        Sync: the latency. Async: `max(load of a set, latency / (max_staleness + 1))`.
        """
        if latency_s is None:
            latency_s = sum(seconds) if shape.num_sets == 1 else shape.bound_s(seconds)
        staleness = self.problem.schedule.max_staleness
        return latency_s if not staleness else max(latency_s / (staleness + 1), *shape.loads(seconds))

    def free_bound_s(self) -> float:
        """No plan takes less: each role has all devices for itself; or no device ever waits."""
        alone: Split = tuple((role,) for role in range(len(self.roles)))
        every = self.sizes[-1]
        upto = [self.upto(role, every) for role in range(len(self.roles))]
        seconds = [0.0 if call is None else upto[role][0][call] for role, call, _ in self.work]
        return max(self.cost(self.shape(alone), seconds), sum(area for _, area in upto) / self.cluster.num_devices)

    def handover(self, engine: Role, source: tuple[Mesh, Option], target: tuple[Mesh, Option]) -> float:
        """Seconds of new weights on their way to an engine."""
        (origin, giving), (goal, taking) = source, target
        key = (engine.name, origin, giving.layout, giving.is_on_host, goal, taking.layout)
        if key not in self._handovers:
            self._handovers[key] = handover_s(
                engine.shape,
                self.cluster,
                Side(origin, giving.layout),
                Side(goal, taking.layout),
                is_on_host=giving.is_on_host,
            )
        return self._handovers[key]

    def handover_of(self, engine: int, placed: Mapping[str, tuple[Mesh, Option]]) -> float:
        """The same, of where everything stands."""
        role = self.roles[engine]
        return self.handover(role, placed[role.weights_from], placed[role.name])

    # --------------------------------------------------------------------------------------------------------- meshes

    def split_of(self, candidate: Candidate) -> Split:
        """The sets of a plan's roles, by its meshes."""
        return tuple(tuple(self.index[option.role] for option in one.options) for one in candidate.combinations)

    def meshes(self, sizes: tuple[int, ...]) -> tuple[Mesh, ...] | None:
        """Where sets of these sizes stand: the largest first, each at the lowest free place; None when they do not fit."""
        if sizes not in self._places:
            self._places[sizes] = place(self.cluster, sizes)
        return self._places[sizes]


@lru_cache(maxsize=1024)
def _options(
    role: Role, cluster: Cluster, size: int, workload: Workload, choices: Choices, asked: Layout | None
) -> tuple[Option, ...]:
    """Kept over searches: to explain why nothing fits means to plan again with other limits. Host memory is no part of it."""
    return all_options(role, cluster, Mesh(0, size), workload, choices, layout=asked)
