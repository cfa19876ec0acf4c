"""What the losses share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Output = Tensor | tuple[Tensor, dict[str, Tensor]]


def held(values: Tensor, bound: float | None) -> Tensor:
    """Values within +-bound; as they are without a bound."""
    return values if bound is None else values.clamp(-bound, bound)
