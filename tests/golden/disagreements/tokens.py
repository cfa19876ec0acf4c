"""Advantages per token: sums and GAE through holes in the mask, whitening."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import flowrl as fr
from flowrl_operators import advantages
from tests.golden.disagreements.tables import Cells, Row, Section, at, evaluated, mapped, recorded
from tests.golden.vectors import ragged

HOLES = np.array([1, 1, 0, 0, 1])
"""Two tokens, a tool's answer of two tokens, and one more."""
PAID = [0.0, 0.0, 0.0, 0.0, 1.0]


def _zeros(*names: str, width: int = 5) -> dict[str, Any]:
    return {name: [[0.0] * width] for name in names}


def _inputs(system: str, mask: list[int]) -> dict[str, Any]:
    """One response with reward 1 at its last token, as a system takes it."""
    if system in ("verl", "skyrl"):
        return {"token_level_rewards": [PAID], "response_mask": [mask]}
    if system == "roll":
        return {"token_level_rewards": [PAID], "mask": [mask]}
    if system == "openrlhf":
        return {"rewards": [1.0], "action_mask": [mask], **_zeros("kl")}
    return {"rewards": [1.0], "mask": [mask], "response_lengths": [5], **_zeros("log_probs", "ref_log_probs")}


# ---------------------------------------------------------------------------------------------------------- REINFORCE++


def _returns(name: str) -> Cells:
    inputs = _inputs(name.partition(".")[0], HOLES.tolist())
    params = {} if name.startswith(("verl", "skyrl")) else {"kl_coef": 0.0}
    found = mapped("advantage", name, inputs, gamma=0.9, **params)
    return (at(found["returns"])[0][HOLES == 1],)


def _our_returns(text: str) -> Cells:
    columns = (np.array([1.0]), ragged(HOLES[None].astype(bool)), None)
    found = evaluated(text, reinforce_pp=functools.partial(advantages.reinforce_pp, *columns))
    return (found["returns"].values[HOLES == 1],)


