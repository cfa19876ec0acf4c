"""What a plan has to carry: how many prompts, and how long prompts and responses are.

A length is always a distribution. At one mean, a spread of response lengths can double the time of sampling (see
`flowrl.cost.generation`), and it is the longest sequence that must fit a micro-batch.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.schema.columns import nearest
from flowrl.schema.fields import check_fields, is_int, is_number, shown

MOST_TOKENS = 10**9
"""Of a sequence."""
MOST_SEQUENCES = 10**7
"""Responses of one iteration: a length is drawn for each."""
MOST_SIGMA = 20
_BINS = 1024
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Lengths:
    """A histogram of lengths in tokens.

    Example:
        Lengths(tokens=(512, 1024), weights=(3.0, 1.0))        # three in four have 512 tokens
    """

    tokens: tuple[int, ...]
    """Rising."""
    weights: tuple[float, ...]
    """How often each occurs; they need not add to 1."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.tokens or len(self.tokens) != len(self.weights):
            raise ConfigError(
                f"Lengths needs one weight for each length and at least one; found {len(self.tokens)} lengths and "
                f"{len(self.weights)} weights"
            )
        rising = all(a < b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        if self.tokens[0] < 1 or not rising:
            raise ConfigError(f"Lengths needs rising lengths of at least 1 token; found {self.tokens[:8]}")
        if self.tokens[-1] > MOST_TOKENS:
            raise ConfigError(f"Lengths go up to {MOST_TOKENS:,} tokens; found {self.tokens[-1]}")
        if not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            raise ConfigError(f"Lengths needs finite weights above 0; found {self.weights[:8]}")

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Lengths:
        """Of measured lengths, such as those of the last steps."""
        try:
            counts = sorted(Counter(operator.index(length) for length in lengths).items())
        except TypeError as error:
            raise ConfigError(f"lengths are whole numbers of tokens: {error}") from error
        return cls(tuple(length for length, _ in counts), tuple(float(count) for _, count in counts))

    @classmethod
    def of_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        column: str = "prompt_ids",
        *,
        encode: Callable[[Any], Sequence[Any]] | None = None,
    ) -> Lengths:
        """Of a data set's rows.

        Example:
            Lengths.of_rows(dataset, "prompt", encode=tokenizer.encode)

        Args:
            rows: mappings with the column: dicts, rows of a Hugging Face data set.
            column: token ids; with `encode`, whatever that takes: text, a list of messages.
            encode: gives the token ids of one value. For chat messages that is the tokenizer's chat template.

        Errors: ConfigError for a row without the column, or with text and no `encode`: characters are no tokens.
        """
        return cls.of(_length(row, number, column, encode) for number, row in enumerate(rows))

    @classmethod
    def fixed(cls, tokens: int) -> Lengths:
        """All of one length: right for padded data, too good to be true for responses."""
        return cls((tokens,), (1.0,))

    @classmethod
    def lognormal(cls, mean: float, sigma: float, cap: int) -> Lengths:
        """A guess: lognormal with spread `sigma`, cut at `cap`, of mean `mean` after the cut.

        0.5 to 0.8 is a usual spread of responses to mathematical problems. Raises `ConfigError` when `cap` is below `mean`.
        """
        if not (is_number(mean) and is_number(sigma) and is_int(cap)):
            given = ", ".join(map(shown, (mean, sigma, cap)))
            raise ConfigError(f"lognormal needs numbers as mean and sigma and a whole number as cap; found {given}")
        if not 1 <= mean <= cap or not 0 <= sigma <= MOST_SIGMA or cap > MOST_TOKENS:
            raise ConfigError(
                f"lognormal needs 1 <= mean <= cap and sigma >= 0, cap up to {MOST_TOKENS:,} and sigma up to {MOST_SIGMA}; found "
                f"{mean}, {cap}, {sigma}"
            )
        scores = _scores()
        low, high = -8 * sigma - 1, math.log(cap) + 8 * sigma + 1
        for _ in range(60):  # the median under which the mean of the cut lengths is what was asked
            middle = (low + high) / 2
            found = float(np.clip(np.exp(middle + sigma * scores), 1, cap).mean())
            low, high = (middle, high) if found < mean else (low, middle)
        return cls.of(np.clip(np.rint(np.exp(low + sigma * scores)), 1, cap).astype(int).tolist())

    @property
    def mean(self) -> float:
        return sum(a * b for a, b in zip(self.tokens, self.weights, strict=True)) / sum(self.weights)

    @property
    def longest(self) -> int:
        return self.tokens[-1]

    def draw(self, count: int, *, turn: float = 0.0) -> tuple[int, ...]:
        """`count` lengths at evenly spread quantiles, in an order without trend. The same arguments give the same lengths.

        The longest length is among them. `turn` in [0, 1) begins the order elsewhere, so that two draws are not in step.
        """
        return _draw(self, count, turn)


def _length(row: Mapping[str, Any], number: int, column: str, encode: Callable[[Any], Sequence[Any]] | None) -> int:
    if column not in row:
        raise ConfigError(f"row {number} has no column '{column}'; {nearest(column, list(row))}")
    value = row[column]
    if encode is not None:
        return len(encode(value))
    if isinstance(value, str):
        raise ConfigError(f"column '{column}' holds text, and lengths count tokens: give encode=tokenizer.encode")
    return len(value)


