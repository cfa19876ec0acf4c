"""Advantages: how much better a response, a step or a token was than expected.

Operators see NumPy: [N] for values per response, `fr.Ragged` for values per token. They compute in float64; the columns
store float32.

[Note: Rows that say nothing]
A row counts in a mean or a deviation only if its reward is finite and it has a token that trains (where `loss_mask` is
there to tell). Every other row gets advantage 0 and moves nobody's baseline: a verifier that failed, or a sibling that was
masked out, must not decide what its group learns.

[Note: Rounding is no signal]
Rewards that differ by no more than a few float32 steps are equal; a group of them gets exactly 0. Without this, eight times
0.95 has a deviation of 1e-8 and advantages of 0.05 to 0.9, depending on eps.
"""

from __future__ import annotations

import math

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError, DataError

SCALES = ("group", "batch", "none")

# --- helpers on arrays --------------------------------------------------------------------------------------------------


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
    table, where = _packed(rewards, mask)
    for t in range(table.shape[1] - 2, -1, -1):
        table[:, t] += factor * table[:, t + 1]
    return _unpacked(table, where, mask)


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


def _packed(values: fr.Ragged, mask: fr.Ragged) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    # tokens of the mask moved to the left of a zero-filled table [N, longest]; and where each of them lies in it
    inside = mask.values.astype(bool)
    rows = mask.row_index[inside]
    counts = np.bincount(rows, minlength=len(mask)).astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1])) if len(counts) else np.zeros(0, np.int64)
    columns = np.arange(len(rows)) - starts[rows]
    table = np.zeros((len(mask), int(counts.max(initial=0))))
    table[rows, columns] = values.values[inside]
    return table, (rows, columns)


def _unpacked(table: np.ndarray, where: tuple[np.ndarray, np.ndarray], mask: fr.Ragged) -> fr.Ragged:
    values = np.zeros(len(mask.values))
    values[mask.values.astype(bool)] = table[where]
    return fr.Ragged.like(values, mask)


# --- per response -------------------------------------------------------------------------------------------------------


def _group_norm_locality(*, scale: str, by: str, **_: object) -> fr.Locality:
    if scale not in SCALES:
        raise ConfigError(f"group_norm scale is one of {', '.join(SCALES)}; found {scale!r}")
    return fr.Locality("batch") if scale == "batch" else fr.group(by)


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality=_group_norm_locality, min_group=2, many_groups=True)
def group_norm(
    reward: fr.SAMPLE.f32,
    group: fr.SAMPLE.str.named_by("by"),
    loss_mask: fr.TOKEN.bool = None,
    *,
    scale: str = "group",
    eps: float = 1e-6,
    unbiased: bool = False,
    by: str = "prompt_id",
):
    """GRPO: A_i = (R_i - mean of the group) / (std + eps).

    From DeepSeekMath (arXiv 2402.03300), whose formula leaves the kind of std open; the population one is taken here.
    verl and TRL divide by n - 1: `unbiased=True`, with eps 1e-6 and 1e-4.

    Args:
        scale: `"group"`: std of the group; `"batch"`: std of all rewards of the step (arXiv 2508.08221); `"none"`:
            centred only, Dr. GRPO (arXiv 2503.20783).
        eps: added to the std.
        unbiased: divide by n - 1 in the std.
        by: the column whose equal values make a group.

    A group of one, and one whose rewards are all equal, gets exactly 0. NaN rewards and rows without a token that trains
    get 0 and are left out of mean and std.
    """
    values = np.asarray(reward, np.float64)
    is_counted = counted(values, loss_mask)
    centred, number, count = centred_in_groups(values, group, is_counted)
    if scale == "none":
        return centred
    if scale == "batch":
        common = deviation(values[is_counted], unbiased=unbiased)
        return centred / (common + eps) if common > 0 else centred
    squares = np.bincount(number, weights=centred**2, minlength=len(count))
    spread = np.sqrt(squares / np.maximum(count - int(unbiased), 1))
    return centred / np.where(spread > 0, spread + eps, 1.0)[number]  # without spread it is all zeros, whatever eps


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality=lambda *, by: fr.group(by), min_group=2, many_groups=True)
def rloo(
    reward: fr.SAMPLE.f32,
    group: fr.SAMPLE.str.named_by("by"),
    loss_mask: fr.TOKEN.bool = None,
    *,
    by: str = "prompt_id",
):
    """REINFORCE leave-one-out: A_i = R_i - mean of the other rewards of the group.

    From Ahmadian et al. (arXiv 2402.14740). A group of one gets 0 (as in TRL and SkyRL; verl gives R there). NaN rewards
    and rows without a token that trains get 0 and are left out.
    """
    values = np.asarray(reward, np.float64)
    centred, number, count = centred_in_groups(values, group, counted(values, loss_mask))
    return centred * (count / np.maximum(count - 1, 1))[number]


