"""The ways in which a role can run on a mesh, and which of them are worth looking at.

An option is a layout and its settings (tokens of a micro-batch, recomputation, class of offload, the engine's share of memory)
with what they cost: seconds of each call, bytes on a device between and during its calls, bytes on hosts. What a role costs
depends on how many devices its mesh has and over how many nodes they go, never on which ones, so options are made once for each
size.

Engines are made in `flowrl.planner.engine_options`, trainers and frozen models in `flowrl.planner.train_options`.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.choices import Choices, Option, Setting
from flowrl.planner.engine_options import engine_options
from flowrl.planner.roles import Role
from flowrl.planner.train_options import frozen_options, trained_options
from flowrl.planner.workload import Workload

__all__ = ["Choices", "Option", "Setting", "all_options", "beats"]


def all_options(
    role: Role,
    cluster: Cluster,
    mesh: Mesh,
    workload: Workload,
    choices: Choices,
    *,
    layout: Layout | None = None,
) -> tuple[Option, ...]:
    """Every option of a role on a mesh that fits its devices alone; none when nothing does.

    `layout`: this one only, also where the planner would not offer it by itself.
    """
    if role.is_engine:
        found = engine_options(role, cluster, mesh, workload, choices, layout)
    else:
        make = trained_options if role.is_trained else frozen_options
        found = make(role, cluster, mesh, workload, choices, layout)
    context, capacity = choices.memory.context_bytes, choices.room_bytes(cluster)
    return tuple(one for one in found if one.peak_bytes + context * one.has_context <= capacity)


def likely(options: Sequence[Option]) -> tuple[Option, ...]:
    """Of a role's options, those with which a fast plan is found soon: without tensor parallelism that a lower degree makes
    needless.

    An option stays when no option of a lower degree is as fast in each call with as little on hosts and the same numerics. What
    is left out may still be in the best plan, as it takes less device memory: a search goes through all options behind these.
    """
    kept: list[Option] = []
    lower: list[tuple[int, tuple[float, ...]]] = []
    for one in sorted(options, key=lambda option: option.layout.tp):
        degree = one.layout.tp
        costs = (*one.seconds, one.host_bytes, one.numerics, one.is_on_host)
        if degree > 1 and any(tp < degree and beats(other, costs) for tp, other in lower):
            continue
        kept.append(one)
        lower.append((degree, costs))
    return tuple(kept)


def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether `one` is nowhere higher."""
    return all(a <= b for a, b in zip(one, other, strict=True))
