"""Advantages and returns. Systems that leave masked tokens unmasked, or fill them, are compared where the mask is 1."""

from __future__ import annotations

from typing import Any

import numpy as np

import flowrl as fr
from flowrl_operators import advantages, rewards
from tests.golden.pieces._undefined import defined
from tests.golden.runner import Contract, Where
from tests.golden.vectors import Case, matrix, ragged, to_array

VERL = {"unbiased": True, "count_eps": 1e-8}
"""How verl whitens."""


def spread(case: Case, advantage: np.ndarray, mask: str = "response_mask") -> Where:
    """An advantage per response at each of its tokens."""
    inside = case.array(mask)
    return Where(np.broadcast_to(np.asarray(advantage)[:, None], inside.shape), inside)


def on(case: Case, tokens: fr.Ragged, mask: str = "response_mask") -> Where:
    return Where(matrix(tokens), case.array(mask))


def scores(case: Case) -> np.ndarray:
    """The response's reward: rewards per token summed over the whole row."""
    return case.array("token_level_rewards").sum(1)


def groups(case: Case) -> np.ndarray:
    return np.asarray(case.inputs["index"])


def in_order(count: int, size: int) -> np.ndarray:
    """Groups of `size` rows one after the other."""
    return np.arange(count) // size


# --- group statistics -----------------------------------------------------------------------------------------------------


def verl_grpo(case: Case, match: Any) -> dict[str, Any]:
    p = case.params
    by_std = p["norm_adv_by_std_in_grpo"] if "norm_adv_by_std_in_grpo" in p else "nostd" not in match[0]
    found = advantages.group_norm(
        scores(case), groups(case), None,
        scale="group" if by_std else "none", unbiased=True, eps=p["epsilon"], single="scaled",
    )  # fmt: skip
    return {"advantages": spread(case, found)}


def verl_rloo(case: Case, match: Any) -> dict[str, Any]:
    single = "reward" if match[0] == "verl.rloo" else "zero"
    return {"advantages": spread(case, advantages.rloo(scores(case), groups(case), None, single=single))}


def opo(case: Case) -> dict[str, Any]:
    found = advantages.opo(
        scores(case), groups(case), ragged(case.array("response_mask")), single="reward", counts="scored"
    )
    return {"advantages": spread(case, found)}


def gpg(case: Case) -> dict[str, Any]:
    found = advantages.gpg(
        scores(case), groups(case), None,
        valid="nonzero", divisor=float(case.params["f_norm"]), single="reward", count_ratio="float32",
    )  # fmt: skip
    return {"advantages": spread(case, found)}


def pass_at_k(case: Case, match: Any) -> Any:
    p, score, group = case.params, scores(case), groups(case)
    found = advantages.pass_at_k(
        score, group, None, scale="group" if p["norm_adv_by_std_in_grpo"] else "none", eps=p["epsilon"]
    )
    if np.isnan(score).any():
        return Contract(
            "a row of unknown reward says nothing",
            holds=bool(np.isfinite(found).all() and not found[np.isnan(score)].any()),
        )
    if "raises" in case.outputs:
        _, number, count = np.unique(group, return_inverse=True, return_counts=True)
        alone = count[number] == 1
        holds = alone.any() and (found[alone] == 0).all() and np.isfinite(found).all()
        return Contract("a group of one gets 0", holds=bool(holds))
    return {"advantages": spread(case, found)}


def skyrl_maxrl(case: Case) -> dict[str, Any]:
    found = advantages.maxrl(
        scores(case), groups(case), None, eps=case.params["epsilon"], negative="divide", single="reward"
    )
    return {"advantages": spread(case, found)}


def trl_grpo(case: Case, match: Any) -> dict[str, Any]:
    p, reward = case.params, case.array("rewards")
    found = advantages.group_norm(
        reward, in_order(len(reward), p["num_generations"]), None,
        scale=p["scale_rewards"], unbiased=True, eps=p["eps"], count_ratio="float32",
    )  # fmt: skip
    return {"advantages": found}


