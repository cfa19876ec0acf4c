"""How this pack's operators and losses are tried by the conformance kit: `flowrl ops test core` and `pack_cases("core")` find
CASES here.

It holds configurations (one that is required, and each value of an option), columns that must hold something particular, and
properties that do not hold, with the reason. What is not named is tried with its defaults.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.testing import WIDTH


def each(**options: Any) -> list[dict[str, Any]]:
    """The defaults, and each of these values of each option by itself."""
    return [{}, *({name: value} for name, values in options.items() for value in values)]


def with_(common: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """As `each`, for an operator whose required options are `common`."""
    return [{**common, **more} for more in each(**options)]


def as_many_words(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """A reward function as TRL takes them."""
    return [float(len(text.split())) for text in completions]


def contains(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A reward function as verl takes them."""
    return float(ground_truth in solution_str)


def letters(rng: np.random.Generator, n: int) -> list[str]:
    return [str(rng.choice(list("ABC"))) for _ in range(n)]


def alike(rng: np.random.Generator, n: int) -> list[list[int]]:
    """Prompts of one length, so that rows of different responses are never equally long."""
    return [[1, 2]] * n


def extra(rng: np.random.Generator, n: int) -> list[str]:
    return ['{"split": "test"}'] * n


def distinct(rng: np.random.Generator, lengths: Any) -> list[Any]:
    """Ids of a list of likeliest tokens, each once."""
    return [[rng.permutation(5)[:WIDTH].tolist() for _ in range(length)] for length in lengths]


def nats(rng: np.random.Generator, lengths: Any) -> list[Any]:
    """Their log-probabilities: less than 1 in sum."""
    return [np.log(rng.dirichlet(np.ones(WIDTH + 1), int(length))[:, :WIDTH]).tolist() for length in lengths]


def sentences(rng: np.random.Generator, n: int) -> list[str]:
    return [" ".join(map(str, rng.integers(0, 3, int(rng.integers(0, 6))))) for _ in range(n)]


WEIGHT = "it is a weight, which has no gradient of its own"
BY_HOST = "pairs are matched by their ids, on the host, once for each micro-batch"
PAIRED: dict[str, Any] = {"skip": {"device": BY_HOST}}
OF_TEACHER: dict[str, Any] = {
    "skip": {"device": "a teacher's ids beyond the vocabulary are refused, once for each micro-batch"}
}
GROUPS = {"single": ("reward",), "counts": ("scored",)}
KL = {"kind": ("k2", "k3", "abs", "full"), "log_ratio_clip": (None,)}
DRIFT = [
    *with_(
        {"high": 1.5},
        statistic=("k1", "k2", "k3", "tv", "binary_kl"), over=("sum", "mean", "max", "each"), unknown=("equal", "extreme"),
    ),
    *({"high": 0.5, "statistic": "k3", "direction": way} for way in ("from_old", "both")),
]  # fmt: skip

