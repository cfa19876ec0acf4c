"""When no plan fits: which memory is short, by how much, and what would help, each tried by planning again.

offload     every class of it                                    more devices    twice to eight times as many nodes
smaller     micro-batches, one long sequence each                shorter         responses, cut at a half to an eighth
recompute   activations                                          smaller batch   a half to an eighth of the prompts
hosts       with the least memory that does                      numerics        8-bit moments, low-rank adapters
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrl.cost.offload import ADAM_8BIT, Offload
from flowrl.graph.nodes import Graph
from flowrl.planner.chosen import plan_found
from flowrl.planner.options import Option
from flowrl.planner.placed import chosen
from flowrl.planner.problem import GIB, Candidate, Effort, Problem, host_bytes
from flowrl.planner.search import search
from flowrl.planner.short import least_option
from flowrl.planner.space import PLENTY, Space
from flowrl.planner.steps import Plan
from flowrl.planner.ties import burden
from flowrl.planner.workload import Lengths, Workload

LORA_RANK = 16
FACTORS = (2, 4, 8)
"""By which devices are multiplied, and contexts and batches divided, until a plan fits."""
LEAST_HOST = 2**21
"""Bytes of a host below which no plan is looked for that needs less still."""
QUICK = Effort(branches=30_000, moves=0, alternatives=0)
"""Of each search: whether anything fits, and how fast it is."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One change under which a plan fits."""

    what: str
    seconds: float
    """Predicted, of one iteration."""
    changes_numerics: bool = False
    changes_work: bool = False
    """The iteration does less: shorter responses, fewer prompts."""

    def __str__(self) -> str:
        said = [f"predicted {self.seconds:.1f} s per iteration"]
        said += ["changes numerics"] * self.changes_numerics + ["less work per iteration"] * self.changes_work
        return f"{self.what} ({', '.join(said)})"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why nothing fits, and what would."""

    binding: str
    """The memory that is short, with the bytes of the plan that needs least of it."""
    relaxations: tuple[Relaxation, ...]
    """Those that change the least first."""
    in_vain: tuple[str, ...] = ()
    """What was tried too, and does not help alone."""

    def __str__(self) -> str:
        found = "; ".join(map(str, self.relaxations)) or "none of those tried: smaller models, or many more devices"
        vain = f". In vain: {'; '.join(self.in_vain)}" if self.in_vain else ""
        return f"FR-P01: no plan fits. Binding: {self.binding}. Would fit: {found}{vain}"


@dataclass(frozen=True, slots=True)
class _Try:
    """A change, and the problem with it."""

    what: str
    problem: Problem
    changes_numerics: bool = False
    changes_work: bool = False


@dataclass(frozen=True, slots=True)
class _Host:
    """The least bytes on the fullest host, and the plan that keeps them there."""

    num_bytes: float
    plan: Candidate

    def line(self, capacity_bytes: float) -> str:
        """In words, with who keeps what on all hosts together."""
        need, over = self.num_bytes / GIB, (self.num_bytes - capacity_bytes) / GIB
        options = [option for one in self.plan.combinations for option in one.options if option.host_bytes]
        most = sorted(options, key=lambda option: (-option.host_bytes, option.role))
        names = ", ".join(
            f"'{option.role}' offload {dict(option.settings)['offload']} {option.host_bytes / GIB:.0f}"
            for option in most
        )
        return (
            f"host memory, at least {need:.0f} GiB per node > {capacity_bytes / GIB:.0f}, over by {over:.0f} "
            f"(on all hosts {names})"
        )


def explain(problem: Problem, graph: Graph | None = None) -> Refusal:
    """Why no plan of a problem fits, found by planning again with one limit lifted at a time.

    `graph`: that of the flow, after pruning and merging. With it the seconds of each change are those of the plan that planning
    with it gives; without, those of the fastest plan, as the search counts them.

    Each change names what it costs. Those that change the iteration's work come after those that do not, those that change
    numerics last. Of a change with a degree (devices, lengths, prompts) the smallest is offered that fits.
    """
    host = _least_host(problem)
    found: list[Relaxation] = []
    in_vain: list[str] = []
    for ladder in _ladders(problem, host):
        for one in ladder:
            best = _best(one.problem)
            if best is not None:
                seconds, used = best.seconds, _offloaded(best)
                if graph is not None:
                    plan = plan_found(search(one.problem), graph)
                    seconds, used = plan.predicted.seconds, _offloaded_in(plan)
                what = one.what + used if one.problem.choices.offload != problem.choices.offload else one.what
                found.append(Relaxation(what, seconds, one.changes_numerics, one.changes_work))
                break
        else:
            in_vain.append(ladder[-1].what)
    return Refusal(_binding(problem, host), tuple(found), tuple(in_vain))


def _best(problem: Problem) -> Candidate | None:
    return search(replace(problem, effort=QUICK, tie=0.0)).best


def _offloaded(best: Candidate) -> str:
    """Who uses which class in a plan: ": 'policy' sopt"."""
    used = [
        f"'{option.role}' {dict(option.settings)['offload']}"
        for one in best.combinations
        for option in one.options
        if burden(option)
    ]
    return f": {', '.join(used)}" if used else ""


def _offloaded_in(plan: Plan) -> str:
    """The same of a plan."""
    used = [
        f"'{role}' {one.offload}"
        for role, one in chosen(plan).items()
        if one.offload not in (None, Offload.NONE.value) or dict(one.settings).get("park_weights")
    ]
    return f": {', '.join(used)}" if used else ""


# -------------------------------------------------------------------------------------------------------------- binding


def _binding(problem: Problem, host: _Host | None) -> str:
    """Which memory is short: that of the hosts, when lifting it alone helps; else that of a device."""
    cluster = problem.cluster
    if host is not None:
        return host.line(cluster.host.memory_bytes)
    space, capacity = Space(problem), problem.room_bytes
    worst: tuple[float, str, Option] | None = None
    for index, role in enumerate(problem.roles):
        least = least_option(space, index, cluster.num_devices)
        if least is None and role.is_engine:
            return (
                f"device memory, {capacity / GIB:.1f} GiB: no offered share lets '{role.name}' hold the longest sequence, "
                f"{problem.workload.longest} tokens"
            )
        if least is not None:
            peak = least.peak_bytes + problem.choices.memory.context_bytes * least.has_context
            if worst is None or peak > worst[0]:
                worst = (peak, role.name, least)
    if worst is None:
        return f"no role has an option on {cluster.num_devices} devices"
    peak, name, option = worst
    sizes = f"(at rest {option.static_bytes / GIB:.1f}, working {option.dynamic_bytes / GIB:.1f}, {option.layout})"
    if peak <= capacity:
        return f"device memory, {capacity / GIB:.1f} GiB: each role fits alone, and not together; the largest is '{name}' {sizes}"
    calls = next(role.calls for role in problem.roles if role.name == name)
    call = next((call.node for call in calls if call.work == "train"), calls[0].node)
    over = f"over by {(peak - capacity) / GIB:.1f}"
    return f"device memory, '{name}' in '{call}' {peak / GIB:.1f} > {capacity / GIB:.1f} GiB, {over} {sizes}"


def _least_host(problem: Problem) -> _Host | None:
    """The plan that keeps least on any host; None when more host memory does not help."""
    found: _Host | None = None
    limit = PLENTY
    while True:
        cluster = problem.cluster.with_memory(host_bytes=limit)
        best = _best(replace(problem, cluster=cluster))
        if best is None:
            return found
        used = replace(problem, cluster=cluster).on(best).cluster
        found = _Host(max(host_bytes(used, best.meshes, best.combinations)), best)
        if found.num_bytes < LEAST_HOST:
            return found
        limit = math.ceil(found.num_bytes) - 1


# ---------------------------------------------------------------------------------------------------------- relaxations


def _ladders(problem: Problem, host: _Host | None) -> Iterator[tuple[_Try, ...]]:
    """Changes to try; of each, its degrees rising."""
    choices, workload = problem.choices, problem.workload
    if problem.placement is not None or problem.only:
        what = "another placement" if problem.placement is not None else "other settings than those asked for"
        yield (_Try(what, replace(problem, placement=None, only=())),)
    if set(choices.offload) != set(Offload):
        yield (_Try("every class of offload", replace(problem, choices=replace(choices, offload=tuple(Offload)))),)
    if min(choices.micro_batch_tokens) > workload.longest:
        small = replace(choices, micro_batch_tokens=(workload.longest, *choices.micro_batch_tokens))
        yield (_Try(f"micro-batches of {workload.longest} tokens", replace(problem, choices=small)),)
    if True not in choices.recompute:
        again = replace(choices, recompute=(True, *choices.recompute))
        yield (_Try("recomputed activations", replace(problem, choices=again)),)
    if host is not None:
        gib = math.ceil(host.num_bytes / GIB)
        roomy = problem.cluster.with_memory(host_bytes=gib * GIB)
        yield (_Try(f"hosts of {gib} GiB", replace(problem, cluster=roomy)),)
    larger = (replace(problem.cluster, nodes=problem.cluster.nodes * factor) for factor in FACTORS)
    yield tuple(_Try(f"{one.num_devices} devices", replace(problem, cluster=one)) for one in larger)
    shorter = tuple(_shorter(problem, factor) for factor in FACTORS)
    yield tuple(one for one in shorter if one.problem.workload.longest < workload.longest) or shorter
    fewer = {max(1, workload.prompts // factor) for factor in FACTORS}
    yield tuple(
        _Try(f"{count} prompts per iteration", _with_prompts(problem, count), changes_work=True)
        for count in sorted(fewer, reverse=True)
    )
    if ADAM_8BIT not in choices.optimizers:
        consented = replace(choices, optimizers=(*choices.optimizers, ADAM_8BIT))
        yield (_Try("Adam with 8-bit moments", replace(problem, choices=consented), changes_numerics=True),)
    if all(role.shape.lora is None for role in problem.roles):
        yield (_Try(f"LoRA of rank {LORA_RANK}", _with_lora(problem), changes_numerics=True),)


def _shorter(problem: Problem, factor: int) -> _Try:
    """Responses that are cut at a part of the longest."""
    lengths = problem.workload.response_lengths
    cap = max(1, lengths.longest // factor)
    counts: dict[int, float] = {}
    for tokens, weight in zip(lengths.tokens, lengths.weights, strict=True):
        counts[min(tokens, cap)] = counts.get(min(tokens, cap), 0.0) + weight
    cut: Workload = replace(problem.workload, response_lengths=Lengths(tuple(counts), tuple(counts.values())))
    return _Try(f"responses of at most {cap} tokens", replace(problem, workload=cut), changes_work=True)


def _with_prompts(problem: Problem, count: int) -> Problem:
    """Fewer prompts: all calls of an iteration have that part of their sequences."""
    part = count / problem.workload.prompts
    roles = tuple(
        replace(role, calls=tuple(replace(call, sequences=max(1, round(call.sequences * part))) for call in role.calls))
        for role in problem.roles
    )
    return replace(problem, roles=roles, workload=replace(problem.workload, prompts=count))


def _with_lora(problem: Problem) -> Problem:
    """Adapters for every model that is trained; engines sample from the merged weights."""
    roles = tuple(
        replace(role, shape=role.shape.with_lora(LORA_RANK)) if role.is_trained else role for role in problem.roles
    )
    return replace(problem, roles=roles)