def trl_rloo(case: Case, match: Any) -> dict[str, Any]:
    p, reward = case.params, case.array("rewards")
    clip = tuple(p["reward_clip_range"]) if p["reward_clip_range"] else None
    if p["beta"]:
        reward = rewards.kl_penalised(
            reward, ragged(case.array("old_log_probs")), ragged(case.array("ref_log_probs")), ragged(case.array("mask")),
            coefficient=p["beta"], log_ratio_clip=None, reward_clip=clip,
        )  # fmt: skip
        clip = None
    size = p["num_generations"]
    found = advantages.rloo(reward, in_order(len(reward), size), None, reward_clip=clip)
    if p["normalize_advantages"]:
        # rows without a reward, or without another one to compare with, have no part in mean and deviation
        scored = np.isfinite(reward).reshape(-1, size)
        says = (scored & ((scored.sum(1, keepdims=True) > 1) | (size == 1))).reshape(-1)
        found = np.where(says, found, np.nan)
        found = advantages.batch_norm(found, None, None, unbiased=True, eps=p["eps"], count_ratio="float32")
    return {"advantages": found}


def nemo_grpo(case: Case, match: Any) -> dict[str, Any]:
    p, reward, group = case.params, case.array("rewards"), groups(case)
    over = "others" if p["use_leave_one_out_baseline"] else "group"
    found = advantages.group_norm(
        reward, group, None,
        baseline=over, scale=over if p["normalize_rewards"] else "none", unbiased=True, eps=p["epsilon"],
    )  # fmt: skip
    baseline, std = advantages.group_statistics(reward, group, baseline=over, scale=over, unbiased=True)
    # one unknown reward makes its whole group unknown there, and its std 0
    is_known = ~np.isin(group, group[~np.isfinite(reward)])
    return {
        "advantages": spread(case, found, "mask"),
        "baseline": Where(baseline, np.isfinite(reward)),
        "std": Where(std, is_known),
    }


def areal_norm(case: Case, match: Any) -> dict[str, Any]:
    p, reward = case.params, case.array("rewards")
    mean, std = match["mean"], match["std"]
    baseline = {"None": "none", "group": "others" if match["loo"] else "group"}
    baseline["batch"] = "batch_others" if match["loo"] else "batch"
    found = advantages.group_norm(
        reward, in_order(len(reward), p["group_size"]), None,
        baseline=baseline[mean], scale="none" if std == "None" else std, eps=p["eps"], unbiased=not match["biased"],
        around="baseline", single="scaled" if match["loo"] else "zero",
    )  # fmt: skip
    return {"normalized": found.reshape(np.shape(case.outputs["normalized"]))}


def roll_norm(case: Case, match: Any) -> Any:
    p, reward = case.params, case.array("rewards").reshape(-1)
    found = advantages.group_norm(
        reward, in_order(len(reward), p["n_sample"]), None,
        baseline=p["norm_mean_type"] or "none", scale=p["norm_std_type"] or "none", unbiased=True, eps=p["epsilon"],
        flat="eps",
    )  # fmt: skip
    recorded = case.wanted("normalized")
    if recorded.size != found.size:  # each response by the std of each group
        own = recorded[in_order(len(reward), p["n_sample"]), np.arange(len(reward))]
        known = np.isfinite(own)
        same = np.allclose(found[known], own[known], rtol=case.rtol, atol=case.atol)
        return Contract(
            "a response is divided by the deviation of its own group", bool(same and np.isfinite(found).all())
        )
    return {"normalized": found.reshape(recorded.shape)}


def slime_norm(case: Case, match: Any) -> Any:
    p, rows = case.params, [to_array(group) for group in case.inputs["groups"]]
    reward, size = np.concatenate(rows), p["n_samples_per_prompt"]
    is_whole = len(reward) == size * p["rollout_batch_size"]  # otherwise they take the batch for one group
    group = in_order(len(reward), size) if is_whole else np.zeros(len(reward))
    scale = "none" if match["nostd"] else "group"
    found = advantages.group_norm(reward, group, None, scale=scale, unbiased=True, eps=p["epsilon"])
    return {"normalized": found}


