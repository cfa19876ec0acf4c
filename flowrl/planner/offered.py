"""Whether a placement that is asked for can be at all on a cluster, however much memory there were."""

from __future__ import annotations

from flowrl.errors import ConfigError
from flowrl.mesh import Mesh, Placement
from flowrl.planner.options import all_options
from flowrl.planner.problem import Problem

PLENTY = 2**60
"""Bytes of a device that holds everything: what cannot be done there is no matter of memory."""


def check_placement(problem: Problem) -> None:
    """Raise `ConfigError` for groups that have no place on the cluster, and for a layout that a role never has.

    What only lacks memory passes: that no plan fits is said by `flowrl.planner.relax`.
    """
    if problem.placement is None:
        return
    _check_devices(problem, problem.placement)
    _check_layouts(problem)


def _check_devices(problem: Problem, placement: Placement) -> None:
    """Slices for the groups that have a size, and a device for each other one."""
    sized = tuple(group for group in placement.groups if group.size is not None)
    Placement(sized).meshes(problem.cluster)
    named = {role.name for group in placement.groups for role in group.roles}
    rest = [role.name for role in problem.roles if role.name not in named]
    needed = len(placement.groups) - len(sized) + bool(rest)
    taken = sum(group.size or 0 for group in sized)
    there = problem.cluster.num_devices
    if taken + needed > there:
        others = [str(group) for group in placement.groups if group.size is None] + rest
        raise ConfigError(
            f"'{placement}' gives {taken} of {there} devices to groups with a size, and leaves none for {', '.join(others)}; "
            "smaller layouts, or put them into one group: (a:f8 + b:...)"
        )


def _check_layouts(problem: Problem) -> None:
    """Such as shards over `fsdp` of an engine."""
    wide = problem.cluster.with_memory(device_bytes=PLENTY)
    for role in problem.roles:
        asked = problem.asked_layout(role.name)
        if asked is None:
            continue
        mesh = Mesh(0, asked.size)
        if all_options(role, wide, mesh, problem.workload, problem.choices, layout=asked):
            continue
        offered = sorted({str(one.layout) for one in all_options(role, wide, mesh, problem.workload, problem.choices)})
        there = f"there are {', '.join(offered)}" if offered else "there is none on so many devices"
        kind = "sampled from" if role.is_engine else "trained" if role.is_trained else "only read"
        raise ConfigError(f"'{role.name}', which is {kind}, cannot be laid out as {asked}; {there}")
