"""Passes change what is computed, never what comes out: runs on the null engine with and without them."""

from __future__ import annotations

from typing import Any

import pytest

import flowrl as fr
from flowrl.graph.passes import needed_columns, optimise
from flowrl.runtime import local
from flowrl.runtime.context import Context, Table, Value
from flowrl.runtime.executor import Executor
from tests.null.graph import flows, pieces as p

PROMPTS = [{"prompt_id": str(i), "prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]
TABLE = {f"{i}+1=": [str(i + 1), "7", "<8"] for i in range(12)}
EXAMPLES = [{"prompt_id": str(i), "prompt": f"{i}+1=", "response": str(i + 1)} for i in range(12)]
MODEL = fr.Model(TABLE, optimizer=fr.AdamW(lr=1e-3))


@fr.operator(writes={"advantage": fr.SAMPLE.f32})
def as_advantage(reward: fr.SAMPLE.f32):
    return reward - 0.5


@fr.flow
def wasteful(prompts, policy, ref):
    rows = p.math(fr.rollout(policy, prompts, n=4))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = fr.logprobs(policy, rows, out="start")
    rows = rows.with_columns(half=rows["reward"] / 2, unused=rows["reward"] * 3)
    rows = as_advantage(rows, replace=True)
    fr.log(rows, "start", "half")
    return fr.update(policy, fr.repeat(rows, minibatches=2), loss=p.ppo_clip(0.2))


@fr.flow
def wasteful_inside(prompts, policy, ref):
    def attempt(new):
        rows = fr.logprobs(ref, fr.rollout(policy, new, n=4), out="ref_logprobs")
        return p.math(rows.with_columns(unused=1.0))

    rows = fr.refill(attempt, prompts, keep=p.group_has_signal(), max_rounds=2)
    return fr.update(policy, as_advantage(rows), loss=p.ppo_clip(0.2))


def run(flow: fr.Flow, inputs: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], fr.Graph]:
    done = fr.run_local(flow, steps=3, engine="null", out=None, progress="off", batch=4, max_tokens=12, **inputs)
    weights = {name: host.state()["weights"] for name, host in done.hosts.items()}
    return weights, done.metrics, done.graph


@pytest.mark.parametrize("flow", [wasteful, wasteful_inside], ids=lambda f: f.name)
def test_a_run_is_the_same_with_and_without_passes(flow: fr.Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL}
    weights, metrics, graph = run(flow, inputs)
    assert "ref" not in weights and "ref" not in graph

    monkeypatch.setattr(local, "optimise", lambda graph: (graph, ()))
    plain, plain_metrics, plain_graph = run(flow, inputs)
    assert len(graph) < len(plain_graph)
    assert plain["policy"] == weights["policy"] and any(weights["policy"])
    for found, expected in zip(metrics, plain_metrics, strict=True):
        for name in ("log/start", "log/half", "loss", "update/loss"):
            assert found.get(name) == expected.get(name)


FLOWS: list[tuple[fr.Flow, dict[str, Any]]] = [
    (flows.grpo, {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL}),
    (flows.dapo, {"prompts": PROMPTS, "policy": MODEL}),
    (flows.remax, {"prompts": PROMPTS, "policy": MODEL}),
    (flows.raft, {"prompts": PROMPTS, "policy": MODEL}),
    (flows.distill, {"prompts": PROMPTS, "student": MODEL, "teacher": MODEL}),
    (flows.judged, {"prompts": PROMPTS, "policy": MODEL, "judge": fr.Model(None)}),
    (flows.debate, {"prompts": PROMPTS, "policy": MODEL}),
    (flows.replayed, {"prompts": PROMPTS, "policy": MODEL}),
    (flows.sft, {"examples": EXAMPLES, "policy": MODEL}),
    (wasteful, {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL}),
    (wasteful_inside, {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL}),
]


@pytest.mark.parametrize(("flow", "inputs"), FLOWS, ids=[f.name for f, _ in FLOWS])
def test_needed_columns_are_enough(flow: fr.Flow, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every edge stripped of what `needed_columns` leaves out gives the same weights."""
    weights, _, _ = run(flow, inputs)
    needed = needed_columns(optimise(flow.graph())[0])
    original = Executor._value
    stripped = set()

    def strip(self: Executor, node: fr.Node, context: Context) -> Value:
        value = original(self, node, context)
        if isinstance(value, Table):
            names = needed.get(context.path + node.name, frozenset())
            stripped.update(set(value.batch.names) - names)
            value = value.with_batch(value.batch.select([n for n in value.batch.names if n in names]))
        return value

    monkeypatch.setattr(Executor, "_value", strip)
    assert run(flow, inputs)[0] == weights
    assert stripped or flow is flows.sft