def prime_mean(case: Case) -> dict[str, Any]:
    reward = case.array("group_rewards")
    return {"advantages": advantages.group_norm(reward, np.zeros(len(reward)), None, scale="none")}


def prime_maxrl(case: Case) -> Any:
    reward = case.array("group_rewards")
    found = advantages.maxrl(reward, np.zeros(len(reward)), None)
    unknown = np.isnan(reward)
    if unknown.any():
        return Contract("an unknown reward says nothing", bool(np.isfinite(found).all() and not found[unknown].any()))
    return {"advantages": found}


# --- rewards of several parts ---------------------------------------------------------------------------------------------


def parts_of(case: Case) -> tuple[tuple[str, ...], list[np.ndarray]]:
    given = case.inputs["reward_components"]
    return tuple(given), [to_array(values) for values in given.values()]


def verl_gdpo(case: Case) -> dict[str, Any]:
    parts, columns = parts_of(case)
    found = advantages.multi_reward.function(
        groups(case), ragged(case.array("response_mask")), *columns,
        parts=parts, weights=tuple(case.params["weights"]), order="normalize_then_sum", eps=case.params["epsilon"],
        unbiased=True, single="scaled", counts="scored", over="tokens",
    )  # fmt: skip
    return {"advantages": spread(case, found)}


def nemo_gdpo(case: Case, match: Any) -> dict[str, Any]:
    parts, columns = parts_of(case)
    over = "others" if case.params["use_leave_one_out_baseline"] else "group"
    found = advantages.multi_reward.function(
        groups(case), None, *columns,
        parts=parts, weights=tuple(case.params["weights"]), order="normalize_then_sum", baseline=over, scale=over,
        unbiased=True, over="samples", over_eps=0.0, over_guard="std",
    )  # fmt: skip
    return {"advantages": spread(case, found, "mask")}


def trl_parts(case: Case, match: Any) -> dict[str, Any]:
    p, table = case.params, case.array("rewards_per_func")
    order = p["multi_objective_aggregation"]
    is_sum = order == "sum_then_normalize"
    found = advantages.multi_reward.function(
        in_order(len(table), p["num_generations"]), None, *table.T,
        parts=tuple(f"part_{i}" for i in range(table.shape[1])), weights=tuple(p["reward_weights"]), order=order,
        scale=p["scale_rewards"] if is_sum else "group", eps=p["eps"], unbiased=True, count_ratio="float32", missing="part",
        over="none" if is_sum else "samples", over_eps=p["eps"], over_guard="std",
    )  # fmt: skip
    return {"advantages": found}


# --- sums of rewards ------------------------------------------------------------------------------------------------------


def verl_reinforce_pp(case: Case) -> dict[str, Any]:
    mask = ragged(case.array("response_mask"))
    found = advantages.reinforce_pp(
        np.zeros(len(mask)), mask, ragged(case.array("token_level_rewards")), gamma=case.params["gamma"], **VERL
    )
    return {"advantages": on(case, found["advantages"]), "returns": on(case, found["returns"])}


def verl_reinforce_pp_baseline(case: Case) -> dict[str, Any]:
    mask = ragged(case.array("response_mask"))
    found = advantages.reinforce_pp_baseline(
        scores(case), groups(case), mask, single="reward", counts="scored", guard="variance", **VERL
    )
    return {"advantages": spread(case, found)}


def skyrl_reinforce_pp(case: Case) -> dict[str, Any]:
    mask = ragged(case.array("response_mask"))
    found = advantages.reinforce_pp(
        np.zeros(len(mask)), mask, ragged(case.array("token_level_rewards")),
        gamma=case.params["gamma"], masked="reset", unbiased=True,
    )  # fmt: skip
    return {"advantages": on(case, found["advantages"]), "returns": on(case, found["returns"])}


