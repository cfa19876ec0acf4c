"""Options: what they cost is what the formulas say, and only what can help is offered."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from flowrl.cost.generation import Replica, generate
from flowrl.cost.memory import train_memory
from flowrl.cost.offload import ADAM_8BIT, ADAM_FP32, ADAM_MASTER, Offload
from flowrl.cost.shapes import ModelShape
from flowrl.cost.train import forward_pass_s, train_step
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.cells import undominated
from flowrl.planner.options import Choices, Option, all_options, beats
from flowrl.planner.roles import Call, Role
from flowrl.planner.workload import Lengths, Workload

GIB = 2**30
LLAMA = ModelShape.of("meta-llama/Meta-Llama-3-8B")
WORK = Workload(64, Lengths.fixed(512), Lengths.lognormal(1024, 0.6, cap=4096))
LONG = Workload(64, Lengths.fixed(512), Lengths.lognormal(16_000, 0.6, cap=64_000))
H100 = Cluster.named("8xH100-80G")


def trainer(shape: ModelShape = LLAMA, steps: int = 2) -> Role:
    return Role("policy", "policy", shape, (Call("old", "policy", "forward", 512),
                                            Call("update", "policy", "train", 512, steps=steps)))  # fmt: skip


def frozen(shape: ModelShape = LLAMA) -> Role:
    return Role("ref", "ref", shape, (Call("score", "ref", "forward", 512),))


def engine(shape: ModelShape = LLAMA, weights_from: str = "policy") -> Role:
    return Role("gen", "policy", shape, (Call("rollout", "gen", "generate", 512),), weights_from)


def degrees(options: tuple[Option, ...]) -> set[int]:
    return {option.layout.tp for option in options}


# ------------------------------------------------------------------------------------------------ the formulas, again


@pytest.mark.parametrize("layout", ["f8", "f4t2", "f2t4", "t8"])
@pytest.mark.parametrize("cluster", [H100, replace(H100, nodes=2)], ids=["node", "nodes"])
def test_an_option_of_a_trainer_costs_what_the_formulas_say(layout, cluster):
    asked = Layout.parse(layout)
    if cluster.nodes == 2:
        asked = replace(asked, dp=2)
    choices = Choices(optimizers=(ADAM_FP32, ADAM_8BIT))
    found = all_options(trainer(), cluster, cluster.whole, WORK, choices, layout=asked)
    assert {option.layout for option in found} == {asked} and len(found) > 20
    for option in found:
        said = dict(option.settings)
        offload, tokens = Offload(said["offload"]), said["micro_batch_tokens"]
        state = {"adam_fp32": ADAM_FP32, "adam_8bit": ADAM_8BIT}[said["optimizer"]]
        same = {"tokens": tokens, "shards": asked.fsdp, "tensor_parallel": asked.tp}
        moved = {
            "recompute": said["recompute"],
            "offload": offload,
            "park_weights": said["park_weights"],
            "state": state,
        }
        step = train_step(LLAMA, cluster, cluster.whole, WORK.totals(256), **same, **moved)
        assert option.seconds[1] == pytest.approx(2 * (step.total_s - step.move_s) + step.move_s, rel=1e-12)
        memory = train_memory(LLAMA, cluster, **same, **moved, sequence_parallel=asked.tp > 1)
        assert option.peak_bytes == pytest.approx(memory.total_bytes - 2 * GIB)
        assert option.static_bytes == pytest.approx(1.05 * memory.idle_bytes)
        assert option.host_bytes == memory.host_bytes * asked.dp
        assert option.numerics == (0 if state is ADAM_FP32 else 1)
        assert ("sequence_parallel" in said) == (asked.tp > 1)
        forward = forward_pass_s(LLAMA, cluster, cluster.whole, WORK.totals(512), **same)
        assert option.seconds[0] >= forward
        if memory.idle_bytes:
            assert option.seconds[0] == pytest.approx(forward, rel=1e-12)


def test_an_option_of_an_engine_costs_what_the_formulas_say():
    prompts, responses = WORK.sequences(512)
    found = all_options(engine(), H100, H100.whole, WORK, Choices())
    assert degrees(found) == {1, 2, 4, 8}
    for option in found:
        share = dict(option.settings)["utilization"]
        constants = replace(Choices().engine, utilization=share)
        replica = Replica(LLAMA, H100, option.layout.tp, constants, option.layout.pp)
        direct = generate(replica, prompts, responses, replicas=option.layout.dp)
        assert option.seconds == (pytest.approx(direct.total_s, rel=1e-12),)
        assert option.static_bytes == 0 and option.dynamic_bytes == share * 80 * GIB
        assert option.handover_bytes == 2 * LLAMA.params() / option.layout.tp / option.layout.pp


# --------------------------------------------------------------------------------------------------- what is offered


@pytest.mark.parametrize(
    "role", [trainer(), frozen(), trainer(LLAMA.with_lora(16))], ids=["trained", "frozen", "adapters"]
)
@pytest.mark.parametrize("work", [WORK, LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    "machine", [H100, replace(H100, devices_per_node=6), replace(H100, nodes=2)], ids=["8", "6", "2 of 8"]
)
def test_more_memory_offers_more(role, work, machine):
    """What is offered is left out for nothing that only fits where there is more."""
    for size in (machine.num_devices, 2):
        before: set[Option] = set()
        for gib in (16, 24, 40, 60, 80, 141):
            one = machine.with_memory(device_bytes=gib * GIB)
            found = set(all_options(role, one, Mesh(0, size), work, Choices()))
            assert before <= found
            before = found
        assert before


def test_more_memory_offers_an_engine_more():
    """Shares are of what there is: with more of it, each layout and share stays, and is no slower."""
    for shape in (LLAMA, ModelShape.of("Qwen/Qwen2.5-32B"), ModelShape.of("Qwen/Qwen2.5-0.5B")):
        before: dict[tuple[object, ...], Option] = {}
        for gib in (8, 16, 24, 40, 60, 80, 141):
            one = H100.with_memory(device_bytes=gib * GIB)
            found = all_options(engine(shape), one, one.whole, WORK, Choices())
            now = {(option.layout, option.settings): option for option in found}
            for key, option in before.items():
                if key[0].pp == 1:
                    assert now[key].seconds[0] <= option.seconds[0] * (1 + 1e-12)
                else:  # as quick with no more of the memory, as stages may go
                    assert any(o.seconds <= option.seconds and o.settings <= option.settings for o in found)
            before = now
        assert before


def test_stages_are_left_out_only_where_they_are_no_faster():
    for shape in (LLAMA, ModelShape.of("Qwen/Qwen2.5-0.5B")):
        for machine, size in ((H100, 8), (replace(H100, nodes=2), 16)):
            offered = all_options(engine(shape), machine, Mesh(0, size), WORK, Choices())
            most = max(degrees(offered))
            if any(option.layout.pp > 1 for option in offered) or size == most:
                continue
            layout = Layout(dp=size // most // 2, tp=most, pp=2)
            for option in all_options(engine(shape), machine, Mesh(0, size), WORK, Choices(), layout=layout):
                rivals = [other for other in offered if other.peak_bytes <= option.peak_bytes]
                assert min(other.seconds for other in rivals) <= option.seconds


def test_long_sequences_are_cut_over_devices():
    """64,512 tokens at once do not fit one device of 40 GiB beside its part of the state, and do fit two or more together."""
    small = H100.with_memory(device_bytes=40 * GIB)
    found = all_options(trainer(), small, small.whole, LONG, Choices(offload=(Offload.NONE,)))
    assert found and 1 not in degrees(found)
    assert min(dict(option.settings)["micro_batch_tokens"] for option in found) == LONG.longest
    never = Choices(offload=(Offload.NONE,), train_tensor_parallel=(1,))
    assert not all_options(trainer(), small, small.whole, LONG, never)


def test_slow_links_between_nodes_are_spared():
    """State that takes all devices of two nodes: with tensor parallelism inside a node, less of it crosses."""
    slow = replace(H100, nodes=2, nic_bytes_s=1e9).with_memory(device_bytes=23 * GIB)
    choices = Choices(micro_batch_tokens=(2048,), offload=(Offload.NONE,))
    found = all_options(trainer(), slow, slow.whole, WORK, choices)
    fastest = min(found, key=lambda option: option.seconds[1])
    only = all_options(trainer(), slow, slow.whole, WORK, replace(choices, train_tensor_parallel=(1,)))
    assert {option.layout for option in only} == {Layout(fsdp=16)} and set(only) <= set(found)
    assert fastest.layout.tp > 1 and fastest.seconds[1] < min(option.seconds[1] for option in only)


@pytest.mark.parametrize("memory_gib", [20, 40, 80])
@pytest.mark.parametrize("work", [WORK, LONG], ids=["short", "long"])
@pytest.mark.parametrize("role", [trainer(), frozen()], ids=["trained", "frozen"])
def test_every_degree_of_tensor_parallelism_is_offered(memory_gib, work, role):
    cluster = H100.with_memory(device_bytes=memory_gib * GIB)
    offered = set(all_options(role, cluster, cluster.whole, work, Choices()))
    for tp in (1, 2, 4, 8):
        assert (
            set(all_options(role, cluster, cluster.whole, work, Choices(), layout=Layout(fsdp=8 // tp, tp=tp)))
            <= offered
        )


def test_what_cannot_be_cut_is_not_offered():
    small = H100.with_memory(device_bytes=40 * GIB)
    odd = ModelShape.of("Qwen/Qwen2.5-7B")  # 4 key-value heads
    assert max(degrees(all_options(trainer(odd), small, small.whole, LONG, Choices())), default=1) <= 4
    assert degrees(all_options(trainer(LLAMA.with_lora(16)), small, small.whole, LONG, Choices())) <= {1}
    nodes = replace(small, nodes=2, devices_per_node=4)
    assert max(degrees(all_options(trainer(), nodes, nodes.whole, LONG, Choices()))) <= 4
    for layout in ("t3", "f4t4", "f2p4", "t8p1"):
        asked = Layout.parse(layout)
        assert bool(all_options(trainer(), H100, H100.whole, WORK, Choices(), layout=asked)) == (layout == "t8p1")
    assert not all_options(engine(), H100, H100.whole, WORK, Choices(), layout=Layout(fsdp=8))


def test_what_is_asked_for_is_offered():
    asked = Layout(dp=2, fsdp=2, tp=2)
    assert asked not in {option.layout for option in all_options(trainer(), H100, H100.whole, WORK, Choices())}
    assert all_options(trainer(), H100, H100.whole, WORK, Choices(), layout=asked)
    staged = all_options(engine(), H100, H100.whole, WORK, Choices(), layout=Layout(dp=2, tp=2, pp=2))
    assert staged and {option.layout.pp for option in staged} == {2}


def test_stages_only_where_a_node_does_not_hold_the_engine():
    big, machine = ModelShape.of("deepseek-ai/DeepSeek-V3"), Cluster.named("32xH200")
    for size, layouts in ((8, set()), (16, {Layout(tp=8, pp=2)}), (32, {Layout(dp=2, tp=8, pp=2), Layout(tp=8, pp=4)})):
        found = all_options(engine(big), machine, Mesh(0, size), WORK, Choices())
        assert {option.layout for option in found} == layouts
        for option in found:
            assert option.handover_bytes == 2 * big.params() / (8 * option.layout.pp)
    one = all_options(engine(big), machine, Mesh(0, 16), WORK, Choices(pipeline=(1,)))
    assert one == ()
    assert {option.layout.pp for option in all_options(engine(), machine, Mesh(0, 16), WORK, Choices())} == {1}
    few_heads = ModelShape.of("Qwen/Qwen2.5-0.5B")  # 14 heads over 2 devices at most
    tight = H100.with_memory(device_bytes=int(3.75 * GIB))
    found = all_options(engine(few_heads), tight, tight.whole, WORK, Choices())
    assert {option.layout for option in found} == {Layout(dp=2, tp=2, pp=2), Layout(tp=2, pp=4)}


def test_nothing_changes_numerics_without_consent():
    for offload in Offload:
        found = all_options(trainer(), H100, H100.whole, WORK, Choices(offload=(offload,)))
        assert {dict(option.settings)["optimizer"] for option in found} == {"adam_fp32"}
        assert {option.numerics for option in found} == {0}
    asked = {}
    for state in (ADAM_FP32, ADAM_MASTER):
        choices = Choices(offload=(Offload.CPU_OPTIMIZER,), optimizers=(state,), micro_batch_tokens=(4608,))
        asked[state] = min(option.dynamic_bytes for option in all_options(trainer(), H100, H100.whole, WORK, choices))
    # gradients stay fp32 between micro-batches, unless a state with bf16 gradients was asked for
    assert asked[ADAM_FP32] - asked[ADAM_MASTER] == pytest.approx(1.05 * 2 * LLAMA.params() / 8)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"tensor_parallel": ()}, "at least 1 for tensor_parallel"),
        ({"pipeline": (1, 0)}, "at least 1 for pipeline"),
        ({"train_tensor_parallel": (2.0,)}, "at least 1 for train_tensor_parallel"),
        ({"micro_batch_tokens": (True,)}, "at least 1 for micro_batch_tokens"),
        ({"utilization": (0.9, 1.2)}, "shares above 0 to 1"),
        ({"offload": ()}, "at least one value for offload"),
        ({"optimizers": (ADAM_FP32, ADAM_FP32)}, "these are equal"),
        ({"loss": "cross_entropi"}, "no loss 'cross_entropi'; did you mean 'cross_entropy'"),
        ({"logit_chunk": 0}, "at least 1, or None"),
    ],
)
def test_choices_that_make_no_sense(changes, said):
    with pytest.raises(ConfigError, match=said):
        Choices(**changes)


# ------------------------------------------------------------------------------------------------------------- few


def test_there_are_few():
    machine = Cluster.named("64xH100-80G")
    for role in (trainer(), frozen(), engine(), engine(weights_from="")):
        for size in (1, 8, 64):
            options = all_options(role, machine, Mesh(0, size), WORK, Choices())
            assert len(undominated(options, lambda one: one.costs)) <= 200


numbers = st.floats(0, 3).map(round)


@given(st.lists(st.tuples(st.sampled_from(["f8", "f4t2"]), numbers, numbers, numbers, numbers), max_size=30))
def test_pareto_leaves_out_what_is_beaten_and_nothing_else(rows):
    options = [Option("policy", Layout.parse(row[0]), (float(row[1]),), *map(float, row[2:])) for row in rows]
    kept = undominated(options, lambda one: one.costs)
    assert set(kept) <= set(options)
    for option in options:
        rivals = [other for other in kept if other.layout == option.layout]
        assert any(beats(other.costs, option.costs) for other in rivals)
    for option in kept:
        assert not any(
            other.costs != option.costs and other.layout == option.layout and beats(other.costs, option.costs)
            for other in options
        )
