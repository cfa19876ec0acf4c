"""Policy losses. What corrects for the sampler or for an older policy is in `_policy_corrections`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import flowrl as fr
from flowrl_operators import losses
from tests.golden.guards import ADDED, guarded, padded_tokens
from tests.golden.padded import loss_and_gradient, tensor
from tests.golden.pieces import _policy_corrections as corrections
from tests.golden.runner import Contract
from tests.golden.vectors import Case

COLUMNS = {
    "logprobs": "log_probs",
    "old_logprobs": "old_log_probs",
    "ref_logprobs": "ref_log_probs",
    "rollout_logprobs": "rollout_log_probs",
    "advantages": "advantages",
    "entropy": "entropies",
    "reward": "scores",
    "importance": "importance",
}
CLIPPED = {"clip_fraction": "clip_fraction"}


def answer(
    case: Case,
    loss: fr.Loss,
    *,
    old: str = "old_log_probs",
    ref: str = "ref_log_probs",
    figures: Mapping[str, str] | None = None,
    count: float = 1.0,
    **options: Any,
) -> Any:
    """Loss, gradient and logged figures with the columns the case has.

    `figures` maps names of the case to metrics of ours, means over the trained tokens; `count` is what the recorded mean adds
    to its count, as a factor. What an empty batch gives, and what padding may hold, is ours to say.
    """
    columns = {**COLUMNS, "old_logprobs": old, "ref_logprobs": ref}
    given = {ours: theirs for ours, theirs in columns.items() if theirs in case.inputs}
    found = loss_and_gradient(case, loss, given, **options)
    for theirs, ours in (figures or {}).items():
        if theirs in case.outputs and case.array("mask").any():  # the mean of nothing is no figure
            found[theirs] = count * metric(case, loss, given, ours)
    return guarded(case, found, "grad_log_prob")


def metric(case: Case, loss: fr.Loss, columns: Mapping[str, str], name: str) -> float:
    given = {ours: tensor(case, theirs) for ours, theirs in columns.items()}
    return fr.apply_loss(loss, given, tensor(case, "mask"))[1][name]


# --- verl ---------------------------------------------------------------------------------------------------------------


def verl(case: Case, loss: fr.Loss, figures: Mapping[str, str] | None = None, **average: Any) -> Any:
    average = average or corrections.verl_average(case)
    case, loss = corrections.verl_weighted(case, loss)
    return answer(case, loss, figures=figures, count=padded_tokens(case), **average)


def verl_ppo(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    loss = losses.ppo_clip(p["clip_ratio_low"], high=p["clip_ratio_high"], dual=p["clip_ratio_c"])
    figures = {"actor/pg_clipfrac": "clip_fraction", "actor/pg_clipfrac_lower": "dual_clip_fraction"}
    return verl(case, loss, figures)


def verl_gspo(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    loss = losses.ppo_clip(
        p["clip_ratio_low"], high=p["clip_ratio_high"], level="geometric_token", log_ratio_clip=(None, 10.0)
    )
    return verl(case, loss, {"actor/pg_clipfrac": "clip_fraction"})


def verl_gmpo(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    loss = losses.gmpo(p["clip_ratio_low"], high=p["clip_ratio_high"], count_eps=ADDED, log_ratio_clip=None)
    case, loss = corrections.verl_weighted(case, loss, level="geometric", count_eps=ADDED)
    return answer(case, loss, average="sequence_mean", average_rows="all")


def verl_cispo(case: Case, found: re.Match[str]) -> Any:
    loss = losses.cispo(case.params["clip_ratio_high"], low=case.params["clip_ratio_low"])
    return verl(case, loss, {"actor/pg_clipfrac": "clip_fraction"})


def verl_sapo(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    return verl(case, losses.sapo(p["tau_pos"], negative_tau=p["tau_neg"]), average="sequence_mean", average_eps=ADDED)


def verl_clip_cov(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    loss = losses.clip_cov(
        p["clip_ratio_low"],
        high=p["clip_ratio_high"],
        low_cov=p["clip_cov_lb"],
        high_cov=p["clip_cov_ub"],
        share=p["clip_cov_ratio"],
        log_ratio_clip=None,
    )
    return verl(case, loss, {"actor/pg_clipfrac": "cov_fraction"})


def verl_kl_cov(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    return verl(case, losses.kl_cov(p["kl_cov_ratio"], coef=p["ppo_kl_coef"], log_ratio_clip=None))


def verl_dppo(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    loss = losses.dppo(
        {"tv": "tv", "kl": "binary_kl"}[found["divergence"]],
        low=p["clip_ratio_low"],
        high=p["clip_ratio_high"],
        cap=p["clip_ratio_c"],
    )
    pushes = case.array("advantages")[
        case.array("mask") > 0
    ].all()  # it counts tokens without an advantage as dropped too
    return verl(case, loss, {"actor/pg_clipfrac": "clip_fraction"} if pushes else {})


def verl_dro(case: Case, found: re.Match[str]) -> Any:
    return verl(case, losses.dro(case.params["dro_beta"]))


def verl_gpg(case: Case, found: re.Match[str]) -> Any:
    return verl(case, losses.reinforce())


# --- OpenRLHF -----------------------------------------------------------------------------------------------------------


def openrlhf(case: Case, found: re.Match[str]) -> Any:
    loss, options = corrections.openrlhf(case)
    return answer(case, loss, figures={"clip_ratio": "clip_fraction"}, **options)


# --- AReaL --------------------------------------------------------------------------------------------------------------


def areal(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    if "tau_pos" in p:
        level = "geometric" if p.get("importance_sampling_level") == "sequence" else "token"
        loss = losses.sapo(p["tau_pos"], negative_tau=p["tau_neg"], level=level, log_ratio_clip=None)
        return answer(case, loss, average="token_mean")
    return answer(case, corrections.areal_ppo(p), figures=CLIPPED, average="token_mean")


# --- SkyRL --------------------------------------------------------------------------------------------------------------


def skyrl(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    figure, old = "clip_fraction", "old_log_probs"
    has_figure = found["name"] not in ("sapo", "kl_cov")  # which clip nothing
    match found["name"]:
        case "ppo" | "dual_clip":
            loss = losses.ppo_clip(p["eps_clip_low"], high=p["eps_clip_high"], dual=p.get("clip_ratio_c"))
        case "gspo":
            low, high = p["eps_clip_low"], p["eps_clip_high"]
            loss = losses.ppo_clip(low, high=high, level="geometric_token", log_ratio_clip=(None, 10.0))
        case "cispo":
            loss = losses.cispo(p["cispo_eps_clip_high"], low=p["cispo_eps_clip_low"])
        case "sapo":
            loss = losses.sapo(p["tau_pos"], negative_tau=p["tau_neg"])
        case "clip_cov":
            low, high = p["clip_cov_lb"], p["clip_cov_ub"]
            loss, figure = (
                losses.clip_cov(low_cov=low, high_cov=high, share=p["clip_ratio"], log_ratio_clip=None),
                "cov_fraction",
            )
        case "kl_cov":
            loss = losses.kl_cov(p["kl_cov_frac"], coef=p["ppo_kl_coef"], log_ratio_clip=None)
        case _:
            kind = p["dppo_type"].removeprefix("binary_")
            loss = losses.dppo(
                "tv" if kind == "tv" else "binary_kl",
                low=p["delta_low"],
                high=p["delta_high"],
                value="ratio",
                cap=None,
            )
            old = "rollout_log_probs"
    if p.get("cispo_anchor") == "rollout":
        old = "rollout_log_probs"
    figures = {"clip_ratio": figure} if has_figure else None
    whole = case
    case, loss = corrections.skyrl_corrected(case, loss)
    return answer(case, loss, old=old, average="token_sum", figures=figures if case is whole else None)


# --- slime --------------------------------------------------------------------------------------------------------------


def slime(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    low, high = p.get("eps_clip", 0.2), p.get("eps_clip_high", 0.2)
    match p.get("advantage_estimator"):
        case "cispo":
            loss = losses.cispo(high, low=low, log_ratio_clip=None)
        case estimator:
            level = "geometric" if estimator == "gspo" else "token"
            loss = losses.ppo_clip(low, high=high, dual=p.get("eps_clip_c"), level=level, log_ratio_clip=None)
    loss = corrections.slime_corrected(case, loss, found[0])
    if not p.get("use_kl_loss"):
        return answer(case, loss, **corrections.slime_average(case))
    loss = loss + p["kl_loss_coef"] * slime_kl(p)
    return in_single_precision(case, answer(case, loss, **corrections.slime_average(case)))


def in_single_precision(case: Case, found: Any) -> Any:
    """The recorded KL term is a float32 number inside a float64 loss, so its rounding is far above the file's tolerance."""
    if isinstance(found, Contract):
        return found
    slope, wanted = found["grad_log_prob"], case.wanted("grad_log_prob")
    loose = {"rtol": 1e-5, "atol": 1e-7}
    holds = np.allclose(found["loss"], case.wanted("loss"), **loose) and np.allclose(slope, wanted, **loose)
    return Contract("a term is computed in the precision of its columns (there the KL term in float32)", holds)


