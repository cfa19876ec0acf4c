"""When no plan fits: which memory is short, by how much, and what would help, each tried by planning again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flowrl.cost.offload import ADAM_8BIT, Offload
from flowrl.mesh import Cluster
from flowrl.planner.options import Option, all_options
from flowrl.planner.problem import Problem, host_bytes
from flowrl.planner.search import search

GIB = 2**30
PLENTY = 2**60
LORA_RANK = 16


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One change under which a plan fits."""

    what: str
    seconds: float
    changes_numerics: bool = False

    def __str__(self) -> str:
        consent = ", changes numerics" if self.changes_numerics else ""
        return f"{self.what} ({self.seconds:.1f} s per step{consent})"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why nothing fits, and what would."""

    binding: str
    """The memory that is short, with the bytes of the plan that needs least of it."""
    relaxations: tuple[Relaxation, ...]
    """Those that change the least first."""

    def __str__(self) -> str:
        found = "; ".join(map(str, self.relaxations)) or "none of those tried: smaller models, or many more devices"
        return f"FR-P01: no plan fits. Binding: {self.binding}. Would fit: {found}"


def explain(problem: Problem) -> Refusal:
    """Why no plan of a problem fits, found by planning again with one limit lifted at a time.

    Tried are every class of offload, less of what a step holds at once, more host memory, more devices, an optimizer with 8-bit
    moments and low-rank adapters. Each names what it costs; those that change numerics come last.
    """
    return Refusal(_binding(problem), tuple(_relaxations(problem)))


def _fits(problem: Problem) -> float | None:
    best = search(problem).best
    return None if best is None else best.seconds


def _binding(problem: Problem) -> str:
    """Which memory is short: that of the hosts, when lifting it alone helps; else that of a device."""
    cluster = problem.cluster
    least = _least_host(problem)
    if least is not None:
        return f"host memory, at least {least[0] / GIB:.0f} GiB per node > {cluster.host.memory_bytes / GIB:.0f}"
    worst: tuple[float, str, Option] | None = None
    for role in problem.roles:
        found = _least(problem, cluster, role.name)
        if found is not None and (worst is None or found.peak_bytes > worst[0]):
            worst = (found.peak_bytes, role.name, found)
    capacity = cluster.device.memory_bytes / GIB
    if worst is None:
        return f"device memory, {capacity:.1f} GiB: no engine of the offered shares holds the longest sequence"
    peak, name, option = worst
    peak += problem.choices.memory.context_bytes * option.has_context
    if peak <= cluster.device.memory_bytes:
        return (
            f"device memory, {capacity:.1f} GiB: each role fits alone, and not together; the largest is '{name}' "
            f"{_sizes(option)}"
        )
    return f"device memory, '{name}' {peak / GIB:.1f} > {capacity:.1f} GiB {_sizes(option)}"


def _least_host(problem: Problem) -> tuple[float, float] | None:
    """The least host memory per node with which a plan fits, and its seconds; None when more of it does not help."""
    found: tuple[float, float] | None = None
    limit = PLENTY
    while True:
        cluster = problem.cluster.with_memory(host_bytes=limit)
        best = search(replace(problem, cluster=cluster)).best
        if best is None:
            return found
        needed = max(host_bytes(cluster, best.meshes, best.combinations))
        found = (needed, best.seconds)
        if needed < 2:
            return found
        limit = math.ceil(needed) - 1


def _sizes(option: Option) -> str:
    return f"(at rest {option.static_bytes / GIB:.1f}, working {option.dynamic_bytes / GIB:.1f}, {option.layout})"


def _least(problem: Problem, cluster: Cluster, name: str) -> Option | None:
    """Of a role on all devices, the option with the lowest peak, whether or not it fits."""
    role = next(role for role in problem.roles if role.name == name)
    if role.is_engine:  # takes what it is given: the smallest share that is offered
        found = all_options(role, cluster, cluster.whole, problem.workload, problem.choices)
    else:
        wide = cluster.with_memory(device_bytes=PLENTY)
        found = all_options(role, wide, wide.whole, problem.workload, problem.choices)
    return min(found, key=lambda option: option.peak_bytes, default=None)


def _relaxations(problem: Problem) -> list[Relaxation]:
    """What was tried and fits."""
    choices = problem.choices
    tried: list[tuple[str, Problem, bool]] = []
    if set(choices.offload) != set(Offload):
        tried.append(
            ("every class of offload", replace(problem, choices=replace(choices, offload=tuple(Offload))), False)
        )
    if min(choices.micro_batch_tokens) > problem.workload.longest:
        small = replace(choices, micro_batch_tokens=(problem.workload.longest, *choices.micro_batch_tokens))
        tried.append((f"micro-batches of {problem.workload.longest} tokens", replace(problem, choices=small), False))
    if True not in choices.recompute:
        again = replace(choices, recompute=(True, *choices.recompute))
        tried.append(("recomputed activations", replace(problem, choices=again), False))
    tried.extend(_more(problem))
    with_8bit = replace(choices, optimizers=(*choices.optimizers, ADAM_8BIT))
    if ADAM_8BIT not in choices.optimizers:
        tried.append(("Adam with 8-bit moments", replace(problem, choices=with_8bit), True))
    if all(role.shape.lora is None for role in problem.roles):
        tried.append((f"LoRA of rank {LORA_RANK}", _with_lora(problem), True))
    found = [(what, _fits(one), changes) for what, one, changes in tried]
    return [Relaxation(what, seconds, changes) for what, seconds, changes in found if seconds is not None]


def _more(problem: Problem) -> list[tuple[str, Problem, bool]]:
    """More host memory, and the fewest devices that do."""
    cluster = problem.cluster
    found: list[tuple[str, Problem, bool]] = []
    least = _least_host(problem)
    if least is not None:
        needed = math.ceil(least[0] / GIB)
        found.append(
            (f"hosts of {needed} GiB", replace(problem, cluster=cluster.with_memory(host_bytes=needed * GIB)), False)
        )
    for factor in (2, 4, 8):
        larger = replace(cluster, nodes=cluster.nodes * factor)
        if _fits(replace(problem, cluster=larger)) is not None:
            found.append((f"{larger.num_devices} devices", replace(problem, cluster=larger), False))
            break
    return found


def _with_lora(problem: Problem) -> Problem:
    """Adapters for every model that is trained; engines sample from the merged weights."""
    roles = tuple(
        replace(role, shape=role.shape.with_lora(LORA_RANK)) if role.is_trained else role for role in problem.roles
    )
    return replace(problem, roles=roles)
