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
from flowrl_operators import losses
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
    "rollout_logprobs": "rollout_log_probs",
    "importance": "importance",
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


def openrlhf_gated(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    low, high = (-math.inf, *p["is_correction_threshold"])[-2:]  # one number is the upper bound
    loss = losses.ppo_clip(p["clip_eps_low"], high=p["clip_eps_high"], dual=p.get("dual_clip"))
    exact: dict[str, Any] = {"log_ratio_clip": None, "unknown": "extreme"}
    if p["is_correction_mode"] == "clip":
        loss = loss * losses.truncated_importance(high, floor=low, **exact)
    else:
        over = "mean" if p["is_correction_level"] == "seq" else "token"
        gate = losses.within_drift(low, high, statistic=p["is_correction_gating"], over=over, **exact)
        loss = loss * losses.truncated_importance(None, **exact) * gate
    return answer(case, loss, **openrlhf_average(case))


def openrlhf_gspo(case: Case) -> Any:
    """With any correction its sequence ratio is taken against the sampler; there is no other correction then."""
    p = case.params
    loss = losses.ppo_clip(p["clip_eps_low"], high=p["clip_eps_high"], dual=p.get("dual_clip"), level="geometric")
    return answer(case, loss, old="rollout_log_probs", average="sequence_mean", average_eps=ADDED)


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
        return losses.truncated_importance(high, floor=low or 0.0, level=level, log_ratio_clip=None)
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


def nemo_corrected(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    loss = losses.ppo_clip(
        p.get("ratio_clip_min", 0.2),
        high=p.get("ratio_clip_max", 0.2),
        dual=p.get("ratio_clip_c"),
        level="geometric" if p.get("sequence_level_importance_ratios") else "token",
        count_eps=ADDED,
        log_ratio_clip=None,
    )
    return answer(case, loss * nemo_importance(case), **nemo_average(case))


# --- SkyRL --------------------------------------------------------------------------------------------------------------


def skyrl_correction(params: dict[str, Any]) -> fr.Loss | None:
    """The product of what its off-policy options ask for."""
    p = params
    parts: list[fr.Loss] = []
    kind = p.get("tis_ratio_type")
    if kind is not None:
        parts.append(losses.truncated_importance(p[f"{kind}_tis_ratio_clip_high"], level=kind))
    metric = p.get("sequence_mask_metric")
    if metric is not None:
        name = {"geometric": "geo"}.get(metric, metric)
        over = "mean" if metric == "geometric" else "sum"
        low, high = p[f"{name}_mask_low"], p[f"{name}_mask_high"]
        parts.append(losses.within_drift(low, high, over=over, log_ratio_clip=None))
    for name, over in (("outlier_token_is_threshold", "each"), ("token_mask_is_threshold", "token")):
        low, high = p.get(f"{name}_low"), p.get(f"{name}_high")
        if low is not None or high is not None:
            parts.append(losses.within_drift(low, high, over=over))
    return math.prod(parts[1:], start=parts[0]) if parts else None


def skyrl_corrected(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    loss = losses.ppo_clip(p["eps_clip_low"], high=p["eps_clip_high"])
    correction = skyrl_correction(p)
    return answer(case, loss if correction is None else loss * correction, average="token_sum")


def skyrl_rollout_is(case: Case) -> Any:
    """REINFORCE with the ratio of the live policy to the sampler as a weight, 0 outside the bounds."""
    p = case.params
    weight = losses.masked_importance(1 - p["eps_clip_low"], 1 + p["eps_clip_high"])
    return answer(case, losses.reinforce() * weight, old="", average="token_sum")


def skyrl_cispo(case: Case) -> Any:
    p = case.params
    loss = losses.cispo(p["cispo_eps_clip_high"], low=p["cispo_eps_clip_low"])
    return answer(case, loss, old="rollout_log_probs", average="token_sum")


# --- slime --------------------------------------------------------------------------------------------------------------


def slime_average(case: Case) -> dict[str, Any]:
    if case.params.get("calculate_per_token_loss"):
        return {"average": "token_sum"}
    return {"average": "sequence_mean", "average_rows": 1}


def slime_loss(case: Case) -> fr.Loss:
    p = case.params
    return losses.ppo_clip(
        p.get("eps_clip", 0.2), high=p.get("eps_clip_high", 0.2), dual=p.get("eps_clip_c"), log_ratio_clip=None
    )


def slime_tis(case: Case) -> Any:
    p = case.params
    weight = losses.truncated_importance(p["tis_clip"], floor=p["tis_clip_low"], log_ratio_clip=None)
    return answer(case, slime_loss(case) * weight, **slime_average(case))


def slime_icepop(case: Case) -> Any:
    p = case.params
    weight = losses.masked_importance(p["tis_clip_low"], p["tis_clip"], log_ratio_clip=None)
    return answer(case, slime_loss(case) * weight, **slime_average(case))


def slime_opsm(case: Case) -> Any:
    gate = losses.off_policy_mask(case.params["opsm_delta"], against="old_logprobs")
    return answer(case, slime_loss(case) * gate, **slime_average(case))


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


def trl_loss(case: Case) -> fr.Loss:
    p = case.params
    return losses.ppo_clip(p["epsilon_low"], high=p["epsilon_high"], log_ratio_clip=None)


def trl_weighted(case: Case, found: re.Match[str]) -> Any:
    ratio = case.array("importance_sampling_ratio")
    case = with_input(case, importance=np.broadcast_to(ratio, case.array("mask").shape))
    return answer(case, trl_loss(case) * losses.stored_importance(), **trl_average(case))


def trl_off_policy_mask(case: Case, found: re.Match[str]) -> Any:
    gate = losses.off_policy_mask(case.params["off_policy_mask_threshold"])
    return answer(case, trl_loss(case) * gate, **trl_average(case))


# --- AReaL --------------------------------------------------------------------------------------------------------------


def areal_decoupled(case: Case, found: re.Match[str]) -> Any:
    """PPO against the proximal policy times the weight proximal / behaviour; rejected tokens stay in the count."""
    p = case.params
    correction = areal_correction(p["rejection_sampling"])
    loss = losses.ppo_clip(p["eps_clip"], high=p.get("eps_clip_higher"), dual=p.get("c_clip"), log_ratio_clip=None)
    result = answer(case, loss * correction, average="token_mean")
    if isinstance(result, Contract):
        return result
    return {**result, "behave_imp_weight": Where(per_token(case, correction), case.array("mask") > 0)}


def areal_correction(p: dict[str, Any]) -> fr.Loss:
    low, high = p.get("lower"), p["upper"]
    options: dict[str, Any] = {"log_ratio_clip": None, "unknown": "equal"}
    is_ratio = p["metric"] == "ratio"
    # a row judged by its ratio gets the geometric mean as its weight, whatever it is judged by
    level = "geometric" if p["level"] == "sequence" and is_ratio else "token"
    if p["action"] == "clamp":
        return losses.truncated_importance(high, floor=low or 0.0, level=level, **options)
    divergence = {} if is_ratio else {"statistic": p["metric"].removeprefix("kl_"), "direction": "from_old"}
    over = "token" if p["level"] == "token" else p["agg"]
    gate = losses.within_drift(low, high, over=over, **divergence, **options)
    return losses.truncated_importance(None, level=level, **options) * gate


def per_token(case: Case, weight: fr.Loss) -> np.ndarray:
    """A weight at every token: the gradient of the sum of advantage times weight by the advantage."""
    columns = {**{ours: theirs for ours, theirs in COLUMNS.items() if theirs in case.inputs}, "logprobs": "advantages"}
    found = loss_and_gradient(case, losses.sft() * weight, columns, average="token_sum")
    return -found["grad_log_prob"]


CONVENTIONS: dict[str, Callable[[Case], Any]] = {
    "openrlhf.gspo_rollout_anchored": openrlhf_gspo,
    "skyrl.cispo_rollout_anchor_sum": skyrl_cispo,
    "skyrl.rollout_is_sum": skyrl_rollout_is,
    "slime.tis": slime_tis,
    "slime.icepop": slime_icepop,
    "slime.opsm": slime_opsm,
}

PATTERNS: list[tuple[str, Callable[..., Any]]] = [
    (r"verl\.bypass_.*", lambda case, found: verl_bypass(case)),
    (r"openrlhf\.ppo_is_(token|seq)_(mask|clip)_(ratio|binary_kl|tv)", openrlhf_gated),
    (r"nemo\.ppo_(tis|icepop|seq-mask-tis|is_untruncated).*", nemo_corrected),
    (r"nemo\.guard_.*", nemo_corrected),
    (r"nemo\.gspo_is_sequence.*", nemo_corrected),
    (r"skyrl\.ppo_(tis|seqmask|outlier|token_mask)\w*_sum", skyrl_corrected),
    (r"trl\.\w+_tis_(token|sequence)", trl_weighted),
    (r"trl\.off_policy_mask.*", trl_off_policy_mask),
    (r"areal\.(decoupled|guard)_rs_.*", areal_decoupled),
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
