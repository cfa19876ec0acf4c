"""What is added to a reward, or changes it: length, endings, repetition."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators._options import checked, required


@fr.operator(writes={"reward": fr.SAMPLE.f32}, replaces=True)
def overlong(
    reward: fr.SAMPLE.f32,
    response_ids: fr.TOKEN.i32,
    *,
    soft: int,
    hard: int | None = None,
    weight: float = 1.0,
    cap: bool = True,
):
    """Add DAPO's soft punishment of long responses to `reward`.

    From DAPO (arXiv 2503.14476), eq. 13, n the number of response tokens: 0 for n <= soft, (soft - n) / (hard - soft) up to
    hard, -1 beyond. The paper has soft 16384 and hard 20480.

    Args:
        soft: tokens that cost nothing.
        hard: tokens from which the punishment is whole; None takes 5/4 of soft, the paper's ratio.
        weight: multiplies the punishment.
        cap: False lets the ramp go on below -1 beyond `hard`, as verl, NeMo-RL, AReaL and ms-swift have it; TRL and OpenRLHF
            stop there.
    """
    required("overlong needs a finite weight", math.isfinite(weight), weight=weight)
    end = soft * 5 // 4 if hard is None else hard
    if soft < 0 or end < soft:
        raise ConfigError(f"overlong needs 0 <= soft <= hard; found soft={soft}, hard={end}")
    if not cap and end == soft:
        raise ConfigError(f"overlong without a cap needs soft < hard, or there is no ramp; found {soft} for both")
    length = response_ids.lengths.astype(np.float64)
    ramp = (soft - length) / max(end - soft, 1)
    if cap:
        ramp = np.where(length <= end, ramp, -1.0)
    return np.asarray(reward, np.float64) + weight * np.where(length <= soft, 0.0, ramp)


@fr.operator(writes={"reward": fr.SAMPLE.f32}, replaces=True)
def stop_properly(
    reward: fr.SAMPLE.f32,
    finish_reason: fr.SAMPLE.str,
    *,
    factor: float | None = None,
    value: float | None = None,
):
    """Change the reward of responses that were cut off (`finish_reason` is `length`); one of the two options says how.

    Args:
        factor: multiply it, at least 0; 0.0 takes it away. A negative reward becomes milder by this.
        value: put this in its place. OpenRLHF takes one number for both: from 0 on a factor, below 0 the value.
    """
    if (factor is None) == (value is None):
        raise ConfigError(f"stop_properly needs factor or value, one of them; found factor={factor}, value={value}")
    if factor is not None and not 0 <= factor < math.inf:
        raise ConfigError(f"factor of stop_properly is at least 0; found {factor}; value=... puts a reward in place")
    reward = np.asarray(reward, np.float64)
    is_cut = np.asarray([reason == "length" for reason in finish_reason], bool)
    changed = factor * reward if factor is not None else np.where(np.isnan(reward), np.nan, value)
    return np.where(is_cut, changed, reward)


@fr.operator(writes={"reward": fr.SAMPLE.f32}, replaces=True)
def cosine(
    reward: fr.SAMPLE.f32,
    response_ids: fr.TOKEN.i32,
    *,
    max_length: int,
    correct: tuple[float, float] = (2.0, 1.0),
    wrong: tuple[float, float] = (-10.0, 0.0),
    exceeded: float | None = -10.0,
    clamp: bool = True,
    threshold: float = 0.5,
):
    """Replace a reward of right or wrong by one that also depends on the length, along half a cosine.

    From "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373): with n response tokens and the pair (a, b) for
    right or wrong responses, b + (a - b) / 2 * (1 + cos(pi * n / max_length)): a at length 0, b at `max_length`. The
    defaults are the paper's: short is better when right, and worse when wrong.

    Args:
        max_length: length at which the curve ends.
        correct: rewards of a right response at length 0 and at `max_length`.
        wrong: the same of a wrong response.
        exceeded: reward from `max_length` on; None keeps to the curve. TRL and ms-swift have no such value.
        clamp: the curve stays at its end beyond `max_length`, as in TRL; False lets the cosine turn back, as in ms-swift.
        threshold: a response is right when its reward is at least this. NaN stays NaN.
    """
    if max_length < 1:
        raise ConfigError(f"max_length of rewards.cosine is at least 1; found {max_length}")
    for name, pair in (("correct", correct), ("wrong", wrong)):
        if len(pair) != 2:
            raise ConfigError(f"{name} of rewards.cosine is (at length 0, at max_length); found {pair!r}")
    reward = np.asarray(reward, np.float64)
    length = response_ids.lengths.astype(np.float64)
    share = length / max_length
    is_right = reward >= threshold
    start = np.where(is_right, correct[0], wrong[0])
    end = np.where(is_right, correct[1], wrong[1])
    shaped = end + 0.5 * (start - end) * (1.0 + np.cos(np.pi * (np.minimum(share, 1.0) if clamp else share)))
    if exceeded is not None:
        shaped = np.where(length >= max_length, exceeded, shaped)
    return np.where(np.isnan(reward), np.nan, shaped)


@fr.operator(writes={"reward": fr.SAMPLE.f32}, locality=fr.group("prompt_id"), replaces=True)
def brevity(reward: fr.SAMPLE.f32, response_ids: fr.TOKEN.i32, *, weight: float = 1.0, threshold: float = 0.5):
    """Add a bonus for responses that are short among those of their prompt.

    From Kimi k1.5 (arXiv 2501.12599), section 2.3.3: with lengths between least and most of the group, s = 0.5 - (n - least) /
    (most - least); a right response gets s, a wrong one min(0, s). Nothing where all lengths are equal.

    Args:
        weight: multiplies the bonus.
        threshold: a response is right when its reward is at least this.
    """
    required("brevity needs a finite weight", math.isfinite(weight), weight=weight)
    reward = np.asarray(reward, np.float64)
    length = response_ids.lengths.astype(np.float64)
    if not len(length) or length.max() == length.min():
        return reward
    short = 0.5 - (length - length.min()) / (length.max() - length.min())
    return reward + weight * np.where(reward >= threshold, short, np.minimum(short, 0.0))


def repeated_share(items: Sequence[object], ngram: int) -> float:
    """Share of the n-grams of a sequence that are repetitions of others: 1 - distinct / all; 0.0 where there are none.

    Example:
        repeated_share([5, 5, 5, 5], ngram=2) == 2 / 3
    """
    if ngram < 1:
        raise ConfigError(f"an n-gram has at least 1 item; found {ngram}")
    count = len(items) - ngram + 1
    if count < 1:
        return 0.0
    return 1.0 - len(set(zip(*(items[start : start + count] for start in range(ngram)), strict=True))) / count


@fr.reward(timeout_s=None)
def repetition(
    response_ids: fr.TOKEN.i32 = None,
    response: fr.SAMPLE.str = None,
    *,
    ngram: int = 3,
    penalty: float = -1.0,
    unit: str = "token",
) -> float:
    """`penalty` times the share of n-grams that repeat others (arXiv 2502.03373, appendix); 0.0 for too few tokens.

    Args:
        ngram: length of the n-grams.
        penalty: reward of a response that only repeats itself, in the limit; at most 0.
        unit: `"token"`: n-grams of token ids, as in TRL; `"word"`: of lower-cased words, as in ms-swift.
    """
    if not -math.inf < penalty <= 0:
        raise ConfigError(f"penalty of rewards.repetition is at most 0; found {penalty}")
    checked("unit", unit, ("token", "word"), "rewards.repetition")
    if unit == "word" and response is None:
        raise ConfigError("rewards.repetition(unit='word') reads the column 'response', which is not there")
    if unit == "token" and response_ids is None:
        raise ConfigError(
            "rewards.repetition reads the column 'response_ids', which is not there; unit='word' reads text"
        )
    items = str(response).lower().split() if unit == "word" else np.asarray(response_ids).tolist()
    return penalty * repeated_share(items, ngram)
