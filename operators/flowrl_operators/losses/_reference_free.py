"""Losses of pairs without a reference: CPO, SimPO, ORPO, and the likelihood of the chosen responses that goes with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators.losses._pairs import (
    at_both_rows,
    bounded_exponent,
    check_pairs,
    find_pairs,
    on_both_rows,
    row_scores,
    smoothed,
)

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl_operators.losses._common import Output

CPO_KINDS = ("sigmoid", "hinge", "ipo")


def _check_cpo(*, beta: float, label_smoothing: float, kind: str, reduce: str, alpha: float) -> None:
    if kind not in CPO_KINDS or (label_smoothing and kind != "sigmoid"):
        raise ConfigError(
            f"cpo knows the kinds {', '.join(CPO_KINDS)}, the first with label_smoothing; found kind={kind!r}, "
            f"label_smoothing={label_smoothing!r}"
        )
    check_pairs("cpo", beta=beta, reduce=reduce, label_smoothing=label_smoothing)


@fr.loss(locality=fr.group("pair_id"), per="sample", on_policy=False, max_staleness=None, check=_check_cpo)
def cpo(
    logprobs: fr.TOKEN.f32,
    chosen: fr.SAMPLE.bool,
    pair_id: fr.SAMPLE.str,
    segments: Any,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: str = "sigmoid",
    reduce: str = "sum",
    alpha: float = 0.0,
) -> Output:
    """Contrastive preference optimisation: -log sigma(beta D), D = log pi(w) - log pi(l): DPO with a uniform reference.

    From Xu et al. (arXiv 2401.08417), who add the likelihood of the chosen responses: `cpo() + chosen_nll()`.

    Args:
        label_smoothing: chance e that a pair is the wrong way round, for `kind="sigmoid"`.
        kind: `"sigmoid"`; `"hinge"`: max(0, 1 - beta D) (SLiC); `"ipo"`: (D - 1 / (2 beta))^2.
        reduce: log pi is the sum over a response's tokens, or their mean (TRL takes it for `ipo`).
        alpha: log pi becomes (1 - pi^-alpha) / alpha; see `simpo`.

    Metrics per row: `preference_accuracy`, `preference_margin` (beta D), `chosen_reward`, `rejected_reward` (beta log pi).
    """
    scores = _shaped(row_scores(logprobs, segments, reduce), alpha)
    winners, losers = find_pairs(pair_id, chosen)
    difference = scores[winners] - scores[losers]
    if kind == "sigmoid":
        loss = smoothed(beta * difference, label_smoothing)
    else:
        loss = (1 - beta * difference).relu() if kind == "hinge" else (difference - 1 / (2 * beta)).square()
    return on_both_rows(loss, (beta * scores[winners], beta * scores[losers]), winners, losers)


def _check_simpo(*, beta: float, gamma: float, label_smoothing: float, alpha: float) -> None:
    check_pairs("simpo", beta=beta, label_smoothing=label_smoothing)


@fr.loss(locality=fr.group("pair_id"), per="sample", on_policy=False, max_staleness=None, check=_check_simpo)
def simpo(
    logprobs: fr.TOKEN.f32,
    chosen: fr.SAMPLE.bool,
    pair_id: fr.SAMPLE.str,
    segments: Any,
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    alpha: float = 0.0,
) -> Output:
    """SimPO: -log sigma(r_w - r_l - gamma), r = beta times the mean log-probability of a response's tokens.

    From Meng et al. (arXiv 2405.14734).

    Args:
        gamma: margin by which the chosen response must lead, in units of r (the authors' gamma / beta ratio times beta).
        label_smoothing: chance that a pair is the wrong way round.
        alpha: shape of the reward, AlphaPO (arXiv 2501.03884): r = beta (1 - p^-alpha) / alpha with p the exponential of the mean
            log-probability; 0 is the logarithm.

    Metrics per row: `preference_accuracy`, `preference_margin` (r_w - r_l), `chosen_reward`, `rejected_reward` (r).
    """
    scores = _shaped(row_scores(logprobs, segments, "mean"), alpha)
    winners, losers = find_pairs(pair_id, chosen)
    ours, theirs = beta * scores[winners], beta * scores[losers]
    return on_both_rows(smoothed(ours - theirs - gamma, label_smoothing), (ours, theirs), winners, losers)


def _check_orpo(*, beta: float) -> None:
    check_pairs("orpo", beta=beta)


@fr.loss(locality=fr.group("pair_id"), per="sample", on_policy=False, max_staleness=None, check=_check_orpo)
def orpo(
    logprobs: fr.TOKEN.f32,
    chosen: fr.SAMPLE.bool,
    pair_id: fr.SAMPLE.str,
    segments: Any,
    *,
    beta: float = 0.1,
) -> Output:
    """ORPO's odds-ratio term: -beta log sigma(log odds(w) - log odds(l)), odds = p / (1 - p), p the geometric mean over tokens.

    From Hong et al. (arXiv 2403.07691), whose whole loss is `chosen_nll() + orpo(0.1)`; beta is their lambda.

    Metrics per row: those of pairs, with rewards beta times the mean log-probability, `log_odds` (log of the odds ratio) and
    `log_odds_ratio` (log sigma of it).
    """
    from torch.nn.functional import logsigmoid

    scores = row_scores(logprobs, segments, "mean")
    odds = scores - _log_one_minus_exp(scores)
    winners, losers = find_pairs(pair_id, chosen)
    log_odds = odds[winners] - odds[losers]
    rewards = (beta * scores[winners], beta * scores[losers])
    loss, metrics = on_both_rows(-beta * logsigmoid(log_odds), rewards, winners, losers)
    metrics["log_odds"] = at_both_rows(log_odds.detach(), winners, losers)
    metrics["log_odds_ratio"] = logsigmoid(metrics["log_odds"])
    return loss, metrics


def _check_chosen_nll(*, reduce: str) -> None:
    check_pairs("chosen_nll", reduce=reduce)


@fr.loss(locality=fr.group("pair_id"), per="sample", on_policy=False, max_staleness=None, check=_check_chosen_nll)
def chosen_nll(
    logprobs: fr.TOKEN.f32, chosen: fr.SAMPLE.bool, pair_id: fr.SAMPLE.str, segments: Any, *, reduce: str = "mean"
) -> Output:
    """Minus the log-probability of each pair's chosen response: supervised fine-tuning beside a loss of pairs.

    Keeps the chosen response likely where a contrast alone would only push the other one down: CPO (arXiv 2401.08417), ORPO
    (arXiv 2403.07691), RPO (arXiv 2404.19733), MPO (arXiv 2411.10442).

    Args:
        reduce: `"mean"` over a response's tokens (RPO; ORPO), each pair counting alike, or `"sum"`. TRL averages over the tokens
            of all chosen responses instead, so that long ones count more: that is `losses.sft()` on the chosen rows alone.

    Metrics per row: `chosen_nll`.
    """
    scores = row_scores(logprobs, segments, reduce)
    winners, losers = find_pairs(pair_id, chosen)
    loss = at_both_rows(-scores[winners], winners, losers)
    return loss, {"chosen_nll": loss.detach()}


def _shaped(scores: Tensor, alpha: float) -> Tensor:
    """(1 - p^-alpha) / alpha of p = exp(scores); their logarithm for alpha = 0, which it tends to."""
    import torch

    return -torch.expm1(bounded_exponent(-alpha * scores)) / alpha if alpha else scores


def _log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0, finite with its gradient at x = 0 too, where float precision ends."""
    import torch

    return (-torch.expm1(x.clamp(max=-torch.finfo(x.dtype).eps))).log()
