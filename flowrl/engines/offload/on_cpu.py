"""AdamW on the CPU, bucket by bucket: gradients out, new weights in (ZeRO-Offload, arXiv 2101.06840).

    out    bucket k+1: gradients to host memory
    CPU    bucket k: AdamW on masters and moments
    in     bucket k-1: weights, rounded, back to the device

Host memory beside masters and moments: two buckets of gradients and two of weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowrl.engines.offload.host_adamw import HostAdamW
from flowrl.engines.offload.layout import Bucket, Piece
from flowrl.engines.offload.memory import HostMemory
from flowrl.engines.offload.state import ITEM_BYTES, MOMENTS, HostState, adamw_, flat_of
from flowrl.engines.weights import Weights
from flowrl.errors import EngineError
from flowrl.model import AdamW

STAGES = 2
"""Of gradients, and of weights: one is worked on while the other is copied."""
STAGE_BYTES = 2**28
"""Of a bucket's gradients: long enough for the rate of the link and all threads of the CPU."""


class CpuAdamW(HostAdamW):
    """See the module.

    Args:
        state: over the trained parameters of `weights`, with masters.
        bucket_bytes: of a bucket's gradients in fp32.
    """

    def __init__(
        self,
        weights: Weights,
        options: AdamW,
        state: HostState,
        memory: HostMemory,
        *,
        bucket_bytes: float = STAGE_BYTES,
    ) -> None:
        super().__init__(weights, options, state, int(bucket_bytes) // ITEM_BYTES)
        length = max((bucket.stop - bucket.start for bucket in self._buckets), default=0)
        wide = max(parameter.element_size() for parameter in self._parameters.values())
        grad_bytes, weight_bytes = length * ITEM_BYTES, length * wide
        self._regions = [memory.take(size) for size in (grad_bytes, weight_bytes) for _ in range(STAGES)]
        self._grads = [region.view(0, grad_bytes, torch.float32) for region in self._regions[:STAGES]]
        self._new = [region.view(0, weight_bytes) for region in self._regions[STAGES:]]
        """As bytes: weights may be of several types."""
        self._wide = wide

    @staticmethod
    def over(weights: Weights, options: AdamW, precision: torch.dtype) -> CpuAdamW:
        """For weights whose module is to run in `precision`. Errors: EngineError for shards of a mesh."""
        parameters = weights.trained_parameters()
        if any(isinstance(one, DTensor) for one in parameters.values()):
            raise EngineError(
                f"model '{weights.name}' lies in shards on a mesh, where the CPU does not compute its optimizer; use "
                "offload='sopt', 'park' or 'none'"
            )
        memory = HostMemory(next(iter(parameters.values())).device)
        state = HostState(weights.name, parameters, memory, with_masters=True)
        weights.lead({name: state.part("master", name) for name in parameters}, precision)
        return CpuAdamW(weights, options, state, memory)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        grads, todo = self._due()
        self._lanes.begin()
        for number in range(len(todo) + 1):
            if number < len(todo):
                self._fetch(number, _live(todo[number], grads), grads)
            if number:
                self._work(number - 1, todo[number - 1], grads, rate)
        self._lanes.settle()  # others read the new weights, and the stages are used again

    def _fetch(self, number: int, pieces: list[Piece], grads: Mapping[str, Tensor]) -> None:
        """Gradients of a bucket on their way to the host; the CPU is done with the stage."""
        stage = self._grads[number % STAGES]
        with self._lanes.on("out"):
            for piece in pieces:
                stage[piece.at : piece.end].copy_(
                    grads[piece.name][piece.start : piece.stop].float(), non_blocking=True
                )
            self._lanes.mark("out", number)

    def _work(self, number: int, bucket: Bucket, grads: Mapping[str, Tensor], rate: float) -> None:
        """AdamW on a bucket whose gradients are there, and its weights on their way to the device."""
        pieces, stage, new = _live(bucket, grads), self._grads[number % STAGES], self._new[number % STAGES]
        parts = {kind: flat[bucket.start : bucket.stop] for kind, flat in self.state.flat.items()}
        self._lanes.wait("out", number)
        adamw_(
            [parts["master"][piece.at : piece.end] for piece in pieces],
            [stage[piece.at : piece.end] for piece in pieces],
            ([parts[MOMENTS[0]][p.at : p.end] for p in pieces], [parts[MOMENTS[1]][p.at : p.end] for p in pieces]),
            [torch.tensor(self.state.steps[piece.name], dtype=torch.float32) for piece in pieces],
            self._options,
            rate,
        )
        self._lanes.wait("in", number - STAGES)
        rounded = []
        for piece in pieces:
            weight = flat_of(self._parameters[piece.name])[piece.start : piece.stop]
            there = new[piece.at * self._wide : piece.end * self._wide].view(weight.dtype)[: len(weight)]
            there.copy_(parts["master"][piece.at : piece.end])
            rounded.append((weight, there))
        with self._lanes.on("in"):
            for weight, there in rounded:
                weight.copy_(there, non_blocking=True)
            self._lanes.mark("in", number)


def _live(bucket: Bucket, grads: Mapping[str, Tensor]) -> list[Piece]:
    return [piece for piece in bucket.pieces if piece.name in grads]
