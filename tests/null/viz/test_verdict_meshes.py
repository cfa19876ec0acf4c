"""The figures at the top name the mesh and the step that matter, where meshes span nodes and rows are on their way."""

from __future__ import annotations

import pytest

import flowrl as fr
from examples.flows.ppo import ppo
from flowrl.viz.scene import scene
from flowrl.viz.stacks import stacks
from flowrl.viz.verdict import figures

MODEL = "meta-llama/Llama-3.1-8B"


@pytest.fixture(scope="module")
def plan() -> fr.Plan:
    models = {node.name: MODEL for node in ppo.graph().inputs if node["kind"] == "weights"}
    work = fr.Workload(128, fr.Lengths.fixed(512), fr.Lengths.lognormal(1024, 0.6, cap=4096))
    return fr.plan(ppo, models=models, cluster="64xH100-80G", workload=work)


def test_the_bottleneck_is_a_whole_mesh(plan):
    """The nodes of one mesh have tracks of their own where they send to different neighbours."""
    drawn = scene(plan)
    note = next(one.note for one in figures(drawn, *stacks(plan)) if one.name == "bottleneck")
    track = max((track for group in drawn.groups for track in group.tracks), key=lambda one: one.busy_s)
    step = max(track.bars, key=lambda bar: bar.end_s - bar.start_s).step
    devices = list(step.mesh.devices)
    assert len(devices) > 8
    assert f"devices {devices[0]}–{devices[-1]};" in note
    assert step.name in note


def test_the_peak_is_named_by_what_holds_it(plan):
    """Rows that are on their way at that moment hold nothing."""
    note = next(one.note for one in figures(scene(plan), *stacks(plan)) if one.name == "device memory")
    named = note.split("during ")[1].split(";")[0].split(", ")
    holding = {step.name for step in plan.steps if any(hold.device_bytes for hold in step.predicted.holds)}
    assert named and set(named) <= holding