@fr.operator(writes={"advantage": fr.SAMPLE.f32})
def remax(reward: fr.SAMPLE.f32, baseline: fr.SAMPLE.f32):
    """ReMax: A_i = R_i - reward of the greedy response to the same prompt, in column `baseline`.

    From Li et al. (arXiv 2310.10505). A row with NaN on either side gets 0.
    """
    difference = np.asarray(reward, np.float64) - np.asarray(baseline, np.float64)
    return np.where(np.isfinite(difference), difference, 0.0)


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality="batch")
def batch_norm(
    reward: fr.SAMPLE.f32,
    batch_part: fr.SAMPLE.str.named_by("by") = None,
    loss_mask: fr.TOKEN.bool = None,
    *,
    by: str | None = None,
    eps: float = 1e-6,
    unbiased: bool = False,
):
    """A_i = (R_i - mean) / (std + eps) over the whole step, or over the rows with the same `by` (e.g. each role apart).

    The global normalisation of REINFORCE++ (arXiv 2501.03262) at the level of responses. Rows are left out as in
    `group_norm`.
    """
    values = np.asarray(reward, np.float64)
    is_counted = counted(values, loss_mask)
    advantage = np.zeros(len(values))
    for rows in groups_of(batch_part) if by is not None else [np.arange(len(values))]:
        known = rows[is_counted[rows]]
        if has_spread(values[known]):
            advantage[known] = (values[known] - values[known].mean()) / (
                deviation(values[known], unbiased=unbiased) + eps
            )
    return advantage


# --- per token ----------------------------------------------------------------------------------------------------------


def _token_rewards(reward: np.ndarray, token_rewards: fr.Ragged | None, mask: fr.Ragged) -> fr.Ragged:
    # token rewards, where there are some, are the whole reward; otherwise the response's reward is paid at its end
    return at_last_token(reward, mask) if token_rewards is None else token_rewards


def _without_unknown(rewards: fr.Ragged, mask: fr.Ragged) -> tuple[fr.Ragged, fr.Ragged]:
    # rows with a reward that is not finite take no part: their mask becomes empty
    inside = mask.values.astype(bool)
    unknown = np.zeros(len(mask), bool)
    np.logical_or.at(unknown, mask.row_index, inside & ~np.isfinite(rewards.values))
    kept = fr.Ragged.like(inside & ~mask.spread(unknown), mask)
    return fr.Ragged.like(np.where(kept.values, rewards.values, 0.0).astype(np.float64), mask), kept


def _whitened_locality(*, whiten: bool, **_: object) -> fr.Locality:
    return fr.Locality("batch" if whiten else "row")


