"""A model small enough to be written down, for tests of engines and of whole runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class Bigram(nn.Module):
    """Logits depend on the last token only: what is sampled, and every gradient, can be written down. Not a Transformers
    class."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table.float())
        self.config = SimpleNamespace(vocab_size=len(table))

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> Any:
        return SimpleNamespace(logits=self.table[input_ids])