def verl_remax(case: Case) -> dict[str, Any]:
    found = advantages.remax(
        scores(case), case.array("reward_baselines"), ragged(case.array("response_mask")),
        ragged(case.array("token_level_rewards")), per="token",
    )  # fmt: skip
    return {"advantages": on(case, found["advantages"]), "returns": on(case, found["returns"])}


def nothing_to_whiten(case: Case, advantage: fr.Ragged) -> Contract | None:
    """Where all tokens have the same advantage, what is recorded is the rounding of a float32 mean, times 1e4."""
    if "advantages" not in case.outputs:  # an input of the page on disagreements, which nobody recorded
        return None
    inside = case.array("action_mask") > 0
    recorded = case.wanted("advantages")[inside]
    if matrix(advantage)[inside].any() or not recorded.any() or not np.isfinite(recorded).all():
        return None
    return Contract("equal advantages are whitened to exactly 0", bool((np.abs(recorded) < 0.02).all()))


def openrlhf(case: Case, match: Any) -> Any:
    """A baseline per response, a KL penalty per token, the sum from each token on, and for REINFORCE++ whitening."""
    p, reward, mask = case.params, case.array("rewards"), ragged(case.array("action_mask"))
    group = in_order(len(reward), p["n_samples_per_prompt"])
    match match["name"]:
        case "rloo":
            reward = advantages.rloo(reward, group, None)
        case "grpo_group_norm":
            reward = advantages.group_norm(reward, group, None, unbiased=True, eps=1e-9)
        case "dr_grpo" | "reinforce_plus_plus_baseline":
            reward = advantages.group_norm(reward, group, None, scale="none")
        case "flash_reinforce":
            reward = advantages.group_norm(reward, group, None, baseline="batch", scale="none")
    paid = None
    if p.get("kl_coef"):
        kl = case.array("kl")
        paid = rewards.kl_shaped(reward, ragged(kl), ragged(np.zeros_like(kl)), mask, coefficient=p["kl_coef"])
    found = advantages.reinforce(reward, mask, paid, gamma=p.get("gamma", 1.0), masked="decay")
    advantage = found["advantages"]
    if match["name"].startswith("reinforce_plus_plus"):
        advantage = advantages.whiten(
            advantage, mask, unbiased=False, guard="floor", scale=not (match["no_std"] or p.get("no_std_norm"))
        )
        if (contract := nothing_to_whiten(case, advantage)) is not None:
            return contract
    return {"advantages": on(case, advantage, "action_mask"), "returns": on(case, found["returns"], "action_mask")}


def nemo_reinforce_pp(case: Case, match: Any) -> dict[str, Any]:
    """The reward, centred in its group or not, minus the KL of each token; not summed; whitened."""
    p, reward, mask = case.params, case.array("rewards"), ragged(case.array("mask"))
    if p["minus_baseline"]:
        reward = advantages.group_norm(reward, groups(case), None, scale="none")
    paid = None
    if p["use_kl_in_reward"]:
        paid = rewards.kl_shaped(
            reward, ragged(case.array("log_probs")), ragged(case.array("ref_log_probs")), mask,
            coefficient=p["kl_coef"], kind=p["kl_type"], value_clip=10.0, paid="every",
        )  # fmt: skip
    found = advantages.reinforce_pp(reward, mask, paid, gamma=0.0 if paid else 1.0, guard="floor")
    return {"advantages": on(case, found["advantages"], "mask")}


def nemo_raw(case: Case, match: Any) -> dict[str, Any]:
    reward, mask = case.array("rewards"), ragged(case.array("mask"))
    if case.params["normalize_advantages"]:
        found = advantages.reinforce_pp(reward, mask, None, guard="floor")
    else:
        found = advantages.reinforce(reward, mask, None)
    return {"advantages": on(case, found["advantages"], "mask")}


# --- with a critic --------------------------------------------------------------------------------------------------------


