"""Numbers of a step, for every flow alike: nothing here knows what a column or a node is for.

    reward/mean  reward/std  reward/min  reward/max     every SAMPLE float column a node wrote (bool: the mean alone)
    response_length/mean  finish_reason/stop            what was sampled
    update/loss  update/clip_fraction                   what an update reported, by the update's node
    time/rollout_s  time/step_s  tokens_per_s           where the time went

Everything is kept as sums and counts until the end, so that no number depends on how rows were split over calls,
micro-batches or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowrl.engines.protocol import Stat, UpdateReport
from flowrl.graph.infer import infer
from flowrl.graph.nodes import Graph, Node
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import SAMPLE, ColumnType
from flowrl.store.rows import RowBatch

QUIET = frozenset({"temperature"})
"""Columns that repeat the configuration; they are no result."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and spread of numbers; two of them merge into that of all numbers together.

    Merging: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """

    count: int = 0
    """Numbers that are not NaN; the rest is about them."""
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""
    least: float = math.inf
    greatest: float = -math.inf
    num_nan: int = 0

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        """Of an array of numbers or booleans, any shape."""
        numbers = np.asarray(values, np.float64).reshape(-1)
        known = numbers[~np.isnan(numbers)]
        if not len(known):
            return cls(num_nan=len(numbers))
        with np.errstate(invalid="ignore"):  # infinities have no spread
            mean = float(known.mean())
            squares = float(np.square(known - mean).sum())
        return cls(len(known), mean, squares, float(known.min()), float(known.max()), len(numbers) - len(known))

    def merge(self, other: Moments) -> Moments:
        num_nan = self.num_nan + other.num_nan
        if not self.count or not other.count:
            full = self if self.count else other
            return Moments(full.count, full.mean, full.squares, full.least, full.greatest, num_nan)
        count = self.count + other.count
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * other.count / count,
            self.squares + other.squares + apart * apart * self.count * other.count / count,
            min(self.least, other.least),
            max(self.greatest, other.greatest),
            num_nan,
        )

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self.squares / self.count) if self.count and self.squares >= 0 else math.nan


@dataclass(slots=True)
class Tally:
    """What a step's nodes wrote and reported so far. Tallies of parts of a step merge into that of the whole step."""

    columns: dict[tuple[str, str], Moments] = field(default_factory=dict)
    """(node, column) to its values, in the order written."""
    shares: set[tuple[str, str]] = field(default_factory=set)
    """Boolean columns: their mean is a share, their spread says nothing."""
    lengths: dict[str, Moments] = field(default_factory=dict)
    """Node to the lengths of the responses it wrote."""
    reasons: dict[str, dict[str, int]] = field(default_factory=dict)
    """Node to how often each finish_reason came."""
    reports: dict[str, UpdateReport] = field(default_factory=dict)
    """Node to what its update did."""

    def add_rows(self, node: str, rows: RowBatch, columns: Iterable[str]) -> None:
        """Count the columns that `node` wrote in `rows`."""
        types = rows.types
        for name in columns:
            if name not in types:
                continue
            values = rows[name]
            if name == "response_ids" and isinstance(values, Ragged):
                self.lengths[node] = self.lengths.get(node, Moments()).merge(Moments.of(values.lengths))
            elif name == "finish_reason":
                counts = self.reasons.setdefault(node, {})
                for reason in values:
                    counts[reason] = counts.get(reason, 0) + 1
            elif _is_result(name, types[name]):
                self.columns[node, name] = self.columns.pop((node, name), Moments()).merge(Moments.of(values))
                if types[name].dtype == "bool":
                    self.shares.add((node, name))

    def add_update(self, node: str, report: UpdateReport) -> None:
        """Pool an update's report: sums with sums, counts with counts."""
        pooled = self.reports.setdefault(node, UpdateReport())
        for name, stat in report.metrics.items():
            pooled.metrics.setdefault(name, Stat()).add(stat.total, stat.count)
        pooled.steps += report.steps
        pooled.skipped += report.skipped
        pooled.tokens += report.tokens

    def merge(self, other: Tally) -> None:
        """Take in what another part of the same step (a rank, a chunk) counted."""
        for key, moments in other.columns.items():
            self.columns[key] = self.columns.pop(key, Moments()).merge(moments)
        self.shares |= other.shares
        for node, moments in other.lengths.items():
            self.lengths[node] = self.lengths.get(node, Moments()).merge(moments)
        for node, counts in other.reasons.items():
            mine = self.reasons.setdefault(node, {})
            for reason, count in counts.items():
                mine[reason] = mine.get(reason, 0) + count
        for node, report in other.reports.items():
            self.add_update(node, report)

    def metrics(self, *, writers: Mapping[str, str] | None = None) -> dict[str, float]:
        """Names and numbers.

        When several nodes wrote a column, the plain name (`reward/mean`) is of the node that `writers` names, else of the
        last one (of the first, for what was sampled); the others' are `<node>.reward/mean`. Parts of a sum, which keeps them as
        `reward/<node>`, are told under that name alone.
        """
        chosen = {column: node for node, column in self.columns}
        chosen.update({c: n for c, n in (writers or {}).items() if (n, c) in self.columns})
        found: dict[str, float] = {}
        kept_as = {column for _, column in self.columns}
        for (node, column), moments in self.columns.items():
            if chosen[column] != node and f"{column}/{node}" in kept_as:
                continue  # a part of a sum, which the sum keeps under its own name
            name = column if chosen[column] == node else f"{node}.{column}"
            found.update(_of_column(name, moments, is_share=(node, column) in self.shares))
        sampler = (writers or {}).get("response_ids", "")
        sampler = sampler if sampler in self.lengths else next(iter(self.lengths), "")
        for node, lengths in self.lengths.items():
            lead = "" if node == sampler else f"{node}."
            if lengths.count:
                found[f"{lead}response_length/mean"] = lengths.mean
                found[f"{lead}response_length/max"] = lengths.greatest
        for node, counts in self.reasons.items():
            lead = "" if node == sampler else f"{node}."
            total = sum(counts.values())
            for reason in dict.fromkeys(("stop", "length", *sorted(counts))) if total else ():
                found[f"{lead}finish_reason/{reason}"] = counts.get(reason, 0) / total
        for node, report in self.reports.items():
            found.update({f"{node}/{name}": stat.mean for name, stat in report.metrics.items()})
            found[f"{node}/steps"] = report.steps
            found[f"{node}/skipped"] = report.skipped
            found[f"{node}/tokens"] = report.tokens
        return found

    @property
    def sampled_tokens(self) -> int:
        return round(sum(lengths.mean * lengths.count for lengths in self.lengths.values()))

    @property
    def trained_tokens(self) -> int:
        return sum(report.tokens for report in self.reports.values())


