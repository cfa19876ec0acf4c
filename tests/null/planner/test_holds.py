"""What a role holds by category: the parts add to the option's bytes, and copies are told apart from work."""

from collections import defaultdict
from dataclasses import replace

import pytest

from flowrl.cost.generation import EngineConstants
from flowrl.cost.memory import train_memory
from flowrl.cost.offload import ADAM_8BIT, ADAM_FP32
from flowrl.cost.shapes import ModelShape
from flowrl.mesh import Cluster, Mesh
from flowrl.planner.choices import Choices
from flowrl.planner.draft import Draft
from flowrl.planner.holds import CATEGORIES, held, moves_s
from flowrl.planner.lower import plan_of
from flowrl.planner.options import all_options
from flowrl.planner.problem import Problem
from flowrl.planner.roles import Call, Role
from tests.null.planner.lower_cases import candidates, graph_of
from tests.null.planner.search_cases import CASES, CRITICS, WORK

SMALL = ModelShape.of("Qwen/Qwen2.5-1.5B")
CLUSTER = Cluster.named("8xA100-80G").with_memory(device_bytes=2**50)  # everything is an option
CHOICES = Choices(optimizers=(ADAM_FP32, ADAM_8BIT))
ADAPTED = (
    Role("gen", "frozen", SMALL, (Call("rollout", "gen", "generate", 64),)),
    Role("adapted", "adapted", SMALL.with_lora(16), (Call("old", "adapted", "forward", 64),
                                                     Call("train", "adapted", "train", 64))),
)  # fmt: skip
PROBLEMS = {
    "four roles": Problem(CRITICS, CLUSTER, WORK, choices=CHOICES),
    "adapters": Problem(ADAPTED, CLUSTER, WORK, choices=CHOICES),
    "weights of one byte": Problem(
        ADAPTED[:1], CLUSTER, WORK, choices=replace(CHOICES, engine=EngineConstants(weight_bytes=1))
    ),
}
ALL = [(name, role.name) for name, problem in PROBLEMS.items() for role in problem.roles]


def options_of(name, role_name):
    problem = PROBLEMS[name]
    role = next(role for role in problem.roles if role.name == role_name)
    return problem, role, all_options(role, CLUSTER, Mesh(0, 8), WORK, problem.choices)


@pytest.mark.parametrize(("name", "role_name"), ALL)
def test_the_parts_add_to_the_option(name, role_name):
    problem, role, options = options_of(name, role_name)
    assert options
    for option in options:
        found = held(problem, role, Mesh(0, 8), option)
        rest, states = sum(found.at_rest.values()), sum(one.device_bytes for one in found.states)
        assert rest == pytest.approx(option.static_bytes, abs=2)
        assert rest + states + sum(found.working.values()) == pytest.approx(option.peak_bytes, abs=2)
        on_host = sum(found.on_host.values()) + sum(one.host_bytes for one in found.states)
        assert on_host == pytest.approx(option.host_bytes, abs=2)
        every = [found.at_rest, found.working, found.on_host, *(dict(one.parts) for one in found.states)]
        assert {part for parts in every for part in parts} <= set(CATEGORIES)
        assert all(count > 0 for parts in every for count in parts.values())


@pytest.mark.parametrize(("name", "role_name"), ALL)
def test_calls_take_the_same_wherever_their_state_is_parked(name, role_name):
    """Less the copies of parked state, options that differ in parking alone have equal seconds."""
    problem, role, options = options_of(name, role_name)
    groups = defaultdict(list)
    for option in options:
        settings = dict(option.settings)
        offload = settings.pop("offload", "none")
        settings.pop("park_weights", None)
        group = "none" if offload == "park" else offload
        if offload == "all":
            continue  # streams: nothing of it is parked
        seconds = [a - moves_s(problem, role, option, call) for a, call in zip(option.seconds, role.calls, strict=True)]
        groups[option.layout, group, tuple(settings.items())].append(seconds)
    if any(dict(option.settings).get("offload") == "park" for option in options):
        assert any(len(found) > 1 for found in groups.values())
    for found in groups.values():
        assert all(one == pytest.approx(found[0], rel=1e-9) for one in found)


