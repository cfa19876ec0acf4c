"""Every flow of `examples/flows` runs on the null engine, three steps, and changes what it says it changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrl as fr
from examples.flows import dapo, debate, grpo, judged, online_dpo, ppo, remax, replayed, supervised, tool_use, vine
from flowrl.graph.flows import Flow

PROMPTS = [{"prompt_id": str(i), "prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]
TABLE = {f"{i}+1=": [str(i + 1), "7", f"\\boxed{{{i + 1}}}"] for i in range(12)}
EXAMPLES = [{"prompt_id": str(i), "prompt": f"{i}+1=", "response": str(i + 1)} for i in range(12)]
PAIRS = [
    {"prompt_id": str(i), "prompt": f"{i}+1=", "response": r, "pair_id": str(i), "chosen": c}
    for i in range(8)
    for r, c in ((str(i + 1), True), ("no", False))
]
JUDGE = fr.Model(None, head="reward")
MODEL = fr.Model(TABLE, optimizer=fr.AdamW(lr=1e-3))
CRITIC = fr.Model(None, head="value")

FLOWS: list[tuple[Flow, dict[str, Any], dict[str, Any]]] = [
    (grpo.grpo, {}, {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL}),
    (grpo.grpo_moving_ref, {}, {"prompts": PROMPTS, "heldout": fr.Data(PROMPTS, batch="all"), "policy": MODEL, "ref": MODEL}),
    (ppo.ppo, {}, {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL, "critic": CRITIC, "judge": JUDGE}),
    (ppo.ppo_warm, {"warmup": 2}, {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL, "critic": CRITIC, "judge": JUDGE}),
    (dapo.dapo, {"group_size": 4}, {"prompts": PROMPTS, "policy": MODEL}),
    (remax.remax, {}, {"prompts": PROMPTS, "policy": MODEL}),
    (online_dpo.online_dpo, {}, {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL, "judge": JUDGE}),
    (supervised.raft, {}, {"prompts": PROMPTS, "policy": MODEL}),
    (supervised.distill, {"k": 4}, {"prompts": PROMPTS, "student": MODEL, "teacher": MODEL}),
    (supervised.reward_model, {}, {"pairs": PAIRS, "judge": JUDGE}),
    (supervised.sft, {}, {"examples": EXAMPLES, "policy": MODEL}),
    (judged.judged, {}, {"prompts": PROMPTS, "policy": MODEL, "judge": fr.Model(None)}),
    (tool_use.tool_use, {}, {"prompts": PROMPTS, "policy": fr.Model({"0+1=": ["hm"], **TABLE})}),
    (debate.debate, {}, {"prompts": PROMPTS, "policy": MODEL}),
    (replayed.replayed, {}, {"prompts": PROMPTS, "policy": MODEL}),
    (vine.vine, {}, {"prompts": PROMPTS, "policy": MODEL}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _plain_math(monkeypatch):
    # math-verify is slow to import and not what is tested here
    monkeypatch.setattr(
        "flowrl_operators.rewards.math.function", lambda response, answer, **_: float(answer in response)
    )


def run(flow: Flow, config: dict[str, Any], inputs: dict[str, Any], **options: Any) -> fr.Run:
    return fr.run_local(
        flow.graph(**config),
        steps=3,
        engine="null",
        out=None,
        progress="off",
        batch=4,
        max_tokens=12,
        **inputs,
        **options,
    )


@pytest.mark.parametrize(("flow", "config", "inputs"), FLOWS, ids=[f.name for f, _, _ in FLOWS])
def test_flow_runs(flow, config, inputs):
    done = run(flow, config, inputs)
    assert done.status == "finished" and len(done.metrics) == 3
    updated = {done.graph[node.name].source("model") for node in done.graph if node.kind == "update"}
    assert updated
    assert any(np.any(host.state()["weights"]) for host in done.hosts.values())


@pytest.mark.parametrize(("flow", "config", "inputs"), FLOWS, ids=[f.name for f, _, _ in FLOWS])
def test_equal_seeds_give_equal_runs_and_other_seeds_others(flow, config, inputs):
    def weights(seed):
        return {name: host.state()["weights"] for name, host in run(flow, config, inputs, seed=seed).hosts.items()}

    first = weights(0)
    assert first == weights(0)
    assert first != weights(1)
