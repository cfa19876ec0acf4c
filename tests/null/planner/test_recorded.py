"""Lengths from a data set, and from what a run recorded."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, strategies as st

import flowrl as fr
from examples.flows.dapo import dapo
from examples.rloo import rloo
from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError, RunError
from flowrl.planner.recorded import recorded
from flowrl.planner.workload import Lengths, Workload
from flowrl.runtime.rundir import RunDir


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    prompts = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "12+30=", "answer": "42"}]
    return fr.run_local(rloo, steps=3, engine="null", prompts=prompts, policy="null", progress="off",
                        out=tmp_path_factory.mktemp("runs"), record=("*",))  # fmt: skip


def test_a_run_tells_the_next_plan_what_it_sampled(run):
    folder, found = RunDir.open(run.path), Workload.of_run(run.path)
    rows = [folder.edge(step, "rollout") for step in range(3)]
    prompts, responses = (
        [int(length) for one in rows for length in one[name].lengths] for name in ("prompt_ids", "response_ids")
    )
    assert found.prompts == folder.info["data"]["prompts"]["batch"] == len(set(rows[0]["prompt_id"]))
    assert found.prompt_lengths == Lengths.of(prompts)  # short ones are told exactly
    assert found.response_lengths == Lengths.of(length for length in responses if length)
    assert found.rounds == 1


def test_the_newest_steps_of_a_node(run):
    folder = RunDir.open(run.path)
    last = [int(length) for length in folder.edge(2, "rollout")["response_ids"].lengths if length]
    found = Workload.of_run(run.path, node="rollout", last=1, prompts=7)
    assert found.response_lengths == Lengths.of(last) and found.prompts == 7
    with pytest.raises(ConfigError, match="no lengths of a node 'rolout'; did you mean 'rollout'"):
        Workload.of_run(run.path, node="rolout")
    with pytest.raises(ConfigError, match="at least one step"):
        Workload.of_run(run.path, last=0)


def test_it_is_a_workload_to_plan_with(run):
    shape = ModelShape.of("Qwen/Qwen2.5-0.5B")
    plan = fr.plan(rloo, models={"policy": shape}, cluster="1xA100-80G", workload=Workload.of_run(run.path))
    assert plan.steps


def test_a_refill_says_how_often_it_tried(tmp_path):
    prompts = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    run = fr.run_local(dapo(group_size=4), steps=4, engine="null", prompts=prompts, policy="null", progress="off", batch=4,
                       out=tmp_path)  # fmt: skip
    tried, passed = (sum(one[f"refill/{name}"] for one in run.metrics) for name in ("tried", "groups"))
    found = Workload.of_run(run.path)
    assert found.prompts == 4 and tried > passed > 0
    assert found.rounds == pytest.approx(tried / passed)
    assert sum(found.prompt_lengths.weights) == tried * 4  # of all that was sampled, not of what passed


def test_what_a_run_does_not_tell(run, tmp_path):
    with pytest.raises(RunError, match="not the folder of a run"):
        Workload.of_run(tmp_path)
    old = tmp_path / "old-1"
    shutil.copytree(run.path, old)
    lines = [json.loads(line) for line in (old / "trace.jsonl").read_text().splitlines()]
    for line in lines:
        line["attributes"].pop("lengths", None)
    (old / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RunError, match="recorded no lengths"):
        Workload.of_run(old)
    torn = {**lines[0], "attributes": {"lengths": {"prompt": {"tokens": [1], "counts": []}}}}
    (old / "trace.jsonl").write_text(json.dumps(torn) + "\n")
    with pytest.raises(RunError, match="no histogram"):
        Workload.of_run(old)


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=300))
def test_bins_keep_count_longest_and_nearly_the_sum(lengths):
    found = recorded(np.array(lengths), np.array(lengths))
    assert found["prompt"] == found["response"] and json.loads(json.dumps(found)) == found
    tokens, counts = found["response"]["tokens"], found["response"]["counts"]
    known = [length for length in lengths if length]
    assert sum(counts) == len(known)
    assert tokens == sorted(set(tokens))
    if known:
        assert tokens[-1] == max(known)
        total = sum(a * b for a, b in zip(tokens, counts, strict=True))
        assert total == pytest.approx(sum(known), abs=len(tokens) + len(known) / 2)
        assert len(tokens) <= 64 + 32 * 12 + 1


def test_lengths_of_rows():
    rows = [{"prompt_ids": [1, 2, 3], "prompt": "a b"}, {"prompt_ids": [4], "prompt": "a b c d"}]
    assert Lengths.of_rows(rows) == Lengths.of([3, 1])
    assert Lengths.of_rows(rows, "prompt", encode=str.split) == Lengths.of([2, 4])
    with pytest.raises(ConfigError, match="holds text, and lengths count tokens"):
        Lengths.of_rows(rows, "prompt")
    with pytest.raises(ConfigError, match="row 0 has no column 'promt'"):
        Lengths.of_rows(rows, "promt")
