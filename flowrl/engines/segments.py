"""Row boundaries of packed tokens, as a loss gets them through a parameter named `segments`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Which of the packed tokens belongs to which row.

    Shapes: T trained tokens of N rows, all rows after each other; `x` may have inner dimensions after T or N.

    Example:
        segments.sum(logprobs)          # [T] to [N]: log-probability of each response
        segments.spread(advantage)      # [N] to [T]: a row's number at each of its tokens
    """

    row_index: Tensor
    """[T] int64: row of each token, not decreasing."""
    num_rows: int
    lengths: Tensor
    """[N] int64: trained tokens of each row; 0 for rows that have none."""

    @classmethod
    def of(cls, row_index: Tensor, num_rows: int) -> Segments:
        return cls(row_index, num_rows, torch.bincount(row_index, minlength=num_rows))

    def sum(self, x: Tensor) -> Tensor:
        """[T, ...] to [N, ...]; 0 for rows without tokens."""
        return x.new_zeros((self.num_rows, *x.shape[1:])).index_add(0, self.row_index, x)

    def mean(self, x: Tensor) -> Tensor:
        """[T, ...] to [N, ...]; 0 for rows without tokens."""
        count = self.lengths.clamp(min=1).to(x.dtype)
        return self.sum(x) / count.reshape(-1, *(1,) * (x.dim() - 1))

    def max(self, x: Tensor) -> Tensor:
        """[T, ...] to [N, ...]; minus infinity for rows without tokens."""
        return self._extreme(x, "amax", -torch.inf)

    def min(self, x: Tensor) -> Tensor:
        """[T, ...] to [N, ...]; infinity for rows without tokens."""
        return self._extreme(x, "amin", torch.inf)

    def spread(self, x: Tensor) -> Tensor:
        """[N, ...] to [T, ...]: each row's value at each of its tokens."""
        return x[self.row_index]

    def _extreme(self, x: Tensor, how: str, empty: float) -> Tensor:
        index = self.row_index.reshape(-1, *(1,) * (x.dim() - 1)).expand_as(x)
        start = x.new_full((self.num_rows, *x.shape[1:]), empty)
        return start.scatter_reduce(0, index, x, how)
