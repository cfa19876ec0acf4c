"""What is placed, what a placement is, and which orders of work it leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.graph.nodes import Graph
from flowrl.graph.schedule import Schedule, Sync
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.mesh.meshes import is_part, is_power_of_two
from flowrl.mesh.placement import Group, Placement, Role as Placed
from flowrl.planner.cells import Combination
from flowrl.planner.options import Choices, Option, Setting
from flowrl.planner.orders import Shape
from flowrl.planner.roles import Role, roles_of
from flowrl.planner.waiting import Work
from flowrl.planner.workload import Workload
from flowrl.schema.fields import check_fields

INFINITE = float("inf")
LEAST_CHANGE = 5e-4
"""A difference in seconds below this part is none in a text that has percents with one digit."""
LEAST_CAUSE = 0.25
"""Part of a difference in seconds from which one piece of work is named as its cause."""
NEAR = 0.05
"""A plan that is slower by no more than this part is offered for its memory."""
CLEARLY_LESS = 0.1
"""Part of the device memory that such a plan saves at least."""
MOST_CAUSES = 3
"""Pieces of work that are named where none alone makes the difference."""
GIB = 2**30
TIE = 0.02
"""Below this part two plans of one problem cannot be told apart by the cost model. Assumed."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How far a search goes. Counted, never timed, so that equal problems have equal answers on every machine."""

    branches: int = 120_000
    """Partial placements and partial choices of options that are looked at, before the rest is left to a random search."""
    moves: int = 400
    """Of that random search."""
    seed: int = 0
    """Of that random search."""
    alternatives: int = 3
    """Other ways to split the roles that are planned too, to say why they lost; 0 for none."""
    alternative_branches: int = 3_000
    """For all of these together."""
    finished: int = 60
    """Plans that are finished because they may be faster once copies of parked state are hidden (`flowrl.planner.finish`)."""

    def __post_init__(self) -> None:
        check_fields(self)
        least = {"branches": 1, "moves": 0, "alternatives": 0, "alternative_branches": 0, "finished": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"Effort needs {name} of at least {low}; found {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be placed, and where."""

    roles: tuple[Role, ...]
    cluster: Cluster
    workload: Workload
    schedule: Schedule = field(default_factory=Sync)
    choices: Choices = field(default_factory=Choices)
    placement: Placement | None = None
    """What the user asks for; where it says "..." the planner chooses."""
    tie: float = TIE
    """Plans that differ by no more than this part are equal: the cost model cannot tell two plans of one problem apart better.
    Of equal plans the simplest is taken (`flowrl.planner.ties`). 0: the fastest, however little it gains."""
    effort: Effort = field(default_factory=Effort)
    only: tuple[tuple[str, str, Setting], ...] = ()
    """Role, setting and the one value that its options may have: ("policy", "offload", "park"). For what-if questions."""

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
        placement: Placement | str | None = None,
        tie: float = TIE,
        effort: Effort | None = None,
    ) -> Problem:
        """The roles of a graph on a cluster. Raises `ConfigError` for models that do not fit the graph."""
        roles = roles_of(graph, models, workload)
        asked = Placement.parse(placement) if isinstance(placement, str) else placement
        return cls(roles, cluster, workload, schedule or Sync(), choices or Choices(), asked, tie, effort or Effort())

    def __post_init__(self) -> None:
        if not 0 <= self.tie < 1:
            raise ConfigError(f"tie is the relative error between two plans, from 0 to below 1; found {self.tie!r}")
        names = [role.name for role in self.roles]
        if len(set(names)) != len(names):
            raise ConfigError(f"roles need different names; found {names}")
        # the answer must not depend on the order in which roles are given
        object.__setattr__(self, "roles", tuple(sorted(self.roles, key=lambda role: role.name)))
        if self.placement is not None:
            self.placement.check_roles(frozenset(names))

    @property
    def room_bytes(self) -> int:
        """Of a device's memory, what a plan may fill."""
        return self.choices.room_bytes(self.cluster)

    @property
    def parts(self) -> tuple[Problem, ...]:
        """The problem on the whole cluster, then on fewer devices of each node (`parts`)."""
        return tuple(replace(self, cluster=one) for one in parts(self.cluster))

    def on(self, candidate: Candidate) -> Problem:
        """The problem on those devices of each node that a plan uses."""
        if candidate.per_node == self.cluster.devices_per_node:
            return self
        return replace(self, cluster=replace(self.cluster, devices_per_node=candidate.per_node))

    def allows(self, split: Sequence[Sequence[int]]) -> bool:
        """Whether a split keeps together and apart what the placement says; a group that is named takes no others."""
        if self.placement is None:
            return True
        sets = {frozenset(self.roles[index].name for index in mine) for mine in split}
        return all(frozenset(role.name for role in group.roles) in sets for group in self.placement.groups)

    def asked_size(self, mine: Sequence[int]) -> int | None:
        """Devices that the placement gives to a set of roles."""
        groups = () if self.placement is None else self.placement.groups
        names = {self.roles[index].name for index in mine}
        return next((group.size for group in groups if group.roles[0].name in names), None)

    def takes(self, option: Option) -> bool:
        """Whether an option has the layout and the settings that are asked of its role."""
        layout = self.asked_layout(option.role)
        said = dict(option.settings)
        wanted = all(said.get(key) == value for role, key, value in self.only if role == option.role)
        return wanted and (layout is None or option.layout == layout)

    def asked_layout(self, role: str) -> Layout | None:
        """Layout that the placement gives to a role, without its order of ranks: that is chosen by what then moves least."""
        placed = None if self.placement is None else self.placement.role(role)
        return None if placed is None or placed.layout is None else placed.layout.ordered("mod")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One complete plan, with what the cost model says of it."""

    seconds: float
    """Of one iteration; with Async from one version of the weights to the next."""
    meshes: tuple[Mesh, ...]
    combinations: tuple[Combination, ...]
    """Of each mesh."""
    busy_s: tuple[float, ...]
    """For which each mesh is busy in an iteration."""
    latency_s: float
    """Of one iteration alone, from its first call to its last."""
    order: tuple[int, ...]
    """In which calls and handovers (as `Problem.work` lists them) start."""
    work_s: tuple[float, ...]
    """Of each of them."""
    per_node: int
    """Devices of each node from which the meshes are counted; the others of a node stay idle."""

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

    def option(self, role: str) -> Option:
        """Of a role. Raises `KeyError` for a role that is not placed."""
        return next(option for one in self.combinations for option in one.options if option.role == role)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found."""

    problem: Problem
    best: Candidate | None
    """None where nothing fits; `flowrl.planner.relax` says what would."""
    fastest: Candidate | None = None
    """`best` is this one or, within `Problem.tie` of it, a simpler one."""
    others: tuple[Candidate, ...] = ()
    """Plans of other kinds, the fastest first: of other splits, with other layouts, without offload."""
    refused: tuple[str, ...] = ()
    """Kinds of which nothing fits, and what is short, a line each."""
    bound_s: float = INFINITE
    """No plan of the search space takes less."""
    placements: int = 0
    """Splits with sizes whose options were looked at."""
    simulated: int = 0
    """Plans whose seconds were computed."""
    pruned: int = 0
    """Branches left because of a bound."""
    unfit: int = 0
    """Placements of which nothing fits."""
    is_exhaustive: bool = True
    """False: `Effort.branches` was not enough; a random search went through a part of the rest."""
    why_simpler: str = ""
    """Where a tie decided: what is simpler about `best` than about `fastest`."""

    @property
    def gap(self) -> float:
        """By how much the best plan may be above the bound, as a part of it."""
        return INFINITE if self.best is None else self.best.seconds / self.bound_s - 1 if self.bound_s > 0 else 0.0

    def why_not(self, other: Candidate) -> str:
        """Why another candidate lost, in one line: its seconds, what it does otherwise, and what then takes longer."""
        best = self.best
        assert best is not None
        more = other.seconds / best.seconds - 1 if best.seconds else 0.0
        change = f"{more:+.1%}" if abs(more) >= LEAST_CHANGE else "as fast"
        said = [
            f"{other.placement}: {other.seconds:.1f} s ({change})",
            *([used_text(other.per_node, self.problem.cluster)] if other.per_node != best.per_node else []),
            *settings_changed(self.problem.roles, best, other),
        ]
        work = work_of(self.problem.roles)
        sign = 1 if more >= 0 else -1  # of a faster one, what it does faster
        gains = [sign * (theirs - mine) for mine, theirs in zip(best.work_s, other.work_s, strict=True)]
        ranked = sorted(range(len(work)), key=lambda at: (-gains[at], at))
        clear = max(LEAST_CHANGE * best.seconds, LEAST_CAUSE * abs(other.seconds - best.seconds))
        causes = [at for at in ranked[:1] if gains[at] > clear]
        if not causes and len(said) == 1 and len(other.meshes) == 1:  # many small ones
            causes = [at for at in ranked[:MOST_CAUSES] if gains[at] > LEAST_CHANGE * best.seconds]
        for at in causes:
            role, call, _ = work[at]
            owner = self.problem.roles[role]
            name = f"the weights of '{owner.name}'" if call is None else f"'{owner.calls[call].node}'"
            said.append(f"{name} {best.work_s[at]:.1f} -> {other.work_s[at]:.1f} s")
        if len(other.meshes) == 1 < len(best.meshes):
            said.append(f"its calls take turns on one mesh, where {len(best.meshes)} work at the same time")
        if more <= NEAR and other.peak_bytes <= (1 - CLEARLY_LESS) * best.peak_bytes:
            said.append(f"{other.peak_bytes / GIB:.1f} GiB per device instead of {best.peak_bytes / GIB:.1f}")
        if len(other.meshes) > 1:
            index = max(range(len(other.meshes)), key=lambda one: other.busy_s[one])
            names = ", ".join(option.role for option in other.combinations[index].options)
            said.append(f"{other.meshes[index]} ({names}) is busy for {other.busy_s[index]:.1f} s")
        if more <= -LEAST_CHANGE:
            said.append("a tie: what was chosen is simpler")
        return "; ".join(said)


