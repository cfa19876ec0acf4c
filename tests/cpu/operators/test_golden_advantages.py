"""Advantages against the numbers of other systems."""

from dataclasses import replace

import numpy as np

from flowrl_operators import advantages, filters, rewards
from tests.golden.vectors import Case, cases, matrix, ragged, to_array


def group_norm(reward, group, **config):
    return advantages.group_norm.function(reward, group, None, **config)


def rloo(reward, group):
    return advantages.rloo.function(reward, group, None)


def sizes(group):
    """[N] how many rows share each row's group."""
    return np.asarray([(group == g).sum() for g in group])


def spread(advantage, mask):
    return advantage[:, None] * mask


VERL_GRPO = {
    "advantage__verl.grpo_std": {"unbiased": True, "eps": 1e-6},
    "advantage__verl.grpo_nostd_drgrpo": {"scale": "none"},
    "advantage__verl.grpo_vectorized_std": {"unbiased": True, "eps": 1e-6},
    "advantage__skyrl.grpo_std": {"unbiased": True, "eps": 1e-6},
    "advantage__skyrl.grpo_nostd": {"scale": "none"},
}


@cases(*VERL_GRPO)
def test_group_norm_on_token_rewards(file: str, case: Case) -> None:
    score, mask = case.array("token_level_rewards").sum(1), case.array("response_mask")
    group = np.asarray(case.inputs["index"])
    found = group_norm(score, group, **VERL_GRPO[file])
    alone = sizes(group) == 1
    # a group of one is the one deliberate difference: 0 here, its own reward there
    assert (found[alone] == 0).all()
    case.close(spread(found, mask), case.wanted("advantages"), (mask == 1) & ~alone[:, None])


TRL_GRPO = {
    "advantage__trl.grpo_scale_group": "group",
    "advantage__trl.grpo_scale_batch": "batch",
    "advantage__trl.grpo_scale_none": "none",
}


@cases(*TRL_GRPO)
def test_group_norm_as_trl(file: str, case: Case) -> None:
    reward = case.array("rewards")
    group = np.arange(len(reward)) // case.params["num_generations"]
    found = group_norm(reward, group, scale=TRL_GRPO[file], unbiased=True, eps=1e-4)
    # their n / (n - 1) is a quotient of integer tensors, so it is rounded to float32 whatever the rewards' dtype
    replace(case, rtol=5e-8).close(found, case.wanted("advantages"))


@cases("advantage__nemo.grpo_mean_std", "advantage__nemo.grpo_mean_nostd", "advantage__nemo.grpo_loo_nostd")
def test_group_norm_as_nemo(file: str, case: Case) -> None:
    reward, mask = case.array("rewards"), case.array("mask")
    group = np.asarray(case.inputs["index"])
    if "loo" in file:
        found = rloo(reward, group)
    else:
        found = group_norm(reward, group, unbiased=True, eps=1e-6, scale="none" if "nostd" in file else "group")
    case.close(spread(found, np.ones_like(mask)), case.wanted("advantages"), mask == 1)


ROLL = {
    "advantage__roll.reward_norm_mean-group_std-group": {"unbiased": True, "eps": 1e-6},
    "advantage__roll.reward_norm_mean-group_std-batch": {"unbiased": True, "eps": 1e-6, "scale": "batch"},
    "advantage__roll.reward_norm_mean-group_std-None": {"scale": "none"},
    "advantage__areal.norm_mean-group_std-group-biased": {"eps": 1e-5},
    "advantage__areal.norm_mean-group_std-group": {"unbiased": True, "eps": 1e-5},
    "advantage__areal.norm_mean-group_std-None": {"scale": "none"},
}


@cases(*ROLL)
def test_group_norm_as_roll_and_areal(file: str, case: Case) -> None:
    reward = case.array("rewards")
    group = np.arange(len(reward)) // case.params.get("n_sample", case.params.get("group_size"))
    case.close(group_norm(reward, group, **ROLL[file]), case.wanted("normalized").reshape(-1))