def verl_gae(case: Case) -> dict[str, Any]:
    p, mask = case.params, ragged(case.array("response_mask"))
    found = advantages.gae(
        np.zeros(len(mask)), ragged(case.array("values")), mask, ragged(case.array("token_level_rewards")), None,
        gamma=p["gamma"], lam=p["lam"], whiten=False,
    )  # fmt: skip
    return {
        "advantages_unwhitened": on(case, found["advantages"]),
        "returns": on(case, found["returns"]),
        "advantages": on(case, advantages.whiten(found["advantages"], mask, **VERL)),
    }


def skyrl_gae(case: Case) -> dict[str, Any]:
    p, mask = case.params, ragged(case.array("response_mask"))
    found = advantages.gae(
        np.zeros(len(mask)), ragged(case.array("values")), mask, ragged(case.array("token_level_rewards")), None,
        gamma=p["gamma"], lam=p["lam"], masked="all", whiten=False,
    )  # fmt: skip
    return {
        "advantages_unwhitened": on(case, found["advantages"]),
        "returns": on(case, found["returns"]),
        "advantages": on(case, advantages.whiten(found["advantages"], mask)),
    }


def nemo_gae(case: Case, match: Any) -> dict[str, Any]:
    p, reward, mask = case.params, case.array("rewards"), ragged(case.array("mask"))
    paid = advantages.at_last_token(reward, mask)
    if p["kl_coef"]:
        paid = rewards.kl_shaped(
            reward, ragged(case.array("log_probs")), ragged(case.array("ref_log_probs")), mask,
            coefficient=p["kl_coef"], kind=p["kl_type"], value_clip=10.0,
        )  # fmt: skip
    policy, critic, alpha = p["gae_lambda_policy"], p["gae_lambda_value"], p["length_adaptive_alpha"] or None
    if critic is None and (policy is not None or alpha):  # two lambdas as soon as one of them is given
        critic = p["lam"]
    found = advantages.gae(
        reward, ragged(case.array("values")), mask, paid, None,
        gamma=p["gamma"], lam=p["lam"] if policy is None else policy, lam_returns=critic,
        adaptive=alpha, count_ratio="float32", whiten=p["normalize_advantages"],
    )  # fmt: skip
    return {
        "advantages": on(case, found["advantages"], "mask"),
        "returns": on(case, found["returns"], "mask"),
        "token_level_rewards": on(case, paid, "mask"),
    }


def openrlhf_gae(case: Case, match: Any) -> Any:
    p, reward, mask = case.params, case.array("rewards"), ragged(case.array("action_mask"))
    kl = case.array("kl")
    paid = rewards.kl_shaped(reward, ragged(kl), ragged(np.zeros_like(kl)), mask, coefficient=p["kl_coef"])
    found = advantages.gae(
        reward, ragged(case.array("values")), mask, paid, None,
        gamma=p["gamma"], lam=p["lam"], masked="decay", whiten=False,
    )  # fmt: skip
    advantage = found["advantages"]
    if not match["raw"]:
        advantage = advantages.whiten(advantage, mask, unbiased=False, guard="floor")
        if (contract := nothing_to_whiten(case, advantage)) is not None:
            return contract
    answer = {"advantages": on(case, advantage, "action_mask"), "returns": on(case, found["returns"], "action_mask")}
    if "token_level_rewards" in case.outputs:
        answer["token_level_rewards"] = on(case, paid, "action_mask")
    return answer


def roll(case: Case, match: Any) -> dict[str, Any]:
    p, mask, paid = case.params, ragged(case.array("mask")), ragged(case.array("token_level_rewards"))
    same = {"gamma": p["gamma"], "whiten": p["whiten_advantages"], "unbiased": True, "clip": p["advantage_clip"]}
    nothing = np.zeros(len(mask))
    if match["name"] == "gae":
        found = advantages.gae(
            nothing, ragged(case.array("values")), mask, paid, None, lam=p["lam"], masked="values", **same
        )
    else:
        found = advantages.reinforce(nothing, mask, paid, masked="decay", **same)
    return {"advantages": on(case, found["advantages"], "mask"), "returns": on(case, found["returns"], "mask")}


