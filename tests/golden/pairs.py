"""Golden cases of preference pairs, laid out as rows with `chosen` and `pair_id`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flowrl as fr
from tests.golden.vectors import Case, to_array


def columns_of_pairs(num_rows: int, *, interleaved: bool = False) -> dict[str, Any]:
    """`chosen` and `pair_id` of rows in two blocks (all chosen, then all rejected), or pair by pair."""
    row = np.arange(num_rows)
    half = max(num_rows // 2, 1)
    is_chosen, pair = (row % 2 == 0, row // 2) if interleaved else (row < half, row % half)
    return {"chosen": torch.tensor(is_chosen), "pair_id": [f"pair {number}" for number in pair]}


def stacked(case: Case, *names: str) -> Tensor:
    """Inputs with one number per response, one below the other, as responses of one token: [rows, 1]."""
    return torch.tensor(np.concatenate([to_array(case.inputs[name]) for name in names]))[:, None]


def loss_and_gradient(
    loss: fr.Loss, columns: Mapping[str, Any], mask: Tensor, leaf: str, **average: Any
) -> tuple[float, np.ndarray, dict[str, float]]:
    """(loss, its gradient by the column `leaf`, metrics) of `fr.apply_loss`."""
    live = columns[leaf].clone().requires_grad_()
    value, metrics = fr.apply_loss(loss, {**columns, leaf: live}, mask, **average)
    gradient = torch.zeros_like(live)
    if value.requires_grad:
        gradient = torch.autograd.grad(value, live, allow_unused=True)[0]
        gradient = torch.zeros_like(live) if gradient is None else gradient
    return value.item(), gradient.numpy(), metrics


def of_each_pair(loss: fr.Loss, columns: Mapping[str, Any]) -> np.ndarray:
    """[P] the loss of each pair in turn, for responses of one token in two blocks."""
    rows = len(columns["chosen"])
    values = []
    for pair in range(rows // 2):
        at = torch.tensor([pair, pair + rows // 2])
        one = {
            name: column[at] if isinstance(column, Tensor) else [column[row] for row in at.tolist()]
            for name, column in columns.items()
        }
        values.append(fr.apply_loss(loss, one, torch.ones(2, 1))[0].item())
    return np.asarray(values)
