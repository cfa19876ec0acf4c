"""Training on a mesh: the optimizer steps of `Trainer`, its rows shared over ranks.

    every rank    counts of the whole step -> weights of tokens and rows
    data rank i   its micro-batches: forward, loss, backward; gradients are summed over ranks as they come
    every rank    one exchange: loss, metrics, squared norm -> the same numbers everywhere -> clip, check, AdamW on its shard

The job is the same on every rank, all its rows: nothing about rows is asked of other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowrl.engines.forward import Forward
from flowrl.engines.mesh.passes import Passes
from flowrl.engines.mesh.sharding import Sharded
from flowrl.engines.mesh.shares import nothing, shared_blocks
from flowrl.engines.mesh.weights import MeshWeights
from flowrl.engines.offload.state import local_of
from flowrl.engines.offload.store import OptimizerStore
from flowrl.engines.packing import Batch
from flowrl.engines.trainer_torch import Numbers, Step, Trainer, Work, sums_of
from flowrl.model import AdamW

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank adds to a step."""

    loss: float
    square: float
    """Its share of the squared norm of the gradient."""
    metrics: Mapping[str, tuple[float, float]]
    is_live: bool
    is_counted: bool
    """False for ranks that computed the same rows as another one of their tp group."""


class MeshTrainer(Trainer):
    """AdamW over the shards of one module."""

    def __init__(
        self,
        forward: Forward,
        weights: MeshWeights,
        options: AdamW,
        sharded: Sharded,
        passes: Passes,
        *,
        micro_batch_tokens: int,
        max_context: int | None,
        store: OptimizerStore | None = None,
    ) -> None:
        super().__init__(
            forward, weights, options, micro_batch_tokens=micro_batch_tokens, max_context=max_context, store=store
        )
        self.sharded = sharded
        self.mesh = sharded.mesh
        self._copies = {name: copies_of(master) for name, master in self.trained.items()}
        self.passes = passes
        self._columns: list[Tensor] = []
        """Live columns of the block at hand."""
        self._is_live = False

    def _accumulate(self, work: Work, rows: np.ndarray) -> Step:
        self._is_live = False
        self.passes.expect(work.job.rows.prompt_ids, rows, whole="scores" in work.live)
        with self.mesh.guard.waiting(f"the gradients of model '{self.forward.name}', optimizer step {self.steps}"):
            return super()._accumulate(work, rows)

    def _blocks(self, work: Work, rows: np.ndarray) -> Iterator[np.ndarray]:
        blocks = shared_blocks(
            work.lengths[rows],
            self.micro_batch_tokens,
            self.mesh.data_size,
            self.mesh.data_rank,
            groups=self._groups(work, rows),
        )
        for index, block in enumerate(blocks):
            self.sharded.add_over_copies(index == len(blocks) - 1)
            yield rows[block]

    def _run(self, function: Any, *args: Any) -> Any:
        return self.sharded.call(function, *args)

    def _micro_batch(
        self, work: Work, rows: np.ndarray, token_weight: np.ndarray, row_weight: np.ndarray
    ) -> tuple[Tensor, dict[str, tuple[Tensor, int]]]:
        """[Note: Every pass has a backward pass] Ranks add up gradients of a layer together. So a loss that depends on nothing
        here, or a block of no rows, still gets a graph through the model: a sum of none of its outputs, which is 0 and
        gives gradients that are 0. So do outputs of the backbone that nothing reads (see [Note: Loose ends] in `passes`)."""
        self.passes.begin()
        self._columns.clear()
        if len(rows):
            total, found = super()._micro_batch(work, rows, token_weight, row_weight)
            self._is_live |= total.requires_grad
        else:
            batch = nothing()
            row_T = torch.from_numpy(batch.row_T).to(self.forward.device)
            self.live_columns(batch, row_T, np.ones(0, np.float32), work.live)
            total, found = torch.zeros((), device=self.forward.device), {}
        if work.live:
            self.passes.fill()
        for end in (*self._columns, *self.passes.ends):
            total = total + end[:0].sum().float()
        self._columns.clear()
        self.passes.ends.clear()
        return total, found

    def live_columns(
        self, batch: Batch, row_T: Tensor, temperature: np.ndarray, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        found = super().live_columns(batch, row_T, temperature, wanted)
        self._columns.extend(found.values())
        return found

    def _gradients(self) -> dict[str, Tensor]:
        return {name: local_of(grad) for name, grad in super()._gradients().items()}

    def _numbers(self, step: Step, grads: Mapping[str, Tensor]) -> Numbers:
        """The same on every rank, to the bit: parts are added in the order of ranks."""
        mine = Part(
            loss=float(step.loss),
            square=self._square(grads),
            metrics=sums_of(step),
            is_live=self._is_live,
            is_counted=self.mesh.is_first_of_tp,
        )
        what = f"the loss of model '{self.forward.name}', optimizer step {self.steps}"
        parts = self.mesh.exchange(mine, what)
        counted = [part for part in parts if part.is_counted]
        metrics: dict[str, tuple[float, float]] = {}
        for part in counted:
            for name, (total, count) in part.metrics.items():
                before = metrics.get(name, (0.0, 0))
                metrics[name] = (before[0] + total, before[1] + count)
        return Numbers(
            loss=sum(part.loss for part in counted),
            grad_norm=math.sqrt(square) if (square := sum(part.square for part in parts)) >= 0 else math.nan,
            metrics=metrics,
            is_live=any(part.is_live for part in parts),
        )

    def _square(self, grads: Mapping[str, Tensor]) -> float:
        """The squared norm of what this rank holds; what several ranks hold alike is divided among them."""
        if not grads:
            return 0.0
        norms = torch.stack(torch._foreach_norm(list(grads.values()))).double()
        copies = torch.tensor([self._copies[name] for name in grads], dtype=torch.float64, device=norms.device)
        return float((norms.square() / copies).sum())


def copies_of(tensor: Tensor) -> int:
    """Ranks that hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(axis) for axis, placement in enumerate(tensor.placements) if placement.is_replicate())
