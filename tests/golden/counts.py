"""What some systems add to the count they divide by, which shows in the ninth digit where the count is small.

Over the tokens of a row that is `average_eps` of `fr.apply_loss`; over all tokens of a batch it is no option of ours (an empty
batch gives 0 without it), so that a golden case carries it as a factor.
"""

from __future__ import annotations

from tests.golden.vectors import Case

ADDED = 1e-8


def padded_tokens(case: Case, mask: str = "mask") -> float:
    """N / (N + 1e-8): makes a mean over the N tokens of the mask sum / (N + 1e-8)."""
    count = float(case.array(mask).sum())
    return count / (count + ADDED)
