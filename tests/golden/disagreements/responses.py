"""Advantages per response, and filters of groups."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import flowrl as fr
from flowrl_operators import advantages, filters
from tests.golden.disagreements.tables import RECORDED, Cells, Row, Section, at, evaluated, mapped, recorded

OPERATORS = ("group_norm", "rloo", "opo", "gpg", "maxrl", "pass_at_k")


def group_of(
    convention: str,
    reward: list[float],
    trains: list[int] | None = None,
    index: list[int] | None = None,
    **params: Any,
) -> np.ndarray:
    """[N] what a convention makes of rewards; responses have one token, or with trains=0 none.

    `index` says which group each is of, for verl, SkyRL and NeMo-RL; without it they are one group.
    """
    system, size = convention.partition(".")[0], len(reward)
    index = index or [0] * size
    mask = [[m] for m in trains or [1] * size]
    if system in ("verl", "skyrl"):
        inputs: dict[str, Any] = {"token_level_rewards": [[r] for r in reward], "index": index}
        found = mapped("advantage", convention, {**inputs, "response_mask": mask}, **params)
    elif system == "nemo":
        found = mapped("advantage", convention, {"rewards": reward, "index": index, "mask": mask}, **params)
    elif system == "openrlhf":
        params = {"n_samples_per_prompt": size, "gamma": 1.0, "kl_coef": 0.0, **params}
        found = mapped("advantage", convention, {"rewards": reward, "action_mask": mask}, **params)
    elif system == "prime":
        found = mapped("advantage", convention, {"group_rewards": reward}, **params)
    elif system == "slime":
        params = {"n_samples_per_prompt": size, "rollout_batch_size": 1, **params}
        found = mapped("advantage", convention, {"groups": [reward]}, {"normalized": [0.0] * size}, **params)
    else:
        name = {"trl": "num_generations", "areal": "group_size", "roll": "n_sample"}[system]
        outputs = {} if system == "trl" else {"normalized": [0.0] * size}
        found = mapped("advantage", convention, {"rewards": reward}, outputs, **{name: size}, **params)
    return at(found.get("advantages", found.get("normalized"))).reshape(size, -1)[:, 0]


def call(text: str, reward: list[float], trains: list[int] | None = None, index: list[int] | None = None) -> np.ndarray:
    """[N] what a call of ours makes of rewards: our operators of groups have their columns filled in."""
    mask = fr.Ragged.of([[m] for m in trains or [1] * len(reward)], dtype=bool)
    columns = (np.asarray(reward), np.asarray(index or [0] * len(reward)), mask)
    bound = {name: functools.partial(getattr(advantages, name), *columns) for name in OPERATORS}

    def batch_norm(values: np.ndarray = columns[0], **options: Any) -> np.ndarray:
        return np.asarray(advantages.batch_norm(values, None, None, **options))

    return np.asarray(evaluated(text, **bound, batch_norm=batch_norm))


# ------------------------------------------------------------------------------------------------------- GRPO's deviation

ONE_RIGHT, NEARLY = [1.0, 0.0, 0.0, 0.0], [0.001, 0.0, 0.0, 0.0]

DEVIATION = Section(
    title="GRPO: which deviation, and what is added to it",
    text="The paper divides by the std of the group's rewards and does not say which. Dividing by n − 1 instead of n "
    "makes every advantage of a group of 4 smaller by 13%. What is added to the std matters where rewards hardly "
    "differ.",
    given="Two groups of four responses, with rewards 1, 0, 0, 0 and 0.001, 0, 0, 0. Answer: the advantage of the "
    "first response.",
    system=lambda name: (group_of(name, ONE_RIGHT)[0], group_of(name, NEARLY)[0]),
    ours=lambda text: (call(text, ONE_RIGHT)[0], call(text, NEARLY)[0]),
    answers=("of the 1", "of the 0.001"),
    rows=(
        Row(
            "verl.grpo_std skyrl.grpo_std nemo.grpo_mean_std roll.reward_norm_mean-group_std-group "
            "slime.reward_norm_grpo_std",
            "group_norm(unbiased=True)",
        ),
        Row("openrlhf.grpo_group_norm", "group_norm(unbiased=True, eps=1e-9)"),
        Row("areal.norm_mean-group_std-group", "group_norm(unbiased=True, eps=1e-5)"),
        Row("trl.grpo_scale_group", "group_norm(unbiased=True, eps=1e-4)"),
        Row("areal.norm_mean-group_std-group-biased", "group_norm(eps=1e-5)"),
        Row("verl.grpo_nostd_drgrpo openrlhf.dr_grpo trl.grpo_scale_none prime.grpo_mean_only", 'group_norm(scale="none")'),
    ),
    default="group_norm()",
    why="with n every group has the same mean square, whatever its size. A constant factor is the learning rate's "
    "business.",
)  # fmt: skip


# -------------------------------------------------------------------------------------------------------- a group of one

LONELY = [0.7]


def _alone(name: str) -> Cells:
    if name.startswith("verl.grpo_passk"):
        case = recorded("advantage", name, "singleton_group_2")
        return (f"raises {case.outputs['raises']}",)
    return (group_of(name, LONELY)[0],)


ALONE = Section(
    title="A group of one",
    text="One response to a prompt has nothing to be compared with. Some systems then use its reward as the "
    "advantage, which is REINFORCE without a baseline amid rows that have one: a reward that is never negative then "
    "pushes up everything.",
    given="One response with reward 0.7. Answer: its advantage.",
    system=_alone,
    ours=lambda text: (call(text, LONELY)[0],),
    rows=(
        Row("verl.grpo_std skyrl.grpo_std", 'group_norm(single="scaled")'),
        Row("verl.grpo_nostd_drgrpo", 'group_norm(scale="none", single="reward")'),
        Row("verl.rloo", 'rloo(single="reward")'),
        Row("verl.opo", 'opo(single="reward")'),
        Row("skyrl.maxrl", 'maxrl(single="reward")'),
        Row("nemo.grpo_mean_std nemo.grpo_loo_std", "group_norm()"),
        Row("verl.rloo_vectorized skyrl.rloo", "rloo()"),
        Row(
            "roll.reward_norm_mean-group_std-group slime.reward_norm_grpo_std",
            instead="none; NaN would spread to the whole step",
            beyond=True,
            stated=(float("nan"),),
        ),
        Row("verl.grpo_passk_std verl.grpo_passk_nostd", instead="none; `pass_at_k()` gives 0"),
    ),
    default="group_norm()",
    why="no comparison, no signal; `rloo()`, `opo()`, `maxrl()`, `gpg()` and `pass_at_k()` give 0 as well, and the "
    "checks of a flow warn when `n=1` makes all groups so.",
    source="Through the mapping; the exceptions are recorded",
    label="FlowRL, any of them",
    note="verl has two functions of the same estimator, `rloo` and its vectorised form, which differ here.",
)


# ------------------------------------------------------------------------------------------------- a row that cannot train

SIBLINGS, TRAINS = [1.0, 0.0, 0.0, 1.0], [1, 1, 1, 0]

MASKED_SIBLING = Section(
    title="The reward of a row that does not train",
    text="A response is masked out whole (it was cut off, its tool crashed). Its reward may still stand in its "
    "siblings' baseline, or not. If it does, advantages of the rows that train no longer sum to 0.",
    given="Rewards 1, 0, 0, 1; the last row has no trained token. Answer: advantages of the first three, without a "
    "std.",
    system=lambda name: (group_of(name, SIBLINGS, TRAINS)[:3],),
    ours=lambda text: (call(text, SIBLINGS, TRAINS)[:3],),
    rows=(
        Row(
            "verl.grpo_nostd_drgrpo nemo.grpo_mean_nostd openrlhf.dr_grpo",
            'group_norm(scale="none", counts="scored")',
        ),
    ),
    default='group_norm(scale="none")',
    why="who masks a row whole says that it should not be there. Where the reward is good and only the tokens are "
    'not, `counts="scored"` says so.',
)


# ----------------------------------------------------------------------------------------------- a group with a row missing

SHORT_GROUPS, OF = [1.0, 0.0, 1.0, 0.5, 0.5, 0.1, 0.3], [0, 0, 0, 1, 1, 1, 1]


def _incomplete(name: str) -> Cells:
    if name.startswith("slime"):
        found = recorded("advantage", name, "c2").wanted("normalized")
    else:
        found = group_of(name, SHORT_GROUPS, index=OF)
    return found[:3], found[3:]


def _our_incomplete(text: str) -> Cells:
    found = call(text, SHORT_GROUPS, index=OF)
    return found[:3], found[3:]


INCOMPLETE = Section(
    title="A group with a response missing",
    text="A response was lost: its tool crashed, a filter dropped it. Groups that are told apart by the prompt do "
    "not mind. Groups that are told apart by counting rows do: slime then takes the whole batch for one group, so "
    "that advantages compare responses to different prompts.",
    given="Two groups of four of which the first lost a row: 1, 0, 1 and 0.5, 0.5, 0.1, 0.3. Answer: the advantages.",
    system=_incomplete,
    ours=_our_incomplete,
    answers=("first group", "second group"),
    rows=(
        Row("verl.grpo_std skyrl.grpo_std nemo.grpo_mean_std", "group_norm(unbiased=True)"),
        Row("slime.reward_norm_grpo_std", "batch_norm(unbiased=True)"),
    ),
    default="group_norm()",
    source="Recorded for slime (case `c2`), through the mapping for the others",
    why="a group is the rows of a prompt, in any number and any order.",
    note="TRL, OpenRLHF, AReaL and ROLL tell groups apart by counting, too; their vectors hold whole groups only.",
)

# -------------------------------------------------------------------------------------------------------------------- GPG

TWO_GROUPS = [1.0, 1.0, 1.0, 0.0]

GPG = Section(
    title="GPG: what counts as a response that teaches",
    text="GPG enlarges the advantages by the share of rows that have a gradient. The paper counts the rows of groups "
    "whose rewards differ; counting rewards that are not 0 comes to another number as soon as a group is all right.",
    given="Two groups of two, 1, 1 and 1, 0. Answer: advantages of the second group.",
    system=lambda name: (group_of(name, TWO_GROUPS, index=[0, 0, 1, 1])[2:],),
    ours=lambda text: (call(text, TWO_GROUPS, index=[0, 0, 1, 1])[2:],),
    rows=(Row("verl.gpg", 'gpg(valid="nonzero")'),),
    default="gpg()",
    why="as in the paper: two of four rows have a gradient, so each counts twice.",
)

# ------------------------------------------------------------------------------------------------------- leave one out

ONE_WRONG = [1.0, 1.0, 1.0, 0.0]

LEAVE_ONE_OUT = Section(
    title="Leave-one-out and a deviation: around which mean",
    text="The baseline leaves the row itself out. The std that then divides may be of all rows, of the others, or "
    "taken around the baselines that were subtracted.",
    given="Rewards 1, 1, 1, 0. Answer: advantages of a 1 and of the 0.",
    system=lambda name: (group_of(name, ONE_WRONG)[2:],),
    ours=lambda text: (call(text, ONE_WRONG)[2:],),
    rows=(
        Row("nemo.grpo_loo_std", 'group_norm(baseline="others", scale="others", unbiased=True)'),
        Row(
            "areal.norm_mean-group-loo_std-group",
            'group_norm(baseline="others", around="baseline", unbiased=True, eps=1e-5)',
        ),
        Row("verl.rloo skyrl.rloo trl.rloo openrlhf.rloo nemo.grpo_loo_nostd", "rloo()"),
        Row("trl.rloo_normalized", "batch_norm(rloo(), unbiased=True, eps=1e-4)"),
    ),
    default='group_norm(baseline="others")',
    why="the std measures the group, and one baseline for each row does not change how far its rewards are apart.",
    note="In the first line the others of the 0 are all 1, so that their std is 0 and nothing is divided. The batch "
    'of the last line but one is this group; in a flow that is `rloo`, then `batch_norm(of="advantage")`.',
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ MaxRL

PUNISHED = [0.0, 0.0, -1.0, -1.0]

MAXRL = Section(
    title="MaxRL with a negative mean",
    text="MaxRL divides the centred reward by the group's mean, which makes sense for rewards that are not negative. "
    "With a negative mean the division turns all signs round: the better response is pushed down.",
    given="Rewards 0, 0, −1, −1. Answer: advantages of a 0 and of a −1.",
    system=lambda name: (group_of(name, PUNISHED)[1:3],),
    ours=lambda text: (call(text, PUNISHED)[1:3],),
    rows=(
        Row("skyrl.maxrl", 'maxrl(eps=1e-6, negative="divide")'),
        Row("prime.maxrl", "maxrl()", beyond=True),
    ),
    default="maxrl()",
    why="silence instead of the wrong sign.",
)

# ------------------------------------------------------------------------------------------------------- parts of a reward

RIGHT, TIDY, LENGTHS = [1.0, 0.0, 0.0, 1.0], [0.0, 0.2, 0.0, 0.1], [1, 1, 1, 5]


def _parts(name: str) -> Cells:
    mask = [[1] * n + [0] * (5 - n) for n in LENGTHS]
    if name.startswith("trl"):
        table = [list(pair) for pair in zip(RIGHT, TIDY, strict=True)]
        found = mapped("advantage", name, {"rewards_per_func": table}, num_generations=4, reward_weights=[1.0, 1.0])
        return (at(found["advantages"]),)
    names = {"mask": mask, "response_mask": mask}
    inputs = {"reward_components": {"right": RIGHT, "tidy": TIDY}, "index": [0] * 4, **names}
    return (at(mapped("advantage", name, inputs, weights=[1.0, 1.0])["advantages"])[:, 0],)


def _multi_reward(text: str) -> Cells:
    mask = fr.Ragged.of([[1] * n for n in LENGTHS], dtype=bool)
    columns = (np.zeros(4), mask, np.asarray(RIGHT), np.asarray(TIDY))
    bound = functools.partial(advantages.multi_reward.function, *columns, parts=("right", "tidy"))
    return (np.asarray(evaluated(text, multi_reward=bound)),)


PARTS = Section(
    title="GDPO: normalised once more, over what",
    text="Each part of a reward is normalised in its group, the results are summed, and the sum is normalised over "
    "the step: over responses, or over tokens, where a long response counts as often as it has tokens.",
    given="Two parts, 1, 0, 0, 1 and 0, 0.2, 0, 0.1; the last response has 5 tokens, the others one. Answer: the "
    "four advantages.",
    system=_parts,
    ours=_multi_reward,
    rows=(
        Row("verl.gdpo", 'multi_reward(order="normalize_then_sum", unbiased=True, over="tokens")'),
        Row("nemo.gdpo_mean", 'multi_reward(order="normalize_then_sum", unbiased=True, over="samples")'),
        Row(
            "trl.multi_reward_normalize_then_sum",
            'multi_reward(order="normalize_then_sum", unbiased=True, eps=1e-4, over="samples", over_eps=1e-4, over_guard="std")',
        ),
        Row("trl.multi_reward_sum_then_normalize", "multi_reward(unbiased=True, eps=1e-4)"),
    ),
    default="multi_reward()",
    why="the sum is a reward like any other until somebody asks for more.",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- dynamic sampling

GROUPS = {
    "1, 1, 1, 0": [1.0, 1.0, 1.0, 0.0],
    "0.5, 0.5": [0.5, 0.5],
    "0.7, 0.7, 0.7": [0.7, 0.7, 0.7],
    "1 alone": [1.0],
}


def _kept(name: str) -> Cells:
    piece = "dynamic_sampling_filter"
    found = mapped(piece, name, {"group_scores": list(GROUPS.values())}, {"keep": []})
    return tuple("kept" if keep else "dropped" for keep in found["keep"])


def _filtered(text: str) -> Cells:
    kept = []
    for reward in GROUPS.values():
        names = {
            name: functools.partial(getattr(filters, name), np.asarray(reward))
            for name in ("group_has_signal", "group_mean_between")
        }
        kept.append("kept" if evaluated(text, **names).all() else "dropped")
    return tuple(kept)


DYNAMIC = Section(
    title="Dynamic sampling: which groups teach nothing",
    text="DAPO samples again where all responses are right or all are wrong. For rewards of any kind that becomes a "
    "std above 0, or a mean between two bounds. Three times 0.7 has in float64 a std of 1.1e−16.",
    given="Four groups by themselves.",
    system=_kept,
    ours=_filtered,
    answers=tuple(GROUPS),
    rows=(
        Row("verl.std_eq_0_dropped", 'group_has_signal(rounding="counts", single="keep")', beyond=True),
        Row("skyrl.std_gt_0", 'group_has_signal(rounding="counts")', beyond=True),
        Row("slime.std_gt_1e-6", "group_has_signal(eps=1e-6, unbiased=True)", beyond=True),
        Row("openrlhf.mean_in_open_range", "group_mean_between(low=0.0, high=1.0)"),
    ),
    default="group_has_signal()",
    why="a group is kept when its advantages are not 0, and rounding is no difference between responses.",
    note="The vectors of the first three hold groups of different and of representable equal rewards; the answers to "
    "the last two columns follow from their rule.",
)


def _kept_rows(name: str) -> Cells:
    case = recorded("dynamic_sampling_filter", name, "c0")
    return ("".join("yes " if keep else "no " for keep in case.outputs["keep_rows"][0]).strip(),)


ODD_ONE = Section(
    title="Dynamic sampling by the deviation of the others",
    text="With a leave-one-out baseline NeMo-RL judges each row by the std of its siblings. The one wrong answer "
    "among right ones has siblings that do not differ, and goes, although its advantage is the largest of the group.",
    given="The group 1, 1, 1, 0. Answer: whether each row is kept.",
    system=_kept_rows,
    ours=lambda text: (
        "".join(
            "yes " if keep else "no "
            for keep in evaluated(text, group_has_signal=functools.partial(filters.group_has_signal, np.array(ONE_WRONG)))
        ).strip(),
    ),
    rows=(
        Row("nemo.std_nonzero_loo", 'group_has_signal(over="others")'),
        Row("nemo.std_nonzero_mean", "group_has_signal()"),
    ),
    default="group_has_signal()",
    why="a group is kept or dropped whole.",
    source=RECORDED,
)  # fmt: skip
