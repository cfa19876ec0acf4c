"""Floors are below every option, and worth having."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from flowrl.cost.shapes import ModelShape
from flowrl.mesh import Cluster, Mesh
from flowrl.planner.floors import floors
from flowrl.planner.options import Choices, all_options
from flowrl.planner.problem import slice_sizes
from flowrl.planner.roles import Call, Role
from flowrl.planner.workload import Lengths, Workload
from tests.null.planner.search_cases import LARGE, SMALL, critic_roles

MODELS = [SMALL, LARGE, LARGE.with_lora(16), ModelShape.of("Qwen/Qwen3-30B-A3B")]


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from(MODELS),
    name=st.sampled_from(["4xA100-80G", "8xH100-80G", "32xH100-80G"]),
    sequences=st.sampled_from([8, 100, 512]),
    lengths=st.sampled_from([Lengths.fixed(256), Lengths.lognormal(512, 0.8, cap=4096)]),
    recompute=st.sampled_from([(True, False), (True,)]),
    share=st.sampled_from([1.0, 0.1]),
    steps=st.sampled_from([1, 3]),
)
def test_no_option_is_below_its_floor(shape, name, sequences, lengths, recompute, share, steps):
    machine, choices = Cluster.named(name), Choices(recompute=recompute)
    work = Workload(sequences, Lengths.fixed(128), lengths)
    looked_at = 0
    for role in critic_roles(shape, shape, sequences):
        calls = tuple(replace(call, share=share, steps=steps if call.work == "train" else 1) for call in role.calls)
        role = replace(role, calls=calls)
        mine = floors(role, machine, work, choices)
        for size in slice_sizes(machine):
            for option in all_options(role, machine, Mesh(0, size), work, choices):
                for floor, seconds in zip(mine, option.seconds, strict=True):
                    assert floor.seconds(size) <= seconds * (1 + 1e-9), (option, floor)
                looked_at += 1
    assert looked_at


def test_a_floor_is_no_less_than_half_of_what_training_takes():
    """Else it would leave out nothing."""
    role = Role("policy", "policy", LARGE, (Call("update", "policy", "train", 256),))
    machine, work, choices = (
        Cluster.named("8xA100-80G"),
        Workload(256, Lengths.fixed(512), Lengths.fixed(512)),
        Choices(),
    )
    least = min(option.seconds[0] for option in all_options(role, machine, Mesh(0, 8), work, choices))
    assert floors(role, machine, work, choices)[0].seconds(8) > least / 2


@pytest.mark.parametrize("devices", [1, 8])
def test_the_longest_response_is_no_quicker_on_more_devices(devices):
    role = Role("gen", "policy", SMALL, (Call("rollout", "gen", "generate", 4),))
    work = Workload(4, Lengths.fixed(16), Lengths.fixed(1000))
    floor = floors(role, Cluster.named("8xA100-80G"), work, Choices())[0]
    assert floor.seconds(devices) >= 1000 * Choices().engine.step_overhead_s