def areal_gae(case: Case, match: Any) -> dict[str, Any]:
    """Theirs has the whole sequence, everything moved one to the left: place t answers for token t + 1."""
    p, attention = case.params, case.array("attention_mask")
    mask = np.roll(case.array("loss_mask"), -1, 1)
    mask[:, -1] = 0
    width, lengths = attention.shape[1], attention.sum(1).astype(int)
    is_cut = lengths == width
    reward = np.where(is_cut, 0.0, case.array("rewards")) if p["mask_no_eos_with_zero"] else case.array("rewards")
    end = ragged((np.arange(width) == lengths[:, None] - 2).astype(float))
    policy = np.roll(case.array("logprobs"), -1, 1)
    paid = rewards.kl_shaped(
        reward, ragged(policy), ragged(case.array("ref_logp_already_shifted")), ragged(mask),
        advantages.at_last_token(reward, end), coefficient=p["kl_ctl"], kind=p["kl_estimator"], value_clip=10.0,
    )  # fmt: skip
    values = case.array("values")
    found = advantages.gae(
        reward, ragged(values), ragged(mask), paid, np.where(is_cut, values[:, -1], 0.0),
        gamma=p["gamma"], lam=p["lam"], whiten=False,
    )  # fmt: skip
    return {
        "advantages": Where(matrix(found["advantages"]), mask),
        "returns": Where(matrix(found["returns"]), mask),
        "tot_rewards": Where(matrix(paid), mask),
        "loss_mask_shifted": mask,
    }


def slime(case: Case, match: Any) -> Any:
    """Responses are cut at their length."""
    p, lengths = case.params, np.asarray(case.inputs["response_lengths"])

    def cut(table: np.ndarray) -> fr.Ragged:
        return fr.Ragged.of([row[:n] for row, n in zip(table, lengths, strict=True)], dtype=np.float64)

    reward, mask = case.array("rewards"), cut(case.array("mask"))
    name = match["name"]
    policy, reference = cut(case.array("log_probs")), cut(case.array("ref_log_probs"))
    is_held = p["kl_type"] == "low_var_kl"
    how = {
        "coefficient": p["kl_coef"],
        "kind": "k3" if is_held else p["kl_type"],
        "value_clip": 10.0 if is_held else None,
    }
    whole = fr.Ragged.like(np.ones(len(mask.values)), mask)
    if name == "ppo":
        paid = rewards.kl_shaped(reward, policy, reference, whole, **how)
        found = advantages.gae(
            reward, cut(case.array("values")), mask, paid, None,
            gamma=p["gamma"], lam=p["lam"], masked="all", whiten=False,
        )  # fmt: skip
    elif name in ("grpo", "gspo", "cispo"):
        found = advantages.reinforce(reward, mask, None)
    elif name == "reinforce_plus_plus":
        paid = rewards.kl_shaped(reward, policy, reference, mask, **how)
        found = advantages.reinforce(reward, mask, paid, gamma=p["gamma"], masked="decay")
    else:
        paid = rewards.kl_shaped(reward, policy, reference, mask, paid="every", **how)
        found = advantages.reinforce(reward, mask, paid, gamma=0.0)
    advantage = found["advantages"]
    if match["whitened"]:
        advantage = advantages.whiten(advantage, mask)
    is_empty = np.asarray([not row.any() for row in mask])
    if "raises" in case.outputs and is_empty.any():
        silent = not any(row.any() for row, empty in zip(found["advantages"], is_empty, strict=True) if empty)
        holds = silent and np.isfinite(advantage.values).all()
        return Contract("a row without a trained token says nothing", holds=bool(holds))

    def padded(column: fr.Ragged) -> Where:
        table = np.zeros_like(case.array("mask"))
        for row, values in zip(table, column, strict=True):
            row[: len(values)] = values
        inside = case.array("mask") * (np.arange(table.shape[1]) < lengths[:, None])
        return Where(table, inside)

    return {"advantages": padded(advantage), "returns": padded(found["returns"])}


