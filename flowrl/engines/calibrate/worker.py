"""One process of a calibration: `python -m flowrl.engines.calibrate.worker '{"rank": 0, ...}'`.

It appends a line of JSON for each measurement, {"name": ..., "value": ...} or {"name": ..., "error": ...}, so that what was
measured is there whatever happens later. It ends when its parent does: the parent holds the other end of its input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does."""

    rank: int
    world: int
    folder: str
    is_gpu: bool
    quick: bool
    wait_s: float
    """For other processes, at most."""


class Log:
    """The file of one process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def attempt(self, name: str, measure: Callable[[], Any]) -> None:
        """Write the value of a measurement or why there is none."""
        try:
            line: dict[str, Any] = {"name": name, "value": measure()}
        except (
            Exception
        ) as error:  # a backend that lacks an operation, too little memory: the rest can be measured all the same
            text = str(error).strip().splitlines()
            line = {"name": name, "error": f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@contextmanager
def joined(rank: int, world: int, folder: str, *, is_gpu: bool, wait_s: float) -> Iterator[Any]:
    """The device of one process, while it is in the job's process group: NCCL on GPUs, gloo on a CPU. Ends with its parent.

    Args:
        folder: of all processes; they meet there.
        wait_s: for other processes, at most.
    """
    threading.Thread(target=end_with_parent, daemon=True).start()
    # ranks of one machine meet over its own loop, whatever its host name resolves to
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=wait_s),
        device_id=device if is_gpu else None,
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()


def main(argument: str) -> None:
    import torch

    job = Job(**json.loads(argument))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.world))
    with joined(job.rank, job.world, job.folder, is_gpu=job.is_gpu, wait_s=job.wait_s) as device:
        _measure(job, device, Log(Path(job.folder) / f"{job.rank}.jsonl"))


def _measure(job: Job, device: Any, log: Log) -> None:
    import torch
    import torch.distributed as dist

    from flowrl.engines.calibrate import compute, host, links
    from flowrl.engines.calibrate.effort import Effort

    effort = Effort.of(is_gpu=job.is_gpu, quick=job.quick)

    def device_facts() -> dict[str, Any]:
        if not job.is_gpu:
            return {"name": "cpu", "memory_bytes": 0}
        facts = torch.cuda.get_device_properties(device)
        return {"name": facts.name, "memory_bytes": facts.total_memory}

    log.attempt("device", device_facts)
    together: dict[str, Callable[[], Any]] = {
        "products": lambda: compute.products(device, effort),
        "copy": lambda: compute.copy_bytes_s(device, effort),
        "decode": lambda: compute.decode(
            device, effort
        ),  # before kernels are traced, which graphs do not always survive
        "layers": lambda: compute.layers(device, effort),
        "attention": lambda: compute.attention(device, effort),
        "adam": lambda: compute.adam_bytes_s(device, effort),
        "loss": lambda: compute.loss(device, effort),
        "host_copies": lambda: host.copies(device, effort),
        "host_adam": lambda: host.adam_params_s(effort, job.world),
        "starts": lambda: links.starts(device, effort, job.world),
        "sharded": lambda: links.shard_s(device, effort, job.world),
    }
    for name, measure in together.items():
        dist.barrier()
        log.attempt(name, measure)
        if job.is_gpu:
            torch.cuda.empty_cache()
    for ranks, group in links.groups(job.world):
        for name in links.OPERATIONS:
            dist.barrier()
            if job.rank < ranks:
                log.attempt(
                    f"{name}/{ranks}",
                    lambda name=name, group=group, ranks=ranks: links.collective(name, group, ranks, device, effort),  # type: ignore[misc]
                )
    log.attempt("done", lambda: True)


def end_with_parent() -> None:
    """Wait for the end of this process's input, and then end at once. For a thread of its own."""
    while os.read(sys.stdin.fileno(), 1):  # not by way of sys.stdin, whose lock is wanted at the end of the interpreter
        pass
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
