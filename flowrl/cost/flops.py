"""Work of a forward pass and of a training step, in floating-point operations (a multiply and an add are two)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from flowrl.cost.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """One forward pass, split by what a backward pass has to do again."""

    matmul: float
    """Products with the model's own matrices."""
    attention: float
    """Products of queries, keys, probabilities and values: both factors are activations."""
    adapters: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.adapters


def forward_flops(shape: ModelShape, lengths: Sequence[int]) -> ForwardFlops:
    """`2·N_mm·T + 2·a·d·L·Σ s²` for causal sequences of the given lengths.

    N_mm are the parameters of matrices (of experts, those a token goes to); T = Σ s. A layer with a window w does
    `2·a·d·(2·w·s - w²)` where s > w. Latent attention has heads of `(qk_dim + value_dim) / 2`. Adapters add `2·N_lora·T`.

    The head counts for every token: a caller that scores only responses does less. Experts count as if tokens were spread evenly
    over devices and their small products ran as fast as large ones; both make a mixture look faster than it is.
    """
    windowed = 0 if shape.window is None else len(shape.windowed_layers)
    tokens, pairs, seen = _sums(tuple(lengths), shape.window if windowed else None)
    attention = (shape.layers - windowed) * pairs + windowed * seen
    return ForwardFlops(
        2.0 * shape.matmul_params() * tokens,
        2 * shape.heads * attention_width(shape) * attention,
        2.0 * shape.lora_params() * tokens,
    )


def train_flops(shape: ModelShape, lengths: Sequence[int], *, recompute: bool = True) -> float:
    """A forward and a backward pass: `3·C_f`; with full recomputation of activations `4·C_f`.

    With LoRA the base's matrices need no gradient of their own: 2 (3) times their forward work. Attention's backward pass
    is twice its forward all the same, as both factors are activations.
    """
    forward = forward_flops(shape, lengths)
    again = 1 if recompute else 0
    base = 2 if shape.lora is not None else 3
    return (base + again) * forward.matmul + (3 + again) * (forward.attention + forward.adapters)


@lru_cache(maxsize=1024)
def _sums(lengths: tuple[int, ...], window: int | None) -> tuple[int, float, float]:
    """Tokens, Σ s², and the same within the window: a planner asks for one workload hundreds of times."""
    seen = 0.0 if window is None else float(sum(twice_pairs(length, window) for length in lengths))
    return sum(lengths), float(sum(length * length for length in lengths)), seen


def twice_pairs(length: float, window: int) -> float:
    """Twice the pairs of a token and one it sees: `s²`; with a window `2·w·s - w²` beyond it."""
    return length * length if length <= window else 2.0 * window * length - window * window


def attention_width(shape: ModelShape) -> float:
    """Mean size of a query-key head and a value head."""
    if shape.latent is None:
        return shape.head_dim
    return (shape.latent.qk_dim + shape.latent.value_dim) / 2