@lru_cache(maxsize=1)
def _scores() -> np.ndarray:
    """Quantiles of the normal distribution at the middle of each bin."""
    return np.array([NormalDist().inv_cdf((index + 0.5) / _BINS) for index in range(_BINS)])


@lru_cache(maxsize=256)
def _draw(lengths: Lengths, count: int, turn: float) -> tuple[int, ...]:
    if count < 1:
        raise ConfigError(f"a draw has at least one length; found {count}")
    upto = list(accumulate(lengths.weights))
    drawn = [lengths.tokens[bisect_left(upto, (index + 0.5) / count * upto[-1])] for index in range(count)]
    drawn[-1] = lengths.longest
    # multiples of the golden ratio, modulo 1: every stretch of the order has lengths of all sizes
    order = sorted(range(count), key=lambda index: (turn + index * _GOLDEN) % 1.0)
    return tuple(drawn[index] for index in order)


@dataclass(frozen=True, slots=True)
class Workload:
    """One step's work.

    Example:
        Workload(prompts=128, prompt_lengths=Lengths.fixed(512), response_lengths=Lengths.lognormal(1024, 0.6, cap=4096))
    """

    prompts: int
    """Prompts of one iteration."""
    prompt_lengths: Lengths
    """A whole number is taken too, and stands for prompts that all have this length."""
    response_lengths: Lengths
    group_size: int | None = None
    """Responses of each prompt; None: as many as the rollout says."""
    rounds: float = 1.0
    """Rounds that a refill takes on average: it samples this many times what it passes on."""

    def __post_init__(self) -> None:
        if _is_count(self.prompt_lengths):
            object.__setattr__(self, "prompt_lengths", Lengths.fixed(self.prompt_lengths))  # type: ignore[arg-type]
        for name in ("prompt_lengths", "response_lengths"):
            value: Any = getattr(self, name)
            if not isinstance(value, Lengths):
                hint = (
                    f": a mean alone says little of sampling. Lengths.lognormal({value}, 0.6, cap={4 * value}) guesses a spread, "
                    f"Lengths.fixed({value}) is for responses that all have {value} tokens"
                    if name == "response_lengths" and is_int(value)
                    else ""
                )
                raise ConfigError(f"a workload needs Lengths as {name}; found {shown(value)}{hint}")
        for name in ("prompts", "group_size"):
            value = getattr(self, name)
            if not _is_count(value) and (value is not None or name == "prompts"):
                raise ConfigError(f"a workload needs a whole number as {name}; found {shown(value)}")
        check_fields(self)
        if self.prompts < 1 or (self.group_size is not None and self.group_size < 1) or not self.rounds >= 1:
            raise ConfigError(
                f"a workload has at least one prompt, one response of each and one round; found {self.prompts} prompts, "
                f"group_size {self.group_size}, rounds {self.rounds}"
            )
        sequences = self.prompts * (self.group_size or 1) * self.rounds
        if sequences > MOST_SEQUENCES:
            raise ConfigError(
                f"a workload has {MOST_SEQUENCES:,} responses of one iteration at most; found {shown(sequences)}: {self.prompts} "
                f"prompts, group_size {self.group_size}, rounds {self.rounds}"
            )

    @classmethod
    def of_run(
        cls, path: str | Path, *, prompts: int | None = None, node: str | None = None, last: int = 20
    ) -> Workload:
        """What a run sampled: the lengths that its folder recorded, its prompts per iteration and the rounds of a refill.

        Example:
            fr.plan(grpo, ..., workload=fr.Workload.of_run("runs/grpo-3"))

        Args:
            path: the run's folder; the run may still be going on.
            prompts: of an iteration; left out, as many as the run took.
            node: lengths of this rollout only; left out, of all of them.
            last: steps to take, the newest ones.

        The longest response is the longest there was. Where the next run may sample longer ones, its micro-batches need room for
        them: give `Lengths` with the cap instead. Errors: RunError when the run recorded no lengths.
        """
        from flowrl.planner.recorded import workload_of_run

        if not isinstance(path, str | Path):
            raise ConfigError(
                f"Workload.of_run needs the path of a run's folder; found {shown(path)} ({type(path).__name__})"
            )
        if not is_int(last):
            raise ConfigError(f"Workload.of_run needs a whole number of steps as last; found {shown(last)}")
        return workload_of_run(path, prompts=prompts, node=node, last=last)

    def sequences(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Prompt and response lengths of `count` sequences."""
        return self.prompt_lengths.draw(count, turn=0.5), self.response_lengths.draw(count)

    def totals(self, count: int) -> tuple[int, ...]:
        """Tokens of `count` sequences, prompt and response together."""
        return _totals(self, count)

    def mean_total(self, count: int) -> float:
        """Mean tokens of `count` sequences."""
        return _mean(self, count)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence there can be: a micro-batch must hold it."""
        return self.prompt_lengths.longest + self.response_lengths.longest


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@lru_cache(maxsize=256)
def _totals(workload: Workload, count: int) -> tuple[int, ...]:
    prompts, responses = workload.sequences(count)
    return tuple(a + b for a, b in zip(prompts, responses, strict=True))


@lru_cache(maxsize=256)
def _mean(workload: Workload, count: int) -> float:
    return sum(_totals(workload, count)) / count
