"""Processes that torchrun started agree on a folder in shared memory, by the store that torchrun has for them."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from flowrl.engines.launch.folder import make_folder
from flowrl.errors import ConfigError, EngineError

MEET_S = 300.0
"""Longest wait for the others to start; less where the run waits less."""


def folder_of_job(rank: int, world: int, *, timeout_s: float) -> Path:
    """The folder that rank 0 makes for all. Errors: ConfigError for ranks on several hosts; EngineError when they do not meet."""
    wait = timedelta(seconds=min(timeout_s, MEET_S))
    try:
        store, _, _ = next(rendezvous("env://", rank, world, timeout=wait))
        if rank == 0:
            store.set("flowrl/folder", f"{socket.gethostname()} {make_folder()}")
        store.wait(["flowrl/folder"], wait)
        host, _, folder = store.get("flowrl/folder").decode().partition(" ")
        store.set(f"flowrl/here/{rank}", "")
        store.wait([f"flowrl/here/{one}" for one in range(world)], wait)  # rank 0 holds the store until all have read
    except (RuntimeError, ValueError, dist.DistError) as error:
        raise EngineError(
            f"rank {rank} did not meet the {world - 1} others of the job within {wait}: {error}"
        ) from error
    if host != socket.gethostname():
        raise ConfigError(
            f"rank {rank} is on {socket.gethostname()} and rank 0 on {host}; rows cross ranks in the memory of one host so far: "
            "start all ranks on one"
        )
    return Path(folder)
