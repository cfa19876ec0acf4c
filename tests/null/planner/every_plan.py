"""All plans of a small problem, by the rules and nothing else: what a search must agree with."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from flowrl.mesh import Mesh
from flowrl.planner.handover import Side, handover_s
from flowrl.planner.options import Option, all_options
from flowrl.planner.problem import Problem, place

GIB = 2**30
STEPS = {"none": 0, "park": 2, "sopt": 4, "opt": 6, "all": 8}
EDGE = ("gen", "policy")
BESIDE = ("critic",)
"""May work while weights wait, in some order: the critic's update does not come before the policy's. All else comes behind the
rollout and before the update."""

OptionsOf = Callable[[Problem, int, int], tuple[Option, ...]]
HandoverOf = Callable[[Problem, Mesh, Option, Mesh, Option], float]


def real_options(problem: Problem, role: int, size: int) -> tuple[Option, ...]:
    return all_options(problem.roles[role], problem.cluster, Mesh(0, size), problem.workload, problem.choices)


def real_handover(problem: Problem, source: Mesh, giving: Option, target: Mesh, taking: Option) -> float:
    shape = next(role.shape for role in problem.roles if role.name == "gen")
    return handover_s(shape, problem.cluster, Side(source, giving.layout), Side(target, taking.layout),
                      is_on_host=giving.is_on_host)  # fmt: skip


class EveryPlan:
    """`least` is the fewest seconds of all plans (infinite when none fits), `simplest` the key of the plan that a tie takes."""

    def __init__(
        self, problem: Problem, options_of: OptionsOf = real_options, handover_of: HandoverOf = real_handover
    ) -> None:
        self.problem, self.handover_of = problem, handover_of
        self.fitting = list(self._fitting(options_of))
        self.least = math.inf
        for part, labels, meshes, options, _ in self.fitting:
            self.least = min(self.least, self.seconds(part, labels, meshes, options, self.least))

    def simplest(self) -> tuple[float, ...]:
        limit = self.least * (1 + max(self.problem.tie, 1e-12))
        keys = []
        for part, labels, meshes, options, peak in self.fitting:
            seconds = self.seconds(part, labels, meshes, options, limit * (1 + 1e-9))
            if seconds <= limit * (1 + 1e-12):
                keys.append((*self._simplicity(part, options, meshes, peak), seconds))
        return min(keys)

    def _simplicity(self, part, options, meshes, peak) -> tuple[int, ...]:
        layouts: dict[str, set[str]] = {}
        for role, option in zip(self.problem.roles, options, strict=True):
            layouts.setdefault(role.model, set()).add(str(option.layout))
        said = [dict(option.settings) for option in options]
        steps = sum(STEPS[one.get("offload", "none")] + int(one.get("park_weights", False)) for one in said)
        numerics = max(option.numerics for option in options)
        roles = zip(self.problem.roles, options, strict=True)
        cuts = sum(option.layout.tp - 1 for role, option in roles if not role.is_engine)
        changes = sum(len(one) - 1 for one in layouts.values())
        idle = self.problem.cluster.devices_per_node - part.cluster.devices_per_node
        return numerics, idle, len(meshes), cuts, changes, steps, math.ceil(peak / GIB)

    def _fitting(
        self, options_of: OptionsOf
    ) -> Iterator[tuple[Problem, tuple[int, ...], tuple[Mesh, ...], tuple[Option, ...], float]]:
        """Also those that leave devices of each node idle; of one node, if there are sizes that more devices do not have."""
        known: list[set[int]] = []
        for per_node in range(self.problem.cluster.devices_per_node, 0, -1):
            machine = replace(self.problem.cluster, devices_per_node=per_node)
            sizes = {size for size in range(1, per_node + 1) if machine.slices(size)}
            if machine.nodes > 1 or not any(sizes <= larger for larger in known):
                yield from self._fitting_on(replace(self.problem, cluster=machine), options_of)
            known.append(sizes)

    def _fitting_on(
        self, problem: Problem, options_of: OptionsOf
    ) -> Iterator[tuple[Problem, tuple[int, ...], tuple[Mesh, ...], tuple[Option, ...], float]]:
        machine, count = problem.cluster, len(problem.roles)
        sizes = [n for n in range(1, machine.num_devices + 1) if machine.slices(n)]
        for labels in itertools.product(range(count), repeat=count):
            if [label for i, label in enumerate(labels) if label not in labels[:i]] != list(range(max(labels) + 1)):
                continue
            for chosen in itertools.product(sizes, repeat=max(labels) + 1):
                meshes = place(machine, chosen)
                if meshes is None:
                    continue
                ways = [options_of(problem, role, chosen[label]) for role, label in enumerate(labels)]
                for options in itertools.product(*ways):
                    least, peak = self._peaks(problem, labels, meshes, options)
                    if least <= problem.room_bytes:
                        yield problem, labels, meshes, options, min(peak, problem.room_bytes)

    def _peaks(self, problem, labels, meshes, options) -> tuple[float, float]:
        """On the fullest device, when nothing works while weights wait, and when all does that may; infinite: a host is over."""
        hosts, least, peak = [0.0] * problem.cluster.nodes, 0.0, 0.0
        for label, mesh in enumerate(meshes):
            mine = [option for option, at in zip(options, labels, strict=True) if at == label]
            held = self._held(mine)
            handed = [one.handover_bytes for one in mine if one.role in EDGE]
            least = max(least, held + max(one.dynamic_bytes for one in mine), held + sum(handed))
            meanwhile = [one.dynamic_bytes + max(handed, default=0.0) for one in mine if one.role in BESIDE]
            peak = max(peak, least, held + max(meanwhile, default=0.0))
            nodes = mesh.nodes(problem.cluster.devices_per_node)
            for node in nodes:
                hosts[node] += sum(one.host_bytes for one in mine) / len(nodes)
        return (least, peak) if max(hosts) <= problem.cluster.host.memory_bytes else (math.inf, math.inf)

    def _held(self, mine) -> float:
        """By the roles of a set, between their calls."""
        context = self.problem.choices.memory.context_bytes * any(one.has_context for one in mine)
        return sum(one.static_bytes for one in mine) + context

    def _has_room(self, name, done, owner, at, option_of) -> bool:
        """Whether a call fits beside the weights that wait on its set when those before it are done."""
        if name == "move":
            return True
        mine = [one for role, one in option_of.items() if at[role] == at[owner[name]]]
        used = self._held(mine) + option_of[owner[name]].dynamic_bytes
        shards = "update" in done and "move" not in done
        engine = "move" in done or "rollout" not in done
        for role, waits in (("policy", shards), ("gen", engine)):
            if waits and role != owner[name] and at[role] == at[owner[name]]:
                used += option_of[role].handover_bytes
        return used <= self.problem.room_bytes

    def seconds(self, problem, labels, meshes, options, enough: float) -> float:
        """The shortest order of the calls that fits, found by trying all; `enough` or more where the loads alone are."""
        tasks: dict[str, tuple[float, set[int], set[str]]] = {}
        at = {role.name: label for role, label in zip(problem.roles, labels, strict=True)}
        option_of = {option.role: option for option in options}
        for role in problem.roles:
            for call, seconds in zip(role.calls, option_of[role.name].seconds, strict=True):
                tasks[call.node] = (seconds, {at[role.name]}, set(call.after))
        moving = self.handover_of(
            problem, meshes[at["policy"]], option_of["policy"], meshes[at["gen"]], option_of["gen"]
        )
        tasks["move"] = (moving, {at["gen"], at["policy"]}, {"rollout", "update"})
        loads = [sum(seconds for seconds, sets, _ in tasks.values() if label in sets) for label in range(len(meshes))]
        shares = problem.schedule.max_staleness + 1
        if max(loads) >= enough:
            return math.inf
        shortest = math.inf
        owner = {call.node: role.name for role in problem.roles for call in role.calls}

        def down(done: dict[str, float], free: tuple[float, ...]) -> None:
            nonlocal shortest
            if len(done) == len(tasks):
                shortest = min(shortest, max(done.values()))
            for name, (seconds, sets, after) in tasks.items():
                if name not in done and after <= set(done) and self._has_room(name, done, owner, at, option_of):
                    start = max([0.0, *(done[one] for one in after), *(free[one] for one in sets)])
                    if start + seconds < min(shortest, enough * shares):
                        now = tuple(start + seconds if one in sets else time for one, time in enumerate(free))
                        down({**done, name: start + seconds}, now)

        down({}, (0.0,) * len(meshes))
        return shortest if shares == 1 else max([shortest / shares, *loads])
