"""Every algorithm of the gallery on the null engine: it checks clean, runs, and changes what it says it changes."""

from __future__ import annotations

import numpy as np
import pytest

import flowrl as fr
from examples.gallery.dapo import dapo
from examples.gallery.runs import PROMPTS, RUNS, TinyRun

ANSWERS = {row["prompt"]: [row["answer"], "7", "3"] for row in PROMPTS}
MODEL = fr.Model(ANSWERS, optimizer=fr.AdamW(lr=1e-3))
MAKERS = {
    **dict.fromkeys(("policy", "student", "ref", "teacher"), lambda run: MODEL),
    "critic": lambda run: fr.Model(None, head="value"),
    "judge": lambda run: fr.Model(None, head="reward"),
}
NAMED = {
    *(
        "ppo",
        "grpo",
        "dr_grpo",
        "dapo",
        "rloo",
        "reinforce_pp",
        "remax",
        "gspo",
        "cispo",
        "gmpo",
        "opo",
        "gpg",
        "maxrl",
        "gdpo",
    ),
    *("online_dpo", "raft", "distill", "sft", "dpo", "reward_model"),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_it_checks_and_runs(run: TinyRun) -> None:
    fr.check(run.flow, **run.config)
    done = run.run(engine="null", steps=3, makers=MAKERS)
    assert done.status == "finished" and len(run.curve(done)) == 3
    changed = {done.graph[node.name].source("model") for node in done.graph if node.kind == "update"}
    assert changed and any(np.any(host.state()["weights"]) for host in done.hosts.values())


def test_none_is_missing() -> None:
    assert set(RUNS) == NAMED
    assert all(run.flow.name == name for name, run in RUNS.items())


def test_dapo_judges_groups_by_right_and_wrong_alone() -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
    # all right and some of it long: no signal; the other has one, and what is long there pays for it
    said = fr.Model({"1+1=": ["2", "2          "], "1+2=": ["3", "7          "]}, optimizer=fr.AdamW(lr=1e-3))
    done = fr.run_local(
        dapo(soft_length=8), engine="null", prompts=rows, policy=said, batch=2, max_tokens=16, out=None, progress="off"
    )
    kept = done.rows("overlong")
    assert set(kept["prompt"]) == {"1+2="}
    assert set(kept["reward"].tolist()) == {1.0, -1.0} and set(done.rows("refill")["reward"].tolist()) == {1.0, 0.0}
