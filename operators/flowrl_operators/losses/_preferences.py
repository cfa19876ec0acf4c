"""Losses of pairs that compare the policy with a reference: DPO and its family.

Notation: h the score of a response, the sum (or mean) over its tokens of logprobs - ref_logprobs; h_w that of the chosen
response, h_l of the rejected one; D = h_w - h_l; sigma the logistic function.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import flowrl as fr
from flowrl.errors import ConfigError, DataError
from flowrl_operators._options import required
from flowrl_operators.losses._pairs import (
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

DPO_KINDS = (
    "sigmoid", "robust", "hinge", "ipo", "nca", "sppo", "apo_zero", "apo_down", "exo", "discopop",
)  # fmt: skip
DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")
SMOOTHED_KINDS = ("sigmoid", "robust", "exo")


def _check_dpo(
    *,
    beta: float,
    label_smoothing: float,
    kind: str,
    reduce: str,
    divergence: str,
    alpha: float,
    tau: float,
) -> None:
    e = label_smoothing
    if kind not in DPO_KINDS:
        raise ConfigError(f"dpo knows the kinds {', '.join(DPO_KINDS)}; found {kind!r}")
    if divergence not in DIVERGENCES:
        raise ConfigError(f"dpo knows the divergences {', '.join(DIVERGENCES)}; found {divergence!r}")
    if e and kind not in SMOOTHED_KINDS:
        raise ConfigError(
            f"label_smoothing is for the kinds {', '.join(SMOOTHED_KINDS)}; found {e!r} with kind={kind!r}"
        )
    check_pairs("dpo", beta=beta, reduce=reduce, label_smoothing=e)
    required(
        "dpo needs label_smoothing under 0.5 for kind='robust', between 0 and 1 (usually 1e-3) for kind='exo', and tau > 0 for "
        "kind='discopop'",
        (kind != "robust" or e < 0.5) and (kind != "exo" or e > 0) and (kind != "discopop" or tau > 0),
        kind=kind,
        label_smoothing=e,
        tau=tau,
    )


@fr.loss(locality=fr.group("pair_id"), per="sample", on_policy=False, max_staleness=None, check=_check_dpo)
def dpo(
    logprobs: fr.TOKEN.f32,
    ref_logprobs: fr.TOKEN.f32,
    chosen: fr.SAMPLE.bool,
    pair_id: fr.SAMPLE.str,
    segments: Any,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: str = "sigmoid",
    reduce: str = "sum",
    divergence: str = "reverse_kl",
    alpha: float = 0.5,
    tau: float = 0.05,
) -> Output:
    """Direct preference optimisation: -log sigma(beta D), D = h_w - h_l, and what else was proposed for the same columns.

    From Rafailov et al. (arXiv 2305.18290). h is the sum (or mean) over a response's tokens of logprobs - ref_logprobs: h_w of
    the chosen response, h_l of the rejected one; sigma is the logistic function.

    Args:
        beta: strength of the pull towards the reference.
        label_smoothing: chance e that a pair is the wrong way round, for the kinds `sigmoid`, `robust` and `exo`.
        kind: the function of h_w and h_l that is minimised (b = beta):

            - `"sigmoid"`: -(1 - e) log sigma(b D) - e log sigma(-b D). With e > 0 that is conservative DPO (Mitchell, 2023; so in
              OpenRLHF; TRL ignores e here).
            - `"robust"`: (-(1 - e) log sigma(b D) + e log sigma(-b D)) / (1 - 2e), unbiased under flipped labels
              (arXiv 2403.00409).
            - `"hinge"`: max(0, 1 - b D) (SLiC, arXiv 2305.10425).
            - `"ipo"`: (D - 1 / (2 b))^2 (arXiv 2310.12036); also `losses.ipo`.
            - `"nca"`: -log sigma(b h_w) - (log sigma(-b h_w) + log sigma(-b h_l)) / 2 (arXiv 2402.05369).
            - `"sppo"`: (h_w - 1 / (2 b))^2 + (h_l + 1 / (2 b))^2, with hard labels (arXiv 2405.00675).
            - `"apo_zero"`: sigma(-b h_w) + sigma(b h_l): the chosen one rises, the rejected one falls (arXiv 2408.06266).
            - `"apo_down"`: sigma(b h_w) + sigma(-b D): both fall, the rejected one more (same paper).
            - `"exo"`: KL of (sigma(b D), sigma(-b D)) to (1 - e, e), e > 0, usually 1e-3 (arXiv 2402.00856).
            - `"discopop"`: sigma(-b D / tau) of the sigmoid loss and the rest of exp(-b D) (arXiv 2406.08414).
        reduce: `"sum"` takes h over a whole response; `"mean"` divides it by the number of its tokens (TRL's `sigmoid_norm`
            and `ipo`; NeMo-RL's averaged log-probabilities).
        divergence: h becomes f'(exp(h)) of another f-divergence than the reverse KL (arXiv 2309.16240): `"forward_kl"`
            1 - exp(-h); `"js"` log 2 + log sigma(h); `"alpha"` (exp((alpha - 1) h) - 1) / (alpha - 1). Exponents are held
            under 80 (700 in float64), where the gradient ends.
        alpha: of the alpha-divergence; near 1 it is the reverse KL.
        tau: temperature of `"discopop"`.

    Metrics per row: `preference_accuracy`, `preference_margin` (beta D), `chosen_reward`, `rejected_reward` (beta h), with h
    before the divergence.
    """
    h = row_scores(logprobs - ref_logprobs, segments, reduce)
    worth = h if divergence == "reverse_kl" else _diverged(logprobs - ref_logprobs, segments, reduce, divergence, alpha)
    winners, losers = find_pairs(pair_id, chosen)
    loss = _pair_loss(kind, worth[winners], worth[losers], beta, label_smoothing, tau)
    return on_both_rows(loss, (beta * h[winners], beta * h[losers]), winners, losers)


def _check_ipo(*, beta: float, reduce: str) -> None:
    check_pairs("ipo", beta=beta, reduce=reduce)


@fr.loss(locality=fr.group("pair_id"), per="sample", on_policy=False, max_staleness=None, check=_check_ipo)
def ipo(
    logprobs: fr.TOKEN.f32,
    ref_logprobs: fr.TOKEN.f32,
    chosen: fr.SAMPLE.bool,
    pair_id: fr.SAMPLE.str,
    segments: Any,
    *,
    beta: float = 0.1,
    reduce: str = "sum",
) -> Output:
    """Identity preference optimisation: (D - 1 / (2 beta))^2, a margin to reach instead of one to grow for ever.

    D = h_w - h_l, the chosen response's h less the rejected one's; h is the sum over its tokens of logprobs - ref_logprobs.
    From Azar et al. (arXiv 2310.12036), whose D is over whole responses, as in OpenRLHF. TRL divides each h by the number of
    its tokens: `reduce="mean"`. The same as `dpo(kind="ipo")`. Metrics as in `dpo`.
    """
    h = row_scores(logprobs - ref_logprobs, segments, reduce)
    winners, losers = find_pairs(pair_id, chosen)
    loss = _pair_loss("ipo", h[winners], h[losers], beta, 0.0, 1.0)
    return on_both_rows(loss, (beta * h[winners], beta * h[losers]), winners, losers)


def _check_aot(*, beta: float, label_smoothing: float, paired: bool) -> None:
    check_pairs("aot", beta=beta, label_smoothing=label_smoothing)


@fr.loss(locality="batch", per="sample", on_policy=False, max_staleness=None, check=_check_aot)
def aot(
    logprobs: fr.TOKEN.f32,
    ref_logprobs: fr.TOKEN.f32,
    chosen: fr.SAMPLE.bool,
    segments: Any,
    pair_id: fr.SAMPLE.str = None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    paired: bool = True,
) -> Output:
    """Alignment by optimal transport: one distribution of numbers must lie above another one, quantile by quantile.

    From Melnyk et al. (arXiv 2406.05882). Both lists are sorted over the whole step and compared rank by rank with
    -(1 - e) log sigma(beta d) - e log sigma(-beta d).

    Args:
        label_smoothing: e.
        paired: True compares the policy's margins log pi(w) - log pi(l) with the reference's, which needs `pair_id`; False
            compares h, the sum of logprobs - ref_logprobs, of the chosen rows with h of the rejected ones, which may answer
            other prompts.

    The loss of a rank lies on the rows that hold it (with `paired`, in the policy's list). Errors: DataError when the chosen rows
    are not as many as the rejected ones. Metrics as in `dpo`; without pairs, those of a rank.
    """
    import torch

    h = row_scores(logprobs - ref_logprobs, segments, "sum")
    if paired:
        if pair_id is None:
            raise DataError("aot compares the margins of pairs and needs the column 'pair_id'; or say paired=False")
        winners, losers = find_pairs(pair_id, chosen)
        policy, reference = (row_scores(side, segments, "sum") for side in (logprobs, ref_logprobs))
        upper, rank = (policy[winners] - policy[losers]).sort(stable=True)
        winners, losers = winners[rank], losers[rank]
        lower = (reference[winners] - reference[losers]).sort(stable=True).values
    else:
        sides = [torch.nonzero(chosen == is_chosen).flatten() for is_chosen in (True, False)]
        if len(sides[0]) != len(sides[1]):
            raise DataError(
                "aot needs as many chosen rows as rejected ones in a step, to compare them rank by rank; found "
                f"{len(sides[0])} and {len(sides[1])}"
            )
        (upper, first), (lower, second) = (h[rows].sort(stable=True) for rows in sides)
        winners, losers = sides[0][first], sides[1][second]
    loss = smoothed(beta * (upper - lower), label_smoothing)
    return on_both_rows(loss, (beta * h[winners], beta * h[losers]), winners, losers)


def _diverged(per_token: Tensor, segments: Any, reduce: str, divergence: str, alpha: float) -> Tensor:
    """f'(exp(h)) of each row; a divergence is one of whole responses, so a mean over tokens is taken of its value."""
    import torch
    from torch.nn.functional import logsigmoid

    h = row_scores(per_token, segments, "sum")
    match divergence:
        case "forward_kl":
            value = -torch.expm1(bounded_exponent(-h))
        case "js":
            value = math.log(2) + logsigmoid(h)
        case _:
            power = alpha - 1
            value = h if abs(power) < 1e-6 else torch.expm1(bounded_exponent(power * h)) / power
    return value if reduce == "sum" else value / segments.lengths.clamp(min=1)


def _pair_loss(kind: str, ours: Tensor, theirs: Tensor, beta: float, e: float, tau: float) -> Tensor:
    """[P] loss of each pair from the scores of its chosen and of its rejected response; see `dpo`."""
    import torch
    from torch.nn.functional import logsigmoid

    up, down, lead = beta * ours, beta * theirs, beta * (ours - theirs)
    match kind:
        case "sigmoid":
            return smoothed(lead, e)
        case "robust":
            return ((e - 1) * logsigmoid(lead) + e * logsigmoid(-lead)) / (1 - 2 * e)
        case "hinge":
            return (1 - lead).relu()
        case "ipo":
            return (ours - theirs - 1 / (2 * beta)).square()
        case "nca":
            return -logsigmoid(up) - (logsigmoid(-up) + logsigmoid(-down)) / 2
        case "sppo":
            return (ours - 1 / (2 * beta)).square() + (theirs + 1 / (2 * beta)).square()
        case "apo_zero":
            return (-up).sigmoid() + down.sigmoid()
        case "apo_down":
            return up.sigmoid() + (-lead).sigmoid()
        case "exo":
            chance = torch.tensor(e, dtype=torch.float32)  # single precision is what TRL's constants have, too
            right, wrong = (-chance).log1p().item(), chance.log().item()
            return lead.sigmoid() * (logsigmoid(lead) - right) + (-lead).sigmoid() * (logsigmoid(-lead) - wrong)
    # discopop: sigma(lead / tau) exp(-lead) as one exponential: apart, they are 0 and infinity far below 0
    return -logsigmoid(lead) * (-lead / tau).sigmoid() + bounded_exponent(logsigmoid(lead / tau) - lead).exp()
