"""A buffer node over an experience table: rows that fail now and then, and groups that are never seen in part."""

from __future__ import annotations

import numpy as np

import flowrl as fr

PROMPTS = [{"prompt": f"{i}+1="} for i in range(4)]
POLICY = fr.Model({f"{i}+1=": ["1", "2"] for i in range(4)})
seen: list[list[int]] = []


@fr.reward
def sometimes(response: str) -> float:
    sometimes_calls.append(response)
    if len(sometimes_calls) == 11:
        raise ValueError("no luck")
    return 1.0


sometimes_calls: list[str] = []


@fr.operator(writes={"size": fr.SAMPLE.f32}, locality="batch")
def group_sizes(prompt_id, sample_id):
    ids = [(p, s.split("/")[0]) for p, s in zip(prompt_id, sample_id, strict=True)]
    sizes = [ids.count(i) for i in ids]
    seen.append(sizes)
    return np.array(sizes)


@fr.loss
def plain(logprobs, reward):
    return -logprobs * reward


@fr.flow
def replayed(prompts, policy):
    rows = sometimes(fr.rollout(policy, prompts, n=2))
    rows = fr.buffer(rows, capacity=11, draw=11, by="prompt_id")
    return fr.update(policy, group_sizes(rows), loss=plain())


def test_a_row_that_fails_once_and_a_full_buffer() -> None:
    sometimes_calls.clear()
    seen.clear()
    data = fr.Data(PROMPTS, batch=4, shuffle=False)
    run = fr.run_local(
        replayed, steps=4, engine="null", out=None, progress="off", checks=False, prompts=data, policy=POLICY
    )
    assert [step["buffer/rows"] for step in run.metrics] == [8, 10, 10, 10]  # whole groups of two, at most eleven rows
    assert all(size % 2 == 0 for sizes in seen for size in sizes)
    assert run.metrics[1]["sometimes/flagged"] == 1 and "sometimes/flagged" not in run.metrics[2]