CASES: dict[str, Any] = {
    # ---- advantages
    "advantages.group_norm": {
        "config": each(
            baseline=("others", "batch", "batch_others", "none"), scale=("others", "batch", "none"), unbiased=(True,),
            around=("baseline",), flat=("eps",), count_ratio=("float32",), **GROUPS,
        ),
    },
    "advantages.rloo": {"config": each(reward_clip=((-0.5, 0.5),), **GROUPS)},
    "advantages.maxrl": {"config": each(**GROUPS)},
    "advantages.pass_at_k": {"config": each(k=(2,), scale=("group",), counts=("scored",))},
    "advantages.reinforce_pp_baseline": {"config": each(guard=("variance", "std"), **GROUPS)},
    "advantages.batch_norm": {"config": each(unbiased=(True,), by=("role",), counts=("scored",))},
    "advantages.optimal_token_baseline": {"config": each(align=("trained",), tail=("zero",), single=("reward",))},
    "advantages.sum_pi_squared": {"columns": {"policy_top_logprobs": nats}},
    "advantages.gae": [
        {"config": each(whiten=(False,), masked=("decay",), gamma=(0.9,), clip=(1.0,))},
        {"config": {"masked": "values"}, "skip": {"leaks": "masked tokens bootstrap with their values: that is the option"}},
    ],
    "advantages.reinforce": {"config": each(whiten=(True,), masked=("decay",), gamma=(0.9,))},
    "advantages.reinforce_pp": {"config": each(guard=("floor", "std"), masked=("decay",))},
    "advantages.whiten": {"config": each(guard=("floor", "std"), centre=(False,), scale=(False,))},
    "advantages.gdpo": {"config": with_({"parts": ("a", "b")}, over=("tokens", "none"), weights=((1.0, 2.0),))},
    "advantages.multi_reward": {
        "config": with_({"parts": ("a", "b")}, order=("normalize_then_sum",), missing=("part",), over=("samples",))
    },
    # ---- filters, masks, samplers
    "evaluate.pass_rates": {"config": each(k=((1, 2),))},
    "filters.group_has_signal": {"config": each(unknown=("drop", "keep"), single=("keep",))},
    "filters.length": {"config": each(most=(3,), truncated=("drop",))},
    "filters.top": {"config": each(k=(2,), least=(0.0,))},
    "masks.drift": {"config": DRIFT},
    "importance.importance_weights": {"config": each(outside=("zero",), level=("sequence", "geometric"), normalise=(False,))},
    "samplers.part_by_length": {
        "config": with_({"parts": 2}, method=("greedy",), equal_size=(True,)),
        "skip": {"order": "of two parts with equal loads the one that comes first is part 0"},
    },
    "samplers.batch_by_tokens": [
        {"config": {"max_tokens": 8}, "columns": {"prompt_ids": alike}},
        {
            "config": [{"max_tokens": 8, "fit": "first_fit"}, {"max_tokens": 8, "fit": "in_order"}],
            "skip": {"order": "first come, first served: that is the option"},
        },
    ],
    # ---- rewards
    "rewards.judge": {"skip": {"*": "it asks a server"}},
    "rewards.code": {"skip": {"*": "it runs programs in child processes; its own tests try what they may do"}},
    "rewards.choice": {"columns": {"answer": letters}},
    "rewards.f1": {"columns": {"response": sentences, "answer": sentences}},
    "rewards.regex": {"config": [{"pattern": r"\d"}]},
    "rewards.total": {"config": with_({"weights": {"a": 1.0, "b": -0.5}}, missing=("zero",))},
    "rewards.cosine": {"config": [{"max_length": 5}]},
    "rewards.overlong": {"config": [{"soft": 2}, {"soft": 2, "hard": 4}]},
    "rewards.repetition": {"config": each(unit=("word",)), "columns": {"response": sentences}},
    "rewards.stop_properly": {"config": [{"factor": 0.5}, {"value": -1.0}]},
    "rewards.kl_shaped": {"config": with_({"coefficient": 0.1}, paid=("every",), value_clip=(1.0,), **KL)},
    "rewards.kl_penalised": {"config": with_({"coefficient": 0.1}, **KL)},
    "rewards.adaptive_kl_shaped": {"config": [{"coefficient": 0.1, "target": 0.1, "horizon": 100}]},
    "rewards.token_kl": {
        "columns": {
            "policy_top_ids": distinct, "policy_top_logprobs": nats, "ref_top_ids": distinct, "ref_top_logprobs": nats,
        },
    },
    # ---- adapters
    "adapters.trl.function_reward": {"config": [{"function": as_many_words}]},
    "adapters.verl.reward": {"config": [{"function": contains}], "columns": {"extra_info": extra}},
    "adapters.reasoning_gym.reward": {"skip": {"*": "its answers belong to its own data; tested with them"}},
    "adapters.verifiers.reward": {"skip": {"*": "its answers belong to an environment of that package"}},
    # ---- losses
    "losses.ppo_clip": [
        {"config": each(dual=(3.0,), level=("sequence", "geometric"), high=(0.28,))},
        {"config": {"level": "geometric_token"}, "stop_gradient": "each token is one of the row's ratio, by GSPO-token"},
    ],
    "losses.cispo": {"stop_gradient": WEIGHT, "config": each(drop=(True,))},
    "losses.topr": {"stop_gradient": WEIGHT},
    "losses.vespo": {"stop_gradient": WEIGHT},
    "losses.kl_cov": {"stop_gradient": "the tokens of greatest covariance are chosen without gradient"},
    "losses.clip_cov": {"stop_gradient": "the tokens of greatest covariance are chosen without gradient"},
    "losses.dppo": {
        "stop_gradient": WEIGHT, "config": each(divergence=("binary_kl",), drop=("all",), value=("ratio",)),
    },
    "losses.kl": {
        "stop_gradient": "gradient= differentiates another estimator than the one reported",
        "config": [*each(kind=("k1", "k2", "abs"), gradient=("k2",), importance=("value", "gradient")), {"value_clip": 1.0}],
    },
    "losses.within_drift": {"config": DRIFT},
    "losses.truncated_importance": {"config": each(level=("sequence", "geometric"), unknown=("equal", "extreme"))},
    "losses.masked_importance": {"config": each(level=("sequence", "geometric"))},
    "losses.forward_kl": {**OF_TEACHER, "config": each(outside=("renormalise", "ignore"))},
    "losses.reverse_kl": {**OF_TEACHER, "config": each(outside=("renormalise", "ignore", "floor"))},
    "losses.jsd": {"config": each(beta=(0.0, 1.0), outside=("renormalise",))},
    "losses.value_clip": {"config": each(clip=(None,), huber=(1.0,))},
    "losses.dpo": {
        **PAIRED,
        "config": [
            *each(kind=("hinge", "ipo", "nca", "sppo", "apo_zero", "apo_down", "discopop"), reduce=("mean",)),
            {"kind": "robust", "label_smoothing": 0.1},
            {"kind": "exo", "label_smoothing": 1e-3},
            *({"divergence": name} for name in ("forward_kl", "js", "alpha")),
        ],
    },
    **{f"losses.{name}": PAIRED for name in ("ipo", "chosen_nll", "orpo", "simpo", "aot", "bradley_terry")},
    "losses.cpo": {**PAIRED, "config": each(kind=("hinge", "ipo"), reduce=("mean",), alpha=(0.1,))},
}  # fmt: skip
