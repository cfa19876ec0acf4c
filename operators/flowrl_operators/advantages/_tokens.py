"""Advantages per token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError, DataError
from flowrl_operators._options import above_0, checked, required
from flowrl_operators.advantages._arrays import (
    Piece,
    accumulate,
    any_in_row,
    as_bool,
    at_last_token,
    discounted,
    pieces_of,
    row_sums,
    whiten_flat,
    whitened,
)
from flowrl_operators.advantages._groups import COUNT_RATIOS

MASKED = ("skip", "decay", "values", "all")
"""What masked tokens between those that train do in GAE; see `gae`."""

RETURNS = ("skip", "decay", "reset")
"""What masked tokens do in a sum of rewards; see `reinforce`."""


def _unit(where: str, **numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not 0.0 <= number <= 1.0:
            raise ConfigError(f"{where} needs 0 <= {name} <= 1; found {number!r}")


def _known_rows(reward: np.ndarray, per_token: fr.Ragged | None, where: fr.Ragged, rows: fr.Ragged) -> np.ndarray:
    """[N] rows whose numbers per token, or without those whose reward, are finite at the tokens of `where`."""
    if per_token is None:
        return np.isfinite(reward)
    bad = ~np.isfinite(per_token.values)
    return ~any_in_row(bad & where.values, rows.offsets) if bad.any() else np.ones(len(rows), bool)


def _whitened_locality(*, whiten: bool, **_: object) -> fr.Locality:
    return fr.Locality("batch" if whiten else "row")


@fr.operator(writes={"advantages": fr.TOKEN.f32, "returns": fr.TOKEN.f32}, locality=_whitened_locality)
def gae(
    reward: fr.SAMPLE.f32,
    values: fr.TOKEN.f32,
    loss_mask: fr.TOKEN.bool,
    token_rewards: fr.TOKEN.f32 = None,
    last_value: fr.SAMPLE.f32 = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_returns: float | None = None,
    adaptive: float | None = None,
    count_ratio: str = "exact",
    masked: str = "skip",
    whiten: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
    clip: float | None = None,
):
    """Generalised advantage estimation: delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lam A_next.

    From Schulman et al. (arXiv 1506.02438). `returns` = A + V before whitening. r is `token_rewards` where that column
    exists, otherwise `reward` at the last token that trains. Nothing follows a row's last token, unless `last_value` has the
    value of the state in which a response was cut off.

    Args:
        lam_returns: lambda of the returns, for a critic that learns with another one: VAPO (arXiv 2504.05118) has 1.
        adaptive: lambda of the advantages grows with the number n of tokens that train, 1 - 1 / max(adaptive * n, 1), instead of
            `lam`; VAPO has 0.05.
        count_ratio: that lambda is `"exact"`, or computed in `"float32"` (NeMo-RL).
        masked: what tokens that do not train (tool output) do. `"skip"`: nothing, the next token is the next one that trains
            (verl, NeMo-RL, AReaL); `"decay"`: they pay nothing and are worth nothing, and time passes, so that each costs a
            factor gamma * lam (OpenRLHF); `"values"`: they pay nothing, and their values bootstrap (ROLL); `"all"`: their values
            and their rewards count (SkyRL, slime).
        whiten: advantages become (A - mean) / sqrt(var + eps) over all tokens of the step, as PPO for language models does
            since Ziegler et al. (arXiv 1909.08593); False keeps the estimator itself. Operator `whiten` has more options.
        unbiased: var divides by n - 1.
        clip: hold the advantages within this on both sides in the end (ROLL).

    A row with a reward or value that is not finite gets advantages 0 and returns equal to its values, so that neither policy
    nor critic moves.
    """
    _unit("gae", gamma=gamma, lam=lam, lam_returns=lam_returns)
    required("gae needs clip > 0, adaptive > 0 or None", above_0(clip, adaptive), clip=clip, adaptive=adaptive)
    checked("masked", masked, MASKED, "gae")
    trains = as_bool(loss_mask)
    seen = trains if masked in ("skip", "decay") else fr.Ragged.like(np.ones_like(trains.values), trains)
    known = _known_rows(reward, token_rewards, trains if masked in ("skip", "values") else seen, trains)
    known &= _known_rows(np.zeros(len(trains)), values, seen, trains)
    if last_value is not None:
        known &= np.isfinite(last_value)
    decay = gamma * (lam if adaptive is None else adapted_lambda(trains, adaptive, count_ratio))
    steps = _Steps(
        fr.Ragged.like(np.ones_like(trains.values), trains) if masked != "skip" else trains,
        values.values, token_rewards if token_rewards is None else token_rewards.values,
        np.asarray(reward), last_value, known, gamma,
    )  # fmt: skip
    if masked != "skip":
        steps = steps.over_all_tokens(trains, masked)
    advantages, returns = steps.run(decay, None if lam_returns is None else gamma * lam_returns)
    if masked != "skip" and not trains.values.all():
        advantages, returns = np.where(trains.values, advantages, 0.0), np.where(trains.values, returns, 0.0)
    if not known.all():
        returns = np.where(trains.spread(known), returns, np.nan_to_num(np.where(trains.values, values.values, 0.0)))
    if whiten:
        whiten_flat(advantages, _of_rows(trains, known).values, unbiased, eps)
    if clip is not None:
        np.clip(advantages, -clip, clip, out=advantages)
    return {"advantages": fr.Ragged.like(advantages, trains), "returns": fr.Ragged.like(returns, trains)}


@dataclass(frozen=True, slots=True)
class _Steps:
    """What GAE goes over."""

    mask: fr.Ragged
    """Which tokens are steps."""
    values: np.ndarray
    """[T]"""
    paid: np.ndarray | None
    """[T] rewards; None: `final` at each row's last step, which spares an array as long as all responses."""
    final: np.ndarray
    """[N]"""
    bootstrap: np.ndarray | None
    """[N] value of the state after a row's last step; None: 0."""
    known: np.ndarray
    """[N] rows that count; the others are as if all were 0."""
    gamma: float

    def over_all_tokens(self, trains: fr.Ragged, masked: str) -> _Steps:
        """Every token a step; those that do not train without rewards, and without values if they only decay."""
        paid = at_last_token(self.final, trains).values if self.paid is None else self.paid
        return replace(
            self,
            values=np.where(trains.values, self.values, 0.0) if masked == "decay" else self.values,
            paid=paid if masked == "all" else np.where(trains.values, paid, 0.0),
        )

    def run(self, decay: float | np.ndarray, decay_returns: float | None) -> tuple[np.ndarray, np.ndarray]:
        """A and A + V [T], 0 where no step is; the latter with a decay of its own if there is one."""
        advantages, returns = np.zeros(len(self.values)), np.zeros(len(self.values))
        for piece in pieces_of(self.mask):
            worth, deltas = self._deltas(piece)
            found = accumulate(deltas, piece.offsets, _of(decay, piece.rows))
            piece.put(advantages, found)
            other = found if decay_returns is None else accumulate(deltas, piece.offsets, decay_returns)
            piece.put(returns, other + worth)
        return advantages, returns

    def _deltas(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        """(values, r + gamma V_next - V) of a piece."""
        filled = piece.offsets[1:] > piece.offsets[:-1]
        ends, known = piece.offsets[1:][filled] - 1, self.known[piece.rows]
        worth = piece.take(self.values)
        paid = None if self.paid is None else piece.take(self.paid)
        if not known.all():
            unknown = np.repeat(~known, np.diff(piece.offsets))
            worth[unknown] = 0.0
            if paid is not None:
                paid[unknown] = 0.0
        deltas = np.empty_like(worth)
        np.multiply(worth[1:], self.gamma, out=deltas[:-1])
        deltas[ends] = (
            0.0 if self.bootstrap is None else self.gamma * np.where(known, self.bootstrap[piece.rows], 0.0)[filled]
        )
        deltas -= worth
        if paid is None:
            deltas[ends] += np.where(known, self.final[piece.rows], 0.0)[filled]
        else:
            deltas += paid
        return worth, deltas


def _of(factor: float | np.ndarray, rows: slice) -> float | np.ndarray:
    return factor[rows] if isinstance(factor, np.ndarray) else factor


def adapted_lambda(mask: fr.Ragged, alpha: float, count_ratio: str = "exact") -> np.ndarray:
    """[N] VAPO's lambda, 1 - 1 / (alpha n) for n tokens of the mask, never below 0."""
    checked("count_ratio", count_ratio, COUNT_RATIOS, "gae")
    if not alpha > 0:
        raise ConfigError(f"gae needs adaptive > 0; found {alpha!r}")
    number = np.float32 if count_ratio == "float32" else np.float64
    length = row_sums(as_bool(mask).values, mask.offsets).astype(number)
    return (number(1) - number(1) / np.maximum(number(alpha) * length, number(1))).astype(np.float64)


def _of_rows(mask: fr.Ragged, known: np.ndarray) -> fr.Ragged:
    return mask if known.all() else fr.Ragged.like(mask.values & mask.spread(known), mask)


@fr.operator(writes={"advantages": fr.TOKEN.f32, "returns": fr.TOKEN.f32}, locality=_whitened_locality)
def reinforce(
    reward: fr.SAMPLE.f32.named_by("of"),
    loss_mask: fr.TOKEN.bool,
    token_rewards: fr.TOKEN.f32 = None,
    *,
    gamma: float = 1.0,
    masked: str = "skip",
    whiten: bool = False,
    unbiased: bool = False,
    eps: float = 1e-8,
    clip: float | None = None,
    of: str = "reward",
):
    """REINFORCE without a baseline: A_t = G_t = r_t + gamma G_next, the sum of rewards from each token on.

    From Williams (1992). r is `token_rewards` where that column exists, otherwise `reward` at the last token that trains.
    With gamma 0 each token keeps its own reward.

    Args:
        masked: what tokens that do not train (tool output) do: `"skip"`: nothing (verl); `"decay"`: time passes, and each
            costs a factor gamma (OpenRLHF, slime); `"reset"`: they end the sum, so that what is paid after a tool call does
            not reach what was written before it (SkyRL).
        whiten: take away mean and std of all tokens of the step, (G - mean) / sqrt(var + eps).
        unbiased: var divides by n - 1.
        clip: hold the advantages within this on both sides in the end (ROLL).
        of: the column of the reward per response, e.g. `"advantage"` for what a group operator made of it.

    A row whose reward is not finite gets 0.
    """
    required("reinforce needs clip > 0 or None", above_0(clip), clip=clip)
    advantages, returns, counts = _returns(reward, loss_mask, token_rewards, gamma, masked)
    if whiten:
        advantages = whitened(advantages, counts, unbiased=unbiased, eps=eps)
    if clip is not None:
        advantages = fr.Ragged.like(advantages.values.clip(-clip, clip), loss_mask)
    return {"advantages": advantages, "returns": returns}


@fr.operator(writes={"advantages": fr.TOKEN.f32, "returns": fr.TOKEN.f32}, locality="batch")
def reinforce_pp(
    reward: fr.SAMPLE.f32.named_by("of"),
    loss_mask: fr.TOKEN.bool,
    token_rewards: fr.TOKEN.f32 = None,
    *,
    gamma: float = 1.0,
    masked: str = "skip",
    unbiased: bool = False,
    eps: float = 1e-8,
    guard: str = "variance",
    count_eps: float = 0.0,
    of: str = "reward",
):
    """REINFORCE++: returns G_t = r_t + gamma G_next, whitened over all tokens of the step: (G - mean) / sqrt(var + eps).

    From Hu (arXiv 2501.03262); r is `token_rewards` (KL-shaped by `rewards.kl_shaped`) where that column exists, otherwise
    `reward` at the last token that trains. A row whose reward is not finite gets 0.

    Args:
        masked: what tokens that do not train do, as in `reinforce`.
        unbiased: the variance divides by n - 1 (verl, SkyRL, slime), not by n (the authors' OpenRLHF).
        eps, guard, count_eps: as in `whitened`; OpenRLHF has `guard="floor"`.
        of: the column of the reward per response.
    """
    returns, same, counts = _returns(reward, loss_mask, token_rewards, gamma, masked)
    return {
        "advantages": whitened(returns, counts, unbiased=unbiased, eps=eps, guard=guard, count_eps=count_eps),
        "returns": same,
    }


def _returns(
    reward: np.ndarray, loss_mask: fr.Ragged, token_rewards: fr.Ragged | None, gamma: float, masked: str
) -> tuple[fr.Ragged, fr.Ragged, fr.Ragged]:
    """(sums from each token on, the same, mask of tokens of known rows)."""
    _unit("reinforce", gamma=gamma)
    checked("masked", masked, RETURNS, "reinforce")
    trains = as_bool(loss_mask)
    counts = _of_rows(trains, _known_rows(reward, token_rewards, trains, trains))
    paid = at_last_token(np.asarray(reward, np.float64), counts) if token_rewards is None else token_rewards
    if masked == "skip":
        returns = discounted(paid, counts, gamma)
        return returns, returns, counts
    inside = np.where(counts.values, paid.values, 0.0)
    if masked == "reset":  # each run of tokens that train is a row of its own
        edges = np.flatnonzero(np.diff(counts.values, prepend=False)) if len(inside) else np.zeros(0, np.int64)
        offsets = np.union1d(edges, counts.offsets)
    else:
        offsets = counts.offsets
    every = fr.Ragged(np.ones(len(inside), bool), offsets)
    summed = discounted(fr.Ragged.like(inside, every), every, gamma)
    returns = fr.Ragged.like(np.where(counts.values, summed.values, 0.0), loss_mask)
    return returns, returns, counts


@fr.operator(writes={"advantages": fr.TOKEN.f32}, locality="batch", replaces=True)
def whiten(
    advantages: fr.TOKEN.f32,
    loss_mask: fr.TOKEN.bool,
    *,
    unbiased: bool = True,
    eps: float = 1e-8,
    guard: str = "variance",
    centre: bool = True,
    scale: bool = True,
    count_eps: float = 0.0,
):
    """`advantages` become (A - mean) / std over all tokens of the step that train; after any operator that writes them.

    Args: as in `whitened`, which calls this by its parts: unbiased, eps, guard, centre, scale, count_eps.

    A row in which an advantage is not finite gets 0 and has no part in mean and std.
    """
    trains = as_bool(loss_mask)
    known = _known_rows(np.zeros(len(trains)), advantages, trains, trains)
    return whitened(
        advantages, _of_rows(trains, known), unbiased=unbiased, eps=eps, guard=guard, centre=centre, scale=scale,
        count_eps=count_eps,
    )  # fmt: skip


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
