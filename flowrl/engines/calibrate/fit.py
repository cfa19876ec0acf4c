"""Rates from measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured time and what was done in it."""

    flops: float
    moved: float
    """In whatever unit its price is wanted: bytes kept by layers, logits."""
    seconds: float


def fit(samples: Sequence[Sample], *, least_per_flop: float = 0.0) -> tuple[float, float]:
    """(seconds per FLOP, seconds per unit moved) with the least sum of squared relative errors.

    `seconds = flops · x + moved · y` for each sample, x at least `least_per_flop`, y at least 0. One sample, or several with the
    same ratio, leave the split open: then all time is that of the FLOP.
    """
    rows = [(one.flops / one.seconds, one.moved / one.seconds) for one in samples]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:
        return max(a / aa, least_per_flop), 0.0
    x = (a * bb - b * ab) / determinant
    if x < least_per_flop:
        x = least_per_flop
    y = (b - ab * x) / bb
    if y < 0:
        return max(a / aa, least_per_flop), 0.0
    return x, y
