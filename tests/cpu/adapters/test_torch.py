"""Operators on plain tensors: the same numbers as on rows, whatever lies in the padding."""

import numpy as np
import pytest
import torch

import flowrl as fr
from flowrl.errors import ConfigError, DataError, OperatorError, SchemaError
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl_operators import adapters, advantages, filters, rewards
from flowrl_operators.adapters import arrays, padded

MASK = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]])


def test_rows_get_a_number_each() -> None:
    reward = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    found = adapters.torch.apply(advantages.group_norm, {"reward": reward, "prompt_id": ["a", "a", "b"]}, scale="none")
    assert found.tolist() == [0.5, -0.5, 0.0]
    assert found.dtype == torch.float64
    half = adapters.torch.apply(advantages.rloo.bind(), {"reward": reward.bfloat16(), "prompt_id": ["a", "a", "b"]})
    assert half.dtype == torch.bfloat16


def test_tokens_get_one_each_and_padding_is_not_looked_at() -> None:
    rewards_at, values = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)).unbind()
    columns = {"token_rewards": rewards_at, "values": values, "reward": rewards_at.sum(-1)}
    found = adapters.torch.apply(advantages.gae, columns, MASK)
    torn = {n: torch.where(MASK == 1, c, torch.nan) if c.ndim == 2 else c for n, c in columns.items()}
    again = adapters.torch.apply(advantages.gae, torn, MASK)
    for name in found:
        assert found[name].shape == (4, 4)
        assert not found[name][MASK == 0].any()
        torch.testing.assert_close(again[name], found[name])
    # the same rows in a table, cut at their last token
    lengths = [3, 4, 0, 2]
    types = dict.fromkeys(("token_rewards", "values"), fr.TOKEN.f32)
    types |= {"loss_mask": fr.TOKEN.bool, "reward": fr.SAMPLE.f32}
    cut = {n: [r[:k].tolist() for r, k in zip(columns[n], lengths, strict=True)] for n in ("token_rewards", "values")}
    cut["reward"] = columns["reward"].tolist()
    cut["loss_mask"] = [(row[:k] == 1).tolist() for row, k in zip(MASK, lengths, strict=True)]
    table = run_operator(advantages.gae.bind(), RowBatch(cut, types)).rows
    for name in found:
        wanted = np.concatenate([found[name][row, :k].numpy() for row, k in enumerate(lengths)])
        np.testing.assert_allclose(np.where(table["loss_mask"].values, table[name].values, 0), wanted, rtol=1e-6)


def test_filters_give_their_mask() -> None:
    columns = {"reward": torch.tensor([1.0, 0.0, 1.0]), "prompt_id": ["a", "a", "b"]}
    assert adapters.torch.apply(filters.top, columns, k=1).tolist() == [True, False, True]
    pairs = adapters.torch.apply(filters.best_and_worst, columns)
    assert pairs.mask.tolist() == [True, True, False]
    assert pairs.columns["chosen"].tolist() == [True, False, False]


def test_rows_one_by_one() -> None:
    found = arrays.apply(rewards.exact, {"response": ["4", "5"], "answer": ["4", "4"]})
    assert found.tolist() == [1.0, 0.0]


@fr.operator(writes={"seen": fr.SAMPLE.f32}, locality="stateful")
def counts(reward: fr.SAMPLE.f32, *, state: fr.State):
    state["n"] = state.get("n", 0) + len(reward)
    return np.full(len(reward), state["n"])


def test_what_remembers_is_given_its_memory() -> None:
    state = fr.State()
    reward = torch.zeros(2)
    assert adapters.torch.apply(counts, {"reward": reward}, state=state).tolist() == [2, 2]
    assert adapters.torch.apply(counts, {"reward": reward}, state=state).tolist() == [4, 4]


@fr.operator(writes={"advantage": fr.SAMPLE.f32})
def breaks(reward: fr.SAMPLE.f32):
    raise ValueError("broken")


def test_what_is_missing_or_breaks_is_told() -> None:
    with pytest.raises(DataError, match="'gae' reads 'values'; there are reward, loss_mask"):
        adapters.torch.apply(advantages.gae, {"reward": torch.zeros(4)}, MASK)
    with pytest.raises(SchemaError, match=r"'values' has shape \(4, 3\) and the mask \(4, 4\)"):
        adapters.torch.apply(advantages.gae, {"reward": torch.zeros(4), "values": torch.zeros(4, 3)}, MASK)
    with pytest.raises(DataError, match="one value per row"):
        arrays.apply(advantages.rloo, {"reward": [1.0], "prompt_id": ["a", "b"]})
    with pytest.raises(OperatorError, match="'breaks' failed on all rows: ValueError: broken"):
        arrays.apply(breaks, {"reward": [1.0]})
    with pytest.raises(ConfigError, match="an operator is needed"):
        arrays.apply(len, {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has its configuration already"):
        arrays.apply(filters.top.bind(k=1), {"reward": [1.0], "prompt_id": ["a"]}, k=2)


def test_a_matrix_where_a_number_per_row_is_read_is_told() -> None:
    uid = ["a", "a", "b", "b"]
    for mask in (None, MASK):
        with pytest.raises(SchemaError, match=r"'group_norm' reads 'reward' as one value per row, \[B\]"):
            adapters.torch.apply(advantages.group_norm, {"reward": torch.zeros(4, 4), "prompt_id": uid}, mask)
    with pytest.raises(SchemaError, match=r"'gae' reads 'values' per token: give it as \[B, T\], with mask="):
        adapters.torch.apply(advantages.gae, {"reward": torch.zeros(4), "values": torch.zeros(4)}, MASK)


def test_padding_on_either_side() -> None:
    column = fr.Ragged.of([[1, 2, 3], [], [4]], np.int64)
    for side in ("left", "right"):
        whole, mask = padded.matrix(column, fill=9, side=side), padded.mask_of(column, side=side)
        assert padded.ragged(whole, mask) == column
        assert (whole[~mask] == 9).all()
    assert padded.matrix(column, side="left").tolist() == [[1, 2, 3], [0, 0, 0], [0, 0, 4]]
    assert padded.lengths_of(MASK.numpy()).tolist() == [3, 4, 0, 2]
    assert padded.lengths_of(np.zeros((2, 0))).tolist() == [0, 0]
    with pytest.raises(SchemaError, match="left or the right"):
        padded.matrix(column, side="top")
    with pytest.raises(SchemaError, match="does not say which"):
        padded.ragged(np.zeros((2, 3)), np.zeros((2, 2)))


def test_until_end_keeps_the_end() -> None:
    ids = np.asarray([[5, 1, 2, 1], [5, 5, 5, 5], [1, 5, 5, 5]])
    assert padded.until_end(ids, {1}).tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert padded.until_end(ids, ()).all()
