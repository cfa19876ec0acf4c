"""One rank of the tests of what a mesh keeps in memory and computes in pieces: as `mesh_worker`, with work of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowrl.engines import forward as forward_module
from flowrl.engines.forward import Forward
from flowrl.engines.mesh import vocabulary
from flowrl.engines.mesh.host import MeshHost, open_on_mesh
from flowrl.engines.mesh.ranks import RankMesh
from flowrl.engines.protocol import TokenRows
from flowrl.schema.ragged import Ragged
from tests.distributed import mesh_worker
from tests.distributed.mesh_cases import CASES, VOCAB, Case, Letters, job_of, metrics_of, model_of, train, uses_of
from tests.distributed.mesh_worker import opened

SHORT_ROWS = Case("llama", num_rows=14, budget=400)
"""Rows of very different lengths in few blocks, so that short ones share lines."""
DEEP = Case("llama", num_rows=12, budget=400)
SLICE = 5
"""Tokens whose logits are there at once."""


class Meter:
    """What autograd keeps between forward and backward, weights left out."""

    def __init__(self, host: MeshHost) -> None:
        self._host = host
        self._held: list[Tensor] = []  # a storage that is freed could give its address to another
        self.num_bytes = 0
        self.logit_rows = 0
        """Of the largest tensor that was kept of each token and each word of the vocabulary."""

    @contextmanager
    def running(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield

    def _keep(self, tensor: Tensor) -> Tensor:
        mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        seen = {one.untyped_storage()._cdata for one in self._held} | self._gathered()
        if mine.untyped_storage()._cdata not in seen:
            self._held.append(mine)
            self.num_bytes += mine.untyped_storage().nbytes()
        hidden, width = self._host.module.config.hidden_size, VOCAB // self._host.mesh.layout.tp
        if mine.is_floating_point() and mine.shape[-1:] == (width,) and mine.shape != (hidden, width):
            self.logit_rows = max(self.logit_rows, mine.numel() // width)
        return tensor

    def _gathered(self) -> set[int]:
        found = set()
        for part in self._host.sharded._parts():
            for one in part._get_fsdp_state()._fsdp_param_group.fsdp_params:  # type: ignore[union-attr]
                param = getattr(one, "_unsharded_param", None)
                if param is not None:
                    local = param.to_local() if isinstance(param, DTensor) else param
                    found.add(local.untyped_storage()._cdata)
        return found


def kept(mesh: RankMesh, folder: Path) -> Any:
    """Bytes that an update keeps for its backward pass, with and without activation checkpointing."""
    found = {}
    for is_recomputed in (False, True):
        case = replace(DEEP, model={"gradient_checkpointing": is_recomputed, "precision": "fp32"})
        host = opened("kept", mesh, case)
        host.forward.shares_prompts = False  # recomputing does without
        meter = Meter(host)
        with meter.running():
            report = metrics_of(host.update(job_of(case, 0)))
        found[is_recomputed] = (meter.num_bytes, report)
    return found


def logits(mesh: RankMesh, folder: Path) -> Any:
    """Rows of the largest tensor of logits that is kept, and that is made, all at once and in slices: of a rank's words."""
    found = {}
    made: list[int] = []
    whole, sums_of_part = Forward.logits, vocabulary.sums_of_part

    def noted(self: Forward, hidden: Tensor, temperature: Tensor | None) -> Tensor:
        made.append(len(hidden))
        return whole(self, hidden, temperature)

    def noted_part(logits: Tensor, *args: Any, **options: Any) -> Tensor:
        made.append(len(logits))
        return sums_of_part(logits, *args, **options)

    for size in (2**26, SLICE * VOCAB):
        host = opened("logits", mesh, DEEP)
        made.clear()
        meter = Meter(host)
        with (
            mock.patch.object(forward_module, "SLICE_ELEMENTS", size),
            mock.patch.object(Forward, "logits", noted),
            mock.patch.object(vocabulary, "sums_of_part", noted_part),
            meter.running(),
        ):
            report = metrics_of(host.update(job_of(DEEP, 0)))
        found[size] = (meter.logit_rows, max(made), report)
    return found


def packed(mesh: RankMesh, folder: Path) -> Any:
    """Training on lines that rows share; and what another neighbour in the line changes."""
    lines: list[int] = []
    run = forward_module.run_packed

    def noted(base: Any, block: Any, device: torch.device) -> Tensor:
        lines.append(len(block.line_B) - len(block.ids))
        return run(base, block, device)

    with mock.patch.object(forward_module, "run_packed", noted):
        host = opened("packed", mesh, SHORT_ROWS)
        lines.clear()  # of the probe when it was opened
        trained = train(host, SHORT_ROWS)
        saved = sum(lines)
        rows = neighbours(0)
        before = host.logprobs(rows)
        after = host.logprobs(neighbours(1))
    host.forward.packs = False
    return {
        "saved": saved,
        "trained": trained,
        "before": before,
        "after": after,
        "padded": host.logprobs(rows),
    }


def neighbours(shift: int) -> TokenRows:
    """One long row and many short ones; `shift` changes the tokens of every second short one, none of its lengths."""
    draw = np.random.default_rng(5)
    prompts = [draw.integers(3, VOCAB, length) for length in (9, 2, 3, 2, 3, 2, 3, 2, 3)]
    responses = [draw.integers(3, VOCAB, length) for length in (20, 4, 3, 5, 4, 3, 4, 5, 3)]
    for row in range(2, len(prompts), 2):
        prompts[row] = (prompts[row] - 3 + shift) % (VOCAB - 3) + 3
    return TokenRows(Ragged.of(prompts, np.int32), Ragged.of(responses, np.int32), np.ones(len(prompts), np.float32))


def buffers(mesh: RankMesh, folder: Path) -> Any:
    """Of a model that was built without weights and read from files."""
    case = CASES["smollm"]
    model = replace(model_of(case), source=folder / "smollm", tokenizer=Letters())
    host = open_on_mesh("files", model, uses_of(case), mesh, seed=0)
    return {name: buffer.clone() for name, buffer in host.module.named_buffers()}


def skips(mesh: RankMesh, folder: Path) -> Any:
    """One row, on one rank, makes the second step infinite: nothing of the state changes on any rank."""
    case = Case("llama", loss="hostile")
    host = opened("hostile", mesh, case)
    assert host.trainer is not None
    host.update(job_of(case, 1))
    before = host.state()
    job = job_of(case, 0)
    job.columns["advantage"][3] = 1e9  # type: ignore[index]
    report = metrics_of(host.update(job))
    after = host.state()
    same = all(np.array_equal(before["weights"][name], array) for name, array in after["weights"].items())
    for name, entry in after["optimizer"].items():
        same &= all(np.array_equal(before["optimizer"][name][key], entry[key]) for key in ("exp_avg", "exp_avg_sq"))
        same &= float(before["optimizer"][name]["step"]) == float(entry["step"])
    next_report = metrics_of(host.update(job_of(case, 2)))
    return {
        "report": report,
        "is_same": same,
        "schedules": (before["schedule"], after["schedule"]),
        "versions": (before["version"], after["version"]),
        "next": next_report,
    }


mesh_worker.EXTRAS.update({one.__name__: one for one in (kept, logits, packed, buffers, skips)})

if __name__ == "__main__":
    mesh_worker.main(sys.argv[1])