def used_text(per_node: int, cluster: Cluster) -> str:
    """`on 4 of the 5 devices of each node`, `on all devices of each node`."""
    count = "all" if per_node == cluster.devices_per_node else f"{per_node} of the {cluster.devices_per_node}"
    return f"on {count} devices{' of each node' if cluster.nodes > 1 else ''}"


def digits(seconds: float) -> float:
    """As many digits as do not depend on the order in which a sum was taken: for texts that sort by them."""
    return float(f"{seconds:.9g}")


def settings_changed(roles: Sequence[Role], best: Candidate, other: Candidate) -> list[str]:
    """`'policy' offload park -> sopt`: on the same meshes layouts, offload and optimizers that differ, elsewhere the last two; if
    none of them do, all that does."""

    def differ(keys: Sequence[str]) -> list[str]:
        found = []
        for role in roles:
            mine, theirs = (_said(one.option(role.name)) for one in (best, other))
            both = [key for key in keys or mine if key in mine and key in theirs]
            changed = [f"{key} {mine[key]} -> {theirs[key]}" for key in both if mine[key] != theirs[key]]
            found += [f"'{role.name}' {', '.join(changed)}"] if changed else []
        return found

    layout = ("layout",) if _sets(best) == _sets(other) else ()
    return differ((*layout, "offload", "optimizer")) or (differ(()) if layout else [])


