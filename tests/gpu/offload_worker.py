"""One rank of the test of offload on several GPUs: `python -m tests.gpu.offload_worker '{"rank": 0, ...}'`."""

from __future__ import annotations

import gc
import json
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flowrl.engines.calibrate.worker import end_with_parent
from flowrl.engines.mesh.guard import Patience
from flowrl.engines.mesh.host import MeshHost, open_on_mesh
from flowrl.engines.mesh.ranks import RankMesh
from flowrl.mesh import Layout
from flowrl.model import AdamW, Model
from tests.distributed.mesh_cases import Case, job_of, llama, metrics_of, uses_of

CASE = Case("llama", num_rows=16, budget=64)


def model(offload: str) -> Model:
    """Large enough that its state is more than what CUDA's libraries take meanwhile."""
    return Model(
        lambda: llama(hidden_size=512, intermediate_size=1024, num_hidden_layers=4), device="cuda", offload=offload,
        micro_batch_tokens=CASE.budget, optimizer=AdamW(lr=1e-2, eps=1e-3),
    )  # fmt: skip


def trained(mesh: RankMesh, offload: str) -> tuple[MeshHost, dict[str, Any]]:
    host = open_on_mesh("policy", model(offload), uses_of(CASE), mesh, seed=0)
    reports = [metrics_of(host.update(job_of(CASE, seed))) for seed in range(3)]
    is_parked = host.is_parked
    host.onload()
    weights = dict(host.state()["weights"])
    assert host.trainer is not None
    return host, {
        "reports": reports, "weights": weights, "is_parked": is_parked, "host_bytes": host.host_bytes,
        "store": type(host.trainer.store).__name__,
    }  # fmt: skip


def parked(mesh: RankMesh) -> dict[str, Any]:
    """Device memory before a model is opened, while it is parked, and the peak of each of five rounds."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    host, _ = trained(mesh, "none")
    here = torch.cuda.memory_allocated()
    rounds = []
    for _ in range(5):
        torch.cuda.reset_peak_memory_stats()
        copied = host.offload()
        torch.cuda.synchronize()
        away = torch.cuda.memory_allocated()
        host.onload()
        torch.cuda.synchronize()
        rounds.append((copied, away, torch.cuda.max_memory_allocated(), host.host_bytes))
    return {"before": before, "here": here, "rounds": rounds}


def checkpoint(mesh: RankMesh, folder: Path) -> bool:
    """Written with the optimizer's state on the host, and read into one on the device."""
    first, _ = trained(mesh, "sopt")
    first.write_state(str(folder / "checkpoint"))
    mesh.exchange(None, "all parts of the checkpoint")
    second = open_on_mesh("policy", model("none"), uses_of(CASE), mesh, seed=0)
    second.read_state(str(folder / "checkpoint"))
    assert second.version == first.version == 3
    pairs = zip(first.weights.masters.values(), second.weights.masters.values(), strict=True)
    return all(torch.equal(one.to_local(), two.to_local()) for one, two in pairs)  # type: ignore[attr-defined]


def main(argument: str) -> None:
    job = json.loads(argument)
    threading.Thread(target=end_with_parent, daemon=True).start()
    folder, rank = Path(job["folder"]), job["rank"]
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", f"file://{folder}/meet", rank=rank, world_size=job["world"], timeout=timedelta(seconds=120)
    )
    mesh = RankMesh.join(Layout.parse(job["layout"]), "mesh", patience=Patience(timeout_s=120, poll_s=0.2))
    assert mesh is not None
    found = {kind: trained(mesh, kind)[1] for kind in ("none", "park", "sopt", "opt")}
    found["parked"] = parked(mesh)
    found["checkpoint"] = checkpoint(mesh, folder)
    torch.save(found, folder / f"{rank}.pt")
    mesh.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
