"""Divergences between student and teacher, over the whole vocabulary and over the teacher's likeliest tokens."""

from __future__ import annotations

from re import Match
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flowrl as fr
from flowrl_operators import advantages, losses
from tests.golden.padded import loss_and_gradient
from tests.golden.runner import Contract, Where
from tests.golden.vectors import Case, matrix, ragged

UNANSWERED = {
    "entropy_sum": "a figure to log: the sum over the tokens of the metric student_entropy",
    "n_valid": "the number of tokens that train, an input",
    "teacher_mass": "the sum of an input",
    "overlap_count": "a figure to log: how many tokens are among the k likeliest of both",
    "overlap_token_advantage": "a figure to log: log teacher - log student at the tokens of both",
}


def nemo_advantage(case: Case) -> dict[str, Any]:
    teacher, student, mask = (ragged(case.array(name)) for name in ("teacher_logprobs", "prev_logprobs", "mask"))
    found = advantages.distillation(teacher, student, fr.Ragged.like(mask.values > 0, mask))
    return {"advantages": matrix(found)}


def _on_logits(
    case: Case, loss: fr.Loss, columns: dict[str, Tensor], mask: Tensor, factor: float = 1.0
) -> dict[str, Any]:
    """Loss and gradient by the student's logits [rows, tokens, vocabulary]."""
    logits = torch.tensor(case.array("student_logits"), requires_grad=True)
    value, _ = fr.apply_loss(loss, {"logits": logits, **columns}, mask)
    value = factor * value
    gradient = torch.zeros_like(logits)
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value, logits)
    return {"loss": value.item(), "grad_student_logits": gradient.numpy()}


def nemo_topk(case: Case, found: Match[str]) -> dict[str, Any]:
    """The teacher's likeliest tokens under its distribution over the whole vocabulary."""
    teacher, ids = torch.tensor(case.array("teacher_logits")).log_softmax(-1).topk(int(case.params["topk"]), -1)
    reverse = losses.reverse_kl(outside="floor" if found["zero"] else "ignore")
    share = {"forward": 1.0, "reverse": 0.0, "mixed": case.params["mixed_kl_weight"]}[found["kind"]]
    loss = share * losses.forward_kl(outside="ignore") + (1 - share) * reverse
    mask = torch.tensor(case.array("mask"))
    if "sample_mask" in case.inputs:
        mask = mask * torch.tensor(case.array("sample_mask"))[:, None]
    return _on_logits(case, loss, {"teacher_ids": ids, "teacher_logprobs": teacher}, mask)


def trl_jsd(case: Case, found: Match[str]) -> Any:
    """A mean over tokens, or what else `reduction` says of the numbers per token and word."""
    is_given = "labels" in case.inputs
    mask = torch.tensor(case.array("labels")) != -100 if is_given else torch.tensor(case.array("completion_mask")) != 0
    teacher = torch.tensor(case.array("teacher_logits"))
    count = max(int(mask.sum()), 1)
    factor = {"batchmean": 1.0, "sum": float(count), "mean": 1.0 / teacher.shape[-1]}[
        case.params.get("reduction", "batchmean")
    ]
    loss = losses.jsd(case.params["beta"], temperature=case.params.get("temperature", 1.0))
    answer = _on_logits(case, loss, {"teacher_logits": teacher}, mask, factor)
    if np.isnan(case.wanted("loss")) and not mask.any():
        return Contract("0 where no token trains", answer["loss"] == 0 and not answer["grad_student_logits"].any())
    where = np.broadcast_to(mask.numpy()[..., None], teacher.shape)
    if np.isnan(case.wanted("grad_student_logits")[~where]).any():  # from NaN in padding
        answer["grad_student_logits"] = Where(answer["grad_student_logits"], where)
    return answer


def verl_topk(case: Case) -> dict[str, Any]:
    """The loss of each token; gradient of their sum."""
    logits = torch.tensor(case.array("student_logits"), requires_grad=True)
    packed, shape = logits.flatten(0, -2), logits.shape[:-1]
    ids, teacher = (torch.tensor(case.array(f"teacher_topk_{name}")).flatten(0, -2) for name in ("ids", "log_probs"))
    value, metrics = losses.forward_kl(
        packed, ids.long(), teacher, outside="ignore", min_logprob=case.params["log_prob_min_clamp"]
    )
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    return {
        "distillation_losses": value.reshape(shape),
        "student_mass": metrics["inside_mass"].reshape(shape),
        "grad_student_logits": gradient,
    }


def prime_opd(case: Case) -> Any:
    """The pull to the teacher, and (x - q)^2, which is twice k2, to the policy that sampled."""
    loss = losses.distillation_gradient(max_drop=0.2, log_ratio_clip=None) + 2e-3 * losses.kl("k2")
    columns = {
        "logprobs": "log_probs",
        "rollout_logprobs": "rollout_log_probs",
        "teacher_logprobs": "ref_log_probs",
        "ref_logprobs": "rollout_log_probs",
    }
    answer = loss_and_gradient(case, loss, columns)
    if not np.isfinite(case.wanted("loss")) and np.isfinite(answer["loss"]):
        is_still = not answer["grad_log_prob"][case.array("mask") == 0].any()
        return Contract("nothing outside the mask is looked at, and no token at all gives 0", bool(is_still))
    return answer


CONVENTIONS = {
    "nemo.opd_advantage": nemo_advantage,
    "verl.forward_kl_topk": verl_topk,
    "prime.ref_kl_opd": prime_opd,
}

PATTERNS = [
    (r"nemo\.topk_(?P<kind>forward|reverse|mixed)(?P<zero>_zero_outside)?", nemo_topk),
    (r"trl\.(gkd_jsd|distillation_trainer)_beta[\d.]+", trl_jsd),
]
