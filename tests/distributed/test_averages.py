"""Averages over real ranks (gloo): the loss and its gradient are those of one process, however rows lie on ranks and in
micro-batches."""

from __future__ import annotations

import functools
import operator
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import flowrl as fr
from flowrl_operators import losses

AVERAGES: list[dict[str, Any]] = [
    {"average": "token_mean"},
    {"average": "sequence_mean"},
    {"average": "sequence_mean", "average_rows": "all"},
    {"average": "sequence_sum"},
    {"average": "constant", "average_length": 9},
    {"average": "prompt_mean"},
]

# lengths of the rows of each rank; 0 is a row without a trained token, and one rank has nothing to train on
ROWS = [[5, 0, 2, 3], [1], [0]]


def rows_of(rank: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Columns and mask of a rank's rows; padding is garbage."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.tensor(ROWS[rank])
    shape = (len(lengths), 6)
    columns: dict[str, Any] = {
        "logprobs": -torch.rand(shape, generator=generator, dtype=torch.float64),
        "advantage": torch.randn(len(lengths), generator=generator, dtype=torch.float64),
        "prompt_id": [f"p{(rank + i) % 3}" for i in range(len(lengths))],
    }
    mask = torch.arange(6)[None] < lengths[:, None]
    columns["old_logprobs"] = torch.where(mask, columns["logprobs"] + 0.1, torch.nan)
    return columns, mask


def gradient(
    columns: dict[str, Any], mask: torch.Tensor, totals: fr.Totals, average: dict[str, Any], micro: int
) -> Any:
    """(loss, gradient) over micro-batches of `micro` rows, by the counts of the whole step."""
    leaf = columns["logprobs"].clone().requires_grad_()
    total = 0.0
    for start in range(0, len(mask), micro):
        part = {name: values[start : start + micro] for name, values in {**columns, "logprobs": leaf}.items()}
        loss, _ = fr.apply_loss(losses.ppo_clip(0.2), part, mask[start : start + micro], totals=totals, **average)
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
    return total, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def totals_of(columns: dict[str, Any], mask: torch.Tensor) -> fr.Totals:
    return fr.Totals.of(mask.sum(1).numpy(), columns["prompt_id"])


def on_rank(rank: int, world: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    columns, mask = rows_of(rank)
    counts: list[Any] = [None] * world
    dist.all_gather_object(counts, totals_of(columns, mask))
    totals = functools.reduce(operator.add, counts)
    found = []
    for average in AVERAGES:
        for micro in (1, 3, 4):
            loss, grad = gradient(columns, mask, totals, average, micro)
            pooled = torch.tensor([loss], dtype=torch.float64)
            dist.all_reduce(pooled)  # sums of the parts, never means of means
            found.append((pooled.item(), grad.numpy()))
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_ranks_and_micro_batches_change_nothing(tmp_path: Path) -> None:
    world = len(ROWS)
    mp.spawn(on_rank, (world, str(tmp_path)), nprocs=world)
    everything = [rows_of(rank) for rank in range(world)]
    whole = {
        name: torch.cat([c[name] for c, _ in everything])
        if isinstance(everything[0][0][name], torch.Tensor)
        else [value for c, _ in everything for value in c[name]]
        for name in everything[0][0]
    }
    mask = torch.cat([m for _, m in everything])
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world)]
    for i, average in enumerate(AVERAGES):
        loss, grad = gradient(whole, mask, totals_of(whole, mask), average, len(mask))
        assert loss != 0
        for j in range(3):
            answers = [rank[3 * i + j] for rank in ranks]
            assert all(value == pytest.approx(loss, abs=1e-12) for value, _ in answers)
            np.testing.assert_allclose(np.concatenate([g for _, g in answers]), grad, atol=1e-12)


def test_a_token_weighs_the_same_wherever_it_lies() -> None:
    # five tokens of gradient 1 on one rank, one of gradient 10 on the other: 15 / 6; a mean of the means is 5.5
    totals = fr.Totals(num_tokens=6, num_rows=2)
    total = 0.0
    for slope, count in ((1.0, 5), (10.0, 1)):
        leaf = torch.zeros(1, count, dtype=torch.float64, requires_grad=True)
        loss, _ = fr.apply_loss(
            losses.sft(), {"logprobs": -slope * leaf}, torch.ones(1, count), average="token_mean", totals=totals
        )
        loss.backward()
        total += float(leaf.grad.sum())
    assert total == pytest.approx(2.5)
