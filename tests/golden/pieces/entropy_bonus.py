"""Entropy of the policy as a bonus, averaged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import flowrl as fr
from flowrl.engines.forward import token_stats
from flowrl_operators import losses
from tests.golden.padded import tensor
from tests.golden.pieces._policy_corrections import VERL_AVERAGES
from tests.golden.runner import Contract, Where
from tests.golden.vectors import Case


def verl(case: Case, found: re.Match[str]) -> Any:
    """Its average of the entropy is minus our bonus, which is a loss."""
    leaf, mask = tensor(case, "logits", grad=True), tensor(case, "mask")
    inside = mask > 0
    trained = leaf[inside]
    _, found_entropy = token_stats(trained, torch.zeros(len(trained), dtype=torch.int64), with_entropy=True)
    assert found_entropy is not None
    entropy = torch.zeros_like(mask).masked_scatter(inside, found_entropy)
    mode = case.params["loss_agg_mode"]
    norm = {"average": "constant", "average_length": mask.shape[1]}
    options = norm if mode == "seq-mean-token-sum-norm" else VERL_AVERAGES[mode]
    value, _ = fr.apply_loss(losses.entropy_bonus(), {"entropy": entropy}, mask, **options)
    (gradient,) = torch.autograd.grad(-value, leaf)
    if not mask.any():
        return Contract("0 where no token trains", value.item() == 0 and not gradient.any())
    if np.isnan(case.wanted("entropy_loss")) and np.isnan(case.array("logits")[case.array("mask") == 0]).any():
        return Contract("padding is never looked at", bool(np.isfinite(value.item()) and gradient.isfinite().all()))
    where = np.broadcast_to(
        inside.numpy()[..., None], leaf.shape
    )  # NaN in padding leaves NaN in the recorded gradient there
    return {"entropy_loss": -value.item(), "grad_logits": Where(gradient.numpy(), where)}


CONVENTIONS: dict[str, Callable[[Case], Any]] = {}

PATTERNS: list[tuple[str, Callable[..., Any]]] = [(r"verl\.(token|seq)-.*", verl)]
