"""Why nothing fits, and what would."""

from dataclasses import replace

import pytest

from flowrl.cost.offload import ADAM_8BIT, ADAM_MASTER, Offload
from flowrl.cost.shapes import ModelShape
from flowrl.mesh import Cluster, Placement
from flowrl.planner.options import Choices
from flowrl.planner.problem import Problem
from flowrl.planner.relax import explain
from flowrl.planner.search import search
from flowrl.planner.workload import Lengths, Workload
from tests.null.planner.search_cases import CASES, MIDDLE, cluster, group_roles

GIB = 2**30
LLAMA_70B = ModelShape.of("meta-llama/Llama-2-70b-hf")
WORK = Workload(32, Lengths.fixed(512), Lengths.fixed(512))


def test_a_large_model_without_offload():
    """70B on eight 80 GiB devices: state alone is 128.5 GiB on each, and streaming the optimizer's state helps."""
    problem = Problem(group_roles(LLAMA_70B, LLAMA_70B, 256), Cluster.named("8xA100-80G"), WORK,
                      choices=Choices(offload=(Offload.NONE,)))  # fmt: skip
    assert search(problem).best is None
    found = explain(problem)
    assert "device memory, 'policy'" in found.binding and "at rest 134.9" in found.binding  # 128.5 and fragmentation
    offered = {one.what.split(":")[0]: one for one in found.relaxations}
    assert "every class of offload" in offered and "LoRA of rank 16" in offered
    assert offered["LoRA of rank 16"].changes_numerics and not offered["every class of offload"].changes_numerics
    assert str(found).startswith("FR-P01: no plan fits. Binding: device memory")


def test_too_little_host_memory():
    problem = CASES["no_host"]
    found = explain(problem)
    assert "host memory" in found.binding and "> 20" in found.binding
    assert any(one.what.startswith("hosts of") for one in found.relaxations)


@pytest.mark.parametrize("name", ["no_host"])
def test_each_relaxation_is_a_plan(name):
    problem = CASES[name]
    for one in explain(problem).relaxations:
        if one.what.endswith("devices"):
            more = int(one.what.split()[0]) // problem.cluster.num_devices
            larger = replace(problem, cluster=replace(problem.cluster, nodes=problem.cluster.nodes * more))
            assert search(replace(larger, tie=0.0)).best.seconds == one.seconds


def test_the_least_host_memory_is_the_least():
    """70B with its reference, and consent to bf16 gradients: 12 bytes for each parameter must go to the host, 771 GiB."""
    machine = Cluster.named("8xA100-80G").with_memory(host_bytes=300 * GIB)
    consent = Choices(optimizers=(ADAM_MASTER,))
    found = explain(Problem(group_roles(LLAMA_70B, LLAMA_70B, 256), machine, WORK, choices=consent))
    assert (
        "host memory, at least 771 GiB per node > 300, over by 471 (on all hosts 'policy' offload sopt 771)"
        in found.binding
    )
    assert "hosts of 771 GiB" in [one.what for one in found.relaxations]


def test_nothing_helps():
    found = explain(replace(CASES["tight"], cluster=cluster("1xA100-80G", 3)))
    assert not found.relaxations and "none of those tried" in str(found)


def relaxed(problem, one):
    """The problem with a relaxation, made from its words."""
    number = int("".join(filter(str.isdigit, one.what)) or 0)
    match one.what.split(":")[0]:
        case "every class of offload":
            return replace(problem, choices=replace(problem.choices, offload=tuple(Offload)))
        case "Adam with 8-bit moments":
            return replace(
                problem, choices=replace(problem.choices, optimizers=(*problem.choices.optimizers, ADAM_8BIT))
            )
        case "LoRA of rank 16":
            roles = [replace(r, shape=r.shape.with_lora(16)) if r.is_trained else r for r in problem.roles]
            return replace(problem, roles=tuple(roles))
        case what if what.startswith("micro-batches"):
            sizes = (number, *problem.choices.micro_batch_tokens)
            return replace(problem, choices=replace(problem.choices, micro_batch_tokens=sizes))
        case what if what.endswith("devices"):
            nodes = number // problem.cluster.devices_per_node
            return replace(problem, cluster=replace(problem.cluster, nodes=nodes))
        case what if what.startswith("hosts"):
            return replace(problem, cluster=problem.cluster.with_memory(host_bytes=number * GIB))
        case what if what.startswith("responses"):
            return replace(problem, workload=replace(problem.workload, response_lengths=Lengths.fixed(number)))
    raise AssertionError(one.what)


LONG = Workload(16, Lengths.fixed(512), Lengths.fixed(32768))
CHOICES = Choices(offload=(Offload.NONE, Offload.PARK), logit_chunk=None)
SHORT_OF = {
    "state": Problem(group_roles(LLAMA_70B, LLAMA_70B, 64), Cluster.named("8xA100-80G"), WORK, choices=CHOICES),
    "activations": Problem(group_roles(MIDDLE, MIDDLE, 64), cluster("2xA100-80G", 60, 500), LONG, choices=CHOICES),
    "micro-batches": Problem(group_roles(MIDDLE, MIDDLE, 64), cluster("2xA100-80G", 40), WORK,
                             choices=replace(CHOICES, micro_batch_tokens=(32768,))),
}  # fmt: skip


@pytest.mark.parametrize("name", SHORT_OF)
def test_what_would_fit_does_and_takes_what_is_said(name):
    problem = SHORT_OF[name]
    assert search(problem).best is None
    found = explain(problem)
    assert found.relaxations
    for one in found.relaxations:
        best = search(replace(relaxed(problem, one), tie=0.0)).best
        assert best is not None and best.seconds == pytest.approx(one.seconds), one


def test_every_kind_of_relaxation_is_tried():
    """Offload, adapters, more devices, shorter context, smaller batches, on a device and of a step."""
    kinds = (
        "every class of offload",
        "LoRA",
        "devices",
        "responses",
        "micro-batches",
        "prompts per iteration",
        "8-bit",
    )
    helped = {name: explain(problem) for name, problem in SHORT_OF.items()}
    for kind in kinds:
        assert any(
            kind in what for one in helped.values() for what in (*(r.what for r in one.relaxations), *one.in_vain)
        ), kind
    assert any("responses of at most" in one.what for one in helped["activations"].relaxations)
    assert any("micro-batches of" in one.what for one in helped["micro-batches"].relaxations)
    assert any("LoRA" in one.what and one.changes_numerics for one in helped["state"].relaxations)
    assert any("devices" in one.what for one in helped["state"].relaxations)
    shorter = next(one for one in helped["activations"].relaxations if "responses" in one.what)
    assert shorter.changes_work and "less work per iteration" in str(shorter)


def test_a_placement_that_does_not_fit():
    problem = replace(CASES["plenty"], placement=Placement.parse("gen:t2 | (policy:f1 + ref:f1)"))
    found = explain(problem)
    assert found.relaxations[0].what == "another placement"
    assert found.relaxations[0].seconds == pytest.approx(search(replace(CASES["plenty"], tie=0.0)).best.seconds)


def test_how_much_is_lacking():
    problem = SHORT_OF["state"]
    found = explain(problem)
    assert "'policy' in 'update'" in found.binding and "over by" in found.binding
    need = float(found.binding.split("'update' ")[1].split(" >")[0])
    enough = problem.cluster.with_memory(device_bytes=int((need + 60) * GIB))  # and a reference and an engine beside it
    assert search(replace(problem, cluster=enough)).best is not None
