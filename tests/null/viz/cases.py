"""Plans written by hand: twelve nodes on 64 devices with every kind of step, and names that try to break out of a page."""

from __future__ import annotations

from typing import Any

from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.report import Alternative, Searched
from flowrl.planner.steps import Plan, Predicted, Step
from flowrl.planner.tasks import Edge, Hold, Lane, StepKind
from flowrl.planner.workload import Lengths, Workload

GIB = 2**30
SAMPLE, TRAIN = Mesh(0, 32), Mesh(32, 32)
D8T4, F32, D4F8 = Layout.parse("d8t4"), Layout.parse("f32"), Layout.parse("d4f8")
HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\x00\u202e]]>-->\\😀–"
"""A name of a step, a node, a mesh or a column."""


def compute(
    name: str,
    mesh: Mesh,
    seconds: float,
    *after: str,
    role: str = "",
    layout: Layout | None = None,
    lane: Lane = Lane.COMPUTE,
    holds: tuple[Hold, ...] = (),
    reads: tuple[str, ...] = (),
) -> Step:
    settings = (("role", role),) if role else ()
    return Step(name, name, StepKind.COMPUTE, mesh, (lane,), Predicted(seconds, holds=holds), after, layout=layout,
                reads=reads, settings=settings)  # fmt: skip


def move(
    name: str,
    node: str,
    kind: StepKind,
    lane: Lane,
    mesh: Mesh,
    seconds: float,
    num_bytes: int,
    *after: str,
    source: Mesh | None = None,
    reads: tuple[str, ...] = (),
    layout: Layout | None = None,
    holds: tuple[Hold, ...] = (),
) -> Step:
    return Step(name, node, kind, mesh, (lane,), Predicted(seconds, num_bytes=num_bytes, holds=holds), after, source,
                layout, reads)  # fmt: skip


def large_steps() -> tuple[Step, ...]:
    """PPO with two rewards and a reward model: sampling on one half, training on the other."""
    k = StepKind
    working = lambda act, logit=0.0: (  # noqa: E731
        Hold("activations", act * GIB), Hold("logits", logit * GIB), Hold("gathered layers", 1.2 * GIB)
    )  # fmt: skip
    cache = (Hold("KV cache", 42 * GIB),)
    parked = Hold(
        "policy optimizer", 14 * GIB, from_task="policy.onload", from_edge=Edge.START, until_task="policy.offload"
    )
    return (
        compute("rollout", SAMPLE, 48.2, role="gen", layout=D8T4, holds=cache, reads=("prompt_ids",)),
        move("rollout.rows", "math_reward", k.TRANSFER, Lane.NIC, TRAIN, 0.011, 96 * 2**20, "rollout", source=SAMPLE,
             reads=("response_ids", "rollout_logprobs", "loss_mask")),
        compute("math_reward", SAMPLE, 3.4, "rollout", lane=Lane.HOST, reads=("response", "answer")),
        compute("code_reward", SAMPLE, 9.1, "rollout", lane=Lane.HOST, reads=("response", "answer")),
        compute("reward_model", SAMPLE, 6.3, "rollout", role="rm", layout=D8T4, holds=working(3.0), reads=("response_ids",)),
        compute("old_logprobs", TRAIN, 7.7, "rollout.rows", role="policy", layout=F32, holds=working(2.2, 4.0)),
        compute("ref_logprobs", TRAIN, 7.7, "rollout.rows", role="ref", layout=F32, holds=working(2.2, 4.0)),
        compute("values", TRAIN, 6.9, "rollout.rows", role="critic", layout=D4F8, holds=working(2.0)),
        move("scores.rows", "gae", k.TRANSFER, Lane.NIC, TRAIN, 0.0006, 5 * 2**20, "math_reward", "code_reward",
             "reward_model", source=SAMPLE, reads=("reward",)),
        compute("gae", TRAIN, 0.8, "scores.rows", "values", lane=Lane.HOST, reads=("reward", "values")),
        compute("whiten", TRAIN, 0.2, "gae", lane=Lane.HOST, reads=("advantages",)),
        move("policy.onload", "update_policy", k.ONLOAD, Lane.H2D, TRAIN, 1.6, 448 * GIB, "ref_logprobs", reads=("optimizer",)),
        compute("update_critic", TRAIN, 24.9, "whiten", role="critic", layout=D4F8,
                holds=(*working(6.0), Hold("critic gradients", 2 * GIB))),
        compute("update_policy", TRAIN, 31.4, "whiten", "old_logprobs", "policy.onload", role="policy", layout=F32,
                holds=(*working(9.0, 4.0), Hold("policy gradients", 1.75 * GIB), parked), reads=("advantages", "old_logprobs")),
        move("policy.offload", "update_policy", k.OFFLOAD, Lane.D2H, TRAIN, 1.7, 448 * GIB, "update_policy",
             reads=("optimizer",)),
        move("gen.weights", "update_policy", k.RESHARD, Lane.NIC, SAMPLE, 0.74, 112 * GIB, "update_policy", source=TRAIN,
             reads=("policy",), layout=D8T4, holds=(Hold("reshard buffers", GIB),)),
        move("barrier", "update_policy", k.SYNC, Lane.COMPUTE, Mesh(0, 64), 0.002, 0, "gen.weights"),
        compute("log", SAMPLE, 0.05, "barrier", lane=Lane.HOST),
    )  # fmt: skip


