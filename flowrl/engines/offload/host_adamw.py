"""What the optimizers with their state in host memory have in common: buckets, gradients as flat stretches, what is saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from flowrl.engines.offload.lanes import lanes_for
from flowrl.engines.offload.layout import Bucket
from flowrl.engines.offload.state import HostState, flat_of
from flowrl.engines.weights import Weights
from flowrl.model import AdamW


class HostAdamW:
    """AdamW over buckets of flat memory; see `OptimizerStore`. What is made of it takes the steps.

    Args:
        state: over the trained parameters of `weights`.
        most_elements: of a bucket.
    """

    def __init__(self, weights: Weights, options: AdamW, state: HostState, most_elements: int) -> None:
        self._weights, self._options, self.state = weights, options, state
        self._parameters = weights.trained_parameters()
        self._device = next(iter(self._parameters.values())).device
        self._lanes = lanes_for(self._device)
        self._buckets = state.layout.buckets(most_elements)

    def _due(self) -> tuple[dict[str, Tensor], list[Bucket]]:
        """Flat gradients by parameter, whose steps are counted, and the buckets in which they lie."""
        grads = {name: flat_grad(grad) for name, grad in self._weights.gradients().items()}
        for name in grads:
            self.state.steps[name] = self.state.steps.get(name, 0.0) + 1
        return grads, [bucket for bucket in self._buckets if any(piece.name in grads for piece in bucket.pieces)]

    def entries(self) -> dict[str, dict[str, Any]]:
        return self.state.moments(self._parameters)

    def load(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self.state.take(entries)

    def held(self) -> dict[str, dict[str, Tensor]]:
        return self.state.held(self._parameters)

    def took(self, held: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.state.steps = {name: step for name, entry in held.items() if (step := float(entry["step"]))}

    def tensors(self) -> Iterator[Tensor]:
        return iter(())  # nothing on the device between steps

    @property
    def host_bytes(self) -> int:
        return self.state.host_bytes


def flat_grad(grad: Tensor) -> Tensor:
    """[elements] of what this process holds of a gradient, in the order of its parameter."""
    found: Tensor = flat_of(grad.contiguous())
    return found
