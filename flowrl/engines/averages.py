"""How per-token and per-row losses become one number: weights from the counts of a whole optimizer step.

[Note: Averages are sums]
The loss of a step is sum_t w_t L_t with weights made from counts over the whole step. So it is the same number whatever
the split into micro-batches and ranks, and a part of the step contributes its own terms of the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.averages import Average


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of a whole optimizer step, over all its micro-batches and ranks. Those of its parts add up: `a + b`, `sum(parts)`.

    Example:
        Totals(num_tokens=4096, num_rows=64)
    """

    num_tokens: int
    """Tokens that train."""
    num_rows: int
    """Rows that have such a token."""
    num_all_rows: int | None = None
    """Rows, those without a trained token too; needed by `average_rows="all"`."""
    prompt_tokens: Mapping[Any, int] = field(default_factory=dict)
    """Trained tokens of each prompt, by its id; needed by `prompt_mean`."""

    @classmethod
    def of(cls, counts: np.ndarray, prompts: Sequence[Any] | None = None) -> Totals:
        """From the trained tokens of each row, [N], and the id of each row's prompt."""
        by_prompt: Counter[Any] = Counter()
        for prompt, count in zip(prompts if prompts is not None else (), counts.tolist(), strict=prompts is not None):
            by_prompt[prompt] += count
        return cls(int(counts.sum()), int((counts > 0).sum()), len(counts), dict(by_prompt))

    def __add__(self, other: Totals) -> Totals:
        """Of two parts together; a prompt may have rows in both."""
        known = self.num_all_rows is not None and other.num_all_rows is not None
        prompts = dict(self.prompt_tokens)
        for prompt, count in other.prompt_tokens.items():
            prompts[prompt] = prompts.get(prompt, 0) + count
        return Totals(
            self.num_tokens + other.num_tokens,
            self.num_rows + other.num_rows,
            (self.num_all_rows or 0) + (other.num_all_rows or 0) if known else None,
            prompts,
        )

    def __radd__(self, other: Any) -> Totals:
        return self if other == 0 else NotImplemented  # `sum` begins with 0


def weights(
    average: Average, counts: np.ndarray, *, totals: Totals | None = None, prompts: Sequence[Any] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """([N] float64 weight of each token of a row, [N] float64 weight of each row).

    A term that is per="sample" is averaged over rows, whatever the average's name; `rows` says over which. A row without a
    trained token weighs nothing; with rows="all" it is counted. A loss of pairs returns the pair's loss at both of its rows;
    that makes the mean over rows the mean over pairs.

    Args:
        counts: [N] trained tokens of each row.
        totals: counts of the whole step; None takes `counts` as all of it.
        prompts: [N] id of each row's prompt, for `prompt_mean`.
    """
    whole = Totals.of(counts, prompts) if totals is None else totals
    trains = counts > 0
    tokens, rows = int(counts.sum()), int(trains.sum())
    if not (whole.num_tokens >= tokens and whole.num_rows >= rows):
        raise ConfigError(
            f"the totals of a step are at least those of a part, {tokens} tokens in {rows} rows; found {whole.num_tokens} tokens "
            f"in {whole.num_rows} rows"
        )
    num_rows = _num_rows(average, whole)
    row = np.where(trains, 1.0 / num_rows, 0.0)
    match average.kind:
        case "token_mean":
            token = np.full(len(counts), 1.0 / max(whole.num_tokens, 1))
        case "token_sum":
            token = np.ones(len(counts))
        case "sequence_mean":
            token = 1.0 / (num_rows * (np.maximum(counts.astype(np.float64), 1) + average.eps))
        case "sequence_sum":
            token = np.full(len(counts), 1.0 / num_rows)
        case "constant":
            token = np.full(len(counts), 1.0 / (num_rows * (average.length or 1)))
        case _:
            token = _of_prompts(average, counts, whole, prompts)
    return np.where(trains, token, 0.0), row


def _num_rows(average: Average, whole: Totals) -> int:
    """What an average over rows divides by."""
    if isinstance(average.rows, int):
        return average.rows
    if average.rows == "trained":
        return max(whole.num_rows, 1)
    if whole.num_all_rows is None:
        raise ConfigError(
            "average_rows='all' needs the number of all rows of the step: Totals(num_tokens, num_rows, num_all_rows); "
            "found none"
        )
    return max(whole.num_all_rows, 1)


def _of_prompts(average: Average, counts: np.ndarray, whole: Totals, prompts: Sequence[Any] | None) -> np.ndarray:
    if prompts is None:
        raise ConfigError("average='prompt_mean' needs the prompt of each row: a column 'prompt_id'; found none")
    known = whole.prompt_tokens
    unknown = [p for p, count in zip(prompts, counts.tolist(), strict=True) if count and not known.get(p)]
    if unknown:
        raise ConfigError(
            f"average='prompt_mean' needs the trained tokens of every prompt of the step in Totals(prompt_tokens=...); "
            f"prompt {unknown[0]!r} is not there"
        )
    if isinstance(average.rows, int):
        num_prompts = average.rows
    else:
        num_prompts = len(known) if average.rows == "all" else sum(count > 0 for count in known.values())
    tokens = np.asarray([max(known.get(prompt, 0), 1) for prompt in prompts], np.float64)
    return 1.0 / (max(num_prompts, 1) * tokens)
