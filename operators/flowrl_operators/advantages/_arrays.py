"""Arithmetic on arrays that advantages share: sums, means and deviations over a mask, sums from each token on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

import flowrl as fr
from flowrl_operators._options import at_least_0, checked, required

GUARDS = ("variance", "floor", "std")
"""Where eps stands: sqrt(variance + eps), sqrt(max(variance, eps)), or std + eps."""

BLOCK = 1 << 14
"""Tokens worked on at a time: their temporaries stay in the cache of a core."""


def token_blocks(values: np.ndarray) -> Iterator[slice]:
    """Slices of the tokens of an array [T, k], so that temporaries of a block stay at some ten megabytes."""
    step = max(1, (1 << 20) // max(1, values.shape[-1]))
    return (slice(start, start + step) for start in range(0, len(values), step))


# --- what belongs to a row ------------------------------------------------------------------------------------------------


def row_sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[N] sum of each row's values [T]; 0 for empty rows. Whole numbers and booleans are summed as integers."""
    return fr.Ragged(values, offsets).sum()


def any_in_row(flags: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[N] whether any of a row's flags [T] is true."""
    found = np.zeros(len(offsets) - 1, bool)
    filled = np.flatnonzero(np.diff(offsets))
    if len(filled):
        found[filled] = np.logical_or.reduceat(flags, offsets[:-1][filled])
    return found


def counted(reward: np.ndarray, loss_mask: fr.Ragged | None) -> np.ndarray:
    """[N] true for rows that count in means and deviations: their reward is finite and, where a mask is there to tell, they have
    a token that trains."""
    known = np.isfinite(reward)
    return known if loss_mask is None else known & any_in_row(as_bool(loss_mask).values, loss_mask.offsets)


def as_bool(mask: fr.Ragged) -> fr.Ragged:
    """A mask of any number type as booleans; not copied where it is one."""
    return mask if mask.values.dtype == bool else fr.Ragged.like(mask.values.astype(bool), mask)


def at_last_token(reward: np.ndarray, mask: fr.Ragged) -> fr.Ragged:
    """The reward of each row at its last token of the mask, 0 elsewhere."""
    values = np.zeros(len(mask.values))
    last = last_token(mask)
    has_any = last >= 0
    values[last[has_any]] = np.asarray(reward, np.float64)[has_any]
    return fr.Ragged.like(values, mask)


def last_token(mask: fr.Ragged) -> np.ndarray:
    """[N] place in the flat array of each row's last token of the mask; -1 where it has none."""
    positions = np.flatnonzero(mask.values)
    before = np.searchsorted(positions, mask.offsets)
    has_any = before[1:] > before[:-1]
    last = np.full(len(mask), -1)
    last[has_any] = positions[before[1:][has_any] - 1]
    return last


# --- sums, means, deviations over a mask ----------------------------------------------------------------------------------


def masked_sum(values: fr.Ragged, mask: fr.Ragged, *, per: str = "batch") -> np.ndarray | float:
    """Sum over the tokens of a mask: of all rows (`per="batch"`, a number) or of each (`per="row"`, [N]).

    What stands outside the mask, NaN included, has no part in this or in any of the functions below.
    """
    checked("per", per, ("batch", "row"), "masked sums")
    rows = row_sums(_inside(values, mask), values.offsets)
    return rows if per == "row" else float(rows.sum())


def masked_mean(
    values: fr.Ragged, mask: fr.Ragged, *, per: str = "batch", count_eps: float = 0.0, empty: float = 0.0
) -> np.ndarray | float:
    """Mean over the tokens of a mask.

    Args:
        per: `"batch"` (a number) or `"row"` ([N]).
        count_eps: added to the number of tokens; verl has 1e-8.
        empty: the mean of nothing; OpenRLHF has NaN.
    """
    total, count = masked_sum(values, mask, per=per), _count(mask, per)
    mean = np.where(count > 0, total / np.where(count > 0, count + count_eps, 1.0), empty)
    return mean if per == "row" else float(mean)


def masked_var(
    values: fr.Ragged, mask: fr.Ragged, *, unbiased: bool = False, per: str = "batch", count_eps: float = 0.0
) -> np.ndarray | float:
    """Variance over the tokens of a mask, divided by n, or by n - 1 if `unbiased`; 0 for fewer than two tokens.

    Other arguments as in `masked_mean`.
    """
    mean = masked_mean(values, mask, per=per, count_eps=count_eps)
    centred = values.values.astype(np.float64) - (values.spread(mean) if per == "row" else mean)
    variance = masked_mean(fr.Ragged.like(centred**2, values), mask, per=per, count_eps=count_eps)
    count = _count(mask, per)
    variance = np.where(count > 1, variance * (count / np.maximum(count - 1, 1) if unbiased else 1.0), 0.0)
    return variance if per == "row" else float(variance)


def whitened(
    values: fr.Ragged,
    mask: fr.Ragged,
    *,
    unbiased: bool,
    eps: float = 1e-8,
    guard: str = "variance",
    centre: bool = True,
    scale: bool = True,
    per: str = "batch",
    count_eps: float = 0.0,
) -> fr.Ragged:
    """(z - mean) / std over all tokens of the mask; 0 outside, and everywhere when there is one token.

    Args:
        unbiased: the variance divides by n - 1.
        eps, guard: `"variance"`: std is sqrt(variance + eps) (verl, NeMo-RL's GAE); `"floor"`: sqrt(max(variance, eps))
            (OpenRLHF); `"std"`: sqrt(variance) + eps (AReaL).
        centre: False adds the mean back in the end.
        scale: False only takes the mean away.
        per: over all rows together, or `"row"`: each row by itself.
        count_eps: added to the number of tokens in means; verl has 1e-8.
    """
    check_deviation(eps, guard, count_eps)
    inside = as_bool(mask).values
    if per == "batch":
        result = _inside(values, mask, copy=True)
        whiten_flat(result, inside, unbiased, eps, guard, centre=centre, scale=scale, count_eps=count_eps)
        return fr.Ragged.like(result, values)
    count = _count(mask, per)
    mean = masked_mean(values, mask, per=per, count_eps=count_eps)
    factor = np.where(count > 1, 1.0, 0.0)
    if scale:
        variance = masked_var(values, mask, unbiased=unbiased, per=per, count_eps=count_eps)
        factor *= inverse_deviation(np.asarray(variance), eps, guard)
    kept = np.zeros_like(mean) if centre else mean
    with np.errstate(invalid="ignore", over="ignore"):  # outside of the mask
        result = (values.values - values.spread(mean)) * values.spread(factor) + values.spread(kept)
    return fr.Ragged.like(np.where(inside, result, 0.0), values)


def whiten_flat(
    values: np.ndarray,
    inside: np.ndarray,
    unbiased: bool,
    eps: float,
    guard: str = "variance",
    *,
    centre: bool = True,
    scale: bool = True,
    count_eps: float = 0.0,
) -> None:
    """`whitened` over all rows in place, on values that are 0 outside the mask; piece by piece, in the cache of a core."""
    check_deviation(eps, guard, count_eps)
    count = int(np.count_nonzero(inside))
    if not count:
        return
    pieces = [slice(first, first + BLOCK) for first in range(0, len(values), BLOCK)]
    mean = float(np.sum(values)) / (count + count_eps)
    squares, is_whole = 0.0, count == len(values)
    for piece in pieces:
        part = values[piece]
        part -= mean
        if not is_whole:
            part *= inside[piece]
        squares += float(part @ part)
    factor = 1.0 if count > 1 else 0.0
    if scale and count > 1:
        variance = squares / (count + count_eps) * (count / (count - 1) if unbiased else 1.0)
        factor = float(inverse_deviation(np.asarray(variance), eps, guard))
    for piece in pieces:
        values[piece] *= factor
        if not centre:
            values[piece] += mean if is_whole else mean * inside[piece]


def check_deviation(eps: float, guard: str, count_eps: float = 0.0) -> None:
    """Errors: ConfigError for options of a normalisation that make no sense."""
    checked("guard", guard, GUARDS, "where eps stands")
    needs = "a normalisation needs eps >= 0 and count_eps >= 0"
    required(needs, at_least_0(eps, count_eps), eps=eps, count_eps=count_eps)


def held_within(values: np.ndarray, bounds: tuple[float, float] | None, name: str) -> np.ndarray:
    """Values held within (least, greatest); as they are for None. Errors: ConfigError for bounds the wrong way round."""
    if bounds is None:
        return values
    is_range = len(bounds) == 2 and bounds[0] <= bounds[1]
    required(f"{name} is two numbers, the least and the greatest", is_range, **{name: bounds})
    return values.clip(*bounds)


def inverse_deviation(variance: np.ndarray, eps: float, guard: str) -> np.ndarray:
    """1 / std with eps where `guard` says; 0 for a std of 0 that nothing guards."""
    check_deviation(eps, guard)
    match guard:
        case "variance":
            std = np.sqrt(variance + eps)
        case "floor":
            std = np.sqrt(np.maximum(variance, eps))
        case _:
            std = np.sqrt(variance) + eps
    return np.where(std > 0, 1.0 / np.where(std > 0, std, 1.0), 0.0)


def _inside(values: fr.Ragged, mask: fr.Ragged, *, copy: bool = False) -> np.ndarray:
    chosen = as_bool(mask).values
    return values.values.astype(np.float64, copy=copy) if chosen.all() else np.where(chosen, values.values, 0.0)


def _count(mask: fr.Ragged, per: str) -> np.ndarray:
    inside = as_bool(mask).values
    return row_sums(inside, mask.offsets) if per == "row" else np.asarray(np.count_nonzero(inside))


# --- sums from each token on ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """Some whole rows: their tokens of a mask, one after the other."""

    rows: slice
    tokens: slice
    inside: np.ndarray | None
    """Which of the rows' tokens are of the mask; None: all."""
    offsets: np.ndarray
    """Where each row begins and ends among the tokens of the mask."""

    def take(self, values: np.ndarray) -> np.ndarray:
        """A copy as float64."""
        mine = values[self.tokens]
        return mine.astype(np.float64) if self.inside is None else mine[self.inside].astype(np.float64)

    def put(self, result: np.ndarray, values: np.ndarray) -> None:
        if self.inside is None:
            result[self.tokens] = values
        else:
            result[self.tokens][self.inside] = values


def pieces_of(mask: fr.Ragged) -> Iterator[Piece]:
    """All rows in pieces of about BLOCK tokens, or of one longer row."""
    first, count, offsets = 0, len(mask), mask.offsets
    while first < count:
        last = int(np.searchsorted(offsets, offsets[first] + BLOCK, side="right")) - 1
        last = min(max(last, first + 1), count)
        tokens = slice(int(offsets[first]), int(offsets[last]))
        inside, mine = mask.values[tokens], offsets[first : last + 1] - offsets[first]
        if inside.all():
            yield Piece(slice(first, last), tokens, None, mine)
        else:
            kept = np.zeros(len(mine), np.int64)
            np.cumsum(row_sums(inside, mine), out=kept[1:])
            yield Piece(slice(first, last), tokens, inside, kept)
        first = last


def accumulate(values: np.ndarray, offsets: np.ndarray, factor: np.ndarray | float) -> np.ndarray:
    """S_t = values_t + factor * S_next within each row [T]; `factor` is a number or one per row [N].

    Each step of the loop joins windows of 1, 2, 4, ... tokens, as the maps z -> value + factor * z compose. The order of
    additions depends on the distance to the row's end alone, so that a row's result has the same bits whatever is around it.
    """
    summed, lengths = values.copy(), np.diff(offsets)
    longest = int(lengths.max(initial=0))
    if longest < 2:
        return summed
    each = np.repeat(factor, lengths) if isinstance(factor, np.ndarray) else np.full(len(values), float(factor))
    each[offsets[1:][lengths > 0] - 1] = 0.0
    spare, step = np.empty_like(each), 1
    while True:
        summed[:-step] += np.multiply(each[:-step], summed[step:], out=spare[:-step])
        if 2 * step >= longest:
            return summed
        np.multiply(each[:-step], each[step:], out=spare[:-step])
        spare[-step:] = 0.0
        each, spare, step = spare, each, 2 * step


def discounted(rewards: fr.Ragged, mask: fr.Ragged, factor: float) -> fr.Ragged:
    """G_t = x_t + factor * G_next over the tokens of `mask`; the next token is the next one of the mask, so that holes
    (tool output) neither pay nor discount. 0 outside the mask."""
    result = np.zeros(len(mask.values))
    for piece in pieces_of(as_bool(mask)):
        piece.put(result, accumulate(piece.take(rewards.values), piece.offsets, factor))
    return fr.Ragged.like(result, mask)


def reward_to_go(rewards: fr.Ragged, mask: fr.Ragged, gamma: float = 1.0) -> fr.Ragged:
    """Discounted sum of rewards from each token on."""
    return discounted(rewards, mask, gamma)


def packed(values: np.ndarray, mask: fr.Ragged) -> tuple[np.ndarray, np.ndarray]:
    """(a copy of the values at the tokens of a boolean mask, where each row begins and ends among them)."""
    if mask.values.all():
        return values.astype(np.float64), mask.offsets
    offsets = np.zeros(len(mask) + 1, np.int64)
    np.cumsum(row_sums(mask.values, mask.offsets), out=offsets[1:])
    return values[mask.values].astype(np.float64), offsets


def unpacked(values: np.ndarray, mask: fr.Ragged) -> np.ndarray:
    """What `packed` took apart, back in place; 0 outside the mask."""
    if len(values) == len(mask.values):
        return values
    result = np.zeros(len(mask.values))
    result[mask.values] = values
    return result