def _said(option: Option) -> dict[str, Setting]:
    return {"layout": str(option.layout), **dict(option.settings)}


def _sets(candidate: Candidate) -> dict[Mesh, frozenset[str]]:
    """Who shares which mesh."""
    pairs = zip(candidate.meshes, candidate.combinations, strict=True)
    return {mesh: frozenset(option.role for option in one.options) for mesh, one in pairs}


# ------------------------------------------------------------------------------------------------------------ structure


def work_of(roles: Sequence[Role]) -> tuple[Work, ...]:
    """Calls and handovers in an order in which each comes after what it waits for.

    A handover comes after the trainer's last update and the engine's samples with the old weights; samples that the flow takes
    after the update come after it.
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


def num_splits(count: int) -> int:
    """In how many ways `count` roles can be split into sets: 1, 2, 5, 15, 52, ... (Bell numbers)."""
    row = [1]
    for _ in range(count - 1):
        row = list(accumulate([row[-1], *row]))
    return row[-1]


def slice_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Sizes of which there is a slice, rising: powers of two inside a node (any number where the node is none), then whole
    nodes."""
    per_node = cluster.devices_per_node
    inside = [size for size in range(1, per_node) if is_part(size, per_node)]
    return (*inside, *range(per_node, cluster.num_devices + 1, per_node))


def parts(cluster: Cluster) -> tuple[Cluster, ...]:
    """The cluster, and what it is with fewer devices in each node, as far as that has slices of its own.

    Three nodes of five devices have no twelve neighbours; three of four have. Plans for such a part leave the other devices idle.
    Fewer nodes need no part: all slices of two nodes are slices of three. A single node needs one only where slices are powers
    of two: those of seven of eight devices are of any size.
    """
    most = cluster.devices_per_node
    if cluster.nodes > 1:
        fewer = range(most - 1, 0, -1)
    else:
        fewer = range(most - 1, most - 2, -1) if is_power_of_two(most) and most > 2 else range(0)
    return (cluster, *(replace(cluster, devices_per_node=one) for one in fewer))


def place(cluster: Cluster, sizes: Sequence[int]) -> tuple[Mesh, ...] | None:
    """A buddy slice for each size: the largest first, each at the lowest free place; None when one finds none."""
    per_node = cluster.devices_per_node
    found: dict[int, Mesh] = {}
    whole, taken = 0, dict[int, int]()  # nodes taken as a whole; devices taken of others, from the first one on
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        if size % per_node == 0:
            first, whole = whole * per_node, whole + size // per_node
        elif not is_part(size, per_node):
            return None
        else:
            node = next(n for n in range(whole, whole + len(taken) + 1) if taken.get(n, 0) + size <= per_node)
            # of powers of two, what is there already is a sum of larger ones, so this is a multiple of the size
            first = node * per_node + taken.get(node, 0)
            taken[node] = taken.get(node, 0) + size
        if first + size > cluster.num_devices:
            return None
        found[index] = Mesh(first, size)
    return tuple(found[index] for index in range(len(sizes)))


def host_bytes(cluster: Cluster, meshes: Sequence[Mesh], combinations: Sequence[Combination]) -> list[float]:
    """What is kept on the host of each node; a mesh spreads it evenly over its nodes."""
    used = [0.0] * cluster.nodes
    for mesh, one in zip(meshes, combinations, strict=True):
        nodes = mesh.nodes(cluster.devices_per_node)
        for node in nodes:
            used[node] += one.host_bytes / len(nodes)
    return used
