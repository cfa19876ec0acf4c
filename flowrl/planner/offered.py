"""Whether the layouts that a placement asks for are layouts that its roles can have."""

from __future__ import annotations

from flowrl.errors import ConfigError
from flowrl.mesh import Mesh
from flowrl.planner.options import all_options
from flowrl.planner.problem import Problem

PLENTY = 2**60
"""Bytes of a device that holds everything: what cannot be done there is no matter of memory."""


def check_layouts(problem: Problem) -> None:
    """Raise `ConfigError` for a layout that a role never has, such as shards over `fsdp` of an engine.

    A layout that only lacks memory passes: that no plan fits is said by `flowrl.planner.relax`.
    """
    wide = problem.cluster.with_memory(device_bytes=PLENTY)
    for role in problem.roles:
        asked = problem.asked_layout(role.name)
        if asked is None or asked.size > wide.num_devices:
            continue
        mesh = Mesh(0, asked.size)
        if all_options(role, wide, mesh, problem.workload, problem.choices, layout=asked):
            continue
        offered = sorted({str(one.layout) for one in all_options(role, wide, mesh, problem.workload, problem.choices)})
        there = f"there are {', '.join(offered)}" if offered else "there is none on so many devices"
        kind = "sampled from" if role.is_engine else "trained" if role.is_trained else "only read"
        raise ConfigError(f"'{role.name}', which is {kind}, cannot be laid out as {asked}; {there}")