def slime_kl(p: dict[str, Any]) -> fr.Loss:
    kind = p["kl_loss_type"]
    weighed = {"importance": "value"} if p.get("use_unbiased_kl") else {}
    if kind == "low_var_kl":
        return losses.kl("k3", log_ratio_clip=None, value_clip=10.0, **weighed)
    return losses.kl(kind, log_ratio_clip=None, **weighed)


# --- ROLL ---------------------------------------------------------------------------------------------------------------


def roll(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    low, high = (p["pg_clip_low"], p["pg_clip_high"]) if p["use_pg_clip_range"] else (p["pg_clip"], p["pg_clip"])
    match found["name"]:
        case "cispo":
            loss = losses.cispo(
                p["cispo_epsilon_high"],
                low=p["cispo_epsilon_low"],
                drop=p["cispo_use_unified_mask"],
                log_ratio_clip=None,
            )
        case "topr":
            positive, negative = p["topr_positive_weight"], p["topr_negative_weight"]
            loss = losses.topr(positive=positive, negative=negative, log_ratio_clip=None)
        case "kimi15":
            loss = losses.dro(p["kimi15_tau"])
        case "pg_vanilla":
            loss = losses.reinforce()
        case "tis":
            loss = losses.cispo(p["tis_upper_bound"] - 1, low=1 - p["tis_lower_bound"], log_ratio_clip=None)
        case _:
            level = "geometric" if p["importance_sampling"] == "seq" else "token"
            dual = 1 + 2 * p["pg_clip"] if p["dual_clip_loss"] else None
            loss = losses.ppo_clip(low, high=high, dual=dual, level=level, log_ratio_clip=None)
    if "ref_log_probs" in case.inputs:
        loss = loss + ROLL_KL_COEF * losses.kl("k3", log_ratio_clip=None, value_clip=10.0)
    return roll_averaged(case, loss)


ROLL_KL_COEF = 0.04
"""The file does not record it; it is the one of the other systems on the same inputs."""


def roll_averaged(case: Case, loss: fr.Loss) -> Any:
    mask = case.array("mask")
    match case.params["loss_agg_mode"]:
        case "token-mean":  # sums over padding too and divides by the tokens of the mask
            if not mask.any() or not np.isfinite(case.wanted("loss")):
                return answer(case, loss, average="token_mean")
            everywhere = corrections.with_input(case, mask=np.ones_like(mask))
            return answer(everywhere, loss, average="token_sum", factor=1 / max(mask.sum(), 1))
        case "seq-mean-token-sum":
            return answer(case, loss, average="sequence_sum", factor=padded_rows(mask))
        case "seq-mean-token-sum-norm":
            return answer(case, loss, average="constant", average_length=mask.shape[1], average_rows=1)
    return answer(case, loss, average="sequence_mean", factor=padded_rows(mask))


def padded_rows(mask: np.ndarray) -> float:
    """B / (B + 1e-8): makes a mean over rows a sum / (B + 1e-8)."""
    rows = float((mask.sum(1) > 0).sum())
    return rows / (rows + ADDED)


# --- TRL ----------------------------------------------------------------------------------------------------------------

TRL_FIGURES = {
    "clip_ratio/region_mean": "clip_fraction",
    "clip_ratio/low_mean": "clip_low_fraction",
    "clip_ratio/high_mean": "clip_high_fraction",
}


TRL_LEVELS = {"token": "token", "sequence": "geometric", "sequence_token": "geometric_token"}


def trl(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    case, loss = corrections.trl_corrected(case, trl_policy(p))
    is_per_row = p.get("importance_sampling_level", "token") != "token"  # so are its figures; ours are of tokens
    figures = {} if is_per_row or p["loss_type"] in ("sapo", "vespo") else TRL_FIGURES
    if p["loss_type"] == "cispo":
        figures = {"cispo_clip_ratio": "pushed_fraction"}
    if share := p.get("top_entropy_quantile"):
        loss = loss * losses.top_entropy(share, threshold="float32")
    if beta := p.get("beta"):
        loss, figures = loss + beta * trl_kl(p), {**figures, "kl": "kl"}
    if coef := p.get("entropy_coef"):
        return trl_with_entropy(case, loss, coef)
    return answer(case, loss, figures=figures, **corrections.trl_average(case))


def trl_policy(p: dict[str, Any]) -> fr.Loss:
    """The policy term alone."""
    level = TRL_LEVELS[p.get("importance_sampling_level", "token")]
    match p["loss_type"]:
        case "cispo":  # its bound is that of the ratio itself
            return losses.cispo(p["epsilon_high"] - 1, level=level, log_ratio_clip=None)
        case "sapo":  # it holds the temperatures in float32
            positive, negative = p.get("sapo_temperature_pos", 1.0), p.get("sapo_temperature_neg", 1.05)
            tau, negative_tau = float(np.float32(positive)), float(np.float32(negative))
            return losses.sapo(tau, negative_tau=negative_tau, level=level, log_ratio_clip=None)
        case "vespo":
            power = (p.get("vespo_k_pos", 2.0), p.get("vespo_k_neg", 3.0))
            decay = (p.get("vespo_lambda_pos", 3.0), p.get("vespo_lambda_neg", 2.0))
            return losses.vespo(power=power, decay=decay)
    # its two-sided bound is the dual clip's where it lies above 1 + epsilon_high
    return losses.ppo_clip(
        p["epsilon_low"], high=p["epsilon_high"], dual=p.get("delta"), level=level, log_ratio_clip=None
    )


def trl_kl(p: dict[str, Any]) -> fr.Loss:
    return losses.kl("k3", log_ratio_clip=None, importance="value" if p.get("use_bias_correction_kl") else None)


def trl_with_entropy(case: Case, loss: fr.Loss, coef: float) -> Any:
    """Its entropy is averaged over tokens whatever the loss is averaged by: two losses, added."""
    found = answer(case, loss, **corrections.trl_average(case))
    if isinstance(found, Contract):
        return found
    acted_on = case
    if share := case.params.get("top_entropy_quantile"):  # over the tokens that learn
        learns = corrections.per_token(case, losses.top_entropy(share, threshold="float32"))
        acted_on = corrections.with_input(case, mask=(learns > 0).astype(float))
    bonus = loss_and_gradient(
        acted_on, coef * losses.entropy_bonus(), {"entropy": "entropies"}, leaf="entropy", out="grad_entropy"
    )
    return {**found, "loss": found["loss"] + bonus["loss"], "grad_entropy": bonus["grad_entropy"]}


def trl_gmpo(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    loss = losses.gmpo(p["epsilon_low"], high=p["epsilon_high"], log_ratio_clip=None)
    figures = {}
    if beta := p.get("beta"):
        loss, figures = loss + beta * trl_kl(p), {"kl": "kl"}
    return rows_say_nothing(case, answer(case, loss, figures=figures, average="sequence_mean", average_rows="all"))


def trl_rloo(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    loss = losses.ppo_clip(p["epsilon_low"], high=p["epsilon_high"], level="sequence", log_ratio_clip=None)
    return rows_say_nothing(case, answer(case, loss, average="sequence_mean", average_rows="all"))


def rows_say_nothing(case: Case, found: Any) -> Any:
    """A row without a trained token adds -A / B to the recorded loss, a constant without gradient; with us it says nothing."""
    if isinstance(found, Contract):
        return found
    empty = case.array("mask").sum(1) == 0
    added = -case.array("advantages")[empty][:, 0].sum() / len(empty) if empty.any() else 0.0
    if not added:
        return found
    same = np.allclose(found["loss"] + added, case.wanted("loss"), rtol=case.rtol, atol=case.atol)
    slope = np.allclose(found["grad_log_prob"], case.wanted("grad_log_prob"), rtol=case.rtol, atol=case.atol)
    return Contract("a row without a trained token says nothing (there it adds -A, without gradient)", same and slope)


# --- prime-rl -----------------------------------------------------------------------------------------------------------


def prime(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    if found["name"] == "ce":
        return answer(case, losses.sft(), average="token_mean")
    if "ipo_threshold" in p:
        loss = losses.dppo(low=p["ipo_threshold"], drop="all", value="ratio", cap=None, log_ratio_clip=None)
    else:
        low, high = p["dppo_mask_low"], p["dppo_mask_high"]
        loss = losses.dppo(low=low, high=high, value="ratio", cap=None, log_ratio_clip=None)
    # (x - q)^2 is twice the k2 estimate with the sampler as the reference
    loss = p["adv_tau"] * loss + 2 * p["kl_tau"] * losses.kl("k2")
    rollout = "rollout_log_probs"
    return answer(case, loss, old=rollout, ref=rollout, average="token_mean")


CONVENTIONS: dict[str, Callable[[Case], Any]] = {**corrections.CONVENTIONS}

PATTERNS: list[tuple[str, Callable[..., Any]]] = [
    *corrections.PATTERNS,
    (r"verl\.(ppo|clip_higher|dual_?clip|dapo|vanilla).*", verl_ppo),
    (r"verl\.gspo_.*", verl_gspo),
    (r"verl\.gmpo.*", verl_gmpo),
    (r"verl\.cispo.*", verl_cispo),
    (r"verl\.sapo.*", verl_sapo),
    (r"verl\.clip_cov.*", verl_clip_cov),
    (r"verl\.kl_cov.*", verl_kl_cov),
    (r"verl\.dppo_(?P<divergence>tv|kl).*", verl_dppo),
    (r"verl\.dro.*", verl_dro),
    (r"verl\.gpg.*", verl_gpg),
    (r"openrlhf\..*", openrlhf),
    (r"areal\.(gspo|ppo|sapo|dual_clip|clip_higher|grpo).*", areal),
    (r"skyrl\.(?P<name>ppo|dual_clip|gspo|cispo|sapo|clip_cov|kl_cov|dppo)(_\w+)?", skyrl),
    (r"slime\..*", slime),
    (r"roll\.(?P<name>cispo|topr|kimi15|pg_vanilla|tis|\w+).*", roll),
    (r"trl\.gmpo.*", trl_gmpo),
    (r"trl\.rloo_sequence_ppo.*", trl_rloo),
    (
        r"trl\.(bnpo|cispo|clip_higher|dapo|dr_grpo|grpo|gspo|luspo|off_policy|sapo|top_entropy|two_sided|vespo).*",
        trl,
    ),
    (r"prime\.(?P<name>ce|dppo_tv_kl|ipo_trust_region).*", prime),
]

UNANSWERED: dict[str, str] = {
    **corrections.UNANSWERED,
    **dict.fromkeys(("vespo/phi_seq_mean", "cispo_clip_ratio", "kl"), "a figure to log"),
}