@cases("advantage__roll.reward_norm_mean-batch_std-batch")
def test_batch_norm(file: str, case: Case) -> None:
    found = advantages.batch_norm.function(case.array("rewards"), None, None, unbiased=True, eps=1e-6)
    case.close(found, case.wanted("normalized").reshape(-1))


@cases("advantage__prime.grpo_mean_only")
def test_centred_only(file: str, case: Case) -> None:
    reward = case.array("group_rewards")
    case.close(group_norm(reward, np.zeros(len(reward)), scale="none"), case.wanted("advantages"))


@cases("advantage__verl.rloo", "advantage__verl.rloo_vectorized", "advantage__skyrl.rloo")
def test_rloo_on_token_rewards(file: str, case: Case) -> None:
    score, mask = case.array("token_level_rewards").sum(1), case.array("response_mask")
    group = np.asarray(case.inputs["index"])
    found = rloo(score, group)
    alone = sizes(group) == 1
    assert (found[alone] == 0).all()  # as in all of them but verl.rloo, which gives the reward
    case.close(spread(found, mask), case.wanted("advantages"), (mask == 1) & ~alone[:, None])


@cases("advantage__trl.rloo")
def test_rloo_as_trl(file: str, case: Case) -> None:
    reward = case.array("rewards")
    group = np.arange(len(reward)) // case.params["num_generations"]
    case.close(rloo(reward, group), case.wanted("advantages"))


@cases("advantage__verl.remax")
def test_remax(file: str, case: Case) -> None:
    # there token rewards are summed from each token on; the first token's number is that of the whole response
    mask = case.array("response_mask")
    reward = (case.array("token_level_rewards") * mask).sum(1)
    found = advantages.remax.function(reward, case.array("reward_baselines"))
    first = (mask.cumsum(1) == 1) & (mask == 1)
    case.close(spread(found, np.ones_like(mask)), case.wanted("advantages"), first)
    togo = advantages.reward_to_go(ragged(case.array("token_level_rewards")), ragged(mask))
    case.close(matrix(togo), case.wanted("returns"), mask == 1)


@cases("advantage__verl.gae")
def test_gae_as_verl(file: str, case: Case) -> None:
    mask = case.array("response_mask")
    columns = (ragged(case.array("values")), ragged(mask == 1), ragged(case.array("token_level_rewards")))
    options = {"gamma": case.params["gamma"], "lam": case.params["lam"]}
    plain = advantages.gae.function(np.zeros(len(mask)), *columns, whiten=False, **options)
    case.close(matrix(plain["advantages"]), case.wanted("advantages_unwhitened"), mask == 1)
    case.close(matrix(plain["returns"]), case.wanted("returns"), mask == 1)
    whitened = advantages.gae.function(np.zeros(len(mask)), *columns, **options)
    # their masked mean divides by the count plus 1e-8, which moves every whitened number by about 1e-9
    replace(case, atol=2e-9).close(matrix(whitened["advantages"]), case.wanted("advantages"), mask == 1)
    assert (matrix(whitened["advantages"])[mask == 0] == 0).all()


@cases("advantage__nemo.gae", "advantage__nemo.gae_kl")
def test_gae_as_nemo(file: str, case: Case) -> None:
    mask, reward = case.array("mask"), case.array("rewards")
    paid = None
    if case.params["kl_coef"]:
        paid = rewards.kl_shaped.function(
            reward,
            ragged(case.array("log_probs")),
            ragged(case.array("ref_log_probs")),
            ragged(mask),
            coefficient=case.params["kl_coef"],
            kind=case.params["kl_type"],
        )
    found = advantages.gae.function(
        reward,
        ragged(case.array("values")),
        ragged(mask),
        paid,
        gamma=case.params["gamma"],
        lam=case.params["lam"],
        whiten=case.params["normalize_advantages"],
    )
    case.close(matrix(found["advantages"]), case.wanted("advantages"), mask == 1)
    case.close(matrix(found["returns"]), case.wanted("returns"), mask == 1)