def trained_writers(graph: Graph) -> dict[str, str]:
    """Column to the node that wrote what the updates of `graph` read of it: whose numbers get the plain name."""
    found = infer(graph)
    writers: dict[str, str] = {}
    for node in graph:
        if node.kind == "update":
            for column, info in found.rows(node.source("rows")).columns.items():
                writers.setdefault(column, info.writer)
    return writers


def _is_result(name: str, kind: ColumnType) -> bool:
    numbers = kind.dtype in ("bool", "f16", "f32", "f64")
    return kind.granularity is SAMPLE and numbers and not kind.inner and name not in QUIET


def _of_column(name: str, moments: Moments, *, is_share: bool) -> dict[str, float]:
    if not moments.count and not moments.num_nan:
        return {}
    found = {f"{name}/mean": moments.mean if moments.count else math.nan}
    if not is_share:
        found[f"{name}/std"] = moments.std
        found[f"{name}/min"] = moments.least if moments.count else math.nan
        found[f"{name}/max"] = moments.greatest if moments.count else math.nan
    if moments.num_nan:
        found[f"{name}/num_nan"] = moments.num_nan
    return found


def step_metrics(
    *,
    written: Sequence[tuple[Node, RowBatch, Sequence[str]]],
    updates: Sequence[tuple[str, UpdateReport]] = (),
    seconds: Mapping[str, float] | None = None,
    step_s: float | None = None,
    extra: Mapping[str, float] | None = None,
    writers: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """All numbers of a step.

    Args:
        written: (node, rows, columns it wrote), in the order it happened; a node may come more than once.
        updates: (node, report).
        seconds: wall time by kind of node.
        step_s: wall time of the whole step.
        extra: numbers of nodes' own, by the name they get.
        writers: column to the node whose values get the plain name (see `Tally.metrics`).
    """
    tally = Tally()
    for node, rows, columns in written:
        tally.add_rows(node.name, rows, columns)
    for name, report in updates:
        tally.add_update(name, report)
    found = tally.metrics(writers=writers)
    found.update(extra or {})
    found.update({f"time/{kind}_s": spent for kind, spent in (seconds or {}).items()})
    if step_s is not None:
        found["time/step_s"] = step_s
        tokens = tally.sampled_tokens or tally.trained_tokens
        if tokens and step_s > 0:
            found["tokens_per_s"] = tokens / step_s
    return found
