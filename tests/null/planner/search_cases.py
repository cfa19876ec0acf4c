"""Small placement problems: few options, so that all plans can be looked at, and memory or hosts that bind."""

from dataclasses import replace

from flowrl.cost.offload import ADAM_8BIT, ADAM_FP32, Offload
from flowrl.cost.shapes import ModelShape
from flowrl.graph.schedule import Async
from flowrl.mesh import Cluster
from flowrl.planner.options import Choices
from flowrl.planner.problem import Problem
from flowrl.planner.roles import Call, Role
from flowrl.planner.workload import Lengths, Workload

GIB = 2**30
SMALL = ModelShape.of("Qwen/Qwen2.5-1.5B")
MIDDLE = ModelShape.of("Qwen/Qwen2.5-3B")
LARGE = ModelShape.of("Qwen/Qwen2.5-7B")
WORK = Workload(16, Lengths.fixed(256), Lengths.lognormal(512, 0.6, cap=2048))
FEW = Choices(micro_batch_tokens=(4096,), utilization=(0.9, 0.5), tensor_parallel=(1, 2), recompute=(True,),
              offload=(Offload.NONE, Offload.PARK, Offload.STREAM_OPTIMIZER))  # fmt: skip


def group_roles(policy: ModelShape, ref: ModelShape, sequences: int = 128) -> tuple[Role, ...]:
    """Rollout, a frozen reference, an update."""
    return (
        Role("gen", "policy", policy, (Call("rollout", "gen", "generate", sequences),), weights_from="policy"),
        Role("policy", "policy", policy, (Call("update", "policy", "train", sequences, ("rollout", "score")),)),
        Role("ref", "ref", ref, (Call("score", "ref", "forward", sequences, ("rollout",)),)),
    )


def critic_roles(policy: ModelShape, critic: ModelShape, sequences: int = 128) -> tuple[Role, ...]:
    """Two models that are trained, and a score that both wait for."""
    both = ("rollout", "old", "values", "score")
    return (
        Role("gen", "policy", policy, (Call("rollout", "gen", "generate", sequences),), weights_from="policy"),
        Role("policy", "policy", policy, (Call("old", "policy", "forward", sequences, ("rollout",)),
                                          Call("update", "policy", "train", sequences, both))),
        Role("critic", "critic", critic, (Call("values", "critic", "forward", sequences, ("rollout",)),
                                          Call("update_2", "critic", "train", sequences, both))),
        Role("ref", "ref", policy, (Call("score", "ref", "forward", sequences, ("rollout",)),)),
    )  # fmt: skip


def cluster(name: str, gib: float, host_gib: float = 1024) -> Cluster:
    return Cluster.named(name).with_memory(device_bytes=int(gib * GIB), host_bytes=int(host_gib * GIB))


GROUPS = group_roles(MIDDLE, MIDDLE)
CRITICS = critic_roles(SMALL, SMALL)
TINY = replace(FEW, utilization=(0.6,), tensor_parallel=(1,), offload=(Offload.NONE, Offload.PARK))
CASES = {
    "plenty": Problem(GROUPS, cluster("2xA100-80G", 80), WORK, choices=FEW),
    "tight": Problem(GROUPS, cluster("2xA100-80G", 40), WORK, choices=FEW),
    "tighter": Problem(GROUPS, cluster("4xA100-80G", 20), WORK, choices=FEW),
    "no_host": Problem(GROUPS, cluster("4xA100-80G", 24, host_gib=20), WORK, choices=FEW),
    "large_ref": Problem(group_roles(SMALL, LARGE), cluster("4xA100-80G", 24), WORK, choices=FEW),
    "async": Problem(GROUPS, cluster("4xA100-80G", 40), WORK, schedule=Async(1), choices=FEW),
    "async_2": Problem(group_roles(SMALL, LARGE), cluster("4xA100-80G", 30), WORK, schedule=Async(2), choices=FEW),
    "critic": Problem(CRITICS, cluster("2xA100-80G", 60), WORK, choices=TINY),
    "critic_tight": Problem(CRITICS, cluster("4xA100-80G", 18), WORK, choices=TINY),
    "critic_in_order": Problem(CRITICS, cluster("1xA100-80G", 34), WORK, choices=TINY),
    "critic_in_order_4": Problem(CRITICS, cluster("4xA100-80G", 13), WORK, choices=TINY),
    "nodes": Problem(GROUPS, replace(cluster("2xA100-80G", 40), nodes=2, devices_per_node=1), WORK, choices=FEW),
    "consent": Problem(GROUPS, cluster("1xA100-80G", 46, host_gib=20), WORK,
                       choices=replace(FEW, optimizers=(ADAM_FP32, ADAM_8BIT))),
}  # fmt: skip
