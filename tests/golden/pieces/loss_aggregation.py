"""Averages: a given matrix of losses as one number, whole, cut into micro-batches, and spread over ranks.

The term is `-sft()`, which returns the column it reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flowrl as fr
from flowrl_operators import losses
from tests.golden.guards import ADDED, guarded
from tests.golden.padded import tensor
from tests.golden.pieces import _policy_corrections as corrections, policy_loss
from tests.golden.runner import Contract, Where, distance
from tests.golden.vectors import Case

Options = dict[str, Any]


def average(values: Tensor, mask: Tensor, options: Options, totals: fr.Totals | None = None) -> Tensor:
    """Our average of a matrix; `factor` is what a system divides by that is no average."""
    options = dict(options)
    factor = options.pop("factor", 1.0)
    value, _ = fr.apply_loss(-losses.sft(), {"logprobs": values}, mask, totals=totals, **options)
    return factor * value


def whole(case: Case, options: Options) -> dict[str, Any]:
    """{"loss", "grad"} of the matrix in one piece."""
    leaf = tensor(case, "loss_mat", grad=True)
    value = average(leaf, tensor(case, "loss_mask"), options)
    (gradient,) = torch.autograd.grad(value, leaf)
    return {"loss": value.item(), "grad": gradient.numpy()}


def answer(case: Case, options: Options) -> Any:
    """The whole matrix and what is recorded of its parts."""
    found = whole(case, options)
    answered = guarded(case, found, "grad", mask="loss_mask") if "grad" in case.outputs else guarded_loss(case, found)
    if isinstance(answered, Contract):
        return answered
    if "microbatch_rows" in case.inputs:
        answered = {**answered, **of_parts(case, options)}
    return {name: value for name, value in answered.items() if name in case.outputs}


def guarded_loss(case: Case, found: dict[str, Any]) -> Any:
    """Files without a gradient, in which padding may be NaN."""
    if not np.isfinite(case.wanted("loss")):
        return Contract("padding is never looked at", bool(np.isfinite(found["loss"])))
    return found


def of_parts(case: Case, options: Options) -> dict[str, Any]:
    """Parts with the counts of the whole add up to the whole; parts by themselves are other numbers, given as they are."""
    values, mask = tensor(case, "loss_mat"), tensor(case, "loss_mask")
    parts = blocks(case, values, mask)
    totals = fr.Totals.of((mask != 0).sum(1).numpy())
    shared = [average(*part, options, totals).item() for part in parts]
    local = [average(*part, options).item() for part in parts]
    ranks = case.params.get("dp_size_for_dp_rank_losses", 1)
    trains = [bool(part_mask.any()) for _, part_mask in parts]  # a part without a token is 0 / 0 there, and 0 here
    return {
        "microbatch_global_losses": shared,
        "microbatch_global_sum": sum(shared),
        "microbatch_local_losses": Where(local, trains),
        "microbatch_local_mean": Where(np.mean(local), all(trains)),
        # gradients are averaged over ranks, so that each rank's loss is multiplied by their number
        "dp_rank_losses": [ranks * value for value in shared],
        "dp_rank_mean": np.mean([ranks * value for value in shared]),
    }


def blocks(case: Case, *matrices: Tensor) -> list[Sequence[Tensor]]:
    """The rows of each micro-batch."""
    rows = [int(count) for count in case.array("microbatch_rows")]
    return list(zip(*(matrix.split(rows) for matrix in matrices), strict=True))


def verl(case: Case, found: re.Match[str]) -> Any:
    if case.params["loss_agg_mode"] == "seq-mean-token-sum-norm":
        length = case.params.get("loss_scale_factor") or case.array("loss_mask").shape[1]
        return answer(case, {"average": "constant", "average_length": length})
    return answer(case, corrections.VERL_AVERAGES[case.params["loss_agg_mode"]])


def openrlhf(case: Case, found: re.Match[str]) -> Any:
    return answer(case, corrections.openrlhf_average(case))


def roll(case: Case, found: re.Match[str]) -> Any:
    mask = case.array("loss_mask")
    padded = len(mask) / (len(mask) + ADDED)  # it divides by the rows + 1e-8
    match case.params["loss_agg_mode"]:
        case "token-mean":  # sums over padding too and divides by the tokens of the mask
            everywhere = corrections.with_input(case, loss_mask=np.ones_like(mask))
            return answer(everywhere, {"average": "token_sum", "factor": 1 / max(mask.sum(), 1)})
        case "seq-mean-token-mean":
            options = {"average": "sequence_mean", "average_eps": ADDED, "average_rows": "all", "factor": padded}
        case "seq-mean-token-sum":
            options = {"average": "sequence_sum", "average_rows": "all", "factor": padded}
        case _:
            options = {"average": "constant", "average_length": mask.shape[1], "average_rows": 1}
    return answer(case, options)


def skyrl(case: Case, found: re.Match[str]) -> Any:
    """It multiplies advantages by the weights of the average beforehand."""
    p = case.params
    values, mask = tensor(case, "loss_mat", grad=True), tensor(case, "loss_mask")
    columns: dict[str, Any] = {"logprobs": values}
    if p["loss_reduction"] == "token_mean_legacy":
        step = p["micro_batch_size"]
        local = [average(*part, {}) for part in zip(values.split(step), mask.split(step), strict=True)]
        value = torch.stack(local).mean()
    else:
        columns["prompt_id"] = [row // 2 for row in range(len(mask))]
        options: Options = {
            "token_mean": {"average": "token_mean"},
            "sequence_mean": {"average": "sequence_mean", "average_rows": "all"},
            "seq_mean_token_sum_norm": {
                "average": "constant",
                "average_length": p.get("max_seq_len"),
                "average_rows": "all",
            },
            "prompt_mean": {"average": "prompt_mean", "average_rows": "all"},
        }[p["loss_reduction"]]
        value, _ = fr.apply_loss(-losses.sft(), columns, mask, **options)
    (weight,) = torch.autograd.grad(value, values)
    weighted = Where((weight * values.detach()).numpy(), mask.numpy() > 0)
    if not np.isfinite(case.wanted("reduced_sum_of_loss")) and value.isfinite():
        holds = not distance(weighted, case.outputs["weighted"], case.rtol, case.atol)[1]
        return Contract("padding is never looked at", holds)
    return {"weighted": weighted, "reduced_sum_of_loss": value.item()}


def trl(case: Case, found: re.Match[str]) -> Any:
    """Micro-batches averaged each by itself and then over micro-batches, apart from what divides by the step's tokens."""
    p = case.params
    loss = policy_loss.trl_policy(p)
    leaf, mask = tensor(case, "log_probs", grad=True), tensor(case, "mask")
    is_global = p["loss_type"] in ("dapo", "cispo", "vespo")
    totals = fr.Totals.of((mask != 0).sum(1).numpy()) if is_global else None
    scale = 1.0 if is_global else 1 / p["gradient_accumulation_steps"]
    names = ("log_probs", "old_log_probs", "advantages", "mask")
    parts = []
    for live, old, advantage, part_mask in blocks(case, leaf, *(tensor(case, name) for name in names[1:])):
        columns = {"logprobs": live, "old_logprobs": old, "advantages": advantage}
        value, _ = fr.apply_loss(loss, columns, part_mask, totals=totals, **corrections.trl_average(case))
        parts.append(scale * value)
    total = torch.stack(parts).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    inputs = [case.array(name)[mask.numpy() == 0] for name in names[:3]]
    if np.isnan(case.wanted("sum")) and any(np.isnan(values).any() for values in inputs):
        return Contract("padding is never looked at", bool(total.isfinite() and gradient.isfinite().all()))
    return {
        "microbatch_losses": [part.item() for part in parts],
        "sum": total.item(),
        "grad_log_prob": gradient.numpy(),
    }


CONVENTIONS: dict[str, Callable[[Case], Any]] = {}

PATTERNS: list[tuple[str, Callable[..., Any]]] = [
    (r"verl\.(token|seq)-.*", verl),
    (r"openrlhf\.(sample|token)", openrlhf),
    (r"roll\.(token|seq)-.*", roll),
    (r"skyrl\.(token_mean|token_mean_legacy|sequence_mean|seq_mean_token_sum_norm|prompt_mean)", skyrl),
    (r"trl\.microbatch_\w+", trl),
]