def large(**others: Any) -> Plan:
    both, sample, train = tuple(range(64)), tuple(SAMPLE.devices), tuple(TRAIN.devices)
    settings: dict[str, Any] = {
        "resident": (
            Hold("device context", 2 * GIB, devices=both),
            Hold("gen engine weights", 3.6 * GIB, devices=sample),
            Hold("rm parameters", 3.5 * GIB, devices=sample),
            Hold("policy parameters", 0.9 * GIB, devices=train),
            Hold("ref parameters", 0.45 * GIB, devices=train),
            Hold("critic parameters", 0.9 * GIB, devices=train),
            Hold("critic optimizer", 7.2 * GIB, devices=train),
            Hold("policy optimizer, parked", host_bytes=448 * GIB, devices=train),
            Hold("staging buffers", host_bytes=64 * GIB, devices=both),
        ),
        "meshes": (("A", SAMPLE), ("B", TRAIN)),
        "workload": Workload(512, Lengths.fixed(512), Lengths.lognormal(1800, 0.6, 8192), group_size=8),
        "searched": Searched(
            119.3, 1840, 412, 1391, 37,
            alternatives=(
                Alternative("gen:d8t4 + rm:d8t4 | policy:f16p2 + ref:f16p2 + critic:f32", 134.6, 71 * GIB, 256 * GIB,
                            "slower: the update waits 7.1 s for the pipeline to fill"),
                Alternative("gen:d16t4 + rm:d16t4 + policy:f64 + ref:f64 + critic:f64", 131.2, 38 * GIB, 640 * GIB,
                            "slower: colocated, so the engine gives back its cache 2 times per step"),
                Alternative("gen:d4t4 | rm:d2t8 | policy:f32 + ref:f32 + critic:f32", 149.7, 49 * GIB, 448 * GIB,
                            "slower: half as many engines sample"),
                Alternative("gen:d16t2 + rm:d8t4 | policy:f32 + ref:f32 + critic:f32", 127.9, 84 * GIB, 448 * GIB,
                            "does not fit: device 0 would hold 84.0 of 80.0 GiB"),
            ),
        ),
    }  # fmt: skip
    return Plan.of(
        "ppo_two_rewards", "9c1fdeadbeef", Cluster.named("64xH100-80G"), large_steps(), **(settings | others)
    )


def hostile() -> Plan:
    """Two steps whose every text tries to be markup or code."""
    mesh = Mesh(0, 2)
    steps = (
        Step(HOSTILE, HOSTILE, StepKind.COMPUTE, mesh, (Lane.COMPUTE,), Predicted(1.5, holds=(Hold(HOSTILE, GIB, GIB),)),
             reads=(HOSTILE,), settings=(("role", HOSTILE), (HOSTILE, HOSTILE))),
        Step(HOSTILE + "2", HOSTILE, StepKind.RESHARD, mesh, (Lane.NVLINK,), Predicted(0.5, num_bytes=GIB), (HOSTILE,),
             reads=(HOSTILE,)),
    )  # fmt: skip
    found = Searched(1.9, 2, 2, 0, 0, alternatives=(Alternative(HOSTILE, 3.0, GIB, GIB, HOSTILE),))
    return Plan.of(HOSTILE, "ab12", Cluster.named("2xA100-80G"), steps, meshes=((HOSTILE, mesh),), searched=found)
