"""Where another system's statistics are undefined (one token has no variance) and it raises or answers NaN; ours are numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.golden.runner import Contract, Where, distance
from tests.golden.vectors import Case, to_array

Answer = Callable[..., Any]


def defined(answer: Answer) -> Answer:
    """An answer that is judged by our contract where the recorded one is undefined: finite there, equal elsewhere; what is
    whitened although there are not two of it is 0."""

    def judged(case: Case, *match: Any) -> Any:
        ours = answer(case, *match)
        if isinstance(ours, Contract):
            return ours
        parts = {name: _split(value) for name, value in ours.items()}
        if "raises" in case.outputs:
            # every name of an answer that another system would have refused is a number, and the main one is 0
            holds = all(np.isfinite(value[where]).all() for value, where in parts.values())
            value, where = parts["advantages"] if "advantages" in parts else next(iter(parts.values()))
            return Contract(
                "fewer than two: finite, and nothing whitened", holds=bool(holds and not value[where].any())
            )
        unknown = {name: _is_nan(case, name, where) for name, (_, where) in parts.items()}
        if not any(mask.any() for mask in unknown.values()):
            return ours
        for name, (value, where) in parts.items():
            rest = Where(value, where & ~unknown[name])
            if distance(rest, case.outputs[name], case.rtol, case.atol)[1] or not np.isfinite(value[where]).all():
                return Contract("a number where the recorded one is NaN, equal elsewhere", holds=False)
        return Contract("a number where the recorded one is NaN, equal elsewhere", holds=True)

    return judged


def _split(value: Any) -> tuple[np.ndarray, np.ndarray]:
    found = value.value if isinstance(value, Where) else value
    numbers = np.asarray(found, np.float64)
    where = np.asarray(value.mask, bool) if isinstance(value, Where) else np.ones(numbers.shape, bool)
    return numbers, where


def _is_nan(case: Case, name: str, where: np.ndarray) -> np.ndarray:
    recorded = to_array(case.outputs[name]) if name in case.outputs else np.zeros(where.shape)
    return np.isnan(recorded) & where if recorded.shape == where.shape else np.zeros(where.shape, bool)
