"""Policy losses, their averages and corrections, KL terms, entropy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import flowrl as fr
from flowrl_operators import losses, masks
from tests.golden.disagreements.tables import RECORDED, Cells, Row, Section, at, evaluated, mapped, recorded
from tests.golden.padded import loss_and_gradient
from tests.golden.pieces.policy_loss import COLUMNS
from tests.golden.vectors import Case, matrix, ragged, to_array

LOSSES = {
    name: getattr(losses, name)
    for name in ("ppo_clip", "cispo", "gmpo", "kl", "truncated_importance", "masked_importance")
}


def ours_on(case: Case, loss: str | fr.Loss, **average: Any) -> tuple[float, np.ndarray]:
    """(loss, gradient) of a loss of ours, or of the text of one, on the columns of a recorded case."""
    given = {ours: theirs for ours, theirs in COLUMNS.items() if theirs in case.inputs}
    term = evaluated(loss, **LOSSES) if isinstance(loss, str) else loss
    found = loss_and_gradient(case, term, given, **average)
    return found["loss"], found["grad_log_prob"]


# ------------------------------------------------------------------------------------------------------------- averages

ROWS = "all_masked_row_4x5_s12"


def _averaged(text: str) -> Cells:
    case = recorded("policy_loss", "verl.ppo_dualclip_token-mean", ROWS)
    return (ours_on(case, "ppo_clip(0.2)", **evaluated(f"dict({text})"))[0],)


AVERAGES = Section(
    title="From tokens to one number",
    text="The loss per token is the same; the step needs one number. Means over tokens, over rows, over rows of "
    "which one trains nothing and counts or does not, sums that the caller divides, sums over a constant: the "
    "learning rate that fits one is wrong for another, and those that divide by a length decide how much a long "
    "response weighs.",
    given=f"Case `{ROWS}`: PPO clip on 4 rows of at most 5 tokens, 13 of them trained; the second row trains none. Answer: the "
    "loss.",
    system=lambda name: (float(recorded("policy_loss", name, ROWS).outputs["loss"]),),
    ours=_averaged,
    rows=(
        Row(
            "verl.ppo_dualclip_token-mean trl.dapo trl.bnpo openrlhf.ppo_token nemo.ppo_token areal.ppo",
            'average="token_mean"',
        ),
        Row(
            "verl.ppo_dualclip_seq-mean-token-mean openrlhf.ppo_sample roll.ppo_seq-mean-token-mean",
            'average="sequence_mean"',
        ),
        Row("trl.grpo nemo.ppo_sequence", 'average="sequence_mean", average_rows="all"'),
        Row("slime.ppo_sample", 'average="sequence_mean", average_rows=1'),
        Row("verl.ppo_dualclip_seq-mean-token-sum roll.ppo_seq-mean-token-sum", 'average="sequence_sum"'),
        Row("trl.luspo", 'average="sequence_sum", average_rows="all"'),
        Row("verl.ppo_dualclip_seq-mean-token-sum-norm", 'average="constant", average_length=5'),
        Row("roll.ppo_seq-mean-token-sum-norm", 'average="constant", average_length=5, average_rows=1'),
        Row("trl.dr_grpo", 'average="constant", average_length=10, average_rows="all"'),
        Row("verl.ppo_dualclip_token-sum skyrl.ppo_sum slime.ppo_token", 'average="token_sum"'),
        Row("roll.ppo_token-mean", instead="none: losses of padding are in its sum"),
    ),
    default='average="token_mean"',
    why="each token that trains weighs the same. A row that trains nothing is as if it were not there. The arguments "
    "are those of `fr.update`.",
    source=RECORDED,
    note="What SkyRL and slime sum is divided by their callers. verl's norm divides by the width of the batch, here "
    "5, unless a number is given; TRL's Dr. GRPO by the greatest completion length, here 10.",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- micro-batches

SPLIT = "ragged_0"


def _split(name: str) -> Cells:
    case = recorded("loss_aggregation", name, SPLIT)
    return (float(case.outputs["sum"]),)


def _split_ours(text: str) -> Cells:
    case = recorded("loss_aggregation", "trl.microbatch_dapo", SPLIT)
    return (ours_on(case, "ppo_clip(0.2, high=0.28)", **evaluated(f"dict({text})"))[0],)


MICRO_BATCHES = Section(
    title="The same step in micro-batches",
    text="A step of six rows is computed two rows at a time. A mean taken in each micro-batch by itself makes tokens "
    "weigh more where their neighbours are few: the result depends on how the step was cut.",
    given=f"Case `{SPLIT}`: six rows with 4, 5, 3, 2, 5, 5 trained tokens, in three micro-batches. Answer: the loss of the step.",
    system=_split,
    ours=_split_ours,
    rows=(
        Row("trl.microbatch_dapo", 'average="token_mean"'),
        Row("trl.microbatch_bnpo", instead="none: a mean of micro-batches' means"),
        Row("trl.microbatch_grpo", 'average="sequence_mean", average_rows="all"'),
    ),
    default='average="token_mean"',
    why="the step's tokens are counted before its first micro-batch, so that the cut changes nothing "
    "([averages](averages.md)).",
    source=RECORDED,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- PPO's clip

FAR = "extreme_4x5_s13"

EXTREME = Section(
    title="PPO far from the old policy",
    text="PPO's minimum does not bound the loss where the advantage is negative and the ratio large. There one token "
    "can outweigh a step. Bounding log r at 20 keeps exp finite and not more; dual clip (arXiv 1912.09729) bounds "
    "the term itself.",
    given=f"Case `{FAR}`: log-ratios up to 24.5 and down to −30, clip 0.2, mean over tokens. Answer: the loss.",
    system=lambda name: (float(recorded("policy_loss", name, FAR).outputs["loss"]),),
    ours=lambda text: (ours_on(recorded("policy_loss", "areal.ppo", FAR), text)[0],),
    rows=(
        Row("areal.ppo nemo.ppo_token trl.dapo trl.bnpo", "ppo_clip(0.2, log_ratio_clip=None)"),
        Row("openrlhf.ppo_token", "ppo_clip(0.2)"),
        Row("verl.ppo_dualclip_token-mean", "ppo_clip(0.2, dual=3.0)"),
    ),
    default="ppo_clip()",
    why="the paper's loss, which cannot overflow. `dual=3.0` is worth having with stale rows; it changes the "
    "objective, so it is asked for.",
    source=RECORDED,
)  # fmt: skip


def one_token(name: str, log_ratio: float, advantage: float, live: float = -1.0) -> float:
    """The loss of a convention for a batch of one token."""
    inputs = {"log_probs": live, "old_log_probs": live - log_ratio, "advantages": advantage, "mask": 1.0}
    outputs = {
        "loss": 0.0,
        "grad_log_prob": [[0.0]],
    }  # an answer is compared with nothing here, but looks whether it is finite
    return float(mapped("policy_loss", name, {key: [[value]] for key, value in inputs.items()}, outputs)["loss"])


def our_token(text: str, log_ratio: float, advantage: float, live: float = -1.0) -> float:
    """The loss of a call of ours for a batch of one token."""
    columns = {"logprobs": live, "old_logprobs": live - log_ratio, "advantages": advantage}
    given = {name: torch.tensor([[value]], dtype=torch.float64) for name, value in columns.items()}
    return fr.apply_loss(evaluated(text, **LOSSES), given, torch.ones(1, 1))[0].item()


DUAL = Section(
    title="The constant of dual clip",
    text="For a negative advantage dual clip stops the term at c |A|. The paper has c = 3. TRL's `delta` bounds the "
    "ratio itself, which is the same.",
    given="One token, ratio 6, advantage −1. Answer: its loss.",
    system=lambda name: (one_token(name, math.log(6), -1.0),),
    ours=lambda text: (our_token(text, math.log(6), -1.0),),
    rows=(
        Row("verl.ppo_dualclip_token-mean areal.ppo_dual_clip openrlhf.ppo_dual_clip slime.dual_clip skyrl.dual_clip_sum",
            "ppo_clip(0.2, dual=3.0)"),
        Row("roll.dual_clip", "ppo_clip(0.2, dual=1.4)"),
        Row("trl.two_sided_delta", "ppo_clip(0.2, dual=1.5)"),
        Row("areal.ppo nemo.ppo_token trl.dapo openrlhf.ppo_token slime.ppo_token skyrl.ppo_sum", "ppo_clip(0.2)"),
    ),
    default="ppo_clip()",
    why="off unless asked for, as in PPO.",
    note="ROLL's constant is 1 + 2 · 0.2, of its clip; TRL's 1.5 is the `delta` that the recorded run was given.",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ GSPO

TOKEN_ADVANTAGES = "ragged_4x6_s80"

GSPO = Section(
    title="GSPO with an advantage per token: same value, another gradient",
    text="GSPO compares whole responses: the ratio is exp of the mean log-ratio. Its gradient can go through that "
    "mean to every token of the row, or, in GSPO-token (the same paper), only to the own token. As long as a row has "
    "one advantage both are equal. With an advantage per token (a critic, a KL in the reward) the losses still are, "
    "and the gradients are not.",
    given=f"Case `{TOKEN_ADVANTAGES}`: 4 rows, clip 0.2, mean over rows of means. Answer: the loss, and its gradient by the two "
    "log-probabilities of the first row that train.",
    system=lambda name: _gspo(name),
    ours=lambda text: _our_gspo(text),
    answers=("loss", "gradient"),
    rows=(
        Row("trl.gspo_token_adv", 'ppo_clip(0.2, level="geometric")'),
        Row("verl.gspo_token_adv", 'ppo_clip(0.2, level="geometric_token")'),
    ),
    default='ppo_clip(0.2, level="geometric")',
    label="FlowRL, in the gallery",
    why="GSPO as the paper defines it first; OpenRLHF, NeMo-RL, slime and ROLL have this form too, SkyRL has the "
    "other. AReaL replaces the advantages by their mean over the row: `row_advantage=True`.",
    source=RECORDED,
)  # fmt: skip


def _gspo(name: str) -> Cells:
    outputs = recorded("policy_loss", name, TOKEN_ADVANTAGES).outputs
    return float(outputs["loss"]), to_array(outputs["grad_log_prob"])[0, :2]


def _our_gspo(text: str) -> Cells:
    case = recorded("policy_loss", "trl.gspo_token_adv", TOKEN_ADVANTAGES)
    loss, gradient = ours_on(case, text, average="sequence_mean")
    return loss, gradient[0, :2]


# ----------------------------------------------------------------------------------------------------------------- CISPO

CISPO = Section(
    title="CISPO: which bounds",
    text="CISPO clips the weight of a token and keeps its gradient. The paper tunes only the upper bound and leaves "
    "the lower one out; most systems keep PPO's pair. In TRL `epsilon_high` is the bound itself, elsewhere what is "
    "added to 1.",
    given="One token with log-probability −1 and advantage 1. Answer: the weight at ratio 0.5 and at ratio 6.",
    system=lambda name: (one_token(name, math.log(0.5), 1.0), one_token(name, math.log(6), 1.0)),
    ours=lambda text: (our_token(text, math.log(0.5), 1.0), our_token(text, math.log(6), 1.0)),
    answers=("ratio 0.5", "ratio 6"),
    rows=(
        Row("verl.cispo nemo.cispo slime.cispo roll.cispo skyrl.cispo_sum", "cispo(high=0.28, low=0.2)"),
        Row("roll.cispo_unified_mask", "cispo(high=0.28, low=0.2, drop=True)"),
        Row("trl.cispo_cap1.28", "cispo(high=0.28)"),
        Row("trl.cispo verl.cispo_no_lower", "cispo(high=4.0)"),
    ),
    default="cispo()",
    why="no lower bound, as in the paper, and ScaleRL's upper one (arXiv 2510.13786).",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ GMPO

EMPTY_ROW = "all_masked_row_4x5_s132"


def _gmpo(name: str) -> Cells:
    outputs = recorded("policy_loss", name, EMPTY_ROW).outputs
    return float(outputs["loss"]), to_array(outputs["grad_log_prob"])[0, 0]


def _our_gmpo(text: str) -> Cells:
    case = recorded("policy_loss", "trl.gmpo", EMPTY_ROW)
    loss, average = evaluated(text, **LOSSES, update=lambda loss, **average: (loss, average))
    value, gradient = ours_on(case, loss, **average)
    return value, gradient[0, 0]


GMPO = Section(
    title="GMPO and a row that trains nothing",
    text="GMPO has one ratio for a response, which is exp(0) = 1 where nothing trains. Such a row then adds −A to "
    "the loss, a number without a gradient, or nothing, and counts in the mean.",
    given=f"Case `{EMPTY_ROW}`: 4 rows, the second trains nothing. Answer: the loss, and its gradient by the first "
    "log-probability.",
    system=_gmpo,
    ours=_our_gmpo,
    answers=("loss", "gradient"),
    rows=(
        Row("verl.gmpo", 'update(gmpo(), average="sequence_mean", average_rows="all")'),
        Row("trl.gmpo", instead="none for the loss; its gradient is the row above"),
    ),
    default="update(gmpo())",
    why="a row that trains nothing says nothing and is not counted.",
    source=RECORDED,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ importance

UNKNOWN = [float("-inf"), float("nan"), -1.1]
"""Log-probabilities of the sampler; those of the trainer are -1."""


def _weights(name: str) -> Cells:
    old = [[-1.0] * 3]
    if name.startswith("trl"):
        inputs = {"train_log_prob": old, "rollout_log_prob": [UNKNOWN], "mask": [[1] * 3]}
        return (at(mapped("rollout_correction", name, inputs)["importance_sampling_ratio"])[0],)
    inputs = {"log_probs": old, "old_log_probs": old, "rollout_log_probs": [UNKNOWN], "mask": [[1] * 3]}
    outputs = {"loss": 0.0, "grad_log_prob": [[0.0] * 3]}
    found = mapped("policy_loss", name, {**inputs, "advantages": [[1.0] * 3]}, outputs)
    return (-3 * at(found["grad_log_prob"])[0],)  # the ratio is 1, so that a gradient is -weight / 3


def our_weights(text: str, sampler: list[float]) -> Cells:
    """The weights of three tokens with these log-probabilities of the sampler."""
    given = {"old_logprobs": [-1.0] * 3, "rollout_logprobs": sampler, "logprobs": [-1.0] * 3, "advantages": [1.0] * 3}
    columns = {name: torch.tensor([values], dtype=torch.float64) for name, values in given.items()}
    only = torch.eye(3)[:, None, :]
    loss = losses.reinforce() * evaluated(text, **LOSSES)  # 1 at each of these tokens, without a weight
    return (np.array([fr.apply_loss(loss, columns, one, average="token_sum")[0].item() for one in only]),)


IMPORTANCE = Section(
    title="Importance weights where the sampler's number is missing",
    text="A sampler can give −∞ for a token it returned (numbers after its filter, a token that was forced), or NaN. "
    "The weight exp(trainer − sampler) of such a token is not known: it may count as 0, as 1, or as what the bounds "
    "make of it.",
    given="Log-probabilities −1 of the trainer; −∞, NaN and −1.1 of the sampler. Answer: the three weights.",
    system=_weights,
    ours=lambda text: our_weights(text, UNKNOWN),
    rows=(
        Row("nemo.guard_is_nonfinite nemo.guard_icepop_nonfinite", "truncated_importance(None)"),
        Row("areal.guard_rs_tok_mask_ratio", 'masked_importance(0.8, 1.2, unknown="equal")'),
        Row("trl.vllm_is_token_truncate_None_3.0", 'truncated_importance(3.0, unknown="extreme")', beyond=True),
    ),
    default="truncated_importance()",
    why="a token of which it is not known who drew it teaches nothing.",
    note="TRL's vectors hold NaN and not −∞.",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------- far from the sampler

APART = [-1.0 - math.log(0.3), -1.0 - math.log(1.1), -1.0 - math.log(3.0)]
"""Log-probabilities of the sampler; those of the trainer are -1, so that the weights are 0.3, 1.1 and 3."""


def _apart(name: str) -> Cells:
    old, mask = [[-1.0] * 3], [[1] * 3]
    if name.startswith(("trl", "verl")):
        inputs = {"train_log_prob": old, "rollout_log_prob": [APART], "mask": mask, "response_mask": mask}
        found = mapped("rollout_correction", name, inputs)
        return (at(found["weights" if name.startswith("verl") else "importance_sampling_ratio"])[0],)
    inputs = {"log_probs": old, "old_log_probs": old, "rollout_log_probs": [APART], "mask": mask}
    outputs = {"loss": 0.0, "grad_log_prob": [[0.0] * 3]}
    found = mapped("policy_loss", name, {**inputs, "advantages": [[1.0] * 3]}, outputs)
    count = 1 if name.endswith("_sum") else 3  # of tokens, which a gradient is divided by
    return (-count * at(found["grad_log_prob"])[0],)


TOO_FAR = Section(
    title="TIS or IcePop: a token on which sampler and trainer disagree",
    text="The weight exp(trainer − sampler) of a token corrects for a sampler that is not quite the policy. Far from 1 it "
    "says more about rounding, or about a stale engine, than about the token. Truncated importance sampling (TIS) holds it "
    "at a bound; IcePop gives weight 0 to the token, and only to it: the rest of its response trains on.",
    given="Log-probabilities −1 of the trainer; sampler's such that the weights are 0.3, 1.1 and 3. Answer: what they become.",
    system=_apart,
    ours=lambda text: our_weights(text, APART),
    rows=(
        Row("verl.is_token_2.0 nemo.ppo_tis_None_2.0", "truncated_importance(2.0)"),
        Row("trl.vllm_is_token_truncate_0.5_2.0 openrlhf.ppo_is_token_clip_ratio", "truncated_importance(2.0, floor=0.5)"),
        Row("slime.tis", "truncated_importance(1.2, floor=0.5)"),
        Row("skyrl.ppo_tis_token_sum", "truncated_importance(1.2)"),
        Row("verl.is_token_0.5_2.0", "masked_importance(0.5, 2.0)"),
        Row("nemo.ppo_icepop_0.8_1.25 openrlhf.ppo_is_token_mask_ratio", "masked_importance(0.8, 1.25)"),
        Row("slime.icepop", "masked_importance(0.8, 1.2)"),
        Row("trl.vllm_is_token_mask_0.7_1.4", "masked_importance(0.7, 1.4)"),
        Row("nemo.ppo_is_untruncated", "truncated_importance(None)"),
    ),
    default="truncated_importance()",
    why="TIS with the bound 2 loses no token. `masked_importance()` is IcePop with the paper's bounds, 0.5 and 5.",
    note="The bounds are arguments everywhere, and these are those that the recorded runs were given. One weight for a whole "
    'response is `level="sequence"`.',
)  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- rejection

LIVE, SAMPLER = [[-1.0, -1.0], [-1.0, -1.0]], [[-1.0, -1.0], [-2.0, -2.0]]


def _rejected(name: str) -> Cells:
    inputs = {"log_probs": LIVE, "old_log_probs": LIVE, "rollout_log_probs": SAMPLER, "mask": [[1, 1], [1, 1]]}
    outputs = {"loss": 0.0, "grad_log_prob": [[0.0] * 2] * 2}
    if name.startswith("verl"):  # the mask alone; what is left goes to a loss that knows nothing of it
        apart = (np.array(LIVE) - np.array(SAMPLER)).tolist()
        kept = mapped(
            "rollout_correction", name, {"log_ratio_train_minus_rollout": apart, "response_mask": inputs["mask"]}
        )
        inputs, name = {**inputs, "mask": at(kept["mask"]).tolist()}, "verl.ppo_dualclip_token-mean"
        del inputs["rollout_log_probs"]
    found = mapped("policy_loss", name, {**inputs, "advantages": [[1.0, 1.0]] * 2}, outputs)
    return (float(found["loss"]),)


def _our_rejected(text: str) -> Cells:
    tables = {"logprobs": LIVE, "old_logprobs": LIVE, "rollout_logprobs": SAMPLER, "advantages": [[1.0, 1.0]] * 2}
    columns = {name: torch.tensor(table, dtype=torch.float64) for name, table in tables.items()}
    mask = torch.ones(2, 2)

    def drift(**options: Any) -> torch.Tensor:
        old, rollout = ragged(np.array(LIVE)), ragged(np.array(SAMPLER))
        kept = masks.drift(old, rollout, ragged(mask.numpy() > 0), **options)
        return torch.tensor(matrix(kept))

    def update(loss: fr.Loss, mask: torch.Tensor = mask) -> float:
        return fr.apply_loss(loss, columns, mask)[0].item()

    return (evaluated(text, **LOSSES, within_drift=losses.within_drift, drift=drift, update=update),)


REJECTED = Section(
    title="A response that was rejected: does it still count",
    text="Responses on which sampler and trainer disagree too much are left out. They can get weight 0 and stay in "
    "the count that the mean divides by, so that many rejections make a small step, or leave the count too, so that "
    "every step has the same size, made by those that are left.",
    given="Two rows of two tokens, advantage 1, ratio 1 to the old policy; on the second row the sampler's "
    "log-probabilities are 1 nat below. Mean over tokens. Answer: the loss.",
    system=_rejected,
    ours=_our_rejected,
    rows=(
        Row(
            "openrlhf.ppo_is_seq_mask_ratio nemo.ppo_seq-mask-tis_0.95_1.05 areal.decoupled_rs_seq_mask_ratio_mean",
            'update(ppo_clip(0.2) * within_drift(0.8, 1.25, over="mean"))',
        ),
        Row("verl.rs_seq_mean_k1_0.9_1.1", 'update(ppo_clip(0.2), mask=drift(low=0.9, high=1.1, over="mean"))'),
    ),
    default='update(ppo_clip(0.2) * within_drift(0.8, 1.25, over="mean"))',
    label="FlowRL, as a term",
    why="neither is a default: a term of a loss weighs, an operator on the mask (`masks.drift`, before `fr.update`) "
    "removes.",
)


# -------------------------------------------------------------------------------------------------------------------- KL


def _far(name: str) -> Cells:
    case = recorded("kl", name, "extreme_0" if name.startswith("skyrl") else "extreme_1")
    return to_array(case.outputs["kl"])[0, :2], to_array(case.outputs["grad_sum_wrt_logprob"])[0, :2]


def our_kl(text: str, live: list[float], reference: list[float]) -> Cells:
    """(values, gradients of their sum) of a KL term."""
    logprobs = torch.tensor([live], dtype=torch.float64, requires_grad=True)
    given = {"logprobs": logprobs, "ref_logprobs": torch.tensor([reference], dtype=torch.float64)}
    values = []
    for i in range(len(live)):
        only = torch.zeros(1, len(live))
        only[0, i] = 1
        values.append(fr.apply_loss(evaluated(text, **LOSSES), given, only, average="token_sum")[0])
    (gradient,) = torch.autograd.grad(sum(values), logprobs)
    return np.array([value.item() for value in values]), gradient.numpy()[0]


KL_FAR = Section(
    title="KL far from the reference",
    text="With d = log π − log π_ref, the estimator k3 = exp(−d) − 1 + d explodes where the policy has all but given "
    "up a token that the reference likes. Systems hold the exponent, the result, or neither; where something is held "
    "the gradient ends: the tokens that are farthest away are no longer pulled back.",
    given="Case `extreme`: d = 24.5 and d = −30. Answer: the estimates and their gradients.",
    system=_far,
    ours=lambda text: our_kl(text, [-0.5, -30.5], [-25.0, -0.5]),
    answers=("estimates", "gradients"),
    rows=(
        Row("verl.k3 skyrl.k3 roll.k3 areal.k3 nemo.k3 openrlhf.k3 slime.low_var_kl", 'kl("k3", value_clip=10.0)'),
        Row("slime.k3", 'kl("k3", log_ratio_clip=None)'),
        Row("verl.k3+", 'kl("k3", value_clip=10.0, gradient="k2")'),
        Row("verl.k1 skyrl.k1 slime.k1 roll.kl", 'kl("k1")'),
        Row("nemo.k1 areal.k1 openrlhf.k1", 'kl("k1", value_clip=10.0)'),
        Row("verl.k2 skyrl.k2 slime.k2 roll.mse", 'kl("k2")'),
        Row("nemo.k2 areal.k2 openrlhf.k2", 'kl("k2", value_clip=10.0)'),
    ),
    default="kl()",
    why="exp cannot overflow: d is held within ±20 before it, so that 23.5 is reported as 19. Nearer than that what is "
    'reported is not cut, where most have 10 at most. For a pull that never ends: `gradient="k2"`.',
    source=RECORDED,
)  # fmt: skip


def _near(name: str) -> Cells:
    inputs = {"logprob": [[-1.0]], "ref_logprob": [[-1.5]], "old_log_probs": [[-1.0]]}
    found = mapped("kl", name, inputs)
    return at(found["kl"])[0, 0], at(found["grad_sum_wrt_logprob"])[0, 0]


def _our_near(text: str) -> Cells:
    value, gradient = our_kl(text, [-1.0], [-1.5])
    return value[0], gradient[0]


KL_NEAR = Section(
    title="KL: same value, another gradient",
    text="As a loss, an estimator is differentiated, and the gradient of a good estimate need not estimate the "
    "gradient. On tokens the policy drew itself that of k1 is 0 in expectation, that of k3 belongs to the KL the "
    "other way round, and d, the gradient of k2, is right (arXiv 2506.09477).",
    given="One token with d = 0.5, drawn by the policy itself. Answer: estimate and gradient.",
    system=_near,
    ours=_our_near,
    answers=("estimate", "gradient"),
    rows=(
        Row("verl.k3 skyrl.k3 slime.k3 roll.k3 areal.k3 nemo.k3 openrlhf.k3", 'kl("k3")'),
        Row("verl.k3+ openrlhf.k3_unbiased_grad", 'kl("k3", gradient="k2")'),
        Row("nemo.k3_score_function", 'kl("k3", importance="value", against=None)'),
        Row("verl.k1 skyrl.k1 slime.k1 roll.kl areal.k1 nemo.k1 openrlhf.k1", 'kl("k1")'),
        Row("verl.k1+ openrlhf.k1_unbiased_grad", 'kl("k1", gradient="k2")'),
        Row("nemo.k1_score_function", 'kl("k1", importance="value", against=None)'),
        Row("verl.k2 skyrl.k2 slime.k2 roll.mse areal.k2 nemo.k2 openrlhf.k2", 'kl("k2")'),
    ),
    default="kl()",
    why="GRPO's KL term as published. `gradient=\"k2\"` is the better loss and one argument away.",
    note="k3 with its score function has exactly the gradient d: the derivative of k3 is 1 − exp(−d), and k3 itself "
    "makes up the rest. With k1 the score function gives d + 1, which has the same expectation.",
)  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- entropy


def _entropy(name: str) -> Cells:
    case = recorded("entropy_logprob", name, FILTERED[name])
    return (to_array(case.outputs["entropy"])[0, -1],)


FILTERED = {"trl.from_logits": "neg_inf_logit", "verl.from_logits": "neg_inf_logits_1"}


def _our_entropy(_: str) -> Cells:
    from flowrl.engines.forward import token_stats

    logits = recorded("entropy_logprob", "trl.from_logits", "neg_inf_logit").array("logits")
    entropy = token_stats(torch.tensor(logits), torch.zeros(1, 1, dtype=torch.int64), with_entropy=True)[1]
    assert entropy is not None
    return (entropy[0, 0].item(),)


ENTROPY = Section(
    title="Entropy of filtered logits",
    text="A token that may not be drawn (top-k, a grammar, a mask over the vocabulary) has the logit −∞. It adds 0 "
    "to the entropy; computed as written, 0 · (−∞) adds NaN, and the step is lost.",
    given="TRL's case: logits 1, −1, −∞, 0.5; verl's has five, two of them −∞. Answer: the entropy.",
    system=_entropy,
    ours=_our_entropy,
    rows=(Row("verl.from_logits trl.from_logits", instead="none"),),
    default="entropy_bonus()",
    why="what cannot happen adds nothing. The trainer computes it: whoever writes `entropy_bonus()` in a loss gets "
    "this.",
    source=RECORDED,
)
