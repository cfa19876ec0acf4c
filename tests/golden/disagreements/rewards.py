"""Rewards by length, answer checking, preference losses."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

import flowrl as fr
from flowrl_operators import losses, rewards
from tests.golden.disagreements.tables import RECORDED, Cells, Row, Section, at, evaluated, mapped, recorded
from tests.golden.pairs import columns_of_pairs

# ------------------------------------------------------------------------------------------------------- label smoothing


def _smoothed(name: str) -> Cells:
    if name.startswith("openrlhf"):
        names = ("policy_chosen_logps", "policy_rejected_logps", "reference_chosen_logps", "reference_rejected_logps")
        inputs: dict[str, Any] = dict(zip(names, ([-1.0], [-3.0], [-1.0], [-1.0]), strict=True))
    else:
        inputs = {"per_token_logps": [[-1.0], [-3.0]], "ref_per_token_logps": [[-1.0], [-1.0]]}
        inputs["completion_mask"] = [[1], [1]]
    return (float(mapped("preference_loss", name, inputs, beta=0.5, label_smoothing=0.1)["loss"]),)


def pair_loss(text: str, live: list[list[float]], mask: list[list[int]]) -> float:
    """The loss of a call of ours on one pair, the chosen response first; the reference says -1 everywhere."""
    logprobs = torch.tensor(live, dtype=torch.float64)
    columns = {"logprobs": logprobs, "ref_logprobs": torch.full_like(logprobs, -1.0), **columns_of_pairs(2)}
    loss = evaluated(text, dpo=losses.dpo, ipo=losses.ipo)
    return fr.apply_loss(loss, columns, torch.tensor(mask))[0].item()


SMOOTHING = Section(
    title="DPO with label smoothing",
    text="A chance e that a pair is labelled the wrong way round can be left aside, mixed into the loss "
    "(conservative DPO), or corrected for, so that the loss is right in expectation (robust DPO, arXiv 2403.00409).",
    given="β = 0.5, the chosen response leads by 2 nats, e = 0.1. Answer: the loss.",
    system=_smoothed,
    ours=lambda text: (pair_loss(text, [[-1.0], [-3.0]], [[1], [1]]),),
    rows=(
        Row("trl.dpo_sigmoid", "dpo(0.5)"),
        Row("openrlhf.dpo_cdpo", "dpo(0.5, label_smoothing=0.1)"),
        Row("trl.dpo_robust", 'dpo(0.5, label_smoothing=0.1, kind="robust")'),
    ),
    default="dpo(0.5, label_smoothing=0.1)",
    why="an argument that is given is used; without it there is no smoothing. The kinds that have no use for it "
    "refuse it.",
    label="FlowRL, e = 0.1",
)

LONG, SHORT = [-0.5] * 4, [-1.5, -1.5]
"""Log-probabilities of a chosen response of 4 tokens and of a rejected one of 2; the reference has -1 everywhere."""


def _ipo(name: str) -> Cells:
    lead = sum(LONG) + 4 - (sum(SHORT) + 2)
    if name.startswith("areal"):
        return (float(at(mapped("preference_loss", name, {"logits": [lead]}, beta=0.1)["losses"])[0]),)
    if name.startswith("openrlhf"):
        names = ("policy_chosen_logps", "policy_rejected_logps", "reference_chosen_logps", "reference_rejected_logps")
        inputs: dict[str, Any] = dict(zip(names, ([sum(LONG)], [sum(SHORT)], [-4.0], [-2.0]), strict=True))
    else:
        inputs = {"per_token_logps": [LONG, [*SHORT, 0.0, 0.0]], "ref_per_token_logps": [[-1.0] * 4] * 2}
        inputs["completion_mask"] = [[1] * 4, [1, 1, 0, 0]]
    return (float(mapped("preference_loss", name, inputs, beta=0.1)["loss"]),)


IPO = Section(
    title="IPO: sums or means over tokens",
    text="IPO pulls the lead of the chosen response to 1 / 2β. The paper's log-ratios are those of whole responses; "
    "averaged over tokens the same β asks for far more.",
    given="β = 0.1; a chosen response of 4 tokens, each 0.5 nats above the reference, and a rejected one of 2, each "
    "0.5 below. Answer: the loss.",
    system=_ipo,
    ours=lambda text: (pair_loss(text, [LONG, [*SHORT, 0.0, 0.0]], [[1] * 4, [1, 1, 0, 0]]),),
    rows=(
        Row("openrlhf.ipo areal.dpo_ipo", "ipo(0.1)"),
        Row("trl.dpo_ipo", 'dpo(0.1, kind="ipo", reduce="mean")'),
    ),
    default="ipo(0.1)",
    why="the paper's.",
    note="AReaL's loss takes the lead as it is given; here the sum.",
)


# ------------------------------------------------------------------------------------------------------- rewards by length

SIZES = [16, 18, 20, 22]


def sized(lengths: list[int]) -> fr.Ragged:
    """Responses of so many tokens."""
    return fr.Ragged(np.zeros(sum(lengths), np.int32), np.concatenate([[0], np.cumsum(lengths)]))


def _overlong(name: str) -> Cells:
    limits = {
        "verl": ("max_resp_len", "overlong_buffer_len"),
        "nemo": ("max_response_length", "overlong_buffer_length"),
        "areal": ("max_response_length", "overlong_tokens"),
        "openrlhf": ("max_new_tokens", "overlong_buffer_len"),
        "ms_swift": ("soft_max_length", "soft_cache_length"),
        "trl": ("max_completion_len", "soft_punish_cache"),
    }
    most, buffer = limits[name.partition(".")[0]]
    own = (
        {"lengths": SIZES} if name.startswith(("trl", "ms_swift")) else {"response_lengths": SIZES, "scores": [0.0] * 4}
    )
    return (at(mapped("overlong_penalty", name, own, **{most: 20, buffer: 4})["rewards"]),)


OVERLONG = Section(
    title="The penalty for length, beyond the limit",
    text="DAPO's soft punishment falls from 0 to −1 over the last tokens before the limit and stays at −1. As a "
    "formula that is a ramp, and whether it ends matters where responses can be longer than the limit it was given, "
    "in evaluation or with a limit of several turns.",
    given="Limit 20, the last 4 of it punished; responses of 16, 18, 20 and 22 tokens. Answer: the four penalties.",
    system=_overlong,
    ours=lambda text: (
        evaluated(text, overlong=functools.partial(rewards.overlong, np.zeros(len(SIZES)), sized(SIZES))),
    ),
    rows=(
        Row("trl.soft_overlong_punishment openrlhf.overlong", "overlong(soft=16, hard=20)"),
        Row("nemo.reward_shaping areal.overlong ms_swift.soft_overlong", "overlong(soft=16, hard=20, cap=False)"),
    ),
    default="overlong(soft=16, hard=20)",
    why="the paper's equation 13.",
    note="verl has no cap either; its responses cannot be longer than the limit.",
)

COSINE_LENGTHS = [50, 100, 150, 200]
BOUNDS = {
    "trl": {"min_value_correct": 0.5, "max_value_correct": 1.0, "min_value_wrong": -1.0, "max_value_wrong": -0.5},
    "ms_swift": {
        "min_len_value_correct": 1.0, "max_len_value_correct": 0.5, "min_len_value_wrong": -0.5, "max_len_value_wrong": 0.0,
    },
}  # fmt: skip


def _cosine(name: str) -> Cells:
    bounds = BOUNDS[name.partition(".")[0]]
    inputs = {"lengths": COSINE_LENGTHS, "correct": True}
    return (at(mapped("cosine_reward", name, inputs, max_len=100, **bounds)["rewards"]),)


COSINE = Section(
    title="The cosine reward beyond the longest length",
    text="Along half a cosine a right answer earns less the longer it is. Beyond the greatest length the curve can "
    "stop, or turn back, so that twice the length earns as much as none; the paper (arXiv 2502.03373) has a fixed "
    "penalty there.",
    given="From 1 at length 0 to 0.5 at length 100; right responses of 50, 100, 150 and 200 tokens. Answer: their "
    "rewards.",
    system=_cosine,
    ours=lambda text: (
        evaluated(text, cosine=functools.partial(rewards.cosine, np.ones(len(COSINE_LENGTHS)), sized(COSINE_LENGTHS))),
    ),
    rows=(
        Row("trl.cosine_scaled", "cosine(max_length=100, correct=(1.0, 0.5), exceeded=None)"),
        Row("ms_swift.cosine", "cosine(max_length=100, correct=(1.0, 0.5), exceeded=None, clamp=False)"),
    ),
    default="cosine(max_length=100, correct=(1.0, 0.5))",
    why="the paper's, −10 from the greatest length on.",
)


# ------------------------------------------------------------------------------------------------------- answer checking

PAIRS = {
    r"1/2 = \frac{2}{4}": ("1/2", r"\frac{2}{4}"),
    "1,234 = 1234": ("1,234", "1234"),
    "7 = 7.0": ("7", "7.0"),
    r"\{1,2,3\} = \{3,2,1\}": (r"\{1,2,3\}", r"\{3,2,1\}"),
    "2^{10} = 1024": ("2^{10}", "1024"),
    r"50\% = 50": (r"50\%", "50"),
    r"-3 = \text{-}3": ("-3", r"\text{-}3"),
}


def _graded(name: str) -> Cells:
    case = recorded("math_equiv", name, "pairs")
    said = next(case.outputs[key] for key in ("verdict", "scores", "rewards") if key in case.outputs)
    verdict = {tuple(pair): said for pair, said in zip(case.inputs["pairs"], said, strict=True)}
    return tuple(bool(verdict[pair] is True or verdict[pair] == 1) for pair in PAIRS.values())


def _our_grade(text: str) -> Cells:
    found = []
    for gold, answer in PAIRS.values():
        names = {
            name: functools.partial(getattr(rewards, name), f"The answer is \\boxed{{{answer}}}.", gold)
            for name in ("math", "exact")
        }
        found.append(bool(evaluated(text, **names, BOXED=rewards.BOXED) == 1.0))
    return tuple(found)


GRADERS = Section(
    title="Is it the same answer?",
    text="Graders of mathematics either parse both sides or rewrite text until it is equal. The second kind is made "
    "for the answers of one benchmark; each fraction, set or power it does not know is a right answer with reward 0. "
    "And graders do not agree on what 50% equals.",
    given="Seven pairs, the reference first. Answer: whether the grader takes the second for it.",
    system=_graded,
    ours=_our_grade,
    answers=tuple(f"`{pair}`" for pair in PAIRS),
    rows=(
        Row("math_verify.dollar_units", 'math(percent="number")'),
        Row("verl.math_verify", 'math(percent="distinct")'),
        Row("openrlhf.grade_answer slime.grade_answer_verl", instead="none"),
        Row("verl.math_reward_is_equiv", instead="none"),
        Row("verl.math_dapo_minerva", instead="none"),
        Row("verl.math_dapo_boxed_fallback", "exact(pattern=BOXED)"),
    ),
    default="math()",
    why="one parser, no second rule behind it. `percent` says what a percent sign means.",
    source=RECORDED,
    note="The first line is TRL's `accuracy_reward`. The lists of replacements in `math_reward_is_equiv` and "
    "`math_dapo_minerva` are those of the MATH benchmark and of Minerva: right for repeating published numbers.",
)  # fmt: skip

TEXTS = {
    "`#### 10 #### 12`": "#### 10 #### 12",
    "`#### $18`": "#### $18",
    "`\\boxed{8}`": "answer: \\boxed{8}",
    "`#### 3/4`": "We get 3/4\n#### 3/4",
    "early": "#### 5" + " and so on" * 40,
}


def _extracted(name: str) -> Cells:
    found = mapped("gsm8k_extract", name, {"texts": list(TEXTS.values())})["answers"]
    return tuple("nothing" if answer is None else answer for answer in found)


def _our_extract(text: str) -> Cells:
    found = [
        evaluated(text, gsm8k_answer=functools.partial(rewards.gsm8k_answer, response)) for response in TEXTS.values()
    ]
    return tuple("nothing" if answer is None else answer for answer in found)


GSM8K = Section(
    title="Where a GSM8K answer stands",
    text="The answer follows `#### `. Of several the first or the last counts, only the end of a response may be "
    "looked at, and a flexible reader takes the last number wherever it is.",
    given="Five responses; the last has `#### 5` and then 400 characters. Answer: what is read.",
    system=_extracted,
    ours=_our_extract,
    answers=tuple(TEXTS),
    rows=(
        Row("verl.strict", "gsm8k_answer(tail=300)", beyond=True),
        Row("skyrl.strict", 'gsm8k_answer(which="first")'),
        Row("verl.flexible", 'gsm8k_answer(method="flexible", tail=300)', beyond=True),
        Row("skyrl.flexible", 'gsm8k_answer(method="flexible")'),
    ),
    default="gsm8k_answer()",
    note="No response of the vectors is so long; that verl looks at the last 300 characters only is what its code "
    "says.",
    why="who corrects an answer means the last one, and a long ending is no mistake. Numbers are then compared as "
    "numbers, so that `5.` is 5; both systems compare text.",
)
