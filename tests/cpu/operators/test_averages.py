"""One number of many: the same however the rows of a step are cut into parts, whatever the average."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flowrl as fr
from flowrl.errors import ConfigError, SchemaError
from flowrl_operators import losses

AVERAGES: list[dict[str, Any]] = [
    {"average": "token_mean"},
    {"average": "token_sum"},
    *({"average": "sequence_mean", "average_rows": rows} for rows in ("trained", "all", 3)),
    {"average": "sequence_mean", "average_eps": 0.1},
    *({"average": "sequence_sum", "average_rows": rows} for rows in ("trained", "all", 1)),
    *({"average": "constant", "average_length": 7, "average_rows": rows} for rows in ("trained", "all", 1)),
    *({"average": "prompt_mean", "average_rows": rows} for rows in ("trained", "all", 2)),
]

# numbers per token and numbers per row in one expression
LOSS = losses.ppo_clip(0.2, high=0.3, dual=3.0) + 0.5 * losses.gmpo(0.4) + 0.01 * losses.kl("k2")

Columns = dict[str, Any]


def step(seed: int, counts: list[int], prompts: list[int]) -> tuple[Columns, Tensor]:
    """Columns of rows with so many trained tokens each, holes between them, and NaN where nothing trains."""
    generator = torch.Generator().manual_seed(seed)
    width = max(counts, default=0) + 2
    mask = torch.zeros(len(counts), width)
    for row, count in enumerate(counts):
        mask[row, torch.randperm(width, generator=generator)[:count]] = 1
    columns: Columns = {"advantage": torch.randn(len(counts), generator=generator, dtype=torch.float64)}
    for name in ("logprobs", "old_logprobs", "ref_logprobs"):
        values = -torch.rand(mask.shape, generator=generator, dtype=torch.float64)
        columns[name] = torch.where(mask > 0, values, torch.nan)
    columns["prompt_id"] = prompts
    return columns, mask


def cut(columns: Columns, mask: Tensor, rows: list[int]) -> tuple[Columns, Tensor]:
    """Some rows, as narrow as they can be: padding of a part is its own business."""
    width = int((mask[rows].sum(0) > 0).nonzero().max()) + 1 if mask[rows].any() else 0
    found: Columns = {}
    for name, column in columns.items():
        if isinstance(column, list):
            found[name] = [column[row] for row in rows]
        else:
            found[name] = column[rows][:, :width] if column.dim() == 2 else column[rows]
    return found, mask[rows][:, :width]


def answer(columns: Columns, mask: Tensor, parts: list[list[int]], **options: Any) -> tuple[Tensor, Tensor]:
    """(loss, gradient by the log-probabilities), both summed over the parts."""
    live = columns["logprobs"].clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for rows in parts:
        part, part_mask = cut({**columns, "logprobs": live}, mask, rows)
        total = total + fr.apply_loss(LOSS, part, part_mask, **options)[0]
    (gradient,) = torch.autograd.grad(total, live, allow_unused=True) if total.requires_grad else (None,)
    return total.detach(), torch.zeros_like(live) if gradient is None else gradient


@st.composite
def steps(draw: Any) -> tuple[Columns, Tensor, list[list[int]]]:
    """A step and one way to cut it: rows in any order, parts of any size, rows and whole parts without a trained token."""
    counts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
    prompts = draw(st.lists(st.integers(0, 3), min_size=len(counts), max_size=len(counts)))
    part_of = draw(st.lists(st.integers(0, 4), min_size=len(counts), max_size=len(counts)))
    order = draw(st.permutations(range(len(counts))))
    columns, mask = step(draw(st.integers(0, 10_000)), counts, prompts)
    return columns, mask, [[row for row in order if part_of[row] == part] for part in sorted(set(part_of))]


@settings(max_examples=150, deadline=None)
@given(steps(), st.sampled_from(AVERAGES))
def test_parts_add_up_to_the_whole(cut_step: tuple[Columns, Tensor, list[list[int]]], options: dict[str, Any]) -> None:
    columns, mask, parts = cut_step
    whole = answer(columns, mask, [list(range(len(mask)))], **options)
    totals = sum(
        (fr.Totals.of(mask[rows].sum(1).long().numpy(), [columns["prompt_id"][row] for row in rows]) for rows in parts),
        start=fr.Totals(0, 0, 0),
    )
    for found, wanted in zip(answer(columns, mask, parts, totals=totals, **options), whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    assert whole[1].isfinite().all()


@pytest.mark.parametrize("options", AVERAGES, ids=lambda options: "-".join(map(str, options.values())))
def test_a_row_that_does_not_train_changes_nothing_but_what_counts_rows(options: dict[str, Any]) -> None:
    columns, mask = step(0, [3, 2, 4], [0, 0, 1])
    more, more_mask = step(0, [3, 2, 4, 0], [0, 0, 1, 2])
    for name in ("logprobs", "old_logprobs", "ref_logprobs"):
        more[name][:3] = columns[name]
    more["advantage"][:3], more["advantage"][3] = columns["advantage"], torch.nan
    more_mask[:3] = mask
    loss, gradient = answer(columns, mask, [[0, 1, 2]], **options)
    with_row, more_gradient = answer(more, more_mask, [[0, 1, 2, 3]], **options)
    if options.get("average_rows") == "all":
        assert not torch.isclose(with_row, loss)
    else:
        torch.testing.assert_close(with_row, loss)
        torch.testing.assert_close(more_gradient[:3], gradient)
    assert not more_gradient[3].any()


def test_averages_differ() -> None:
    """Were two of them the same here, the properties above would say less than they seem to."""
    columns, mask = step(3, [1, 5, 0, 2, 1, 3], [0, 0, 1, 1, 3, 4])
    found = [round(answer(columns, mask, [[0, 1, 2, 3, 4, 5]], **options)[0].item(), 9) for options in AVERAGES]
    assert len(set(found)) == len(found)


def test_a_part_by_itself_is_not_its_share() -> None:
    columns, mask = step(1, [1, 6], [0, 1])
    whole, _ = answer(columns, mask, [[0, 1]], average="token_mean")
    alone, _ = answer(columns, mask, [[0], [1]], average="token_mean")
    assert not torch.isclose(whole, alone / 2)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "top_entropy"])
def test_a_term_of_the_whole_step_refuses_a_part(name: str) -> None:
    columns, mask = step(1, [3, 2], [0, 1])
    columns["entropy"] = columns["old_logprobs"]
    term = getattr(losses, name)()
    term = term * losses.reinforce() if term.weight else term
    fr.apply_loss(term, columns, mask, totals=fr.Totals(5, 2))  # the whole of it is fine
    with pytest.raises(ConfigError, match=rf"'{name}' must see all tokens of an optimizer step \(5\) at once; found 3"):
        fr.apply_loss(term, {n: c[:1] for n, c in columns.items()}, mask[:1], totals=fr.Totals(5, 2))


def test_prompts_of_the_rows_must_be_told() -> None:
    columns, mask = step(1, [3, 2], [0, 1])
    tensors = {**columns, "prompt_id": torch.tensor(columns["prompt_id"])}
    by_list = fr.apply_loss(LOSS, columns, mask, average="prompt_mean")[0]
    assert fr.apply_loss(LOSS, tensors, mask, average="prompt_mean")[0] == by_list
    with pytest.raises(SchemaError, match="'prompt_id' has 1 values for 2 rows"):
        fr.apply_loss(LOSS, {**columns, "prompt_id": ["a"]}, mask, average="prompt_mean")
    del columns["prompt_id"]
    with pytest.raises(SchemaError, match="'prompt_id', which was not given"):
        fr.apply_loss(LOSS, columns, mask, average="prompt_mean")
