"""`fr.plan`: what may be asked of it, and what its errors say."""

import pytest

import flowrl as fr
from examples.flows.grpo import grpo
from flowrl.cost.offload import ADAM_8BIT, ADAM_FP32, Offload
from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError, PlanError, TextError
from flowrl.planner.choices import Choices
from flowrl.planner.planning import problem_of
from flowrl.planner.problem import TIE, Effort
from flowrl.planner.relax import explain
from flowrl.planner.workload import Lengths, Workload

SMALL = ModelShape.of("Qwen/Qwen2.5-1.5B")
LARGE = ModelShape.of("Qwen/Qwen2.5-7B")
WORK = Workload(16, Lengths.fixed(256), Lengths.fixed(512))


def planned(**changed):
    asked = {"models": {"policy": SMALL, "ref": SMALL}, "cluster": "4xA100-80G", "workload": WORK, **changed}
    return fr.plan(grpo(group_size=4), **asked)


def test_a_tie_is_the_users():
    """With 0 the fastest is taken, however little it gains; a wide one takes what is simpler."""
    fast, plain, wide = planned(tie=0), planned(), planned(tie=0.5)
    assert fast.searched.tie == 0 and plain.searched.tie == TIE and wide.searched.tie == 0.5
    assert fast.predicted.seconds <= plain.predicted.seconds * (1 + 1e-9) <= wide.predicted.seconds * (1 + 1e-9)
    assert wide.predicted.seconds <= fast.predicted.seconds * 1.5
    with pytest.raises(ConfigError, match="tie is the relative error between two plans, from 0 to below 1; found 1"):
        planned(tie=1)


def test_effort_reaches_the_search():
    short = planned(effort=Effort(branches=3, moves=2, seed=5, alternatives=0))
    assert not short.searched.is_exhaustive and short.searched.seed == 5
    assert planned().searched.is_exhaustive
    assert short.searched.bound_s <= planned().predicted.seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"models": 5}, "plan needs a dict from each model of the flow .* as models; found 5 .int"),
        ({"cluster": 4}, "plan needs a Cluster.* as cluster; found 4"),
        ({"workload": 16}, "plan needs a Workload as workload; found 16"),
        ({"schedule": 1}, r"plan needs Sync\(\).* as schedule; found 1 \(int\)"),
        ({"placement": 5}, "plan needs a Placement or its text .* as placement; found 5"),
        ({"choices": {}}, "plan needs Choices as choices; found {}"),
        ({"tie": "2%"}, "plan needs a part, 0.02, as tie; found '2%'"),
        ({"effort": 100}, "plan needs an Effort as effort; found 100"),
        ({"placement": ""}, "expected the name of a role; found the end"),
        ({"placement": "gen:d2"}, r"not placed: \['policy', 'ref'\]; place them or end the placement with '| ...'"),
        ({"placement": "actor:f2 | ..."}, r"placed but not in the flow: \['actor'\]"),
        ({"placement": "gen:d3 | ..."}, "'gen:d3' needs 3 devices in one slice"),
        ({"placement": "gen:d4 | ..."}, "leaves none for policy, ref"),
        ({"placement": "gen:f2 | ..."}, "'gen', which is sampled from, cannot be laid out as f2"),
    ],
)
def test_what_was_needed_and_found(changed, message):
    with pytest.raises((ConfigError, TextError), match=message):
        planned(**changed)


def test_what_would_fit_takes_as_long_as_its_plan():
    """Each change under which a plan fits has the seconds that planning with it gives, with its ties and its hidden copies."""
    asked = {"models": {"policy": LARGE, "ref": LARGE}, "cluster": fr.Cluster.named("2xA100-80G").with_memory(
        host_bytes=40 * 2**30), "workload": WORK}  # fmt: skip
    problem, graph = problem_of(grpo(group_size=4), **asked)
    offered = {one.what.split(":")[0]: one for one in explain(problem, graph).relaxations}
    with pytest.raises(PlanError, match="FR-P01") as refused:
        fr.plan(grpo(group_size=4), **asked)
    assert all(str(one) in str(refused.value) for one in offered.values())
    host = next(one for what, one in offered.items() if what.startswith("hosts of"))
    roomy = fr.Cluster.named("2xA100-80G").with_memory(host_bytes=int(host.what.split()[2]) * 2**30)
    assert fr.plan(grpo(group_size=4), **asked | {"cluster": roomy}).predicted.seconds == host.seconds
    consent = Choices(optimizers=(*problem.choices.optimizers, ADAM_8BIT))
    assert problem.choices.optimizers == (ADAM_FP32,) and set(problem.choices.offload) == set(Offload)
    planned_s = fr.plan(grpo(group_size=4), **asked, choices=consent).predicted.seconds
    assert planned_s == offered["Adam with 8-bit moments"].seconds
