"""A loss that never has all logits at once, as the cost model assumes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def chunked_loss(head: nn.Module, hidden: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Sum of cross entropies in fp32. Logits of `chunk` tokens exist at a time; the backward pass computes them again.

    Args:
        head: [T, h] to [T, V].
        hidden: [T, h].
        labels: [T] int64.
    """

    def part(states: Tensor, wanted: Tensor) -> Tensor:
        return functional.cross_entropy(head(states).float(), wanted, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for states, wanted in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        if torch.is_grad_enabled():
            total = total + checkpoint(part, states, wanted, use_reentrant=False)
        else:
            total = total + part(states, wanted)
    return total