@fr.operator(writes={"advantages": fr.TOKEN.f32, "returns": fr.TOKEN.f32}, locality=_whitened_locality)
def gae(
    reward: fr.SAMPLE.f32,
    values: fr.TOKEN.f32,
    loss_mask: fr.TOKEN.bool,
    token_rewards: fr.TOKEN.f32 = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
):
    """Generalised advantage estimation: delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lam A_next.

    From Schulman et al. (arXiv 1506.02438). `next` is the next token that trains, and nothing follows the last one: values
    at masked tokens (tool output) never bootstrap, the convention of verl, NeMo-RL and AReaL. `returns` = A + V before
    whitening. r is `token_rewards` where that column exists, otherwise `reward` at the last token that trains.

    Args:
        whiten: advantages become (A - mean) / sqrt(var + eps) over all tokens of the step, as PPO for language models does
            since Ziegler et al. (arXiv 1909.08593); False keeps the estimator itself.
        unbiased: var divides by n - 1.

    A row whose reward is NaN gets advantages 0 and returns equal to its values, so that neither policy nor critic moves.
    """
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= number <= 1.0:
            raise ConfigError(f"gae needs 0 <= {name} <= 1; found {number!r}")
    mask = fr.Ragged.like(loss_mask.values.astype(bool), loss_mask)
    rewards, known = _without_unknown(_token_rewards(reward, token_rewards, mask), mask)
    paid, where = _packed(rewards, known)
    expected, _ = _packed(values.astype(np.float64), known)
    following = np.concatenate([expected[:, 1:], np.zeros((len(expected), min(1, expected.shape[1])))], axis=1)
    deltas = _unpacked(paid + gamma * following - expected, where, known)
    advantages = discounted(deltas, known, gamma * lam)
    returns = fr.Ragged.like(np.where(mask.values, advantages.values + values.values, 0.0), mask)
    if whiten:
        advantages = whitened(advantages, known, unbiased=unbiased, eps=eps)
    return {"advantages": advantages, "returns": returns}


@fr.operator(writes={"advantages": fr.TOKEN.f32, "returns": fr.TOKEN.f32}, locality="batch")
def reinforce_pp(
    reward: fr.SAMPLE.f32,
    loss_mask: fr.TOKEN.bool,
    token_rewards: fr.TOKEN.f32 = None,
    *,
    gamma: float = 1.0,
    unbiased: bool = False,
    eps: float = 1e-8,
):
    """REINFORCE++: returns G_t = r_t + gamma G_next, whitened over all tokens of the step: (G - mean) / sqrt(var + eps).

    From Hu (arXiv 2501.03262); r is `token_rewards` (KL-shaped by `rewards.kl_shaped`) where that column exists, otherwise
    `reward` at the last token that trains. Masked tokens neither pay nor discount. The authors' OpenRLHF divides the
    variance by n; verl, SkyRL and slime by n - 1 (`unbiased=True`). A row whose reward is NaN gets 0.
    """
    mask = fr.Ragged.like(loss_mask.values.astype(bool), loss_mask)
    rewards, known = _without_unknown(_token_rewards(reward, token_rewards, mask), mask)
    returns = discounted(rewards, known, gamma)
    return {
        "advantages": whitened(returns, known, unbiased=unbiased, eps=eps),
        "returns": returns,
    }


@fr.operator(writes={"advantages": fr.TOKEN.f32})
def from_step_values(
    reward: fr.SAMPLE.f32,
    step_value: fr.TURN.f32,
    step_starts: fr.TURN.i32,
    loss_mask: fr.TOKEN.bool,
):
    """VinePPO: a token's advantage is what its reasoning step changed, A_k = V(s_k+1) - V(s_k); the last: R - V(s_last).

    From Kazemnejad et al. (arXiv 2410.01679): values are means of rollouts that continue from the start of each step.

    Args (columns):
        step_value: value of the state before each step.
        step_starts: index of each step's first response token, rising, from 0.

    Tokens before the first start belong to no step and get 0. A row with a NaN reward or value gets 0. Errors: DataError
    when a row has not one value per step.
    """
    if not np.array_equal(step_value.lengths, step_starts.lengths):
        row = int(np.flatnonzero(step_value.lengths != step_starts.lengths)[0])
        raise DataError(
            f"from_step_values needs one step_value per step; row {row} has {step_value.lengths[row]} values and "
            f"{step_starts.lengths[row]} steps; join the values with collect=True, in the order of the steps"
        )
    result = []
    for final, values, starts, mask in zip(reward, step_value, step_starts, loss_mask, strict=True):
        gains = np.diff(np.asarray([*values, final], np.float64))
        # number of steps begun at each token; the token belongs to the latest of them
        begun = np.searchsorted(starts, np.arange(len(mask)), side="right")
        per_token = np.concatenate(([0.0], gains))[begun]
        is_known = bool(np.isfinite(gains).all())
        result.append(np.where(mask.astype(bool) & is_known, per_token, 0.0))
    return fr.Ragged.of(result, dtype=np.float64)
