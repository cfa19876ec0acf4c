"""Rewards: what a response is worth, and what is added to that.

Rules that look at one response (`math`, `exact`, `format`) are functions of one row; a row that fails or takes too long gets
NaN and says why in `row_error`. `overlong` and `kl_shaped` work on columns.
"""

from __future__ import annotations

import logging
import re

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError, DataError, MissingExtra
from flowrl_operators.advantages import at_last_token

KL_KINDS = ("k1", "k2", "k3", "abs")

NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?"
"""Pattern of a plain number, for `math(pattern=NUMBER)` and `exact(pattern=NUMBER)`."""

# --- rules on one response ----------------------------------------------------------------------------------------------


@fr.reward
def math(response: str, answer: str, *, pattern: str | None = None) -> float:
    """1.0 when the response's final answer equals the reference mathematically, else 0.0, as math-verify judges.

    The last `\\boxed{...}`, formula or number of the response is compared with `answer` (LaTeX with or without dollar
    signs, or a plain number). Needs the extra `math`.

    A formula is evaluated: where the task is to compute `8 + 3`, a response that only repeats `8 + 3` counts as right, and a
    policy will find that out. `pattern=NUMBER` then judges the last number alone.

    Args:
        pattern: judge only what this regular expression (its first group, or the whole) finds last in the response; nothing
            found is 0.0.

    Errors: MissingExtra without math-verify; there is no second, weaker rule to fall back on. DataError when `answer` holds
    no mathematics.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise MissingExtra(
            "rewards.math needs math-verify, which is not installed: pip install 'flowrl-operators[math]'; "
            "rewards.exact compares text without it"
        ) from error
    for part in ("parser", "grader"):
        logging.getLogger(f"math_verify.{part}").addFilter(_is_not_about_timeouts)
    # its own timeouts are signal alarms, which work in the main thread only; the operator's timeout covers both calls
    gold = parse(_as_latex(str(answer)), parsing_timeout=None)
    if not gold:
        raise DataError(
            f"math-verify finds no mathematics in the reference answer {answer!r}; use rewards.exact for text"
        )
    found = response if pattern is None else _last_match(pattern, response)
    return 0.0 if found is None else float(verify(gold, parse(found, parsing_timeout=None), timeout_seconds=None))


def _last_match(pattern: str, text: str) -> str | None:
    """What the first group (or the whole) of a regular expression finds last in a text."""
    matches = list(re.finditer(pattern, text, re.DOTALL))
    if not matches:
        return None
    return matches[-1][1 if matches[-1].re.groups else 0] or ""


def _is_not_about_timeouts(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Timeout is disabled")


def _as_latex(answer: str) -> str:
    is_marked = re.search(r"(?<!\\)\$|\\boxed|\\\(|\\\[", answer)  # an escaped dollar is a currency
    return answer if is_marked else f"${answer}$"


def _exact_timeout(*, pattern: str | None, **_: object) -> float | None:
    return None if pattern is None else 30.0  # only a regular expression can take long


@fr.reward(timeout_s=_exact_timeout)
def exact(
    response: str, answer: str, *, pattern: str | None = None, strip: bool = True, ignore_case: bool = False
) -> float:
    """1.0 when the response is the answer, character for character, else 0.0.

    Args:
        pattern: compare only what the first group (or the whole) of this regular expression finds last in the response;
            nothing found is 0.0.
        strip: leave white space around both out.
        ignore_case: compare case-folded.
    """
    found = response if pattern is None else _last_match(pattern, response)
    if found is None:
        return 0.0
    wanted = str(answer)
    if strip:
        found, wanted = found.strip(), wanted.strip()
    if ignore_case:
        found, wanted = found.casefold(), wanted.casefold()
    return float(found == wanted)


THINK = r"(?!.*<think>.*<think>)\s*<think>.*?</think>.*"


@fr.reward
def format(response: str, *, pattern: str = THINK, prefilled: str = "") -> float:
    """1.0 when the whole response matches a regular expression, else 0.0.

    Args:
        pattern: matched against all of the text, `.` including line ends. The default asks for one thinking part,
            `<think>...</think>`, at the start.
        prefilled: text with which the chat template has already begun the response, e.g. `"<think>\\n"`; the sampled part
            alone would never match.
    """
    return float(re.fullmatch(pattern, prefilled + response, re.DOTALL) is not None)


# --- on columns ---------------------------------------------------------------------------------------------------------


@fr.operator(writes={"reward": fr.SAMPLE.f32})
def overlong(
    reward: fr.SAMPLE.f32,
    response_ids: fr.TOKEN.i32,
    *,
    soft: int,
    hard: int | None = None,
    weight: float = 1.0,
    replace: bool = True,
):
    """Add DAPO's soft punishment of long responses to `reward`.

    From DAPO (arXiv 2503.14476), eq. 13, n the number of response tokens: 0 for n <= soft, (soft - n) / (hard - soft) up to
    hard, -1 beyond. The paper has soft 16384 and hard 20480.

    Args:
        soft: tokens that cost nothing.
        hard: tokens from which the punishment is whole; None takes 5/4 of soft, the paper's ratio.
        weight: multiplies the punishment.
        replace: true, because `reward` is rewritten: this adds to the reward that is there.
    """
    end = soft * 5 // 4 if hard is None else hard
    if not replace:
        raise ConfigError("overlong adds to the reward that is there, so replace stays True")
    if soft < 0 or end < soft:
        raise ConfigError(f"overlong needs 0 <= soft <= hard; found soft={soft}, hard={end}")
    length = response_ids.lengths.astype(np.float64)
    ramp = (soft - length) / max(end - soft, 1)
    punishment = np.where(length <= soft, 0.0, np.where(length <= end, ramp, -1.0))
    return np.asarray(reward, np.float64) + weight * punishment


@fr.operator(writes={"token_rewards": fr.TOKEN.f32})
def kl_shaped(
    reward: fr.SAMPLE.f32,
    policy_logprobs: fr.TOKEN.f32.named_by("logprobs"),
    ref_logprobs: fr.TOKEN.f32,
    loss_mask: fr.TOKEN.bool,
    *,
    coefficient: float,
    kind: str = "k1",
    logprobs: str = "old_logprobs",
):
    """Pay for distance from the reference at every token: r_t = -coefficient * kl_t, plus `reward` at the last token.

    From Ziegler et al. (arXiv 1909.08593) and InstructGPT (arXiv 2203.02155), which use k1. Only tokens that train pay.

    Args:
        coefficient: weight of the penalty.
        kind: estimator, with d = policy - reference: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.
        logprobs: the column of the policy's log-probabilities: `old_logprobs` (recomputed by the trainer), or
            `rollout_logprobs` to do without that pass.
    """
    difference = policy_logprobs.values.astype(np.float64) - ref_logprobs.values.astype(np.float64)
    inside = loss_mask.values.astype(bool)
    penalty = kl_estimate(np.where(inside, difference, 0.0), kind)  # every estimate of 0 is 0
    paid = at_last_token(np.asarray(reward, np.float64), loss_mask).values - coefficient * penalty
    return fr.Ragged.like(paid, loss_mask)


def kl_estimate(difference: np.ndarray, kind: str) -> np.ndarray:
    """Estimators of KL(policy || reference) from the policy's samples; `difference` = log policy - log reference.

    Source: Schulman, "Approximating KL divergence" (2020). k3's exponent is held within +-20.
    """
    match kind:
        case "k1":
            return difference
        case "abs":
            return np.abs(difference)
        case "k2":
            return difference**2 / 2
        case "k3":
            return np.exp(np.clip(-difference, -20.0, 20.0)) - 1.0 + difference
    raise ConfigError(f"kind of KL estimate is one of {', '.join(KL_KINDS)}; found {kind!r}")
