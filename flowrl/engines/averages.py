"""How per-token and per-row losses become one number: weights from the counts of a whole optimizer step.

[Note: Averages are sums]
The loss of a step is sum_t w_t L_t with weights made from counts over the whole step. So it is the same number whatever
the split into micro-batches and ranks, and a part of the step contributes its own terms of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of a whole optimizer step, over all its micro-batches and ranks.

    Example:
        Totals(num_tokens=4096, num_rows=64)
    """

    num_tokens: int
    """Tokens that train."""
    num_rows: int
    """Rows that have such a token."""

    @classmethod
    def of(cls, counts: np.ndarray) -> Totals:
        """From the trained tokens of each row, [N]."""
        return cls(int(counts.sum()), int((counts > 0).sum()))


def weights(
    average: str, counts: np.ndarray, *, average_length: int | None = None, totals: Totals | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """([N] float64 weight of each token of a row, [N] float64 weight of each row).

    A term that is per="sample" is averaged over the rows that have a trained token, whatever `average` says. A loss of pairs
    returns the pair's loss at both of its rows; that makes the mean over rows the mean over pairs.

    Args:
        average: see `flowrl.graph.language.AVERAGES`.
        counts: [N] trained tokens of each row.
        totals: counts of the whole step; None takes `counts` as all of it.
    """
    whole = Totals.of(counts) if totals is None else totals
    num_rows = max(whole.num_rows, 1)
    match average:
        case "token_mean":
            token = np.full(len(counts), 1.0 / max(whole.num_tokens, 1))
        case "sequence_mean":
            token = 1.0 / (num_rows * np.maximum(counts.astype(np.float64), 1))
        case "sequence_sum":
            token = np.full(len(counts), 1.0 / num_rows)
        case "constant" if average_length:
            token = np.full(len(counts), 1.0 / (num_rows * average_length))
        case _:
            raise ConfigError(
                f"average is token_mean, sequence_mean, sequence_sum or constant with average_length; found {average!r}"
            )
    return token, np.where(counts > 0, 1.0 / num_rows, 0.0)
