"""Every flow of `examples/flows` runs on the null engine, three steps, and changes what it says it changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrl as fr
from flowrl.graph.flows import Flow
from tests.null import flow_cases

FLOWS = list(flow_cases.FLOWS.values())


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