RETURNS = Section(
    title="REINFORCE++ through a tool's answer",
    text="The return of a token is the discounted sum of what is paid after it. Between two turns stand tokens of a "
    "tool, which do not train. They can be no steps at all, steps that cost a discount, or the end of what came "
    "before: then the tokens that called the tool never hear of the reward.",
    given="Mask 1, 1, 0, 0, 1, reward 1 at the last token, γ = 0.9. Answer: returns of the three tokens that train.",
    system=_returns,
    ours=_our_returns,
    rows=(
        Row("verl.reinforce_plus_plus", "reinforce_pp(gamma=0.9)"),
        Row("openrlhf.reinforce_plus_plus slime.reinforce_plus_plus", 'reinforce_pp(gamma=0.9, masked="decay")'),
        Row("skyrl.reinforce_plus_plus", 'reinforce_pp(gamma=0.9, masked="reset")'),
    ),
    default="reinforce_pp(gamma=0.9)",
    why="time is counted in decisions of the policy, and a tool's answer is none. With γ = 1, the usual value, the "
    "first two agree.",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ GAE

VALUES = [0.5, 0.5, 9.0, 9.0, 0.5]


def _gae(name: str) -> Cells:
    system = name.partition(".")[0]
    if system == "areal":
        # whole sequences: a token of prompt before, one of padding after, and everything one to the left
        mask = [0, *HOLES.tolist(), 0]
        inputs: dict[str, Any] = {
            "rewards": [1.0], "values": [[*VALUES, 9.0, 0.0]], "attention_mask": [[1] * 6 + [0]], "loss_mask": [mask],
            **_zeros("logprobs", "ref_logp_already_shifted", width=7),
        }  # fmt: skip
        return (
            at(mapped("advantage", name, inputs, gamma=1.0, lam=0.95, kl_ctl=0.0)["advantages"])[0][:5][HOLES == 1],
        )
    params = {"openrlhf": {"kl_coef": 0.0}, "slime": {"kl_coef": 0.0}, "nemo": {"normalize_advantages": False}}
    inputs = {**_inputs(system, HOLES.tolist()), "values": [VALUES]}
    found = mapped("advantage", name, inputs, gamma=1.0, lam=0.95, **params.get(system, {}))
    return (at(found.get("advantages_unwhitened", found["advantages"]))[0][HOLES == 1],)


def _our_gae(text: str) -> Cells:
    columns = (np.array([1.0]), ragged(np.array([VALUES])), ragged(HOLES[None].astype(bool)), None, None)
    found = evaluated(text, gae=functools.partial(advantages.gae, *columns))
    return (found["advantages"].values[HOLES == 1],)


GAE = Section(
    title="GAE through a tool's answer",
    text="The critic is trained at the tokens that train. What it says at a tool's tokens nobody ever corrected. GAE "
    "can step over them, step through them as if they were worth 0, or take the critic at its word there.",
    given="As before, γ = 1, λ = 0.95; the critic says 0.5 at the tokens that train and 9 at the tool's. Answer: "
    "advantages, before whitening.",
    system=_gae,
    ours=_our_gae,
    rows=(
        Row("verl.gae nemo.gae areal.gae", "gae(whiten=False)"),
        Row("openrlhf.gae_unnormalized", 'gae(whiten=False, masked="decay")'),
        Row("roll.gae", 'gae(whiten=False, masked="values")'),
        Row("skyrl.gae slime.ppo", 'gae(whiten=False, masked="all")'),
    ),
    default="gae(whiten=False)",
    why='an advantage must not depend on numbers that nothing trains. `"values"` and `"all"` differ in whether '
    "rewards at the tool's tokens count; here there are none.",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ whitening

FOUR = [1.0, 2.0, 3.0, 6.0]
SMALL = [value / 10_000 for value in FOUR]


def _whitened(name: str) -> Cells:
    first = [
        at(mapped("masked_ops", name, {"values": [values], "mask": [[1] * 4]})["value"])[0, 0]
        for values in (FOUR, SMALL)
    ]
    if name.startswith("verl"):
        alone: Any = f"raises {recorded('masked_ops', name, 'one_token_batch_3').outputs['raises']}"
    else:
        alone = at(mapped("masked_ops", name, {"values": [[5.0]], "mask": [[1]]})["value"])[0, 0]
    return (*first, alone)


def _our_whitened(text: str, alone: bool = True) -> Cells:
    found = []
    for values in (FOUR, SMALL, [5.0])[: 3 if alone else 2]:
        column = ragged(np.array([values]))
        mask = fr.Ragged.like(np.ones(len(values), bool), column)
        found.append(evaluated(text, whiten=functools.partial(advantages.whiten, column, mask)).values[0])
    return tuple(found)


WHITENING = Section(
    title="Whitening",
    text="Advantages of a step minus their mean, over their std. The variance divides by n or n − 1, and what keeps "
    "the division safe stands under the root, is a floor of the variance, or is added to the std. Of small "
    "advantages it decides the size. A step with a single token has no deviation.",
    given="Tokens 1, 2, 3, 6; the same divided by 10,000; one token, 5. Answer: what becomes of the first token.",
    system=_whitened,
    ours=_our_whitened,
    answers=("1, 2, 3, 6", "÷ 10,000", "one token"),
    rows=(
        Row("verl.masked_whiten", instead="`whiten()`; one token gives 0"),
        Row("openrlhf.masked_normalize_rows", 'whiten(unbiased=False, guard="floor")', beyond=True),
        Row("areal.masked_normalization", 'whiten(unbiased=False, eps=1e-5, guard="std")', beyond=True),
    ),
    default="whiten()",
    why="as verl, but a step of one token is a step like any other.",
    note="Beyond the vectors of the last two is the single token.",
)
