"""A golden case of a loss as `fr.apply_loss` takes it: matrices [rows, columns] with a mask, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import flowrl as fr
from tests.golden.vectors import Case


def tensor(case: Case, name: str, *, grad: bool = False) -> Tensor:
    """An input as float64, if wanted as a leaf to differentiate by."""
    return torch.tensor(case.array(name), dtype=torch.float64, requires_grad=grad)


def loss_and_gradient(
    case: Case,
    loss: fr.Loss,
    columns: Mapping[str, str],
    *,
    leaf: str = "logprobs",
    out: str = "grad_log_prob",
    mask: str = "mask",
    factor: float = 1.0,
    **average: Any,
) -> dict[str, Any]:
    """{"loss": ..., out: gradient} of `fr.apply_loss`; `columns` maps our names to those of the case.

    `leaf` is the column to differentiate by; `average` goes to `fr.apply_loss`. `factor` multiplies the loss: what a system
    divides by that is no average.
    """
    given = {ours: tensor(case, theirs, grad=ours == leaf) for ours, theirs in columns.items()}
    value, _ = fr.apply_loss(loss, given, tensor(case, mask), **average)
    value = factor * value
    gradient = torch.zeros_like(given[leaf])
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value, given[leaf])
    return {"loss": value.item(), out: gradient.numpy()}
