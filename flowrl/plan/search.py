"""The best placement of a flow's roles on a cluster: exhaustive, with branch and bound.

    for every way to split the roles into sets                       (sets stand on devices of their own)
        for every size of each set's mesh                            (buddy slices; the largest set first, at the lowest place)
            for every combination of options that fits               (flowrl.plan.cells)
                seconds of one step: the shortest order of its calls (flowrl.plan.orders)

A branch is left when a bound that no completion of it can go below is not below the best plan so far: the load of its busiest set, and
the longest chain of calls, each with its fastest option. What is found is the best of all these plans under the cost model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.graph.nodes import Graph
from flowrl.graph.schedule import Schedule, Sync
from flowrl.mesh import Cluster, Mesh
from flowrl.mesh.placement import Group, Placement, Role as Placed
from flowrl.plan.cells import Combination, Edge, Limits, combine
from flowrl.plan.handover import Side, handover_s
from flowrl.plan.options import Choices, Option, all_options, pareto
from flowrl.plan.orders import Shape
from flowrl.plan.roles import Role, roles_of
from flowrl.plan.workload import Workload

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be placed, and where."""

    roles: tuple[Role, ...]
    cluster: Cluster
    workload: Workload
    schedule: Schedule = field(default_factory=Sync)
    choices: Choices = field(default_factory=Choices)

    @classmethod
    def of(
        cls,
        graph: Graph,
        models: Mapping[str, ModelShape],
        cluster: Cluster,
        workload: Workload,
        *,
        schedule: Schedule | None = None,
        choices: Choices | None = None,
    ) -> Problem:
        """The roles of a graph on a cluster. Raises `ConfigError` for models that do not fit the graph."""
        roles = roles_of(graph, models, workload)
        return cls(roles, cluster, workload, schedule or Sync(), choices or Choices())

    def __post_init__(self) -> None:
        names = [role.name for role in self.roles]
        if len(set(names)) != len(names):
            raise ConfigError(f"roles need different names; found {names}")
        # the answer must not depend on the order in which roles are given
        object.__setattr__(self, "roles", tuple(sorted(self.roles, key=lambda role: role.name)))

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Where new weights are handed over. Beside them work the roles that have a call which does not come before."""
        work = work_of(self.roles)
        found: list[Edge] = []
        for index, (taker, call, _) in enumerate(work):
            if call is None:
                before = {index}
                for at in range(index, -1, -1):
                    before |= set(work[at][2]) if at in before else set()
                others = {role for at, (role, _, _) in enumerate(work) if at not in before} - {taker}
                names = frozenset(self.roles[role].name for role in others)
                found.append(Edge(self.roles[taker].weights_from, self.roles[taker].name, names))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One complete plan, with what the cost model says of it."""

    seconds: float
    """Of one step; with Async from one version of the weights to the next."""
    meshes: tuple[Mesh, ...]
    combinations: tuple[Combination, ...]
    """Of each mesh."""
    busy_s: tuple[float, ...]
    """For which each mesh is busy in a step."""
    latency_s: float
    """Of one step alone, from its first call to its last."""
    order: tuple[int, ...]
    """In which calls and handovers (as `Problem.work` lists them) start."""
    work_s: tuple[float, ...]
    """Of each of them."""

    @property
    def numerics(self) -> int:
        return max(one.numerics for one in self.combinations)

    @property
    def peak_bytes(self) -> float:
        return max(one.peak_bytes for one in self.combinations)

    @property
    def placement(self) -> Placement:
        """In the notation in which a user can ask for it."""
        return Placement(tuple(Group(tuple(Placed(option.role, option.layout) for option in one.options))
                               for one in self.combinations))  # fmt: skip

    @property
    def rank(self) -> tuple[float, ...]:
        """Lower is better: seconds, then numerics, bytes on a device, number of meshes."""
        return (self.seconds, self.numerics, self.peak_bytes, len(self.meshes))

    def option(self, role: str) -> Option:
        """Of a role. Raises `KeyError` for a role that is not placed."""
        return next(option for one in self.combinations for option in one.options if option.role == role)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found."""

    problem: Problem
    best: Candidate | None
    """None where nothing fits; `flowrl.plan.relax` says what would."""
    others: tuple[Candidate, ...]
    """The best of each other split into sets that was looked at to the end, the best first."""
    bound_s: float
    """No plan of the search space takes less."""
    placements: int
    """Splits with sizes that were looked at."""
    simulated: int
    """Combinations whose seconds were computed."""
    pruned: int
    """Branches left because of a bound."""
    unfit: int
    """Placements of which no combination fits."""

    @property
    def gap(self) -> float:
        """By how much the best plan may be above the bound, as a part of it."""
        return INFINITE if self.best is None else self.best.seconds / self.bound_s - 1 if self.bound_s > 0 else 0.0

    def why_not(self, other: Candidate) -> str:
        """Why another candidate lost, in one line."""
        assert self.best is not None
        index = max(range(len(other.meshes)), key=lambda one: other.busy_s[one])
        more = other.seconds / self.best.seconds - 1 if self.best.seconds else 0.0
        names = ", ".join(option.role for option in other.combinations[index].options)
        mesh, busy = other.meshes[index], other.busy_s[index]
        return f"{other.placement}: {other.seconds:.1f} s ({more:+.1%}); {mesh} ({names}) is busy for {busy:.1f} s"


def search(problem: Problem, *, prune: bool = True, top: int = 5, slack: float = 0.0) -> Found:
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
        for split in sorted(splits(len(self.roles)), key=len):
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
        for size in self.sizes:
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
            mesh = self.cluster.slices(size)[0]
            found = all_options(self.roles[role], self.cluster, mesh, problem.workload, problem.choices)
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
        used = [0.0] * self.cluster.nodes
        for mesh, one in zip(meshes, combinations, strict=True):
            nodes = mesh.nodes(self.cluster.devices_per_node)
            for node in nodes:
                used[node] += one.host_bytes / len(nodes)
        return max(used) > self.cluster.host.memory_bytes


# ------------------------------------------------------------------------------------------------------------ structure

Work = tuple[int, int | None, tuple[int, ...]]
"""A role, which of its calls (None: the handover of new weights to it), and the work before it."""


def work_of(roles: Sequence[Role]) -> tuple[Work, ...]:
    """Calls and handovers in an order in which each comes after what it waits for.

    A handover comes after the trainer's last update and the engine's samples with the old weights; samples that the flow takes after
    the update come after it.
    """
    trainer = {role.name: {call.node for call in role.calls if call.work == "train"} for role in roles}
    waits: dict[tuple[int, int | None], set[str]] = {}
    names: dict[str, tuple[int, int | None]] = {}
    for index, role in enumerate(roles):
        updates = trainer.get(role.weights_from, set())
        for at, call in enumerate(role.calls):
            names[call.node] = (index, at)
            waits[index, at] = set(call.after)
            if updates & set(call.after):
                waits[index, at].add(f"to {role.name}")
        if updates:
            old = {call.node for call in role.calls if not updates & set(call.after)}
            names[f"to {role.name}"] = (index, None)
            waits[index, None] = updates | old
    listed: list[tuple[int, int | None]] = []
    while len(listed) < len(waits):
        ready = [key for key in waits if key not in listed and all(names[name] in listed for name in waits[key])]
        if not ready:
            raise ConfigError(
                f"calls wait for each other: {sorted(name for name, key in names.items() if key not in listed)}"
            )
        listed.append(min(ready, key=lambda key: (key[0], -1 if key[1] is None else key[1])))
    return tuple(
        (role, call, tuple(sorted(listed.index(names[n]) for n in waits[role, call]))) for role, call in listed
    )


def shape_of(work: Sequence[Work], roles: Sequence[Role], split: Sequence[Sequence[int]]) -> Shape:
    """Which sets each piece of work occupies under a split; a handover those of both its sides."""
    place_of = {role: index for index, mine in enumerate(split) for role in mine}
    index_of = {role.name: index for index, role in enumerate(roles)}
    sets: list[tuple[int, ...]] = []
    for role, call, _ in work:
        both = {place_of[role]} if call is not None else {place_of[role], place_of[index_of[roles[role].weights_from]]}
        sets.append(tuple(sorted(both)))
    return Shape(tuple(sets), tuple(before for _, _, before in work), len(split))


def splits(count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to split 0 ... count - 1 into sets, each once."""
    if count == 0:
        yield ()
        return
    for rest in splits(count - 1):
        for at in range(len(rest)):
            yield (*rest[:at], (*rest[at], count - 1), *rest[at + 1 :])
        yield (*rest, (count - 1,))


def place(cluster: Cluster, sizes: Sequence[int]) -> tuple[Mesh, ...] | None:
    """A buddy slice for each size: the largest first, each at the lowest free place; None when one finds none."""
    found: dict[int, Mesh] = {}
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        free = (m for m in cluster.slices(sizes[index]) if not any(m.overlaps(taken) for taken in found.values()))
        mesh = next(free, None)
        if mesh is None:
            return None
        found[index] = mesh
    return tuple(found[index] for index in range(len(sizes)))
