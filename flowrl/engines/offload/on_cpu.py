"""AdamW on the CPU, bucket by bucket: gradients out, new weights in (ZeRO-Offload, arXiv 2101.06840).

    out    bucket k+1: gradients to host memory
    CPU    bucket k: AdamW on masters and moments
    in     bucket k-1: weights, rounded, back to the device

Host memory beside masters and moments: two buckets of gradients and two of weights.

[Note: Shards lead themselves] On a mesh the fp32 shards on the device are the masters, which others gather, send and load. So the
host keeps none: weights come out beside their gradients, and go back changed.
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
from flowrl.model import AdamW

STAGES = 2
"""Of gradients, and of weights: one is worked on while the other is copied."""
STAGE_BYTES = 2**28
"""Of a bucket's gradients: long enough for the rate of the link and all threads of the CPU."""


class CpuAdamW(HostAdamW):
    """See the module.

    Args:
        state: over the trained parameters of `weights`; without masters where the parameters are fp32 and lead themselves.
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
        self._has_masters = "master" in state.kinds

    @staticmethod
    def over(weights: Weights, options: AdamW, precision: torch.dtype) -> CpuAdamW:
        """For weights whose module is to run in `precision`. Shards of a mesh are masters; see [Note: Shards lead themselves]."""
        parameters = weights.trained_parameters()
        memory = HostMemory(next(iter(parameters.values())).device)
        is_sharded = any(isinstance(one, DTensor) for one in parameters.values())
        state = HostState(weights.name, parameters, memory, with_masters=not is_sharded)
        if is_sharded:
            weights.make_masters(precision)
        else:
            weights.lead({name: state.part("master", name) for name in parameters}, precision)
        return CpuAdamW(weights, options, state, memory)

    @property
    def host_bytes(self) -> int:
        return super().host_bytes + sum(region.num_bytes for region in self._regions)

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
            if not self._has_masters:
                self._lanes.after("out", "in", number - STAGES)  # weights leave from where they come in
            for piece in pieces:
                stage[piece.at : piece.end].copy_(
                    grads[piece.name][piece.start : piece.stop].float(), non_blocking=True
                )
                if not self._has_masters:
                    self._staged(number, piece).copy_(self._weight(piece), non_blocking=True)
            self._lanes.mark("out", number)

    def _work(self, number: int, bucket: Bucket, grads: Mapping[str, Tensor], rate: float) -> None:
        """AdamW on a bucket whose gradients are there, and its weights on their way to the device."""
        pieces, stage = _live(bucket, grads), self._grads[number % STAGES]
        parts = {kind: flat[bucket.start : bucket.stop] for kind, flat in self.state.flat.items()}
        self._lanes.wait("out", number)
        if self._has_masters:
            masters = [parts["master"][piece.at : piece.end] for piece in pieces]
        else:
            masters = [self._staged(number, piece) for piece in pieces]
        adamw_(
            masters,
            [stage[piece.at : piece.end] for piece in pieces],
            ([parts[MOMENTS[0]][p.at : p.end] for p in pieces], [parts[MOMENTS[1]][p.at : p.end] for p in pieces]),
            [torch.tensor(self.state.steps[piece.name], dtype=torch.float32) for piece in pieces],
            self._options,
            rate,
        )
        if self._has_masters:
            self._lanes.wait("in", number - STAGES)
            for piece, master in zip(pieces, masters, strict=True):
                self._staged(number, piece).copy_(master)
        with self._lanes.on("in"):
            for piece in pieces:
                self._weight(piece).copy_(self._staged(number, piece), non_blocking=True)
            self._lanes.mark("in", number)

    def _weight(self, piece: Piece) -> Tensor:
        """On the device."""
        return flat_of(self._parameters[piece.name])[piece.start : piece.stop]

    def _staged(self, number: int, piece: Piece) -> Tensor:
        """The place of its weights on the host, in the type that they have on the device."""
        dtype = self._parameters[piece.name].dtype
        stage = self._new[number % STAGES][piece.at * self._wide : piece.end * self._wide]
        return stage.view(dtype)[: piece.stop - piece.start]


def _live(bucket: Bucket, grads: Mapping[str, Tensor]) -> list[Piece]:
    return [piece for piece in bucket.pieces if piece.name in grads]
