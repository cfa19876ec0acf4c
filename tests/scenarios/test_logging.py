"""Numbers of a step do not depend on how it was split, and no point of a curve is lost or doubled."""

from pathlib import Path

import pytest
import torch

import flowrl as fr
from flowrl.engines.protocol import Stat, UpdateReport
from flowrl.runtime.metrics import Tally
from flowrl.runtime.rundir import RunDir
from tests.scenarios.pieces import Bigram, Ids, policy, run


@fr.loss(on_policy=False)
def reports(logprobs, is_clipped: fr.TOKEN.f32):
    return -logprobs, {"clip_fraction": is_clipped}


@fr.flow
def flow(rows, policy):
    return fr.update(policy, rows, loss=reports())


def tokens(*clipped: list[float]) -> list[dict[str, object]]:
    return [{"prompt_ids": [3], "response_ids": [4] * len(c), "is_clipped": c} for c in clipped]


# 3 of 12 tokens in the first half of the rows, 3 of 4 in the second
HALVES = ([[1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], [[1, 1, 1], [0]])


@pytest.mark.parametrize("budget", [1, 4, 7, 8, 12, 16, 1000])
def test_a_metric_does_not_depend_on_micro_batches(budget: int) -> None:
    rows = tokens(*HALVES[0], *HALVES[1])
    data = fr.Data(rows, batch="all", types={"is_clipped": fr.TOKEN.f32})
    done = run(flow, rows=data, policy=policy(Bigram(torch.zeros(5, 5)), Ids(5), micro_batch_tokens=budget))
    assert done.metrics[0]["update/clip_fraction"] == 6 / 16  # a mean of the halves' means is 0.5
    assert done.metrics[0]["update/tokens"] == 16


def test_ranks_are_pooled_by_their_counts() -> None:
    whole = Tally()
    for total, count in ((3, 12), (3, 4)):
        rank = Tally()
        rank.add_update("update", UpdateReport({"clip_fraction": Stat(total, count)}, steps=1, tokens=count))
        whole.merge(rank)
    assert whole.metrics()["update/clip_fraction"] == 0.375


def test_steps_out_of_order_and_logged_again(tmp_path: Path) -> None:
    folder = RunDir.create(tmp_path)
    folder.write_metrics(8000, {"inference/tokens": 5.0})
    folder.write_metrics(0, {"train/loss": 9.0})
    for step in range(1, 8):
        folder.write_metrics(step, {"train/loss": float(step)})
    folder.finish("interrupted")
    again = RunDir.resume(folder.path, 5)
    for step in (5, 6, 7, 8):
        again.write_metrics(step, {"train/loss": 10.0 * step})
    again.finish()
    read = RunDir.open(folder.path)
    assert read.metric("inference/tokens") == [(8000, 5.0)]
    losses = [9.0, 1.0, 2.0, 3.0, 4.0, 50.0, 60.0, 70.0, 80.0]
    assert read.metric("train/loss") == list(enumerate(losses))
