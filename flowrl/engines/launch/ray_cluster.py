"""The Ray cluster of a job: found or started, looked at, and a place on it taken for as long as the job runs."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flowrl.engines.launch.across import LOOPBACK
from flowrl.engines.launch.ray_options import LOCAL, RayOptions
from flowrl.errors import ConfigError, EngineError, MissingExtra, WaitTimeout

try:
    import ray as ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise MissingExtra("ranks on a Ray cluster need ray; install it with: pip install 'flowrl[ray]'") from error

ANSWER_S = 10.0
"""Longest wait for a cluster's address to take a connection; Ray itself would try for minutes."""
OBJECT_STORE_BYTES = 100_000_000
"""Of a cluster that is started here: rows and weights never pass Ray's object store."""
EPSILON = 1e-6
"""Ray counts in ten-thousandths."""


@dataclass(frozen=True, slots=True)
class Node:
    """A living node, with all that it has, taken or not.

    Example:
        Node("10.0.0.1 (trainer-1)", cpus=96, gpus=8)
    """

    name: str
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.name} has {_amount(self.cpus, self.gpus)}"


@contextmanager
def connected(options: RayOptions, nproc: int) -> Iterator[None]:
    """Be connected to a cluster; one that this process is connected to already is taken, and stays.

    Errors: ConfigError for an address where nothing answers; EngineError when Ray does not start.
    """
    if ray.is_initialized():
        yield
        return
    address = options.address or os.environ.get("RAY_ADDRESS") or None
    try:
        if address == LOCAL or (address is None and not _joins_running()):
            _start_here(options, nproc)
        elif address is not None:
            _refuse_silent(address)
            ray.init(address=address, **_QUIET)
        yield
    finally:
        ray.shutdown()


_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
"""Ranks' output is passed on by the job itself, so that none of it is lost at the end."""


def _joins_running() -> bool:
    try:
        ray.init(address="auto", **_QUIET)
    except ConnectionError:
        return False
    return True


def _start_here(options: RayOptions, nproc: int) -> None:
    """A cluster of this host, with a slot for each rank, as when processes are started without Ray: only GPUs are counted."""
    slots = max(os.cpu_count() or 1, math.ceil(nproc * options.cpus))
    try:
        ray.init(
            address=LOCAL, _node_ip_address=LOOPBACK, num_cpus=slots, include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES, **_QUIET,
        )  # fmt: skip
    except (RuntimeError, OSError, TimeoutError) as error:
        raise EngineError(f"Ray did not start on {socket.gethostname()}: {error}") from error


def _refuse_silent(address: str) -> None:
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdecimal():
        raise ConfigError(f"the address of a Ray cluster is HOST:PORT, auto or local; found {address!r} (RAY_ADDRESS)")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address}: {error}; start one there (ray start --head --port {port}), or leave out the "
            "address and RAY_ADDRESS for one of this host"
        ) from error


def nodes() -> list[Node]:
    """The living nodes of the cluster."""
    return [
        Node(_name(one), one["Resources"].get("CPU", 0.0), one["Resources"].get("GPU", 0.0))
        for one in ray.nodes()
        if one["Alive"]
    ]


def refuse_too_large(found: Sequence[Node], hosts: Sequence[int], options: RayOptions) -> None:
    """Errors: ConfigError when the nodes could not hold the ranks of all hosts, each host on a node of its own, even if nothing
    else ran there."""
    room = sorted((_most_ranks(one, options) for one in found), reverse=True)
    wanted = sorted(hosts, reverse=True)
    if len(room) >= len(wanted) and all(has >= needs for has, needs in zip(room, wanted, strict=False)):
        return
    raise ConfigError(
        f"{_needed(hosts, options)}; in this Ray cluster {'; '.join(map(str, found)) or 'no node is alive'}: add nodes that are "
        "large enough, or plan for fewer devices"
    )


def _most_ranks(node: Node, options: RayOptions) -> int:
    """How many ranks a node can hold."""
    asked = ((node.cpus, options.cpus), (node.gpus, options.gpus))
    return min(math.floor(has / needs + EPSILON) for has, needs in asked if needs)


def _needed(hosts: Sequence[int], options: RayOptions) -> str:
    """What ranks need, in words."""
    total = sum(hosts)
    ranks = f"{total} rank{'s' if total > 1 else ''} need"
    if len(hosts) == 1:
        return f"{ranks} one node with {_amount(total * options.cpus, total * options.gpus)}, as devices of one node of the plan"
    sizes = [
        f"{hosts.count(one)} with {_amount(one * options.cpus, one * options.gpus)}" for one in dict.fromkeys(hosts)
    ]
    return f"{ranks} {len(hosts)} nodes, as the plan has: {' and '.join(sizes)}"


@dataclass(frozen=True, slots=True)
class Held:
    """Places that a job has on the cluster."""

    group: Any
    """The placement group, with a bundle for each host."""
    names: tuple[str, ...]
    """Of the node of each host."""
    addresses: tuple[str, ...]
    """Of the node of each host."""


@contextmanager
def placed(hosts: Sequence[int], options: RayOptions) -> Iterator[Held]:
    """A placement group with a bundle for the ranks of each host, each on a node of its own; it is removed at the end.

    Errors: WaitTimeout when other jobs leave no nodes with so much room within `options.place_s`.
    """
    bundles = [
        {name: count * ranks for name, count in (("CPU", options.cpus), ("GPU", options.gpus)) if count}
        for ranks in hosts
    ]
    strategy = "STRICT_PACK" if len(hosts) == 1 else "STRICT_SPREAD"
    group = placement_group(bundles, strategy=strategy, name="flowrl")
    try:
        if not group.wait(math.ceil(options.place_s)):  # Ray would cut it to whole seconds
            free = ray.available_resources()
            raise WaitTimeout(
                f"waited {options.place_s:g} s until so much is free: {_needed(hosts, options)}; {'; '.join(map(str, nodes()))}, "
                f"and {_amount(free.get('CPU', 0.0), free.get('GPU', 0.0))} of all are free, as Ray last heard: wait for other "
                "jobs to end (ray status), or give a longer time"
            )
        node_of = placement_group_table(group)["bundles_to_node_id"]
        known = {one["NodeID"]: one for one in ray.nodes()}
        on = [known[node_of[index]] for index in range(len(hosts))]
        yield Held(group, tuple(map(_name, on)), tuple(one["NodeManagerAddress"] for one in on))
    finally:
        remove_placement_group(group)


def bundle_of(group: Any, index: int) -> Any:
    """Where an actor is put: the bundle of a host."""
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})"


def _amount(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU{'' if cpus == 1 else 's'} and {gpus:g} GPU{'' if gpus == 1 else 's'}"
