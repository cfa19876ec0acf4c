"""Whether a placement that is asked for can be at all on a cluster, however much memory there were."""

from __future__ import annotations

from flowrl.cost.train import is_cut_in_training
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Layout, Mesh, Placement
from flowrl.planner.engine_options import engine_degrees
from flowrl.planner.options import all_options
from flowrl.planner.problem import Problem, slice_sizes
from flowrl.planner.roles import Role
from flowrl.planner.space import PLENTY
from flowrl.planner.train_options import layouts

MOST = 12
"""Layouts that an error names."""


def check_placement(problem: Problem) -> None:
    """Raise `ConfigError` for groups that have no place on the cluster, and for a layout that a role never has.

    Enough that it can be on some devices of each node (`Problem.parts`). What only lacks memory passes: that no plan fits is said
    by `flowrl.planner.relax`.
    """
    if problem.placement is None:
        return
    refused: ConfigError | None = None
    for part in problem.parts:
        try:
            _check_devices(part, problem.placement)
            _check_layouts(part)
            return
        except ConfigError as error:  # what is said is of the whole cluster
            refused = refused or error
    if refused is not None:
        raise refused


def check_degrees(problem: Problem) -> None:
    """Raise `ConfigError` where no degree that the choices offer cuts a role on any number of the cluster's devices: more memory
    would not help, nor would any number of nodes."""
    for role in problem.roles:
        if problem.asked_layout(role.name) is not None:
            continue
        name = "tensor_parallel" if role.is_engine else "train_tensor_parallel"
        offered = getattr(problem.choices, name)
        if not any(_has_degree(part, role) for part in problem.parts):
            cluster = problem.cluster
            reasons = (_why_not(role, Layout(tp=tp), cluster) for tp in offered[:MOST])
            why = "; ".join(dict.fromkeys(filter(None, reasons)))
            raise ConfigError(
                f"Choices({name}={offered}) leaves '{role.name}' no layout on nodes of {cluster.devices_per_node} devices"
                f"{f': {why}' if why else ''}. Offer 1 as well"
            )


def _has_degree(problem: Problem, role: Role) -> bool:
    per_node = problem.cluster.devices_per_node
    for size in slice_sizes(problem.cluster):
        if role.is_engine and engine_degrees(role, size, per_node, problem.choices):
            return True
        if not role.is_engine and layouts(role.shape, problem.cluster, Mesh(0, size), problem.choices, None):
            return True
    return False


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
    wide = problem.cluster.with_memory(device_bytes=PLENTY)  # what cannot be done there is no matter of memory
    for role in problem.roles:
        asked = problem.asked_layout(role.name)
        if asked is None:
            continue
        mesh = Mesh(0, asked.size)
        if all_options(role, wide, mesh, problem.workload, problem.choices, layout=asked):
            continue
        offered = _possible(problem, role, wide, mesh)
        more = f" and {len(offered) - MOST} more" if len(offered) > MOST else ""
        there = f"there are {', '.join(offered[:MOST])}{more}" if offered else "there is none on so many devices"
        kind = "sampled from" if role.is_engine else "trained" if role.is_trained else "only read"
        why = _why_not(role, asked, wide)
        raise ConfigError(
            f"'{role.name}', which is {kind}, cannot be laid out as {asked}{f': {why}' if why else ''}; {there}"
        )


def _possible(problem: Problem, role: Role, wide: Cluster, mesh: Mesh) -> list[str]:
    """Every layout of a role on that many devices, also those that are planned only where they are asked for: the simplest
    first."""
    size = mesh.size
    ways = [Layout(dp=size // (f * t * p), fsdp=f, tp=t, pp=p)
            for t in _divisors(size) for p in _divisors(size // t) for f in _divisors(size // (t * p))
            if p == 1 or (f == 1 and role.is_engine)]  # fmt: skip
    found = [one for one in ways if all_options(role, wide, mesh, problem.workload, problem.choices, layout=one)]
    return [str(one) for one in sorted(found, key=lambda one: (one.pp, one.tp, -one.fsdp))]


def _divisors(count: int) -> list[int]:
    return [one for one in range(1, count + 1) if count % one == 0]


def _why_not(role: Role, asked: Layout, cluster: Cluster) -> str:
    """What keeps a role from a layout; empty where it is something else."""
    shape, tp, per_node = role.shape, asked.tp, cluster.devices_per_node
    if role.is_engine and asked.fsdp > 1:
        return "an engine holds its weights whole or cut by t and p, and has no shards (f)"
    if not role.is_engine and asked.pp > 1:
        return "only engines have stages (p)"
    if not role.is_engine and tp > 1 and shape.lora is not None:
        return "tensor parallelism (t) with adapters is not offered"
    if not role.is_engine and tp > 1 and not is_cut_in_training(shape):
        return (
            "tensor parallelism (t) of trainers and scorers cuts layers as Llama's only; use shards (f) and copies (d)"
        )
    if tp > per_node:
        return f"tensor parallelism stays inside a node, and one has {per_node} devices"
    if asked.pp > shape.layers:
        return f"{asked.pp} stages are more than its {shape.layers} layers"
    blocks = [(shape.heads, "attention heads"), (shape.ffn, "feed-forward columns")]
    if shape.experts is not None:
        blocks += [
            (shape.experts.ffn, "columns of an expert"),
            (shape.experts.shared_ffn, "columns of a shared expert"),
        ]
    if not (role.is_engine and tp % shape.kv_heads == 0):
        blocks.insert(1, (shape.kv_heads, "key-value heads"))
    return next((f"{count} {name} do not divide by {tp}" for count, name in blocks if count % tp), "")
