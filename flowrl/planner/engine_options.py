"""Options of a sampling engine: tensor parallelism, stages, and its share of a device's memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from flowrl.cost.generation import Replica, generate
from flowrl.cost.memory import engine_weight_bytes
from flowrl.cost.train import can_split
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.choices import Choices, Option, Setting
from flowrl.planner.roles import Call, Role
from flowrl.planner.workload import Workload


def engine_options(
    role: Role, cluster: Cluster, mesh: Mesh, workload: Workload, choices: Choices, asked: Layout | None = None
) -> Iterator[Option]:
    """Every way in which an engine holds the longest sequence.

    Stages come in on top of as much tensor parallelism as the mesh allows, and only where memory keeps that alone from taking all
    sequences at once. Where it takes them with the smallest share of memory, stages are no faster: as many sequences share each
    step, and there is more to send. Copies of the engine fill the mesh.
    """
    per_node = cluster.devices_per_node
    degrees = engine_degrees(role, mesh.size, per_node, choices)
    pairs = [(tp, 1) for tp in degrees]
    most = max(degrees, default=mesh.size)
    staged = [one for one in choices.pipeline if 1 < one <= role.shape.layers and mesh.size % (most * one) == 0]
    if staged and not _takes_all(role, cluster, mesh, workload, choices, most):
        pairs += [(most, stages) for stages in sorted(staged)]
    if asked is not None:
        is_engine = asked.fsdp == 1 and asked.size == mesh.size and asked.pp <= role.shape.layers
        pairs = [(asked.tp, asked.pp)] if is_engine and _splits(role, asked.tp) else []
    known: dict[tuple[object, ...], tuple[float, float]] = {}
    for tp, stages in pairs:
        yield from _of(role, cluster, mesh, workload, choices, tp, stages, known)


def engine_degrees(role: Role, size: int, per_node: int, choices: Choices) -> list[int]:
    """Degrees of tensor parallelism that an engine may have on so many devices, however much memory they have."""
    # replicas stand in neighbouring devices of one node: over nodes the degree divides a node
    inside = min(size, per_node)
    return [tp for tp in choices.tensor_parallel if inside % tp == 0 and _splits(role, tp)]


def _takes_all(role: Role, cluster: Cluster, mesh: Mesh, workload: Workload, choices: Choices, tp: int) -> bool:
    """Whether replicas without stages sample all their sequences at once with the smallest share of memory."""
    replica = Replica(role.shape, cluster, tp, replace(choices.engine, utilization=min(choices.utilization)))
    room = replica.capacity_tokens(choices.memory)
    if room < workload.longest:
        return False
    means = {call: workload.mean_total(call.sequences) for call in role.calls}
    return all(
        replica.max_batch(mean, choices.memory) >= math.ceil(call.sequences * tp / mesh.size)
        for call, mean in means.items()
    )


def _splits(role: Role, tp: int) -> bool:
    return can_split(role.shape, tp, repeats_kv=True)


def _of(
    role: Role,
    cluster: Cluster,
    mesh: Mesh,
    workload: Workload,
    choices: Choices,
    tp: int,
    stages: int,
    known: dict[tuple[object, ...], tuple[float, float]],
) -> Iterator[Option]:
    """Of one layout, every share of memory."""
    shape, capacity = role.shape, cluster.device.memory_bytes
    replicas = mesh.size // (tp * stages)
    layout = Layout(dp=replicas, tp=tp, pp=stages)
    weights = engine_weight_bytes(shape, tensor_parallel=tp, pipeline=stages, weight_bytes=choices.engine.weight_bytes)
    for share in choices.utilization:
        replica = Replica(shape, cluster, tp, replace(choices.engine, utilization=share), stages)
        if replica.capacity_tokens(choices.memory) < workload.longest:
            continue
        sampled = [_generate(replica, call, workload, replicas, choices, known) for call in role.calls]
        seconds = tuple(call.share * one for call, (one, _) in zip(role.calls, sampled, strict=True))
        slots = tuple(used for _, used in sampled)
        settings: tuple[tuple[str, Setting], ...] = (("utilization", share),)
        used = share * capacity
        if role.weights_from:  # sleeps without weights: new ones come in every step
            yield Option(role.name, layout, seconds, 0.0, used, handover_bytes=weights, settings=settings,
                         slot_utilization=slots)  # fmt: skip
            continue
        yield Option(role.name, layout, seconds, weights, used - weights, settings=(*settings, ("offload", "none")),
                     slot_utilization=slots)  # fmt: skip
        load_s = weights / cluster.host_link.bytes_s
        parked = tuple(time + call.share * load_s for time, call in zip(seconds, role.calls, strict=True))
        settings = (*settings, ("offload", "park"))
        host_bytes = choices.engine.weight_bytes * shape.params() * replicas
        yield Option(role.name, layout, parked, 0.0, used, host_bytes, settings=settings, slot_utilization=slots)


def _generate(
    replica: Replica,
    call: Call,
    workload: Workload,
    replicas: int,
    choices: Choices,
    known: dict[tuple[object, ...], tuple[float, float]],
) -> tuple[float, float]:
    """Seconds of a whole call, and how much of the time its slots work."""
    prompts, responses = workload.sequences(call.sequences)
    mean = workload.mean_total(call.sequences)
    # more slots than sequences change nothing; the cache holds the longest sequence, so a slot there is
    slots = min(replica.max_batch(mean, choices.memory), math.ceil(call.sequences / replicas))
    key = (replica.tensor_parallel, replica.pipeline, slots, call.node)
    if key not in known:
        found = generate(replica, prompts, responses, replicas=replicas, max_batch=slots)
        known[key] = found.total_s, found.slot_utilization
    return known[key]
