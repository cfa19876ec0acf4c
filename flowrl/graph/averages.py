"""How per-token losses become one number: the choices that `fr.update` and `fr.apply_loss` offer, checked in one place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowrl.errors import ConfigError
from flowrl.schema.columns import nearest

AVERAGES = ("token_mean", "token_sum", "sequence_mean", "sequence_sum", "constant", "prompt_mean")
"""Names of averages. With L the loss, m the mask, n_i the trained tokens of row i, B the rows that have any:
token_mean = sum(m L) / sum(n_i); token_sum = sum(m L); sequence_mean = 1/B sum_i sum(m L)_i / n_i; sequence_sum = 1/B sum_i
sum(m L)_i; constant = 1/(B average_length) sum(m L); prompt_mean = 1/P sum_p sum(m L)_p / n_p over the P prompts with
trained tokens, p all rows of a prompt."""

OVER_ROWS = frozenset({"sequence_mean", "sequence_sum", "constant", "prompt_mean"})
"""Averages that divide by a number of rows (prompt_mean: of prompts)."""

ROWS = ("trained", "all")


@dataclass(frozen=True, slots=True)
class Average:
    """One of `AVERAGES` with its options.

    Example:
        Average("constant", length=1024, rows="all")

    Errors: ConfigError for what makes no sense together.
    """

    kind: str = "token_mean"
    length: int | None = None
    """The length that `constant` divides by."""
    rows: str | int = "trained"
    """What B counts: `"trained"` rows that have a trained token, `"all"` rows, or a fixed number (1: a sum over rows)."""
    eps: float = 0.0
    """Added to n_i in `sequence_mean`."""

    def __post_init__(self) -> None:
        if self.kind not in AVERAGES:
            raise ConfigError(
                f"average is one of {', '.join(AVERAGES)}; found {self.kind!r}; {nearest(str(self.kind), AVERAGES)}"
            )
        if (self.kind == "constant") != (self.length is not None):
            raise ConfigError("average_length belongs to average='constant', which needs it")
        if self.length is not None and not _is_count(self.length):
            raise ConfigError(f"average_length is a whole number of at least 1; found {self.length!r}")
        if self.rows not in ROWS and not _is_count(self.rows):
            raise ConfigError(
                f"average_rows is 'trained', 'all' or a whole number of at least 1; found {self.rows!r:.60}"
            )
        if self.rows != "trained" and self.kind not in OVER_ROWS:
            raise ConfigError(
                f"average_rows says what {', '.join(sorted(OVER_ROWS))} divide by; average='{self.kind}' counts no rows"
            )
        is_number = isinstance(self.eps, int | float) and not isinstance(self.eps, bool)
        if not (is_number and math.isfinite(self.eps) and self.eps >= 0):
            raise ConfigError(f"average_eps is a number of at least 0; found {self.eps!r:.60}")
        if self.eps and self.kind != "sequence_mean":
            raise ConfigError(
                f"average_eps is added to the tokens of a row in average='sequence_mean'; '{self.kind}' does not divide by them"
            )

    @classmethod
    def of(cls, get: Callable[[str], Any]) -> Average:
        """From the parameters of an update node; `get` gives None for one that is not there."""
        rows, eps = get("average_rows"), get("average_eps")
        return cls(
            get("average"),
            get("average_length"),
            "trained" if rows is None else rows,
            0.0 if eps is None else eps,
        )

    @property
    def params(self) -> dict[str, Any]:
        """What a node keeps: the name, and options that are not at their default."""
        given: dict[str, Any] = {"average": self.kind}
        if self.length is not None:
            given["average_length"] = self.length
        if self.rows != "trained":
            given["average_rows"] = self.rows
        if self.eps:
            given["average_eps"] = float(self.eps)
        return given

    @property
    def key(self) -> str:
        """The column it tells rows apart by, or empty."""
        return "prompt_id" if self.kind == "prompt_mean" else ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
