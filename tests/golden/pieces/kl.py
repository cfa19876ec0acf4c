"""KL to a reference, per token. The recorded gradient is that of the sum over tokens, with or without a mask."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

import flowrl as fr
from flowrl_operators import losses
from tests.golden.padded import tensor
from tests.golden.pieces._policy_corrections import bound_of_kl
from tests.golden.runner import Where
from tests.golden.vectors import Case

KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def per_token(case: Case, loss: fr.Loss, columns: dict[str, str], *, leaf: str = "logprobs") -> dict[str, Any]:
    """The loss at every position and the gradient of its sum."""
    given = {ours: tensor(case, theirs, grad=ours == leaf) for ours, theirs in columns.items() if theirs in case.inputs}
    shape = case.array("ref_logprob").shape[:2]
    mask = tensor(case, "mask") if "mask" in case.inputs else torch.ones(shape, dtype=torch.float64)
    total, _ = fr.apply_loss(loss, given, mask, average="token_sum")
    (gradient,) = torch.autograd.grad(total, given[leaf])
    value = np.zeros(shape)
    for position in np.argwhere(mask.numpy() > 0):
        only = torch.zeros(shape)
        only[tuple(position)] = 1
        one, _ = fr.apply_loss(loss, given, only, average="token_sum")
        value[tuple(position)] = one.item()
    chosen = mask.numpy() > 0
    return {"kl": Where(value, chosen), "grad_sum_wrt_logprob": Where(gradient.numpy(), chosen)}


COLUMNS = {"logprobs": "logprob", "ref_logprobs": "ref_logprob", "old_logprobs": "old_log_probs"}


def estimate(case: Case, found: re.Match[str]) -> dict[str, Any]:
    system, name = found["system"], found["kind"]
    straight = name.endswith("+")
    name = name.removesuffix("+")
    kind = KINDS.get(name, name)
    p = case.params
    options: dict[str, Any] = {"log_ratio_clip": None}
    match system:
        case "verl" | "skyrl":
            options["log_ratio_clip"] = 20.0
            options["value_clip"] = 10.0 if kind == "k3" else None
            options["gradient"] = "k2" if straight else None
        case "openrlhf":
            options |= {
                "log_ratio_clip": 20.0,
                "value_clip": 10.0,
            }  # it holds -d below 10, where the value is held anyway
            if p.get("unbiased_gradient"):
                options |= {"gradient": "k2", "importance": "gradient", "importance_cap": 10.0}
        case "nemo":
            options = {
                "log_ratio_clip": p["input_clamp"],
                "value_clip": bound_of_kl(kind, p["input_clamp"], p["output_clamp"]),
            }
            if found["variant"] == "_score_function":
                options |= {"importance": "value", "against": None}
        case "areal":
            options["value_clip"] = 10.0 if p.get("apply_clamp") else None
        case "slime":
            options["value_clip"] = 10.0 if name == "low_var_kl" else None
        case "roll":
            options["value_clip"] = 10.0 if kind == "k3" else None
    return per_token(case, losses.kl(kind, **options), COLUMNS)


def full(case: Case) -> dict[str, Any]:
    columns = {"logits": "logprob", "ref_logits": "ref_logprob"}
    return per_token(case, losses.full_kl(normalised=True), columns, leaf="logits")


CONVENTIONS = {"roll.full": full}

PATTERNS = [
    (
        r"(?P<system>verl|skyrl|openrlhf|nemo|areal|slime|roll)\."
        r"(?P<kind>(?:kl|k1|abs|mse|k2|low_var_kl|k3|full)\+?)(?P<variant>_unbiased_grad|_score_function)?",
        estimate,
    )
]