@cases("advantage__verl.reinforce_plus_plus")
def test_reinforce_pp_as_verl(file: str, case: Case) -> None:
    mask = case.array("response_mask")
    found = advantages.reinforce_pp.function(
        np.zeros(len(mask)),
        ragged(mask),
        ragged(case.array("token_level_rewards")),
        gamma=case.params["gamma"],
        unbiased=True,
    )
    case.close(matrix(found["advantages"]), case.wanted("advantages"), mask == 1)
    case.close(matrix(found["returns"]), case.wanted("returns"), mask == 1)


@cases("advantage__openrlhf.reinforce_plus_plus", "advantage__openrlhf.reinforce_plus_plus_kl")
def test_reinforce_pp_as_openrlhf(file: str, case: Case) -> None:
    mask, reward = case.array("action_mask"), case.array("rewards")
    if "holes" in case.name and case.params["gamma"] != 1:
        return  # there masked tokens discount; here, as in verl, they do not
    paid = None
    if "kl" in case.inputs:
        kl = ragged(case.array("kl"))
        nothing = ragged(np.zeros_like(mask))
        paid = rewards.kl_shaped.function(reward, kl, nothing, ragged(mask), coefficient=case.params["kl_coef"])
    found = advantages.reinforce_pp.function(reward, ragged(mask), paid, gamma=case.params["gamma"])
    case.close(matrix(found["advantages"]), case.wanted("advantages"), mask == 1)


@cases(
    "kl_in_reward__verl.apply_kl_penalty_kl",
    "kl_in_reward__verl.apply_kl_penalty_abs",
    "kl_in_reward__verl.apply_kl_penalty_mse",
    "kl_in_reward__verl.apply_kl_penalty_low_var_kl",
)
def test_kl_shaped_reward(file: str, case: Case) -> None:
    mask = case.array("response_mask")
    kind = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}[file.rpartition("penalty_")[2]]
    penalty = rewards.kl_shaped.function(
        np.zeros(len(mask)),
        ragged(case.array("old_log_probs")),
        ragged(case.array("ref_log_prob")),
        ragged(mask),
        coefficient=case.params["init_kl_coef"],
        kind=kind,
    )
    found = case.array("token_level_scores") + matrix(penalty)
    case.close(found, case.wanted("token_level_rewards"), mask == 1)


@cases("kl_in_reward__openrlhf.compute_reward")
def test_reward_at_the_last_token(file: str, case: Case) -> None:
    mask = case.array("action_mask")
    reward = case.array("rewards").clip(*case.params["reward_clip_range"])
    kl, nothing = ragged(case.array("kl")), ragged(np.zeros_like(mask))
    found = rewards.kl_shaped.function(reward, kl, nothing, ragged(mask), coefficient=case.params["kl_coef"])
    case.close(matrix(found), case.wanted("token_level_rewards"), mask == 1)


@cases("overlong_penalty__trl.soft_overlong_punishment")
def test_overlong_as_trl(file: str, case: Case) -> None:
    lengths = np.asarray(case.inputs["lengths"])
    hard, cache = case.params["max_completion_len"], case.params["soft_punish_cache"]
    case.close(overlong(np.zeros(len(lengths)), lengths, soft=hard - cache, hard=hard), case.wanted("rewards"))


@cases("overlong_penalty__openrlhf.overlong")
def test_overlong_as_openrlhf(file: str, case: Case) -> None:
    lengths = np.asarray(case.inputs["response_lengths"])
    hard, cache = case.params["max_new_tokens"], case.params["overlong_buffer_len"]
    found = overlong(
        case.array("scores"), lengths, soft=hard - cache, hard=hard, weight=float(case.params["penalty_factor"])
    )
    case.close(found, case.wanted("rewards"))


def overlong(reward, lengths, **config):
    import flowrl as fr

    ids = fr.Ragged.of([np.zeros(n, np.int32) for n in lengths], dtype=np.int32)
    return rewards.overlong.function(reward, ids, **config)


@cases("dynamic_sampling_filter__slime.std_gt_1e-6")
def test_group_has_signal(file: str, case: Case) -> None:
    found = [bool(filters.group_has_signal.function(to_array(g), eps=1e-6).all()) for g in case.inputs["group_scores"]]
    assert found == [bool(keep) for keep in case.outputs["keep"]]
