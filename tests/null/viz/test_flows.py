"""Pages of planned example flows: sub-graphs, versions that are chosen, moving references, several samplers."""

from __future__ import annotations

from typing import Any

import pytest

import flowrl as fr
import flowrl.viz
from examples.flows.dapo import dapo
from examples.flows.debate import debate
from examples.flows.grpo import grpo_moving_ref
from examples.flows.ppo import ppo_warm
from flowrl.planner.tasks import StepKind
from flowrl.viz.dataflow import dataflow
from flowrl.viz.scene import scene

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip


@pytest.mark.parametrize("flow", [dapo, debate, grpo_moving_ref, ppo_warm], ids=lambda flow: flow.name)
def test_a_flow_is_drawn(flow: Any) -> None:
    graph = flow.graph()
    models = {node.name: SHAPE for node in graph.inputs if node["kind"] == "weights"}
    workload = fr.Workload(32, fr.Lengths.fixed(128), fr.Lengths.fixed(256))
    plan = fr.plan(flow, models=models, cluster="8xA100-80G", workload=workload)
    drawn = dataflow(scene(plan), flow)
    assert [point.name for point in drawn.points] == [node.name for node in graph]
    shown = {bar.index for point in drawn.points for bar in point.bars}
    assert shown == {i for i, step in enumerate(plan.steps) if step.kind is StepKind.COMPUTE}, (
        "no computation is left out"
    )
    moved = {bar.step.name for edge in drawn.edges for bar in edge.moves}
    assert moved >= {step.name for step in plan.steps if step.kind is StepKind.TRANSFER}, "no move of rows is left out"
    back = [edge for edge in drawn.edges if edge.is_back]
    assert back and all("t → t+1" in edge.what for edge in back)
    page = plan.to_html(graph=flow)
    for node in graph:
        assert node.name in page
    assert plan.to_dot(graph=flow).count(" -> ") == len(drawn.edges)
