"""How rows are shared out: parts of equal work, batches under a token budget, and rows too old to train.

Plain functions of lengths, for any data loader, return lists of row numbers:

    balanced_parts(lengths, 8)              8 parts whose sums are as equal as Karmarkar-Karp makes them
    token_batches(lengths, 16_384)          batches of at most 16,384 tokens

The operators `part_by_length` and `batch_by_tokens` write the same as a column.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError, DataError
from flowrl_operators._options import checked

__all__ = [
    "balanced_batches",
    "balanced_parts",
    "batch_by_tokens",
    "greedy_parts",
    "num_token_batches",
    "part_by_length",
    "sums_of",
    "token_batches",
]

METHODS = ("balanced", "greedy")
FITS = ("longest_first", "first_fit", "in_order")


# -------------------------------------------------------------------------------------------------------------- parts


def balanced_parts(lengths: Sequence[float] | np.ndarray, parts: int, *, equal_size: bool = False) -> list[np.ndarray]:
    """Row numbers of each of `parts` parts, in ascending order, so that the sums of `lengths` are nearly equal.

    The largest differencing method of Karmarkar and Karp (1982) for k parts: every row begins as a partial answer of its own;
    the two answers whose sums differ most are put together, the greatest part of one with the least of the other, until one
    is left. The sums differ by no more than the greatest length. What verl, OpenRLHF and slime balance with.

    Args:
        lengths: [N] any non-negative costs.
        equal_size: parts have equally many rows, or differ by one where `parts` does not divide N. The rows are then cut,
            sorted, into blocks of one row for each part, and the sums differ by no more than lengths do within one block:
            never worse than dealing out the sorted rows.

    Errors: ConfigError for fewer rows than parts; DataError for a negative or unknown length.
    """
    costs, parts = _costs_and_parts(lengths, parts, "balanced_parts")
    ascending = np.argsort(costs, kind="stable").tolist()
    values = costs.tolist()
    single: list[Pile] = [(values[row], 1, row, row) for row in ascending]
    if equal_size:
        # rows that are not there are the shortest of all, so each part misses at most one
        whole = [_EMPTY] * (-len(single) % parts) + single
        answers = [whole[start : start + parts] for start in range(0, len(whole), parts)]
    else:
        answers = [[pile] + [_EMPTY] * (parts - 1) for pile in single]
    heap = [_ranked(piles) for piles in answers]
    heapq.heapify(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        heapq.heappush(heap, _ranked([_together(a, b) for a, b in zip(one, reversed(other), strict=True)]))
    return [_rows(pile) for pile in heap[0][-1]]


Pile = tuple[float, int, int, Any]
"""Rows of one part: (sum, number, first row, tree of rows). A tree, so that putting two together copies none. Two piles that
hold rows differ in their first, so piles compare as the tuples they are."""

_EMPTY: Pile = (0, 0, -1, None)


def _together(one: Pile, other: Pile) -> Pile:
    if not one[1] or not other[1]:
        return one if one[1] else other
    return (one[0] + other[0], one[1] + other[1], one[2], (one[3], other[3]))


def _ranked(piles: list[Pile]) -> tuple[Any, ...]:
    """Piles from the greatest down, behind what a heap sorts by: the greatest difference first, then the greatest pile."""
    piles.sort(reverse=True)
    total, count, first, _ = piles[0]
    return (piles[-1][0] - total, -total, -count, -first, piles)


def _rows(pile: Pile) -> np.ndarray:
    found, waiting = [], [pile[3]]
    while waiting:
        node = waiting.pop()
        if isinstance(node, tuple):
            waiting.extend(node)
        elif node is not None:
            found.append(node)
    return np.sort(np.asarray(found, np.int64))


def greedy_parts(
    lengths: Sequence[float] | np.ndarray, parts: int, *, equal_size: bool = False, order: str = "longest_first"
) -> list[np.ndarray]:
    """Row numbers of each of `parts` parts: every row goes to the part with the least sum so far, the earlier of equals.

    Args:
        equal_size: to the part with the fewest rows so far, and among those to the one with the least sum.
        order: `"longest_first"`: Graham's LPT rule (1969), whose greatest sum is at most 4/3 - 1/(3 parts) times the least
            possible one. `"given"`: rows as they come (verl's `greedy_partition`), for rows that are not all known yet.

    Errors: as `balanced_parts`.
    """
    costs, parts = _costs_and_parts(lengths, parts, "greedy_parts")
    checked("order", order, ("longest_first", "given"), "greedy_parts")
    rows = np.argsort(-costs, kind="stable") if order == "longest_first" else np.arange(len(costs))
    heap: list[tuple[int, float, int]] = [(0, 0.0, part) for part in range(parts)]
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for row in rows.tolist():
        count, total, part = heapq.heappop(heap)
        chosen[part].append(row)
        heapq.heappush(heap, (count + int(equal_size), total + costs[row], part))
    return [np.sort(np.asarray(found, np.int64)) for found in chosen]


def _costs_and_parts(lengths: Sequence[float] | np.ndarray, parts: int, name: str) -> tuple[np.ndarray, int]:
    costs = _costs(lengths, name)
    _refuse_parts(parts, name)
    if len(costs) < parts:
        raise ConfigError(f"{name} cannot make {parts} parts of {len(costs)} rows, since no part may be empty")
    return costs, int(parts)


def _refuse_parts(parts: int, name: str) -> None:
    if isinstance(parts, bool) or not isinstance(parts, int | np.integer) or parts < 1:
        raise ConfigError(f"{name} needs a number of parts of at least 1; found {parts!r}")


def _costs(lengths: Sequence[float] | np.ndarray, name: str) -> np.ndarray:
    costs = np.asarray(lengths)
    if costs.ndim != 1:
        raise DataError(f"{name} needs one length per row; found an array of shape {costs.shape}")
    costs = costs.astype(np.float64) if costs.dtype.kind == "f" else costs.astype(np.int64)
    bad = np.flatnonzero(~(costs >= 0))
    if len(bad):
        raise DataError(f"{name} needs lengths of at least 0; row {bad[0]} has {costs[bad[0]]}")
    return costs


# ------------------------------------------------------------------------------------------------------------ batches


def token_batches(
    lengths: Sequence[float] | np.ndarray, max_tokens: float, *, fit: str = "longest_first", long_rows: str = "alone"
) -> list[np.ndarray]:
    """Row numbers of batches that hold at most `max_tokens` tokens each.

    Args:
        lengths: [N] tokens of each row.
        fit: `"longest_first"`: first-fit decreasing (Johnson 1973), at most 11/9 of the fewest batches possible plus one.
            `"first_fit"`: each row, as given, into the first batch with room (OpenRLHF and slime count micro-batches so).
            `"in_order"`: a new batch when the next row does not fit, so that rows stay in order.
        long_rows: a row longer than the budget makes a batch by itself (`"alone"`), or is refused (`"refuse"`).

    Errors: DataError for a row that is too long, with `long_rows="refuse"`, and for negative lengths.
    """
    costs = _costs(lengths, "token_batches")
    checked("fit", fit, FITS, "token_batches")
    checked("long_rows", long_rows, ("alone", "refuse"), "token_batches")
    if not max_tokens > 0:
        raise ConfigError(f"token_batches needs max_tokens above 0; found {max_tokens!r}")
    too_long = np.flatnonzero(costs > max_tokens)
    if len(too_long) and long_rows == "refuse":
        row = int(too_long[0])
        raise DataError(
            f"row {row} has {costs[row]:g} tokens and a batch holds {max_tokens:g}; raise max_tokens, drop such rows "
            "(filters.length), or let them stand alone (long_rows='alone')"
        )
    order = np.argsort(-costs, kind="stable") if fit == "longest_first" else np.arange(len(costs))
    place = _in_order(costs, max_tokens) if fit == "in_order" else _first_fit(costs, order.tolist(), max_tokens)
    return [np.flatnonzero(place == number) for number in range(int(place.max(initial=-1)) + 1)]


def num_token_batches(lengths: Sequence[float] | np.ndarray, max_tokens: float, *, fit: str = "first_fit") -> int:
    """How many batches of at most `max_tokens` tokens `token_batches` makes; sum / max_tokens rounded up is the least possible.

    Ranks that must run equally many batches take the greatest of their numbers and share rows out with `balanced_batches`.
    """
    return len(token_batches(lengths, max_tokens, fit=fit))


def balanced_batches(lengths: Sequence[float] | np.ndarray, max_tokens: float, *, least: int = 1) -> list[np.ndarray]:
    """Batches under a token budget that are also nearly equal: at least `least` of them, else as few as come out balanced.

    No batch is empty, so there are never more than rows: ranks that must run `least` of them fill up with batches of their
    own that weigh nothing. A row longer than the budget stands alone.
    """
    costs = _costs(lengths, "balanced_batches")
    long, short = np.flatnonzero(costs > max_tokens), np.flatnonzero(costs <= max_tokens)
    packed = token_batches(costs[short], max_tokens)
    wanted = max(least - len(long), -int(-costs[short].sum() // max_tokens), 1)
    made = packed
    for count in range(min(wanted, len(short)), len(short) + 1) if len(short) else ():
        made = balanced_parts(costs[short], count)
        if sums_of(costs[short], made).max() <= max_tokens:
            break
        if count >= len(packed) >= wanted:  # packing does with fewer than balancing would
            made = packed
            break
    return [np.asarray([row]) for row in long] + [short[part] for part in made]


def _in_order(costs: np.ndarray, room: float) -> np.ndarray:
    place = np.zeros(len(costs), np.int64)
    total: float = 0
    batch = 0
    for row, cost in enumerate(costs.tolist()):
        if row and total + cost > room:
            batch, total = batch + 1, 0
        total += cost
        place[row] = batch
    return place


def _first_fit(costs: np.ndarray, order: list[int], room: float) -> np.ndarray:
    """Number of the first batch with room for each row, in `order`. A tree of the most room below each node finds it."""
    place = np.zeros(len(costs), np.int64)
    leaves = 1 << max(len(order) - 1, 0).bit_length()
    tree: list[float] = [room] * (2 * leaves)
    opened = 0
    for row in order:
        cost = costs[row]
        if cost > room:  # alone: in a batch that is full from the start
            node, left = leaves + opened, -1.0
        else:
            node = 1
            while node < leaves:
                node = 2 * node if tree[2 * node] >= cost else 2 * node + 1
            left = tree[node] - cost
        place[row] = node - leaves
        opened = max(opened, node - leaves + 1)
        tree[node] = left
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return place


# ---------------------------------------------------------------------------------------------------------- operators


def _work(response_ids: fr.Ragged, prompt_ids: fr.Ragged | None, quadratic: float) -> np.ndarray:
    tokens = response_ids.lengths + (prompt_ids.lengths if prompt_ids is not None else 0)
    return tokens if quadratic == 0 else tokens + quadratic * tokens.astype(np.float64) ** 2


@fr.operator(writes={"part": fr.SAMPLE.i32}, locality="batch")
def part_by_length(
    response_ids: fr.TOKEN.i32,
    prompt_ids=None,
    *,
    parts: int,
    method: str = "balanced",
    equal_size: bool = False,
    quadratic: float = 0.0,
):
    """Share rows out to `parts` parts of nearly equal work: `part`, from 0. Fewer rows than parts leave the last parts empty.

    By Karmarkar and Karp's differencing (1982), or greedily.

    Work is tokens + quadratic * tokens^2, prompt and response together.

    Args:
        method: `"balanced"` (`balanced_parts`) or `"greedy"` (`greedy_parts`, longest first).
        equal_size: parts have equally many rows, give or take one.
        quadratic: what attention costs beside the rest; about 1 / (6 * hidden size): verl takes 1 / 24576 for a model of 7B.
    """
    checked("method", method, METHODS, "part_by_length")
    share = balanced_parts if method == "balanced" else greedy_parts
    _refuse_parts(parts, "part_by_length")
    count = len(response_ids)
    work = _work(response_ids, prompt_ids, quadratic)
    return _numbered(share(work, min(parts, count), equal_size=equal_size) if count else [], count)


@fr.operator(writes={"micro_batch": fr.SAMPLE.i32}, locality="batch")
def batch_by_tokens(
    response_ids: fr.TOKEN.i32,
    prompt_ids=None,
    *,
    max_tokens: int,
    fit: str = "longest_first",
    long_rows: str = "alone",
):
    """Token budget: number the batches of at most `max_tokens` tokens, prompt and response together: `micro_batch`, from 0.

    Args:
        fit, long_rows: as in `token_batches`.
    """
    made = token_batches(_work(response_ids, prompt_ids, 0.0), max_tokens, fit=fit, long_rows=long_rows)
    return _numbered(made, len(response_ids))


def _numbered(parts: list[np.ndarray], count: int) -> np.ndarray:
    number = np.zeros(count, np.int32)
    for part, rows in enumerate(parts):
        number[rows] = part
    return number


def sums_of(lengths: Sequence[float] | np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """[parts] the sum of lengths of each part: what balancing wants equal."""
    costs = _costs(lengths, "sums_of")
    return np.asarray([costs[np.asarray(part, np.int64)].sum() for part in parts])
