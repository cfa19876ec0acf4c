"""Arithmetic on arrays that advantages share."""

from __future__ import annotations

import math

import numpy as np

import flowrl as fr


def counted(reward: np.ndarray, loss_mask: fr.Ragged | None) -> np.ndarray:
    """[N] true for rows that count in statistics; see [Note: Rows that say nothing]."""
    known = np.isfinite(reward)
    return known if loss_mask is None else known & (loss_mask.sum() > 0)


def centred_in_groups(
    values: np.ndarray, keys: np.ndarray, is_counted: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(values minus the mean of their group [N], number of each row's group [N], counted rows of each group).

    0 for rows that do not count and for groups without spread; see [Note: Rounding is no signal].
    """
    seen: dict[object, int] = {}
    number = np.asarray([seen.setdefault(key, len(seen)) for key in np.asarray(keys).tolist()], np.int64)
    known, of = values[is_counted], number[is_counted]
    count = np.bincount(of, minlength=len(seen))
    mean = np.bincount(of, weights=known, minlength=len(seen)) / np.maximum(count, 1)
    least, most = np.full(len(seen), np.inf), np.full(len(seen), -np.inf)
    np.minimum.at(least, of, known)
    np.maximum.at(most, of, known)
    rounding = 4 * float(np.finfo(np.float32).eps) * np.maximum(np.abs(least), np.abs(most))
    with np.errstate(invalid="ignore"):  # a group without a counted row: inf - inf
        has_signal = (count > 1) & (most - least > rounding)
    centred = np.where(is_counted & has_signal[number], values - mean[number], 0.0)
    return centred, number, count


def has_spread(values: np.ndarray) -> bool:
    """Whether numbers differ by more than float32 rounding; see [Note: Rounding is no signal]."""
    if len(values) < 2:
        return False
    step = float(np.finfo(np.float32).eps) * float(np.abs(values).max())
    return float(np.ptp(values)) > 4 * step


def deviation(values: np.ndarray, *, unbiased: bool) -> float:
    """Standard deviation over n (or n - 1) values; exactly 0 without spread."""
    return float(values.std(ddof=int(unbiased))) if has_spread(values) else 0.0


def groups_of(keys: np.ndarray) -> list[np.ndarray]:
    """Row indices of each distinct key, whatever the order of rows."""
    keys = np.asarray(keys)
    _, inverse = np.unique(keys.astype(str), return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(inverse[order])) + 1) if len(order) else []


def discounted(rewards: fr.Ragged, mask: fr.Ragged, factor: float) -> fr.Ragged:
    """G_t = x_t + factor * G_next over the tokens of `mask`; the next token is the next one of the mask, so that holes
    (tool output) neither pay nor discount. 0 outside the mask."""
    table, where = packed(rewards, mask)
    for t in range(table.shape[1] - 2, -1, -1):
        table[:, t] += factor * table[:, t + 1]
    return unpacked(table, where, mask)


def reward_to_go(rewards: fr.Ragged, mask: fr.Ragged, gamma: float = 1.0) -> fr.Ragged:
    """Discounted sum of rewards from each token on."""
    return discounted(rewards, mask, gamma)


def at_last_token(reward: np.ndarray, mask: fr.Ragged) -> fr.Ragged:
    """The reward of each row at its last token of the mask, 0 elsewhere."""
    values = np.zeros(len(mask.values))
    last = np.full(len(mask), -1)
    positions = np.flatnonzero(mask.values)
    last[mask.row_index[positions]] = positions  # later positions overwrite earlier ones
    has_any = last >= 0
    values[last[has_any]] = np.asarray(reward, np.float64)[has_any]
    return fr.Ragged.like(values, mask)


def whitened(values: fr.Ragged, mask: fr.Ragged, *, unbiased: bool, eps: float = 1e-8) -> fr.Ragged:
    """(z - mean) / sqrt(var + eps) over all tokens of the mask; 0 outside, and everywhere when there is one token."""
    inside = mask.values.astype(bool)
    chosen = values.values[inside]
    result = np.zeros(len(values.values))
    if len(chosen) > 1:
        result[inside] = (chosen - chosen.mean()) / math.sqrt(chosen.var(ddof=int(unbiased)) + eps)
    return fr.Ragged.like(result, mask)


def packed(values: fr.Ragged, mask: fr.Ragged) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    # tokens of the mask moved to the left of a zero-filled table [N, longest]; and where each of them lies in it
    inside = mask.values.astype(bool)
    rows = mask.row_index[inside]
    counts = np.bincount(rows, minlength=len(mask)).astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1])) if len(counts) else np.zeros(0, np.int64)
    columns = np.arange(len(rows)) - starts[rows]
    table = np.zeros((len(mask), int(counts.max(initial=0))))
    table[rows, columns] = values.values[inside]
    return table, (rows, columns)


def unpacked(table: np.ndarray, where: tuple[np.ndarray, np.ndarray], mask: fr.Ragged) -> fr.Ragged:
    values = np.zeros(len(mask.values))
    values[mask.values.astype(bool)] = table[where]
    return fr.Ragged.like(values, mask)
