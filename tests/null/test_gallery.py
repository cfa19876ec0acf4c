"""Every algorithm of the gallery on the null engine: it checks clean, runs, and changes what it says it changes."""

from __future__ import annotations

import numpy as np
import pytest

import flowrl as fr
from examples.gallery.runs import PROMPTS, RUNS, TinyRun

ANSWERS = {row["prompt"]: [row["answer"], "7", "3"] for row in PROMPTS}
MODEL = fr.Model(ANSWERS, optimizer=fr.AdamW(lr=1e-3))
MAKERS = {
    **dict.fromkeys(("policy", "student", "ref", "teacher"), lambda run: MODEL),
    "critic": lambda run: fr.Model(None, head="value"),
    "judge": lambda run: fr.Model(None, head="reward"),
}
NAMED = ("PPO GRPO Dr.GRPO DAPO RLOO REINFORCE++ ReMax GSPO CISPO GMPO OPO GPG MaxRL GDPO online-DPO RAFT distillation SFT "
         "DPO reward-model").split()  # fmt: skip


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_it_checks_and_runs(run: TinyRun) -> None:
    fr.check(run.flow, **run.config)
    done = run.run(engine="null", steps=3, makers=MAKERS)
    assert done.status == "finished" and len(run.curve(done)) == 3
    changed = {done.graph[node.name].source("model") for node in done.graph if node.kind == "update"}
    assert changed and any(np.any(host.state()["weights"]) for host in done.hosts.values())


def test_none_is_missing() -> None:
    assert len(RUNS) == len(NAMED)
