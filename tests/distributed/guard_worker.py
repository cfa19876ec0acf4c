"""One rank of the tests of ranks that fail: `python -m tests.distributed.guard_worker '{"rank": 0, "how": ..., ...}'`."""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from flowrl.engines.calibrate.worker import end_with_parent
from flowrl.engines.mesh.guard import Patience
from flowrl.engines.mesh.ranks import RankMesh
from flowrl.errors import FlowError, OperatorError
from flowrl.mesh import Layout


def main(argument: str) -> None:
    job = json.loads(argument)
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder, rank, how = Path(job["folder"]), job["rank"], job["how"]
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=120))
    # a wait is long, so that what ends it is the other rank's failure; the late rank is waited for briefly
    patience = Patience(timeout_s=2.0 if how == "late" else 100.0, poll_s=0.1, grace_s=1.0)
    mesh = RankMesh.join(Layout(fsdp=2), "mesh", patience=patience)
    assert mesh is not None
    assert mesh.exchange(rank, "a first exchange") == [0, 1]
    store = _get_default_store()
    try:
        if rank == 0 or how == "stuck":
            mesh.exchange(0, "the loss of step 3") if rank == 0 else fail(mesh)
        elif how == "raises":
            fail(mesh)
        elif how == "late":
            with mesh.guard.waiting("rewards"):
                store.wait(["seen"], timedelta(seconds=100))  # until the other rank has given up
    except FlowError as error:
        (folder / f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        store.set("seen", "yes")
        if how == "stuck":
            threading.Event().wait()  # alive, and deaf: gloo does not wake the other rank
        try:
            mesh.exchange(rank, "anything after")
        except FlowError as later:
            (folder / f"{rank}.later.txt").write_text(str(later))
        if rank == 0:
            raise  # rank 1 ends as if nothing had happened, so that nobody but the guard ends rank 0


def fail(mesh: RankMesh) -> None:
    with mesh.guard.waiting("gradients of step 3"):
        torch.ones(1)
        raise OperatorError("the loss divides by zero")


if __name__ == "__main__":
    main(sys.argv[1])