def test_forward_passes_of_a_trainer_hold_what_those_of_a_frozen_model_do():
    problem, role, options = options_of("four roles", "policy")
    _, _, frozen = options_of("four roles", "ref")
    option = next(one for one in options if dict(one.settings)["offload"] == "none" and one.layout.tp == 1)
    other = next(one for one in frozen if one.layout == option.layout
                 and dict(one.settings)["micro_batch_tokens"] == dict(option.settings)["micro_batch_tokens"])  # fmt: skip
    ref = next(role for role in problem.roles if role.name == "ref")
    found, beside = held(problem, role, Mesh(0, 8), option), held(problem, ref, Mesh(0, 8), other)
    assert found.during("forward") == pytest.approx(beside.during("forward"))
    assert sum(found.during("forward").values()) < sum(found.during("train").values())
    assert found.during("train") == found.working and beside.during("forward") == beside.working


def test_activations_of_a_trainer_that_is_cut_are_those_of_its_part():
    """A group of tensor-parallel ranks works on the tokens together: the parts are those that the option's memory was made of."""
    problem, role, options = options_of("four roles", "policy")
    states, looked_at = {one.name: one for one in CHOICES.optimizers}, 0
    for option in options:
        said, layout = dict(option.settings), option.layout
        if layout.tp == 1 or said["offload"] != "none":
            continue
        used = train_memory(
            role.shape, CLUSTER, shards=layout.fsdp, tokens=said["micro_batch_tokens"], recompute=said["recompute"],
            tensor_parallel=layout.tp, sequence_parallel=True, state=states[said["optimizer"]],
        )  # fmt: skip
        found, more = held(problem, role, Mesh(0, 8), option), CHOICES.memory.fragmentation
        assert found.working["activations"] == pytest.approx(used.activation_bytes * more)
        assert found.working["logits"] == pytest.approx(used.logit_bytes * more)
        assert found.working["gathered"] == pytest.approx(used.gather_bytes * more)
        looked_at += 1
    assert looked_at


def test_worked_bytes_of_parked_training_state():
    """1.5B parameters over eight devices, fp32: 4 N of weights, 4 N of gradients, 8 N of moments."""
    problem, role, options = options_of("four roles", "policy")
    option = next(one for one in options if dict(one.settings)["offload"] == "park" and not one.numerics)
    found = held(problem, role, Mesh(0, 8), option)
    params, more = SMALL.params(), CHOICES.memory.fragmentation
    weights, rest = found.states
    assert dict(weights.parts) == {"parameters": pytest.approx(4 * params / 8 * more)}
    assert {name: count * 8 / params / more for name, count in rest.parts} == {
        "gradients": pytest.approx(4), "optimizer": pytest.approx(8),
    }  # fmt: skip
    assert weights.moved_bytes + rest.moved_bytes == pytest.approx(16 * params / 8)
    assert weights.calls == ("old", "update") and rest.calls == ("update",) and weights.is_handed_over


def test_a_plan_names_what_it_holds():
    """Every hold is of a role and a category; at the worst moment they add to the peak."""
    problem = CASES["critic_tight"]
    plan = plan_of(problem, candidates("critic_tight")[0], graph_of(problem))
    holds = [*plan.predicted.resident, *(hold for step in plan.steps for hold in step.predicted.holds)]
    roles = {role.name for role in problem.roles}
    for hold in holds:
        role, _, category = hold.what.partition(" ")
        assert category in CATEGORIES and (role in roles or hold.what == "device context")
    used = plan.simulated()[1]
    for one in (*used.devices.values(), *used.hosts.values()):
        assert sum(count for _, count in one.parts) == one.peak_bytes
    parts = dict(used.devices[0].parts)
    assert sum(parts.values()) == plan.predicted.device_bytes
    assert {"policy optimizer", "policy gradients", "policy activations", "device context"} <= set(parts) or parts


def test_a_draft_knows_where_roles_stand():
    problem = CASES["plenty"]
    draft = Draft(problem, candidates("plenty")[0], graph_of(problem))
    assert set(draft.placed) == {role.name for role in problem.roles}
    with pytest.raises(KeyError):
        replace(draft, steps=()).step("rollout")
