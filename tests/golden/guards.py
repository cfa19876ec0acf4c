"""What systems guard against by other means than we do: empty batches, padding that holds anything, counts of 0."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.golden.runner import Contract, Where
from tests.golden.vectors import Case

ADDED = 1e-8
"""What verl, OpenRLHF and NeMo-RL add to a count they divide by, which shows in the ninth digit where the count is small. Over
the tokens of a row that is `average_eps` of `fr.apply_loss`; over a whole batch it is no option of ours (an empty batch gives
0 without it), so that a golden case carries it as a factor."""


def padded_tokens(case: Case, mask: str = "mask") -> float:
    """N / (N + 1e-8): makes a mean over the N tokens of the mask sum / (N + 1e-8)."""
    count = float(case.array(mask).sum())
    return count / (count + ADDED)


def guarded(case: Case, found: dict[str, Any], gradient: str, mask: str = "mask") -> Any:
    """The answer {"loss", gradient}, or our contract where the recorded system raised or gave a number that is not finite
    because no token trains, or because of what lies outside the mask."""
    inside = case.array(mask) > 0
    ours = np.asarray(found[gradient], np.float64)
    if "raises" not in case.outputs and np.isfinite(case.wanted("loss")):
        recorded = case.wanted(gradient)
        stray = recorded.shape == inside.shape and not np.isfinite(recorded[~inside]).all()
        return {**found, gradient: Where(ours, inside)} if stray else found
    if not inside.any():
        return Contract("0 where no token trains", found["loss"] == 0 and not ours.any())
    if _only_padding_is_odd(case, inside):
        return Contract("padding is never looked at", bool(np.isfinite(found["loss"]) and np.isfinite(ours).all()))
    return found


def _only_padding_is_odd(case: Case, inside: np.ndarray) -> bool:
    matrices = [case.array(name) for name, value in case.inputs.items() if np.shape(value) == inside.shape]
    outside = [not np.isfinite(values[~inside]).all() for values in matrices]
    return any(outside) and all(np.isfinite(values[inside]).all() for values in matrices)
