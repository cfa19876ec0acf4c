"""Processes that torchrun started meet by the store that torchrun has for them: on one host or on several.

each rank             says which host it is on (`flowrl.engines.launch.across.host_id`), and at which address
one host              rank 0 makes the folder of the job: all is as with any launcher on one host
several               the first rank of each host makes the folder there; rank 0 holds the hub
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from flowrl.engines.launch.across import LOOPBACK, Across, address_towards, host_id
from flowrl.engines.launch.board import Board
from flowrl.engines.launch.folder import FolderBoard, make_folder
from flowrl.engines.launch.hub import Hub, HubBoard
from flowrl.errors import EngineError

MEET_S = 300.0
"""Longest wait for the others to start; less where the run waits less."""


def meet(rank: int, world: int, *, timeout_s: float) -> Board:
    """The board of the job. Errors: EngineError when the ranks do not meet, or hosts do not reach each other."""
    wait = timedelta(seconds=min(timeout_s, MEET_S))
    try:
        store, _, _ = next(rendezvous("env://", rank, world, timeout=wait))
        board = _met(store, rank, world, wait)
        store.set(f"flowrl/here/{rank}", "")
        store.wait([f"flowrl/here/{one}" for one in range(world)], wait)  # rank 0 holds the store until all have read
        return board
    except (RuntimeError, ValueError, dist.DistError) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(
            f"rank {rank} did not meet the {world - 1} others of the job within {wait}: {error}"
        ) from error


def _met(store: Store, rank: int, world: int, wait: timedelta) -> Board:
    address = address_towards(os.environ.get("MASTER_ADDR", LOOPBACK))
    store.set(f"flowrl/at/{rank}", json.dumps([host_id(), address]))
    found = [json.loads(data) for data in _read(store, [f"flowrl/at/{one}" for one in range(world)], wait)]
    names = list(dict.fromkeys(host for host, _ in found))
    host_of = tuple(names.index(host) for host, _ in found)
    here, first = host_of[rank], host_of.index(host_of[rank])
    if rank == first:
        store.set(f"flowrl/folder/{here}", str(make_folder()))
    folder = Path(_read(store, [f"flowrl/folder/{here}"], wait)[0])
    if len(names) == 1:
        return FolderBoard(folder, rank, world)
    if here == 0:  # the address of torchrun's own store may be one that only this host knows
        address = address_towards(found[host_of.index(1)][1])
    hub = None
    if rank == 0:
        hub = Hub(world, host=address)
        store.set("flowrl/hub", json.dumps([hub.address, hub.token]))
    at, token = json.loads(_read(store, ["flowrl/hub"], wait)[0])
    return HubBoard(Across(at, token, address, host_of, keeper=0), folder, rank, world, hub=hub)


def _read(store: Store, keys: list[str], wait: timedelta) -> list[str]:
    store.wait(keys, wait)
    return [store.get(key).decode() for key in keys]
