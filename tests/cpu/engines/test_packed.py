"""Short rows that share a line of a block give the numbers and gradients of rows alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flowrl.engines.host_torch import TorchHost
from flowrl.engines.packed import can_pack, pack_block
from flowrl.engines.protocol import TokenRows
from flowrl.schema.ragged import Ragged
from tests.cpu.engines.test_prefix import FAMILIES, opened


def different_rows(count: int = 12, seed: int = 0) -> TokenRows:
    """Rows of very different lengths, no prompt twice."""
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(3, 14, draw.integers(2, 14)) for _ in range(count)]
    responses = [draw.integers(3, 14, draw.integers(1, 10)) for _ in range(count)]
    return TokenRows(Ragged.of(prompts, np.int32), Ragged.of(responses, np.int32), np.ones(count, np.float32))


def with_packing(family: str, packs: bool) -> TorchHost:
    host = opened(family, shares=False)
    assert host.forward.packs, f"{family} could pack and does not"
    host.forward.packs = packs
    return host


@pytest.mark.parametrize("family", FAMILIES)
def test_scoring_gives_the_same_numbers(family: str) -> None:
    table = different_rows()
    packed, padded = (with_packing(family, p).logprobs(table).values for p in (True, False))
    np.testing.assert_allclose(packed, padded, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_padded_rows(family: str) -> None:
    table = different_rows()
    grads = []
    for packs in (True, False):
        host = with_packing(family, packs)
        total = torch.zeros(())
        for batch in host._batches(table):
            assert not packs or pack_block(batch.ids, batch.length_B, 0) is not None
            hidden = host.forward.hidden_of(batch)
            logprobs, _ = host.forward.stats(hidden, torch.from_numpy(batch.target_T), None, with_entropy=False)
            total = total + (logprobs * torch.from_numpy(np.cos(batch.flat_T))).sum()
        total.backward()
        grads.append({name: p.grad.clone() for name, p in host.module.named_parameters() if p.grad is not None})
    for name, grad in grads[1].items():
        torch.testing.assert_close(grads[0][name], grad, atol=1e-5, rtol=1e-4)


def test_lines_are_full_and_no_row_is_cut() -> None:
    lengths = np.array([6, 4, 3, 2, 1])
    ids = np.zeros((5, 6), np.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = 10 * (row + 1) + np.arange(length)
    packed = pack_block(ids, lengths, fill=0)
    assert packed is not None and packed.ids.shape[0] < 5
    for row, length in enumerate(lengths):
        line, start = packed.line_B[row], packed.start_B[row]
        assert packed.ids[line, start : start + length].tolist() == ids[row, :length].tolist()
        assert packed.positions[line, start : start + length].tolist() == list(range(length))
    assert np.count_nonzero(packed.ids) == lengths.sum()


def test_rows_of_one_length_are_left_as_they_are() -> None:
    assert pack_block(np.ones((4, 5), np.int64), np.full(4, 5), fill=0) is None


def test_an_architecture_that_looks_at_its_neighbours_does_not_pack() -> None:
    torch.manual_seed(0)
    base = FAMILIES["llama"]().eval().base_model

    class Blind(torch.nn.Module):
        """Takes positions and attends across rows all the same."""

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **more: object) -> object:
            mask = torch.ones_like(input_ids) if position_ids is not None else None
            return base(input_ids=input_ids, position_ids=position_ids, **{"attention_mask": mask, **more})

    assert can_pack(base, 14, torch.device("cpu"))
    assert not can_pack(Blind(), 14, torch.device("cpu"))
    half = base.to(torch.bfloat16)
    assert can_pack(half, 14, torch.device("cpu"))
    assert not can_pack(Blind(), 14, torch.device("cpu"))


def test_supervised_rows_of_all_lengths_train_the_same() -> None:
    from flowrl.engines.protocol import UpdateJob
    from flowrl_operators import losses

    table = different_rows()
    job = UpdateJob(
        rows=table,
        mask=Ragged.like(np.ones(len(table.response_ids.values), bool), table.response_ids),
        columns={},
        loss=losses.sft(),
    )
    reports = [with_packing("llama", packs).update(job).metrics for packs in (True, False)]
    assert reports[0]["loss"].mean == pytest.approx(reports[1]["loss"].mean, rel=1e-5)
    assert reports[0]["grad_norm"].mean == pytest.approx(reports[1]["grad_norm"].mean, rel=1e-4)
