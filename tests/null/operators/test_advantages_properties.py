"""What holds for every advantage, whatever the rewards: order of rows, groups, shifts and scales, missing numbers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import flowrl as fr
from flowrl.graph.operators import OperatorCall
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl_operators import advantages as a

NAN = float("nan")
PARTS = {"parts": ("reward", "bonus")}

PER_GROUP: dict[str, OperatorCall] = {
    "group_norm": a.group_norm.bind(),
    "group_norm of a sample": a.group_norm.bind(unbiased=True, eps=1e-4),
    "leave one out": a.group_norm.bind(baseline="others", scale="others", unbiased=True),
    "around the baseline": a.group_norm.bind(baseline="others", around="baseline", single="scaled"),
    "without baseline": a.group_norm.bind(baseline="none", flat="eps"),
    "dr_grpo": a.group_norm.bind(scale="none", single="reward"),
    "rloo": a.rloo.bind(),
    "opo": a.opo.bind(),
    "maxrl": a.maxrl.bind(),
    "maxrl below zero": a.maxrl.bind(negative="divide", eps=1e-6, single="reward"),
    "pass at 2": a.pass_at_k.bind(k=2),
    "pass at all": a.pass_at_k.bind(scale="group"),
    "sum of parts": a.multi_reward.bind(**PARTS),
    "parts apart": a.multi_reward.bind(**PARTS, order="normalize_then_sum", missing="part", weights=(1.0, 0.5)),
    "optimal_token_baseline": a.optimal_token_baseline.bind(),
    "optimal baseline of turns": a.optimal_token_baseline.bind(align="trained", tail="zero", single="reward"),
}
WHOLE_STEP: dict[str, OperatorCall] = {
    "batch scale": a.group_norm.bind(scale="batch"),
    "flash reinforce": a.group_norm.bind(baseline="batch", scale="none"),
    "batch_norm": a.batch_norm.bind(),
    "gpg": a.gpg.bind(),
    "gpg of rewards": a.gpg.bind(valid="nonzero", single="reward"),
    "reinforce_pp_baseline": a.reinforce_pp_baseline.bind(),
    "gdpo": a.gdpo.bind(**PARTS),
    "gdpo over tokens": a.gdpo.bind(**PARTS, over="tokens"),
    "gae": a.gae.bind(),
    "reinforce_pp": a.reinforce_pp.bind(gamma=0.9),
    "whiten": a.whiten.bind(guard="floor"),
}
PER_ROW: dict[str, OperatorCall] = {
    "remax": a.remax.bind(),
    "remax per token": a.remax.bind(per="token"),
    "gae": a.gae.bind(whiten=False, gamma=0.9),
    "gae through holes": a.gae.bind(whiten=False, masked="decay"),
    "vapo": a.gae.bind(whiten=False, lam_returns=1.0, adaptive=0.5),
    "reinforce": a.reinforce.bind(gamma=0.9),
    "reinforce through holes": a.reinforce.bind(gamma=0.9, masked="decay"),
    "reinforce up to holes": a.reinforce.bind(gamma=0.9, masked="reset"),
}
ALL = PER_GROUP | {f"{name} (step)": call for name, call in WHOLE_STEP.items()} | PER_ROW

Row = tuple[str, float, list[bool]]
REWARD = st.sampled_from([0.0, 1.0, 1.0, 0.5, 0.95, -2.0, NAN])
ROWS = st.lists(
    st.tuples(st.sampled_from("abcd"), REWARD, st.lists(st.booleans(), max_size=4)), min_size=1, max_size=12
)
TOKEN_COLUMNS = ("values", "old_logprobs", "sum_pi_squared", "token_rewards", "advantages")
TYPES = {"prompt_id": fr.PROMPT.str, "loss_mask": fr.TOKEN.bool}
TYPES |= dict.fromkeys(("reward", "bonus", "baseline"), fr.SAMPLE.f32)
TYPES |= dict.fromkeys(TOKEN_COLUMNS, fr.TOKEN.f32)


def table(rows: list[Row]) -> RowBatch:
    """A table with every column that any of the operators reads; what is per row follows from the row alone."""
    reward = np.asarray([r for _, r, _ in rows], np.float32)
    mask = fr.Ragged.of([m for _, _, m in rows], dtype=bool)
    drawn = [np.random.default_rng(len(m) + 7 * sum(m)).normal(size=len(m)) for _, _, m in rows]
    numbers = fr.Ragged.of(drawn, dtype=np.float32)
    paid = fr.Ragged.like(numbers.values * 0.1 + mask.spread(reward), mask)
    columns: dict[str, Any] = {
        "prompt_id": np.asarray([g for g, _, _ in rows], object),
        "loss_mask": mask,
        "reward": reward,
        "bonus": np.asarray([len(m) * 0.25 for _, _, m in rows], np.float32),
        "baseline": np.full(len(rows), 0.25, np.float32),
        "values": numbers,
        "old_logprobs": fr.Ragged.like(-np.abs(numbers.values), mask),
        "sum_pi_squared": fr.Ragged.like(np.abs(np.sin(numbers.values)), mask),
        "token_rewards": paid.astype(np.float32),
        "advantages": paid.astype(np.float32),
    }
    return RowBatch(columns, TYPES)


def answers(call: OperatorCall, rows: RowBatch) -> dict[str, Any]:
    """{column: values} an operator writes."""
    applied = run_operator(call, rows).rows
    return {column.name: applied[column.name] for column in call.writes}


def same(found: Any, wanted: Any, atol: float = 1e-6) -> None:
    found, wanted = (v.values if isinstance(v, fr.Ragged) else v for v in (found, wanted))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=atol)


def taken(column: Any, order: Any) -> Any:
    return column.take(order) if isinstance(column, fr.Ragged) else column[order]


few = partial(settings, deadline=None, max_examples=25)


@few()
@given(ROWS, st.randoms(use_true_random=False), st.sampled_from(sorted(ALL)))
def test_rows_in_any_order_get_the_same(rows: list[Row], random: Any, name: str) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    before, after = answers(ALL[name], table(rows)), answers(ALL[name], table([rows[i] for i in order]))
    for column, values in before.items():
        same(after[column], taken(values, np.asarray(order)))


@few()
@given(ROWS, st.sampled_from(sorted(ALL)))
def test_no_number_that_is_missing_leaks(rows: list[Row], name: str) -> None:
    for column, values in answers(ALL[name], table(rows)).items():
        per_row = fr.Ragged.of([[v] for v in values], dtype=np.float64) if isinstance(values, np.ndarray) else values
        assert np.isfinite(per_row.values).all()
        if column != "returns" and "reward" in {read.column for read in ALL[name].reads} - set(PARTS["parts"]):
            unknown = [i for i, (_, reward, _) in enumerate(rows) if np.isnan(reward)]
            assert all((per_row[i] == 0).all() for i in unknown)


@few()
@given(ROWS, st.sampled_from(sorted(PER_GROUP)))
def test_all_groups_at_once_and_one_at_a_time_give_the_same(rows: list[Row], name: str) -> None:
    call, batch = PER_GROUP[name], table(rows)
    together = answers(call, batch)
    for key in set(batch["prompt_id"].tolist()):
        mine = np.flatnonzero(batch["prompt_id"] == key)
        for column, values in answers(replace(call, many_groups=False), batch.take(mine)).items():
            same(values, taken(together[column], mine))


@few()
@given(ROWS, st.integers(0, 12), st.sampled_from(sorted(PER_ROW)))
def test_rows_in_any_chunks_get_the_same_bits(rows: list[Row], cut: int, name: str) -> None:
    batch = table(rows)
    whole = answers(PER_ROW[name], batch)
    for part in (np.arange(len(rows))[:cut], np.arange(len(rows))[cut:]):
        for column, values in answers(PER_ROW[name], batch.take(part)).items():
            found, wanted = values, taken(whole[column], part)
            assert found == wanted if isinstance(found, fr.Ragged) else np.array_equal(found, wanted)


@few()
@given(ROWS, st.sampled_from(sorted(PER_GROUP)))
def test_groups_are_told_apart_by_key_alone(rows: list[Row], name: str) -> None:
    # the same prompt, asked twice under two ids, makes two groups; both get what one gets
    once = answers(PER_GROUP[name], table(rows))
    twice = answers(PER_GROUP[name], table([*rows, *((f"{g}-again", r, m) for g, r, m in rows)]))
    for column, values in once.items():
        for half in (np.arange(len(rows)), np.arange(len(rows)) + len(rows)):
            same(taken(twice[column], half), values)


SHIFTED = (
    "group_norm", "group_norm of a sample", "leave one out", "rloo", "opo", "pass at 2", "pass at all", "sum of parts",
)  # fmt: skip


@few()
@given(ROWS, st.sampled_from([-3.0, 0.5, 100.0]), st.sampled_from(SHIFTED))
def test_a_shift_of_all_rewards_changes_nothing(rows: list[Row], shift: float, name: str) -> None:
    # multiples of 1/64, so that the shifted rewards are exact in float32 too
    rows = [(g, np.round(r * 64) / 64, m) for g, r, m in rows]
    moved = [(g, r + shift, m) for g, r, m in rows]
    same(answers(PER_GROUP[name], table(moved))["advantage"], answers(PER_GROUP[name], table(rows))["advantage"], 2e-4)


@few()
@given(ROWS, st.sampled_from([0.25, 4.0]))
def test_a_scale_of_all_rewards_scales_what_is_not_divided(rows: list[Row], scale: float) -> None:
    scaled = table([(g, r * scale, m) for g, r, m in rows])
    for name in ("rloo", "opo", "pass at 2", "dr_grpo"):
        same(answers(PER_GROUP[name], scaled)["advantage"], scale * answers(PER_GROUP[name], table(rows))["advantage"])
    exact = a.group_norm.bind(eps=0.0)
    same(answers(exact, scaled)["advantage"], answers(exact, table(rows))["advantage"])
    maxrl = a.maxrl.bind()
    same(answers(maxrl, scaled)["advantage"], answers(maxrl, table(rows))["advantage"])


@few()
@given(ROWS)
def test_advantages_of_a_group_sum_to_zero(rows: list[Row]) -> None:
    batch = table(rows)
    for name in ("group_norm", "dr_grpo", "rloo", "maxrl"):
        call = PER_GROUP[name] if name != "dr_grpo" else a.group_norm.bind(scale="none")
        found = answers(call, batch)["advantage"]
        for key in set(batch["prompt_id"].tolist()):
            assert abs(found[batch["prompt_id"] == key].sum()) < 1e-4


@few()
@given(ROWS, st.sampled_from(sorted(ALL)))
def test_inputs_stay_as_they_are(rows: list[Row], name: str) -> None:
    call, batch = ALL[name], table(rows)
    given_columns = {read.param: batch[read.column] if read.column in batch else None for read in call.reads}
    before = {n: None if v is None else _copy(v) for n, v in given_columns.items()}
    call.resolve()(*given_columns.values(), **dict(call.config))
    for column, values in before.items():
        now = given_columns[column]
        assert now is None or (now == values if isinstance(now, fr.Ragged) else _equal(now, values))


def _copy(values: Any) -> Any:
    return fr.Ragged(values.values.copy(), values.offsets.copy()) if isinstance(values, fr.Ragged) else values.copy()


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))


@few()
@given(ROWS, st.sampled_from(sorted(ALL)))
def test_what_stands_at_masked_tokens_is_not_seen(rows: list[Row], name: str) -> None:
    batch = table(rows)
    mask = batch["loss_mask"].values
    dirty = batch
    for column in TOKEN_COLUMNS:
        values = np.where(mask, batch[column].values, np.inf).astype(np.float32)
        dirty = dirty.with_column(column, fr.Ragged.like(values, batch[column]), fr.TOKEN.f32)
    for column, values in answers(ALL[name], batch).items():
        same(answers(ALL[name], dirty)[column], values)


# --- sums from each token on, against a loop ------------------------------------------------------------------------------


def by_loop(row: np.ndarray, inside: np.ndarray, factor: float, at_hole: Callable[[float], float]) -> np.ndarray:
    result, running = np.zeros(len(row)), 0.0
    for t in range(len(row) - 1, -1, -1):
        running = row[t] + factor * running if inside[t] else at_hole(running)
        result[t] = running if inside[t] else 0.0
    return result


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("masked", ["skip", "decay", "reset"])
@pytest.mark.parametrize("factor", [0.0, 0.9, 1.0])
def test_sums_over_long_and_short_rows_equal_a_loop(seed: int, masked: str, factor: float) -> None:
    draw = np.random.default_rng(seed)
    lengths = [0, 1, 2, 3, 40_000, *draw.integers(0, 900, 40).tolist(), 0]
    rows = [draw.normal(size=n) for n in lengths]
    inside = [draw.random(n) < draw.choice([0.0, 0.5, 1.0]) for n in lengths]
    mask, paid = fr.Ragged.of(inside, dtype=bool), fr.Ragged.of(rows, dtype=np.float64)
    found = a.reinforce(np.zeros(len(rows)), mask, paid, gamma=factor, masked=masked)["returns"]
    holes = {"skip": lambda running: running, "decay": lambda running: factor * running, "reset": lambda _: 0.0}
    for got, row, chosen in zip(found, rows, inside, strict=True):
        np.testing.assert_allclose(got, by_loop(row, chosen, factor, holes[masked]), atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"lam_returns": 1.0}, {"adaptive": 0.05}])
def test_gae_over_many_rows_equals_gae_row_by_row(options: dict[str, float]) -> None:
    draw = np.random.default_rng(1)
    lengths = [*draw.integers(0, 700, 60).tolist(), 20_000]
    values = fr.Ragged.of([draw.normal(size=n) for n in lengths], dtype=np.float64)
    mask = fr.Ragged.like(draw.random(len(values.values)) < 0.8, values)
    reward = np.where(draw.random(len(lengths)) < 0.1, NAN, draw.normal(size=len(lengths)))
    together = a.gae(reward, values, mask, None, None, whiten=False, gamma=0.99, **options)
    for i in range(len(lengths)):
        one = np.asarray([i])
        alone = a.gae(reward[one], values.take(one), mask.take(one), None, None, whiten=False, gamma=0.99, **options)
        for column, found in alone.items():
            assert found == together[column].take(one)  # to the last bit
