"""AdamW on the device, its state in host memory: buckets of it pass through.

    in     bucket k+1: masters and moments to the device
    work   bucket k: AdamW, and weights rounded into the module
    out    bucket k-1: masters and moments back

On the device: weights, gradients and `num_buckets` buckets, these only during the step. The kernel is that of the resident
optimizer, and cuts do not change it (see `layout`), so the numbers are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowrl.cost.offload import OffloadConstants
from flowrl.engines.offload.host_adamw import HostAdamW
from flowrl.engines.offload.layout import Bucket
from flowrl.engines.offload.memory import HostMemory
from flowrl.engines.offload.state import ITEM_BYTES, MOMENTS, HostState, adamw_, flat_of
from flowrl.engines.weights import Weights
from flowrl.model import AdamW

BUCKETS = OffloadConstants()


class StreamedAdamW(HostAdamW):
    """See the module. A weight in fp32 is its own master and stays on the device; only its moments stream.

    Args:
        state: over the trained parameters of `weights`.
        bucket_bytes: of what is kept of a bucket's elements, on the device.
        num_buckets: one computes while another is copied; with two, a bucket comes in as soon as the one before last is out.
    """

    def __init__(
        self,
        weights: Weights,
        options: AdamW,
        state: HostState,
        *,
        bucket_bytes: float = BUCKETS.bucket_bytes,
        num_buckets: int = BUCKETS.num_buckets,
    ) -> None:
        super().__init__(weights, options, state, int(bucket_bytes) // (ITEM_BYTES * len(state.kinds)))
        self._num_buckets = num_buckets

    @staticmethod
    def over(weights: Weights, options: AdamW, precision: torch.dtype) -> StreamedAdamW:
        """For weights whose module is to run in `precision`. Shards of a mesh are masters, whatever it computes in."""
        parameters = weights.trained_parameters()
        memory = HostMemory(next(iter(parameters.values())).device)
        is_rounded = precision != torch.float32 and not any(isinstance(one, DTensor) for one in parameters.values())
        state = HostState(weights.name, parameters, memory, with_masters=is_rounded)
        if is_rounded:
            weights.lead({name: state.part("master", name) for name in parameters}, precision)
        else:
            weights.make_masters(precision)
        return StreamedAdamW(weights, options, state)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        grads, todo = self._due()
        if not todo:
            return
        steps = self._steps(list(grads))
        flat, kinds, lanes = self.state.flat, self.state.kinds, self._lanes
        length = max(bucket.stop - bucket.start for bucket in todo)
        count = min(self._num_buckets, len(todo))
        slots = [
            {kind: torch.empty(length, dtype=torch.float32, device=self._device) for kind in kinds}
            for _ in range(count)
        ]
        lanes.begin()
        for number, bucket in enumerate(todo):
            size = bucket.stop - bucket.start
            slot = {kind: buffer[:size] for kind, buffer in slots[number % count].items()}
            with lanes.on("in"):
                lanes.after("in", "out", number - count)
                for kind in kinds:
                    slot[kind].copy_(flat[kind][bucket.start : bucket.stop], non_blocking=True)
                lanes.mark("in", number)
            lanes.after("work", "in", number)
            self._adam(bucket, slot, grads, steps, rate)
            lanes.mark("work", number)
            with lanes.on("out"):
                lanes.after("out", "work", number)
                for kind in kinds:
                    flat[kind][bucket.start : bucket.stop].copy_(slot[kind], non_blocking=True)
                lanes.mark("out", number)
        lanes.settle()  # others read masters and moments on the host, which no stream orders

    def _adam(
        self,
        bucket: Bucket,
        slot: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        steps: Mapping[str, Tensor],
        rate: float,
    ) -> None:
        pieces = [piece for piece in bucket.pieces if piece.name in grads]
        weights = [flat_of(self._parameters[piece.name])[piece.start : piece.stop] for piece in pieces]
        masters = [slot["master"][piece.at : piece.end] for piece in pieces] if "master" in slot else weights
        adamw_(
            masters,
            [grads[piece.name][piece.start : piece.stop].float() for piece in pieces],
            ([slot[MOMENTS[0]][p.at : p.end] for p in pieces], [slot[MOMENTS[1]][p.at : p.end] for p in pieces]),
            [steps[piece.name] for piece in pieces],
            self._options,
            rate,
        )
        if masters is not weights:
            torch._foreach_copy_(weights, masters)

    def _steps(self, names: list[str]) -> dict[str, Tensor]:
        """Steps taken, on the device; copied at once, as a copy from common memory makes this thread wait."""
        numbers = torch.tensor([self.state.steps[name] for name in names], dtype=torch.float32)
        return dict(zip(names, numbers.to(self._device).unbind(), strict=True))
