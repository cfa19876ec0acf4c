"""Rows that a reward failed on: `row_error` is a column as any other, sums keep it by part, and such rows can be left out."""

from __future__ import annotations

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import CheckError
from flowrl.graph.passes import needed_columns, optimise
from flowrl_operators import advantages, filters, losses, masks, rewards
from tests.null.graph import pieces as p

PROMPTS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
SAID = fr.Model({row["prompt"]: [row["answer"], "7", "many"] for row in PROMPTS}, optimizer=fr.AdamW(lr=1e-3))


@fr.reward
def close(response, answer):
    return 1.0 / (1.0 + abs(int(response) - int(answer)))


@fr.reward
def whole(response):
    return float(int(response) == float(response))


@fr.reward
def silent(response):
    raise LookupError("no")


@fr.reward
def half(response):
    if response == "7":
        raise LookupError("seven")
    return 0.5


def rows_of(make, *, then=None, logs=("reward",)) -> fr.Run:
    @fr.flow
    def flow(prompts, policy):
        rows = make(fr.rollout(policy, prompts, n=6))
        fr.log(rows, *logs, how="count")
        return fr.update(policy, (then or advantages.group_norm)(rows), loss=losses.ppo_clip(0.2))

    return fr.run_local(flow, engine="null", batch=4, prompts=PROMPTS, policy=SAID, out=None, progress="off")


def test_a_flow_may_read_why_rows_failed() -> None:
    run = rows_of(lambda rows: fr.filter(close(rows), fr.col("row_error") == ""))
    kept = run.rows("filter")
    assert 0 < len(kept) < len(run.rows("close")) and set(kept["row_error"]) == {""}
    assert np.isfinite(kept["reward"]).all()


def test_an_operator_that_raises_writes_no_reason() -> None:
    @fr.reward(on_error="raise")
    def strict(response):
        return 1.0

    with pytest.raises(CheckError, match="'row_error', which nothing before it writes"):
        rows_of(lambda rows: fr.filter(strict(rows), fr.col("row_error") == ""))


def test_read_too_early_the_fix_names_who_writes_it() -> None:
    with pytest.raises(CheckError, match="node 'close' writes it"):
        rows_of(lambda rows: close(fr.filter(rows, fr.col("row_error") == "")))


def test_only_who_is_asked_for_a_reason_stays() -> None:
    @fr.flow
    def flow(prompts, policy, ref, *, reads=True):
        rows = fr.logprobs(ref, fr.rollout(policy, prompts, n=4), out="ref_logprobs")
        rows = close(half(rows, out="unused"))
        rows = fr.filter(rows, rows["row_error"] == "") if reads else rows
        return fr.update(policy, advantages.group_norm(rows), loss=p.ppo_clip(0.2))

    # `half` says why a row failed too, so it stays; the reference's log-probabilities are read by nobody
    with_reason, _ = optimise(flow.graph())
    assert "half" in with_reason and "ref_logprobs" not in with_reason
    without, _ = optimise(flow.graph(reads=False))
    assert "half" not in without and "close" in without
    needed = needed_columns(flow.graph())
    assert "row_error" in needed["half"] and "unused" not in needed["half"] and "row_error" not in needed["rollout"]
    assert "row_error" not in needed_columns(flow.graph(reads=False))["close"]


def test_one_after_the_other_keep_both_reasons() -> None:
    rows = rows_of(lambda rows: close(half(rows, out="half")), logs=("row_error",)).rows("close")
    texts = dict(zip(rows["response"], rows["row_error"], strict=True))
    assert "invalid literal" in texts["many"] and texts["7"] == "LookupError: seven"
    both = rows_of(lambda rows: silent(close(rows, out="near")), logs=("row_error",)).rows("silent")
    assert any("invalid literal" in text and text.endswith("; LookupError: no") for text in both["row_error"])


def test_a_sum_keeps_the_reasons_of_its_parts_by_name() -> None:
    run = rows_of(lambda rows: close(rows) + 0.5 * half(rows) + 0.1 * whole(rows))
    rows = run.rows("reward")
    texts = dict(zip(rows["response"], rows["row_error"], strict=True))
    assert texts["many"] == "close, whole: ValueError: invalid literal for int() with base 10: 'many'"
    assert texts["7"] == "half: LookupError: seven"
    assert {text for text in rows["row_error"] if not text}
    kept = rows_of(lambda rows: fr.filter(close(rows) + half(rows), fr.col("row_error") == "")).rows("filter")
    assert len(kept) and set(kept["row_error"]) == {""}


def test_a_part_of_a_sum_is_logged_once() -> None:
    run = rows_of(lambda rows: rewards.exact(rows) + 0.5 * rewards.format(rows))
    found = [name for name in run.metrics[-1] if name.endswith("/mean") and ("exact" in name or "format" in name)]
    assert found == ["reward/exact/mean", "reward/format/mean"]


def test_a_join_keeps_the_reasons_of_both_sides() -> None:
    def joined(rows):
        other = half(rows, out="half").select("half", "row_error")
        return fr.join(close(rows), other, on="sample_id")

    rows = rows_of(joined, logs=("row_error",)).rows("join")
    texts = dict(zip(rows["response"], rows["row_error"], strict=True))
    assert texts["7"].endswith("seven") and "invalid literal" in texts["many"]


def test_rows_without_a_reward_can_be_left_out() -> None:
    run = rows_of(lambda rows: filters.scored(close(rows)))
    assert 0 < len(run.rows("scored")) < len(run.rows("close"))
    assert np.isfinite(run.rows("scored")["reward"]).all()
    by = rows_of(lambda rows: close(filters.scored(half(rows, out="half"), by="half")))
    assert "7" not in set(by.rows("scored")["response"])


def test_rows_without_a_reward_can_be_masked() -> None:
    run = rows_of(close, then=lambda rows: advantages.group_norm(masks.scored(rows)))
    rows = run.rows("scored")
    trains = np.asarray([row.any() for row in rows["loss_mask"]])
    assert 0 < trains.sum() < len(rows) and np.array_equal(trains, np.isfinite(rows["reward"]))
    assert run.metrics[-1]["update/tokens"] == rows["loss_mask"].values.sum() < len(rows["loss_mask"].values)
