"""The part of policy_loss in which a loss is corrected for the sampler, or for an older policy.

`CONVENTIONS`, `PATTERNS` and `UNANSWERED` are merged into those of `policy_loss`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import flowrl as fr
from flowrl_operators import losses, masks
from flowrl_operators.importance import importance_weights
from tests.golden.guards import ADDED, guarded, padded_tokens
from tests.golden.padded import loss_and_gradient
from tests.golden.pieces.rollout_correction import bounds_of, mean_over_padded_mean, rejection
from tests.golden.runner import Contract, Where
from tests.golden.vectors import Case, matrix, ragged

COLUMNS = {
    "logprobs": "log_probs",
    "old_logprobs": "old_log_probs",
    "advantages": "advantages",
    "ref_logprobs": "ref_log_probs",
    "rollout_logprobs": "rollout_log_probs",
    "importance": "importance",
    "entropy": "entropies",
}


def answer(case: Case, loss: fr.Loss, *, old: str = "old_log_probs", **options: Any) -> Any:
    """Loss and gradient with the columns the case has; what an empty batch gives is ours to say."""
    columns = {**COLUMNS, "old_logprobs": old}
    given = {ours: theirs for ours, theirs in columns.items() if theirs in case.inputs}
    found = loss_and_gradient(case, loss, given, **options)
    return guarded(case, found, "grad_log_prob")


def with_input(case: Case, **inputs: np.ndarray) -> Case:
    return replace(case, inputs={**case.inputs, **{name: value.tolist() for name, value in inputs.items()}})


# --- verl ---------------------------------------------------------------------------------------------------------------

VERL_AVERAGES: dict[str, dict[str, Any]] = {
    "token-mean": {"average": "token_mean"},
    "token-sum": {"average": "token_sum"},
    "seq-mean-token-mean": {"average": "sequence_mean", "average_eps": ADDED},
    "seq-mean-token-sum": {"average": "sequence_sum"},
}


def verl_average(case: Case) -> dict[str, Any]:
    mode = case.params["loss_agg_mode"]
    if mode == "seq-mean-token-sum-norm":
        return {"average": "constant", "average_length": case.array("mask").shape[1]}
    return VERL_AVERAGES[mode]


def verl_bypass(case: Case) -> Any:
    """`old_log_probs` is the rollout policy and the live one is compared with it; what is rejected leaves the mask."""
    p = case.params
    live, rollout, mask = case.array("log_probs"), case.array("old_log_probs"), case.array("mask")
    loss = losses.reinforce() if p["loss_type"] == "reinforce" else losses.ppo_clip(0.2, dual=3.0)
    if p["rollout_is"] is not None and p["loss_type"] == "reinforce":
        low, high = bounds_of(p["rollout_is_threshold"])
        weights = importance_weights(
            ragged(live),
            ragged(rollout),
            ragged(mask > 0),
            low=low or 0.0,
            high=high,
            outside="truncate" if low is None else "zero",
            level=p["rollout_is"],
            normalise=bool(p.get("rollout_is_batch_normalize")),
        )
        if "raises" in case.outputs and not weights.values.any():
            return Contract("where nothing is left to weigh, weights are 0 and training goes on", holds=True)
        stored = matrix(weights)
        if p.get("rollout_is_batch_normalize"):
            stored = stored * mean_over_padded_mean(stored, mask > 0, p["rollout_is"])
        case, loss = with_input(case, importance=stored), loss * losses.stored_importance()
    if p["rollout_rs"] is not None:
        options, specs = p["rollout_rs"].split(","), str(p["rollout_rs_threshold"]).split(",")
        kept = mask > 0
        for option, spec in zip(options, specs * len(options) if len(specs) == 1 else specs, strict=False):
            kept = kept & rejection(live, rollout, mask, option.strip(), spec)
        case = with_input(case, mask=kept.astype(float))
    return answer(case, loss, **verl_average(case))


def verl_weighted(case: Case, loss: fr.Loss, **options: Any) -> tuple[Case, fr.Loss]:
    """Every loss of verl may be multiplied with given weights."""
    if "rollout_is_weights" not in case.inputs:
        return case, loss
    case = with_input(case, importance=case.array("rollout_is_weights"))
    return case, loss * losses.stored_importance(**options)


# --- OpenRLHF -----------------------------------------------------------------------------------------------------------


def openrlhf_average(case: Case) -> dict[str, Any]:
    is_token = case.params.get("token_level_loss", True)
    return {"average": "token_mean"} if is_token else {"average": "sequence_mean", "average_eps": ADDED}


def openrlhf(case: Case) -> tuple[fr.Loss, dict[str, Any]]:
    """(its loss with the correction its parameters ask for, options of an answer)."""
    p = case.params
    is_row = p.get("policy_loss_type") == "gspo"
    loss = losses.ppo_clip(
        p["clip_eps_low"],
        high=p["clip_eps_high"],
        dual=p.get("dual_clip"),
        level="geometric" if is_row else "token",
    )
    options = {"average": "sequence_mean", "average_eps": ADDED} if is_row else openrlhf_average(case)
    if p.get("is_correction_level", "off") == "off":
        return loss, options
    if is_row:  # with any correction its sequence ratio is taken against the sampler; there is no other one then
        return loss, {"old": "rollout_log_probs", **options}
    return loss * openrlhf_importance(p), options


def openrlhf_importance(p: dict[str, Any]) -> fr.Loss:
    low, high = (-math.inf, *p["is_correction_threshold"])[-2:]  # one number is the upper bound
    if p["is_correction_mode"] == "clip":
        return losses.truncated_importance(high, floor=low, log_ratio_clip=None, unknown="extreme")
    over = "mean" if p["is_correction_level"] == "seq" else "token"
    statistic = p["is_correction_gating"]
    gate = losses.within_drift(low, high, statistic=statistic, over=over, log_ratio_clip=None)
    return losses.truncated_importance(None, log_ratio_clip=None) * gate


def openrlhf_gated(case: Case, found: re.Match[str]) -> Any:
    loss, options = openrlhf(case)
    result = answer(case, loss, **options)
    inside = case.array("mask") > 0
    if isinstance(result, Contract) or np.isfinite(case.array("rollout_log_probs")[inside]).all():
        return result
    if np.isfinite(case.wanted("loss")):
        return result
    return Contract("a log-ratio that is not known gives no infinite weight", bool(np.isfinite(result["loss"])))


# --- NeMo-RL ------------------------------------------------------------------------------------------------------------


def nemo_importance(case: Case) -> fr.Loss:
    """The correction its parameters ask for. Weights that are not finite become 0."""
    p = case.params
    kind = p.get("truncated_importance_sampling_type", "tis")
    low, high = p.get("truncated_importance_sampling_ratio_min"), p.get("truncated_importance_sampling_ratio")
    level = "sequence" if p.get("sequence_level_importance_ratios") else "token"
    if high is None:
        return losses.truncated_importance(None, level=level, log_ratio_clip=None)
    if kind == "tis":
        return losses.truncated_importance(high, floor=low or 0.0, level=level, log_ratio_clip=None, unknown="least")
    if kind == "icepop":
        return losses.masked_importance(low or 0.0, high, level=level, log_ratio_clip=None)
    gate = losses.within_drift(low, high, over="mean", log_ratio_clip=None, unknown="equal")
    return losses.truncated_importance(None, log_ratio_clip=None) * gate


def nemo_average(case: Case) -> dict[str, Any]:
    if case.params.get("token_level_loss", True):
        return {"average": "token_mean", "factor": padded_tokens(case)}
    rows = len(case.array("mask"))
    return {
        "average": "sequence_mean",
        "average_rows": "all",
        "average_eps": ADDED,
        "factor": rows / (rows + ADDED),
    }


def nemo(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    low, high = p.get("ratio_clip_min", 0.2), p.get("ratio_clip_max", 0.2)
    level = "geometric" if p.get("sequence_level_importance_ratios") else "token"
    old = (
        "" if p.get("force_on_policy_ratio") else "old_log_probs"
    )  # without the column the ratio is to the live policy
    if p.get("disable_ppo_ratio"):
        loss = losses.reinforce()
    elif p.get("use_cispo"):
        loss = losses.cispo(high, low=low, log_ratio_clip=None)
    else:
        dual = p.get("ratio_clip_c")
        loss = losses.ppo_clip(low, high=high, dual=dual, level=level, count_eps=ADDED, log_ratio_clip=None)
    if p.get("use_importance_sampling_correction"):
        loss = loss * nemo_importance(case)
    if beta := p.get("reference_policy_kl_penalty"):
        loss = loss + beta * nemo_kl(p)
    return answer(case, loss, old=old, **nemo_average(case))


def nemo_kl(p: dict[str, Any]) -> fr.Loss:
    kind = p.get("reference_policy_kl_type", "k3")
    entry, most = p.get("kl_input_clamp_value", 20.0), p.get("kl_output_clamp_value", 10.0)
    against = "rollout_logprobs" if p.get("use_on_policy_kl_approximation") else None
    clips = {"log_ratio_clip": entry, "value_clip": bound_of_kl(kind, entry, most)}
    return losses.kl(kind, importance="value", against=against, **clips)


def bound_of_kl(kind: str, entry: float | None, most: float | None) -> float | None:
    """The bound of the estimate: NeMo-RL clips the log-ratio of k1 and k2 too, and for those that is one of the value."""
    of_entry = None if entry is None or kind == "k3" else entry if kind == "k1" else entry**2 / 2
    return min((bound for bound in (of_entry, most) if bound is not None), default=None)


# --- SkyRL --------------------------------------------------------------------------------------------------------------


def skyrl_corrected(case: Case, loss: fr.Loss) -> tuple[Case, fr.Loss]:
    """(the case without the tokens its off-policy options mask, the loss times the weights they ask for): tokens go before a
    row is judged by those that are left."""
    p = case.params
    for name, over in (("outlier_token_is_threshold", "each"), ("token_mask_is_threshold", "token")):
        low, high = p.get(f"{name}_low"), p.get(f"{name}_high")
        if low is not None or high is not None:
            old, rollout, mask = (case.array(column) for column in ("old_log_probs", "rollout_log_probs", "mask"))
            kept = masks.drift(ragged(old), ragged(rollout), ragged(mask > 0), over=over, low=low, high=high)
            case = with_input(case, mask=matrix(kept).astype(float))
    if (kind := p.get("tis_ratio_type")) is not None:
        loss = loss * losses.truncated_importance(p[f"{kind}_tis_ratio_clip_high"], level=kind)
    if (metric := p.get("sequence_mask_metric")) is not None:
        name, over = ("geo", "mean") if metric == "geometric" else (metric, "sum")
        bounds = p[f"{name}_mask_low"], p[f"{name}_mask_high"]
        loss = loss * losses.within_drift(*bounds, over=over, log_ratio_clip=None)
    return case, loss


def skyrl_rollout_is(case: Case) -> Any:
    """REINFORCE with the ratio of the live policy to the sampler as a weight, 0 outside the bounds."""
    p = case.params
    weight = losses.masked_importance(1 - p["eps_clip_low"], 1 + p["eps_clip_high"])
    return answer(case, losses.reinforce() * weight, old="", average="token_sum")


# --- slime --------------------------------------------------------------------------------------------------------------


def slime_average(case: Case) -> dict[str, Any]:
    if case.params.get("calculate_per_token_loss"):
        return {"average": "token_sum"}
    return {"average": "sequence_mean", "average_rows": 1}


def slime_corrected(case: Case, loss: fr.Loss, name: str) -> fr.Loss:
    p = case.params
    if p.get("use_opsm"):
        loss = loss * losses.off_policy_mask(p["opsm_delta"], against="old_logprobs")
    if p.get("use_tis"):  # what takes the place of truncation is a function of the user's, which only the name tells
        low, high = p["tis_clip_low"], p["tis_clip"]
        if "icepop" in name:
            return loss * losses.masked_importance(low, high, log_ratio_clip=None)
        return loss * losses.truncated_importance(high, floor=low, log_ratio_clip=None)
    return loss


# --- TRL ----------------------------------------------------------------------------------------------------------------


def trl_average(case: Case) -> dict[str, Any]:
    p = case.params
    match p["loss_type"]:
        case "grpo" | "sapo":
            return {"average": "sequence_mean", "average_rows": "all"}
        case "dr_grpo":
            return {"average": "constant", "average_length": p["max_completion_length"], "average_rows": "all"}
        case "luspo":
            return {"average": "sequence_sum", "average_rows": "all"}
    return {"average": "token_mean"}


def trl_corrected(case: Case, loss: fr.Loss) -> tuple[Case, fr.Loss]:
    """(the case, the loss times what corrects for the sampler): rows too far off left out, given weights."""
    p = case.params
    if (most := p.get("off_policy_mask_threshold")) is not None:
        against = "rollout_logprobs" if "rollout_log_probs" in case.inputs else "old_logprobs"
        loss = loss * losses.off_policy_mask(most, against=against)
    if "importance_sampling_ratio" in case.inputs:
        ratio = np.broadcast_to(case.array("importance_sampling_ratio"), case.array("mask").shape)
        case, loss = with_input(case, importance=ratio), loss * losses.stored_importance()
    return case, loss


# --- AReaL --------------------------------------------------------------------------------------------------------------


def areal_decoupled(case: Case, found: re.Match[str]) -> Any:
    """PPO against the proximal policy times the weight proximal / behaviour; rejected tokens stay in the count."""
    p = case.params
    correction = areal_correction(p["rejection_sampling"])
    result = answer(case, areal_ppo(p) * correction, average="token_mean")
    if isinstance(result, Contract):
        return result
    return {**result, "behave_imp_weight": Where(per_token(case, correction), case.array("mask") > 0)}


def areal_ppo(p: dict[str, Any]) -> fr.Loss:
    is_row = p.get("importance_sampling_level") == "sequence"
    return losses.ppo_clip(
        p["eps_clip"],
        high=p.get("eps_clip_higher"),
        dual=p.get("c_clip"),
        level="geometric" if is_row else "token",
        row_advantage=is_row,
        log_ratio_clip=None,
    )


def areal_correction(p: dict[str, Any]) -> fr.Loss:
    low, high, agg = p.get("lower"), p["upper"], p.get("agg", "mean")
    is_ratio, is_row = p["metric"] == "ratio", p["level"] == "sequence"
    # a row judged by its ratio gets the geometric mean as its weight, whatever it is judged by
    options: dict[str, Any] = {"level": "geometric" if is_row and is_ratio else "token", "unknown": "equal"}
    weight = losses.truncated_importance(None, log_ratio_clip=None, **options)
    # a difference that is not known counts as 0, but not in an estimate of the KL
    divergence = {} if is_ratio else {"statistic": p["metric"].removeprefix("kl_"), "direction": "from_old"}
    unknown = "equal" if is_ratio else "drop"
    gate = losses.within_drift(
        low, high, over=agg if is_row else "token", log_ratio_clip=None, unknown=unknown, **divergence
    )
    if p["action"] == "mask":
        return weight * gate
    held = losses.truncated_importance(high, floor=low or 0.0, log_ratio_clip=None, **options)
    return held + gate * (weight - held) if agg == "max" and is_row else held  # by sum and mean rows within keep theirs


def per_token(case: Case, weight: fr.Loss) -> np.ndarray:
    """A weight at every token: the gradient of the sum of advantage times weight by the advantage."""
    columns = {**{ours: theirs for ours, theirs in COLUMNS.items() if theirs in case.inputs}, "logprobs": "advantages"}
    found = loss_and_gradient(case, losses.sft() * weight, columns, average="token_sum")
    return -found["grad_log_prob"]


CONVENTIONS: dict[str, Callable[[Case], Any]] = {
    "skyrl.rollout_is_sum": skyrl_rollout_is,
}

PATTERNS: list[tuple[str, Callable[..., Any]]] = [
    (r"verl\.bypass_.*", lambda case, found: verl_bypass(case)),
    (r"openrlhf\.ppo_is_.*", openrlhf_gated),
    (r"nemo\..*", nemo),
    (r"areal\.(decoupled|guard)_.*", areal_decoupled),
]

UNANSWERED = dict.fromkeys(
    (
        "actor/ppo_kl",
        "rollout_corr/rollout_rs_masked_fraction",
        "clip_ratio",
        "ppo_kl",
        "vllm_kl",
        "is_filter_ratio",
        "kl_penalty",
        "probs_ratio",
        "pg_clipfrac",
        "clip_fraction",
        "filtered_fraction",
        "clip_ratio/region_mean",
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
    ),
    "a figure to log",
)
