"""Passes of the backbone, as many on every rank.

[Note: Two passes or one]
A block whose rows share prompts runs in two passes, the prompts and the responses (see `flowrl.engines.prefix`); another
block runs in one. Each pass gathers every layer, on all ranks together. So when any two rows of a call share a prompt, every
block takes two passes: what needs only one adds one over a single token, which costs little but the gathers.

[Note: Loose ends]
The last hidden states of the prompts are read by nobody: only the keys and values go on. FSDP2 gathers a layer again for the
backward pass when a gradient reaches the layer's output. So each output that nobody reads is tied to the loss by a sum of
none of its numbers: 0, with gradients of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from flowrl.engines.forward import Forward
from flowrl.schema.ragged import Ragged

T = TypeVar("T")


class Passes:
    """Counts what one forward of blocks does with a backbone that all ranks run together."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.ends: list[Tensor] = []
        """Outputs that a loss must be tied to, of the passes since `begin`."""
        forward.loose_ends = self.ends
        self._is_twice = False
        self._before = 0

    def expect(self, prompt_ids: Ragged, rows: np.ndarray | None = None, *, whole: bool = False) -> None:
        """Settle how many passes each block takes, from all rows of a call: equal on all ranks.

        Args:
            rows: of the call; None for all.
            whole: whether blocks are never taken apart.
        """
        self._is_twice = self.forward.shares_prompts and not whole and has_pairs(prompt_ids, rows)

    def begin(self) -> None:
        """Before a block."""
        self.ends.clear()

    def fill(self) -> None:
        """After the block's own passes: one more, if it was one only and the others take two."""
        if self._is_twice and not self.ends:
            device = self.forward.device
            none = torch.zeros(0, dtype=torch.int64, device=device)
            self.ends.append(self.forward.hidden(torch.zeros((1, 1), dtype=torch.int64, device=device), none, none))

    def around(self, function: Callable[..., T], *args: Any) -> T:
        """Call what runs a block, without gradient."""
        self.begin()
        found = function(*args)
        self.fill()
        self.ends.clear()
        return found


def has_pairs(prompt_ids: Ragged, rows: np.ndarray | None = None) -> bool:
    """Whether two rows have one prompt."""
    starts, ends = prompt_ids.offsets[:-1], prompt_ids.offsets[1:]
    chosen = range(len(starts)) if rows is None else rows.tolist()
    seen = {prompt_ids.values[starts[row] : ends[row]].tobytes() for row in chosen}
    return len(seen) < len(chosen)
