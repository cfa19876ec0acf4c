"""Why nothing fits, and what would."""

from dataclasses import replace

import pytest

from flowrl.cost.offload import ADAM_MASTER, Offload
from flowrl.cost.shapes import ModelShape
from flowrl.mesh import Cluster
from flowrl.planner.options import Choices
from flowrl.planner.problem import Problem
from flowrl.planner.relax import explain
from flowrl.planner.search import search
from flowrl.planner.workload import Lengths, Workload
from tests.null.planner.search_cases import CASES, cluster, group_roles

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
    assert "host memory, at least 771 GiB per node > 300" in found.binding
    assert "hosts of 771 GiB" in [one.what for one in found.relaxations]


def test_nothing_helps():
    found = explain(replace(CASES["tight"], cluster=cluster("1xA100-80G", 3)))
    assert not found.relaxations and "none of those tried" in str(found)
