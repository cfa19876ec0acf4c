"""The Ray cluster of a job: found or started, looked at, and a place on it taken for as long as the job runs."""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.engines.launch.across import LOOPBACK
from flowrl.engines.launch.ray_options import LOCAL, RayOptions
from flowrl.errors import ConfigError, EngineError, MissingExtra, WaitTimeout

try:
    import ray as ray
    from ray._private.services import find_gcs_addresses
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise MissingExtra("ranks on a Ray cluster need ray; install it with: pip install 'flowrl[ray]'") from error

ANSWER_S = 10.0
"""Longest wait for a cluster's address to take a connection; Ray itself would try for minutes."""
OBJECT_STORE_BYTES = 100_000_000
"""Of a cluster that is started here: rows and weights never pass Ray's object store."""
AUTO = "auto"
"""$RAY_ADDRESS for a cluster of this host that is there already."""
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
    options = replace(options, address=options.address or os.environ.get("RAY_ADDRESS") or None)  # which looks at it
    address = options.address
    try:
        if address in (None, AUTO):
            address = _running(needs_one=address == AUTO)
        elif address != LOCAL:
            _refuse_silent(address)
        if address is None or address == LOCAL:
            _start_here(options, nproc)
        else:
            _join(address)
        yield
    finally:
        ray.shutdown()


_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
"""Ranks' output is passed on by the job itself, so that none of it is lost at the end."""


_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""An empty frame of HTTP/2 settings."""


def _running(*, needs_one: bool) -> str | None:
    """Address of a cluster of this host that answers; None when there is none.

    Ray itself would wait for minutes for one that ended without a word and is still named in its file.

    Errors: ConfigError when one is needed.
    """
    named, silent = _named_in_file(), ""
    if named:
        why = _silent(named)
        if not why:
            return named
        silent = f"{_address_file()} names a Ray cluster at {named}, where none answers ({why})"
    for found in sorted(find_gcs_addresses()):
        if found != named and not _silent(found):
            return str(found)
    if needs_one:
        hint = f": {silent}; remove that file" if silent else ""
        raise ConfigError(
            f"RAY_ADDRESS=auto, and no Ray cluster answers on this host{hint}; start one (ray start --head), or leave "
            "RAY_ADDRESS out for one that lasts as long as this run"
        )
    if silent:
        print(f"note: {silent}; this run starts one of its own (`ray stop`, or remove that file)", file=sys.stderr)
    return None


def _address_file() -> Path:
    """Where `ray start` says which cluster this host belongs to."""
    root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(root, "ray", "ray_current_cluster")


def _named_in_file() -> str:
    try:
        return _address_file().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _silent(address: str) -> str:
    """Why what is at an address is no Ray cluster; "" when one answers.

    A connection is not enough: the port may be another program's by now, or the cluster may hang. What speaks gRPC sends its
    settings to whoever begins (HTTP/2, RFC 9113, 3.4).
    """
    where = _host_and_port(address)
    if where is None:
        return "this is no HOST:PORT"
    try:
        with socket.create_connection(where, timeout=ANSWER_S) as one:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return ""
            one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
            said = one.recv(len(_SETTINGS))
            return "" if said[3:4] == _SETTINGS[3:4] else "what listens there is no Ray cluster"
    except OSError as error:
        return str(error) or type(error).__name__


def _host_and_port(address: str) -> tuple[str, int] | None:
    """None for text that is no such address."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() and int(port) <= 65535 else None


def _join(address: str) -> None:
    try:
        ray.init(address=address, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise EngineError(
            f"the Ray cluster at {address} answers and does not let this process in: {error}; Ray's own lines above say why (a "
            "token that it asks for, another version of Ray or Python); RAY_ADDRESS=local runs on this host without it"
        ) from error


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
    where = _host_and_port(address)
    if where is None:
        raise ConfigError(f"the address of a Ray cluster is HOST:PORT, auto or local; found {address!r} (RAY_ADDRESS)")
    if silent := _silent(address):
        raise ConfigError(
            f"no Ray cluster answers at {address}: {silent}; start one there (ray start --head --port {where[1]}), or leave out "
            "the address and RAY_ADDRESS for one of this host"
        )


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
