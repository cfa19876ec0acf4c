"""One rank of the tests of the mesh: `python -m tests.distributed.mesh_worker '{"rank": 0, ...}'`.

Many cases run in one process, because starting one takes longer than they do. What comes of them is in `<rank>.pt`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from flowrl.engines.audit import audit_module
from flowrl.engines.calibrate.worker import end_with_parent
from flowrl.engines.mesh.guard import Patience
from flowrl.engines.mesh.host import MeshHost, open_on_mesh
from flowrl.engines.mesh.ranks import RankMesh
from flowrl.engines.mesh.sources import Safetensors
from flowrl.engines.offload.memory import HostMemory
from flowrl.engines.offload.on_cpu import CpuAdamW
from flowrl.engines.offload.state import local_of
from flowrl.engines.offload.streamed import StreamedAdamW
from flowrl.errors import FlowError
from flowrl.mesh import Layout
from tests.distributed.mesh_cases import (
    ADAPTED,
    BF16,
    CASES,
    Case,
    CountingBackend,
    Letters,
    job_of,
    metrics_of,
    model_of,
    rows_of,
    scored,
    train,
    uses_of,
)

SCORES = frozenset({"logprobs"})


def opened(name: str, mesh: RankMesh, case: Case | None = None, **options: Any) -> MeshHost:
    case = case or CASES[name]
    return open_on_mesh(name, model_of(case), uses_of(case), mesh, seed=0, **options)


def held(host: MeshHost) -> dict[str, Any]:
    """What this rank holds of each parameter."""
    return {name: param.detach().to_local().clone() for name, param in host.weights.parameters.items()}  # type: ignore[attr-defined]


def case(name: str, mesh: RankMesh, folder: Path) -> dict[str, Any]:
    """A training run, the audit after a step more, and what each rank holds."""
    host = opened(name, mesh)
    found = train(host, CASES[name])
    if mesh.rank:
        del found["state"]
    assert host.trainer is not None
    found["audit"] = audit_module(host.module, host.trainer.optimizer)
    found["held"] = held(host)
    weight = host.module.get_input_embeddings().weight
    head = host.module.get_output_embeddings()
    found["is_tied"] = head is not None and head.weight is weight
    return found


def bf16(mesh: RankMesh, folder: Path) -> Any:
    host = opened("bf16", mesh, BF16)
    found = train(host, BF16)
    found["stored"] = {str(param.dtype) for param in host.weights.parameters.values()}
    return found


def adapters(mesh: RankMesh, folder: Path) -> Any:
    """Adapters train, the base is frozen, sharded as well, and kept in the type that it computes in."""
    host = opened("adapted", mesh, ADAPTED)
    before = held(host)
    reports = [metrics_of(host.update(job_of(ADAPTED, seed))) for seed in range(3)]
    assert host.trainer is not None
    params = host.weights.parameters
    return {
        "reports": reports,
        "moved": {name for name, value in held(host).items() if not torch.equal(before[name], value)},
        "trained": set(host.trainer.trained),
        "stored": {name: str(param.dtype) for name, param in params.items()},
        "copies": {part.copies for part in audit_module(host.module, host.trainer.optimizer).parts},
        "state": host.state(),
    }


def halves(mesh: RankMesh, folder: Path) -> Any:
    """Two meshes of a job, each with a model of its own, at the same time."""
    left = RankMesh.join(Layout(fsdp=2), "left", ranks=(0, 1), patience=mesh.guard.patience)
    right = RankMesh.join(Layout(tp=2), "right", ranks=(2, 3), patience=mesh.guard.patience)
    mine = left or right
    assert mine is not None and (left is None) != (right is None)
    name = "few" if left else "one_rank_trains"
    found = train(opened(name, mine), CASES[name])
    mine.close()
    return name, mine.rank, found


def compiled(mesh: RankMesh, folder: Path) -> Any:
    """Layer by layer, with a backend that needs no compiler; how often compiled layers ran."""
    counted = CountingBackend.registered()
    found: dict[str, Any] = {}
    for name in ("llama", "checkpointing") if mesh.layout.fsdp > 1 else ("llama",):
        case = replace(CASES[name], model={**CASES[name].model, "compile": counted.name})
        counted.forget()
        made = train(opened(name, mesh, case), case, steps=3)
        found[name] = {**made, "graphs": counted.graphs, "calls": counted.calls}
    return found


def compiled_adapters(mesh: RankMesh, folder: Path) -> Any:
    counted = CountingBackend.registered()
    counted.forget()
    case = replace(ADAPTED, model={"compile": counted.name})
    made = train(opened("adapted", mesh, case), case, steps=3)
    return {**made, "calls": counted.calls}


def not_finite(mesh: RankMesh, folder: Path) -> Any:
    """One row, on one rank, makes the loss infinite: no rank takes the step."""
    case = Case("llama", loss="hostile")
    host = opened("hostile", mesh, case)
    before = held(host)
    job = job_of(case, 0)
    job.columns["advantage"][3] = 1e9  # type: ignore[index]
    skipped = metrics_of(host.update(job))
    same = all(torch.equal(before[name], value) for name, value in held(host).items())
    return {"skipped": skipped, "is_same": same, "next": metrics_of(host.update(job_of(case, 0)))}


def learns_nothing(mesh: RankMesh, folder: Path) -> Any:
    """An error that all ranks come to together leaves the mesh usable."""
    host = opened("detached", mesh, Case("llama", loss="detached"))
    found = []
    for loss in ("detached", "stored_only"):
        try:
            host.update(job_of(Case("llama", num_rows=1, loss=loss), 0))
            found.append("no error")
        except FlowError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found, scored(host, CASES["llama"])


def from_files(mesh: RankMesh, folder: Path) -> Any:
    """Read from safetensors, several files; trained a little and written, from host memory."""
    case = CASES["smollm"]
    model = replace(model_of(case), source=folder / "smollm", tokenizer=Letters())
    names: set[str] = set()
    read = Safetensors.read

    def noted(source: Safetensors, name: str) -> Any:
        names.add(name)
        return read(source, name)

    with mock.patch.object(Safetensors, "read", noted):
        host = open_on_mesh("files", model, uses_of(case), mesh, seed=0)
    before = scored(host, case)
    report = metrics_of(host.update(job_of(case, 0)))
    host.offload()
    host.save(str(folder / f"written-{mesh.layout}"))
    assert host.is_parked
    host.onload()
    return {"read": names, "before": before, "report": report, "after": scored(host, case)}


def scoring(mesh: RankMesh, folder: Path) -> Any:
    """Rows in order whatever the share, none at all, top tokens, a model that only scores and one in bf16."""
    case = CASES["llama"]
    host = open_on_mesh("ref", model_of(case), SCORES | {"top_logprobs"}, mesh, seed=0)
    coarse = open_on_mesh("bf16", replace(model_of(case), precision="bf16"), SCORES, mesh, seed=0)
    none = rows_of(replace(case, num_rows=0), 0)
    ids, nats = host.top_logprobs(rows_of(case, 50), 3)
    return {
        "logprobs": scored(host, case),
        "none": host.logprobs(none).values,
        "top": (ids.values, nats.values),
        "bf16": scored(coarse, case),
        "stored": {str(param.dtype) for param in coarse.weights.parameters.values()},
        "sum": host.state()["unchanged"],
    }


def blended(mesh: RankMesh, folder: Path) -> Any:
    """An average of a policy follows it."""
    case = CASES["llama"]
    policy = opened("policy", mesh, case)
    average = open_on_mesh("average", replace(model_of(case)), SCORES | {"source"}, mesh, seed=0)
    policy.update(job_of(case, 0))
    average.blend(policy, 0.5)
    return {"average": average.weights.export(), "policy": policy.weights.export()}


def checkpoint(mesh: RankMesh, folder: Path) -> Any:
    """Three steps, kept in both ways for a run on other ranks."""
    case = CASES["qwen3"]
    host = opened("qwen3", mesh)
    found = train(host, case, steps=3)
    state = host.full_state(keep_on=0)
    if mesh.rank == 0:
        torch.save(state, folder / "state.pt")
    else:
        assert all(array.size == 0 for array in state["weights"].values())
    host.offload()
    dcp.save(host.rank_state(), checkpoint_id=str(folder / "dcp"))
    return found["reports"]


def resumed(mesh: RankMesh, folder: Path) -> Any:
    """The same run goes on from either, on a layout of another kind."""
    case = CASES["qwen3"]
    other = Path((folder / "from.txt").read_text())
    first, second = opened("qwen3", mesh), opened("qwen3", mesh)
    first.restore(torch.load(other / "state.pt", weights_only=False))
    state = second.rank_state()
    dcp.load(state, checkpoint_id=str(other / "dcp"))
    second.restored(state)
    versions = (first.version, second.version)
    return [train(host, case, steps=2, start=3) for host in (first, second)], versions


def shards_of(host: MeshHost) -> dict[str, torch.Tensor]:
    """What this rank holds on its device: weights, buffers, moments, step counters."""
    assert host.trainer is not None
    found = {name: local_of(param.detach()) for name, param in host.weights.parameters.items()}
    found |= dict(host.module.named_buffers())
    found |= {f"moment {number}": local_of(one) for number, one in enumerate(host.trainer.store.tensors())}
    return found


def kept(host: MeshHost) -> dict[str, torch.Tensor]:
    """Weights and moments of this rank, wherever they are."""
    assert host.trainer is not None
    found = {name: local_of(param.detach()).clone() for name, param in host.weights.parameters.items()}
    for name, entry in host.trainer.store.entries().items():
        found |= {f"{key} {name}": local_of(entry[key]).clone() for key in ("exp_avg", "exp_avg_sq")}
    return found


def in_small_buckets(host: MeshHost) -> None:
    """Several of them, also in a model that would fit into one."""
    trainer = host.trainer
    assert trainer is not None
    if isinstance(trainer.store, StreamedAdamW):
        trainer.store = StreamedAdamW(host.weights, trainer.options, trainer.store.state, bucket_bytes=2 * 4 * 192)
    elif isinstance(trainer.store, CpuAdamW):
        memory = HostMemory(host.mesh.device)
        trainer.store = CpuAdamW(host.weights, trainer.options, trainer.store.state, memory, bucket_bytes=4 * 192)


def goes_on(host: MeshHost, name: str, mesh: RankMesh, case: Case) -> bool:
    """Whether a state saved with one class of offload is that of another."""
    other = opened(name, mesh, replace(case, model={**case.model, "offload": "none"}))
    other.restore(host.state())
    first, second = (metrics_of(one.update(job_of(case, 9))) for one in (host, other))
    host.onload()
    same = all(torch.equal(one, two) for one, two in zip(kept(host).values(), kept(other).values(), strict=True))
    return first == second and same


def offloads(mesh: RankMesh, folder: Path) -> Any:
    """Every class of offload trains as the optimizer on the device does."""
    found: dict[str, Any] = {}
    few = (("smollm", "fp32"),)
    for name, precision in few if mesh.layout.tp > 1 else (("llama", "fp32"), ("value", "fp32"), ("llama", "bf16")):
        for kind in ("none", "park", "sopt", "opt"):
            case = replace(CASES[name], model={**CASES[name].model, "precision": precision, "offload": kind})
            host = opened(name, mesh, case)
            assert host.trainer is not None
            in_small_buckets(host)
            reports = [metrics_of(host.update(job_of(case, seed))) for seed in range(3)]
            is_parked = host.is_parked
            host.onload()
            made = {"reports": reports, "after": scored(host, case), "kept": kept(host)}
            if kind == "none":
                expected = made
            else:
                equal = {key: torch.equal(made["kept"][key], value) for key, value in expected["kept"].items()}
                found[f"{name} {precision} {kind}"] = {
                    "names": (set(made["kept"]), set(expected["kept"])),
                    "differ": [key for key, is_equal in equal.items() if not is_equal],
                    "reports": (reports, expected["reports"]),
                    "after": (made["after"], expected["after"]),
                    "store": type(host.trainer.store).__name__,
                    "is_parked": is_parked,
                    "host_bytes": host.host_bytes,
                    "moment_bytes": sum(2 * local_of(p.detach()).nbytes for p in host.trainer.trained.values()),
                }
                if name != "value" and precision == "fp32":
                    found[f"{name} {precision} {kind}"]["resumed"] = goes_on(host, name, mesh, case)
            host.close()
    return found


def parked(mesh: RankMesh, folder: Path) -> Any:
    """Five times away and back: memory is free, and does not grow."""
    case = CASES["smollm"]
    host = opened("parked", mesh, case)
    host.update(job_of(case, 0))
    size = sum(one.untyped_storage().nbytes() for one in shards_of(host).values())
    rounds = []
    for _ in range(5):
        before, storages = kept(host), [one.untyped_storage() for one in shards_of(host).values()]
        copied = host.offload()
        left = sum(storage.nbytes() for storage in storages)
        try:
            host.logprobs(rows_of(case, 0))
            said = ""
        except FlowError as error:
            said = str(error)
        again = host.onload()
        is_same = all(torch.equal(value, kept(host)[name]) for name, value in before.items())
        here = sum(one.untyped_storage().nbytes() for one in shards_of(host).values())
        rounds.append((copied, left, again, is_same, here, host._home.memory.held_bytes, host._home.memory.num_made))
        unchanged = host.offload(writes=False)
        host.onload()
    return {"size": size, "rounds": rounds, "said": said, "unchanged": unchanged, "after": scored(host, case)}


def errors(mesh: RankMesh, folder: Path) -> Any:
    """Before anything is sent: every rank says the same."""
    found = []
    for attempt in (
        lambda: opened("sampler", mesh, Case("llama")).generate([], None),  # type: ignore[arg-type]
        lambda: open_on_mesh("sampler", model_of(Case("llama")), frozenset({"generate"}), mesh, seed=0),
        lambda: opened("model", mesh, Case("llama")).model(),
        lambda: opened("one", mesh, Case("llama")).blend(opened("two", mesh, Case("smollm")), 0.0),
    ):
        try:
            attempt()
            found.append("no error")
        except FlowError as error:
            found.append(str(error))
    return found


EXTRAS: dict[str, Callable[[RankMesh, Path], Any]] = {
    function.__name__: function
    for function in (
        bf16, compiled, compiled_adapters, adapters, halves, not_finite, learns_nothing, from_files, scoring, blended, checkpoint,
        resumed, errors, offloads, parked,
    )
}  # fmt: skip


def main(argument: str) -> None:
    job = json.loads(argument)
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder, rank = Path(job["folder"]), job["rank"]
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=job["world"], timeout=timedelta(seconds=120)
    )
    found: dict[str, Any] = {}
    for text, names in job["work"].items():
        mesh = RankMesh.join(Layout.parse(text), text, patience=Patience(timeout_s=120, poll_s=0.2))
        assert mesh is not None
        for name in names:
            begun = time.monotonic()
            made = case(name, mesh, folder) if name in CASES else EXTRAS[name](mesh, folder)
            found[f"{text} {name}"] = made
            print(f"{text} {name}: {time.monotonic() - begun:.1f} s", flush=True)  # shown when a test fails
        mesh.close()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
