"""Plans as bars, gaps and stacks: they add up to what the planner predicted."""

from __future__ import annotations

import pytest

from flowrl.planner.tasks import Hold, Lane
from flowrl.viz.gantt import tip_of
from flowrl.viz.palette import CATEGORIES, DARK, HUES, LIGHT, OTHER, category_of, named
from flowrl.viz.scene import place_of, roles_of, scene
from flowrl.viz.stacks import stacks
from flowrl.viz.versions import versions
from tests.null.viz.cases import hostile, large


def test_bars_are_the_schedule_of_the_plan() -> None:
    plan = large()
    drawn = scene(plan)
    assert [bar.step.name for bar in drawn.bars] == [step.name for step in plan.steps]
    assert drawn.makespan_s == plan.predicted.latency_s == max(bar.end_s for bar in drawn.bars)
    assert tuple(bar.step.name for bar in drawn.bars if bar.is_critical) == tuple(
        step.name for step in plan.steps if step.name in plan.predicted.critical_path
    )


def test_every_step_is_on_a_track_of_each_of_its_lanes() -> None:
    drawn = scene(large())
    shown = {(bar.step.name, track.lane) for group in drawn.groups for track in group.tracks for bar in track.bars}
    assert shown == {(bar.step.name, lane) for bar in drawn.bars for lane in bar.step.lanes}


def test_bars_and_gaps_fill_the_compute_lanes() -> None:
    drawn = scene(large())
    for group in drawn.groups:
        for track in group.tracks:
            if track.lane is Lane.COMPUTE:
                idle = sum(gap.end_s - gap.start_s for gap in track.gaps)
                assert track.busy_s + idle == pytest.approx(drawn.makespan_s)


def test_gaps_say_what_they_wait_for() -> None:
    drawn = scene(large())
    reasons = {
        group.name: [gap.reason for gap in group.tracks[0].gaps] for group in drawn.groups if group.tracks[0].gaps
    }
    assert reasons["B: devices 32–63"][0] == "waits for rollout, then rollout.rows"
    assert reasons["A: devices 0–31"][-1] == "waits for log"


def test_cpus_of_nodes_are_groups_of_their_own() -> None:
    names = [group.name for group in scene(large()).groups]
    assert names == ["A: devices 0–31", "B: devices 32–63", "CPUs of nodes 0–3", "CPUs of nodes 4–7"]


def test_a_step_of_cpus_is_at_the_cpus_wherever_it_is_named() -> None:
    plan = large()
    drawn = scene(plan)
    for name, place in (("math_reward", "CPUs of nodes 0–3"), ("rollout", "A: devices 0–31")):
        bar = drawn.bar(name)
        assert place_of(plan, bar.step) == place and place in tip_of(drawn, bar)
        group = next(group for group in drawn.groups if any(bar in track.bars for track in group.tracks))
        assert group.name == place


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("gen cache", "gen KV cache"), ("gen weights", "gen engine weights"), ("ref gathered", "ref gathered layers"),
        ("KV cache", "KV cache"), ("policy optimizer, parked", "policy optimizer, parked"), ("cache", "cache"),
        ("device context", "device context"), ("gathered layers", "gathered layers"), ("rows buffers", "rows buffers"),
    ],
)  # fmt: skip
def test_holds_are_named_as_their_category(what: str, said: str) -> None:
    assert named(what) == said


def test_layers_add_up_to_what_the_simulator_counts() -> None:
    plan = large()
    _, used = plan.simulated()
    on_devices, on_hosts = stacks(plan)
    for stack in (*on_devices, *on_hosts):
        usage = (used.hosts if stack.is_host else used.devices)[stack.indices[0]]
        for moment_s, level in usage.levels:
            assert sum(layer.at(moment_s) for layer in stack.layers) == level
    assert {index for stack in on_devices for index in stack.indices} == set(used.devices)
    assert on_devices[0].usage.peak_bytes == plan.predicted.device_bytes
    assert on_hosts[0].usage.peak_bytes == plan.predicted.host_bytes


def test_a_hold_belongs_to_the_category_that_its_name_ends_with() -> None:
    for category in CATEGORIES:
        for word in category.words:
            assert category_of(Hold(f"policy {word}")) == category
    assert category_of(Hold("optimizer_model activations")).name == "activations"
    assert category_of(Hold("policy optimizer, parked")).name == "optimizer"
    assert category_of(Hold("something else")) == OTHER


def test_categories_and_hues_are_told_apart() -> None:
    looks = [(one.hue, one.hatch) for one in CATEGORIES]
    assert len(looks) == len(set(looks))
    assert len(LIGHT) == len(DARK) == len(HUES)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(("hues", "ink"), [(LIGHT, "#16191d"), (DARK, "#e9ecf0")])
def test_text_on_a_fill_is_readable(hues: tuple[tuple[str, str], ...], ink: str) -> None:
    for fill, stroke in hues:
        for other, least in ((ink, 4.5), (stroke, 3.0)):
            bright, dim = sorted((luminance(fill), luminance(other)), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= least, (fill, other)


def test_roles_are_those_that_steps_name_and_their_nodes() -> None:
    steps = large().steps
    roles = roles_of(steps)
    assert roles["gen.weights"] == roles["policy.onload"] == "policy"
    assert roles["math_reward"] == roles["rollout.rows"] == ""
    assert roles_of(hostile().steps).keys() == {step.name for step in hostile().steps}


def test_overlapping_iterations_are_as_stale_as_the_schedule_allows() -> None:
    for most in (0, 1, 3):
        found = versions(scene(large(max_staleness=most)), iterations=9)
        assert max(found.staleness) == min(most, 8)
        assert sum(found.histogram.values()) == 9
        assert list(found.published_s) == sorted(found.published_s)