def optimal_token_baseline(case: Case, match: Any) -> dict[str, Any]:
    p, mask = case.params, ragged(case.array("response_mask"))
    rho = ragged(case.array("rollout_is_weights")) if case.inputs.get("rollout_is_weights") is not None else None
    found = advantages.optimal_token_baseline(
        np.zeros(len(mask)), groups(case), ragged(case.array("old_log_probs")), ragged(case.array("sum_pi_squared")), mask,
        ragged(case.array("token_level_rewards")), rho,
        align="trained" if match["tir"] else "position", tail="zero" if p["handle_zero_tail"] else "kept",
        single="reward", counts="trained" if match["tir"] else "scored", flat="eps", eps=p["epsilon"],
    )  # fmt: skip
    return {"advantages": on(case, found["advantages"]), "returns": on(case, found["returns"])}


CONVENTIONS = {
    "verl.opo": opo,
    "verl.gpg": gpg,
    "verl.gdpo": verl_gdpo,
    "verl.reinforce_plus_plus": verl_reinforce_pp,
    "verl.reinforce_plus_plus_baseline": verl_reinforce_pp_baseline,
    "verl.remax": verl_remax,
    "verl.gae": verl_gae,
    "skyrl.gae": skyrl_gae,
    "skyrl.maxrl": skyrl_maxrl,
    "skyrl.reinforce_plus_plus": skyrl_reinforce_pp,
    "prime.grpo_mean_only": prime_mean,
    "prime.maxrl": prime_maxrl,
}

PATTERNS = [
    (r"(verl|skyrl)\.grpo_(vectorized_)?(no)?std(_\w+)?", verl_grpo),
    (r"(verl|skyrl)\.rloo(_vectorized)?", verl_rloo),
    (r"verl\.grpo_passk_(no)?std", pass_at_k),
    (r"verl\.(?P<tir>tir_)?optimal_token_baseline", optimal_token_baseline),
    (r"trl\.grpo_scale_\w+", trl_grpo),
    (r"trl\.rloo(_\w+)?", trl_rloo),
    (r"trl\.multi_reward_\w+", trl_parts),
    (r"nemo\.grpo_(loo|mean)_(no)?std", nemo_grpo),
    (r"nemo\.gdpo_(loo|mean)", nemo_gdpo),
    (r"nemo\.gae(_\w+)?", nemo_gae),
    (r"nemo\.reinforce_plus_plus(_baseline)?(_kl)?", nemo_reinforce_pp),
    (r"nemo\.raw_reward_(norm|raw)", nemo_raw),
    (
        r"areal\.norm_mean-(?P<mean>group|batch|None)(?P<loo>-loo)?_std-(?P<std>group|batch|None)(?P<biased>-biased)?",
        areal_norm,
    ),
    (r"roll\.reward_norm_mean-(group|batch|None)_std-(group|batch|None)", roll_norm),
    (r"areal\.gae(_\w+)?", areal_gae),
    (r"roll\.(?P<name>gae|reinforce)", roll),
    (r"slime\.reward_norm_(grpo|gspo|cispo|reinforce_plus_plus_baseline)_((?P<nostd>nostd)|std)", slime_norm),
    (r"slime\.(?P<name>ppo|grpo|gspo|cispo|reinforce_plus_plus(?:_baseline)?)(?P<whitened>_whitened)?", slime),
    (r"openrlhf\.gae(?P<raw>_unnormalized)?", openrlhf_gae),
    (
        r"openrlhf\.(?P<name>rloo|grpo_group_norm|dr_grpo|flash_reinforce|reinforce_plus_plus(?:_baseline)?|reinforce)"
        r"(?P<no_std>_no_std)?(?:_kl)?",
        openrlhf,
    ),
]

CONVENTIONS = {name: defined(answer) for name, answer in CONVENTIONS.items()}
PATTERNS = [(pattern, defined(answer)) for pattern, answer in PATTERNS]

UNANSWERED = {"frac_reward_zero_std": "a figure to log"}
