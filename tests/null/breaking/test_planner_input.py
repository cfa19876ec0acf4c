"""What people give the planner and should not: each is refused with what is wrong about it, or said where the plan is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flowrl as fr
from examples.flows.grpo import grpo
from flowrl.cost.audit import Audit, Part
from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError, FlowError
from flowrl.mesh.devices import Device, Host
from flowrl.mesh.links import Measured
from flowrl.planner.audit import audit_layout
from flowrl.planner.choices import Choices
from flowrl.planner.context import context_lines
from flowrl.planner.diff import diff
from flowrl.planner.explain import explain, explain_plan
from flowrl.planner.planning import problem_of
from flowrl.planner.problem import Effort
from flowrl.planner.roles import roles_of
from flowrl.schema.escaped import escaped
from tests.null.breaking.pieces import length, trained
from tests.null.breaking.test_plan_files import damaged

SHAPE = ModelShape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=256, context=1024)
WORK = fr.Workload(4, fr.Lengths.fixed(8), fr.Lengths.of([4, 8]))


@fr.flow
def small(prompts, policy, *, n=2):
    return trained(length(fr.rollout(policy, prompts, n=n)), policy)


def planned(flow: Any = small, **changed: Any) -> fr.Plan:
    asked: dict[str, Any] = {"models": {"policy": SHAPE}, "cluster": "2xA100-80G", "workload": WORK, **changed}
    return fr.plan(flow, **asked)


@pytest.fixture(scope="module")
def made() -> fr.Plan:
    return planned()


# -------------------------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("flow", "prompts", "found"),
    [(small(n=10**9), 4, "4000000000"), (small, 10**7, "20000000"), (small(n=10**6), 11, "11000000")],
)
def test_a_group_size_of_the_flow_counts_too(flow: Any, prompts: int, found: str) -> None:
    with pytest.raises(ConfigError, match=rf"'rollout' of flow 'small' samples {found} responses .* up to 10,000,000"):
        planned(flow, workload=replace(WORK, prompts=prompts))


def test_rounds_of_a_refill_count_too() -> None:
    from examples.flows.dapo import dapo

    work = fr.Workload(10**5, fr.Lengths.fixed(8), fr.Lengths.fixed(8), rounds=50)
    with pytest.raises(ConfigError, match="'refill.rollout' of flow 'dapo' samples"):
        roles_of(dapo.graph(), {"policy": SHAPE}, work)


def test_epochs_are_no_more_responses() -> None:
    """Each epoch trains on the same ones again."""

    @fr.flow
    def often(prompts, policy):
        rows = length(fr.rollout(policy, prompts, n=2))
        return trained(fr.repeat(rows, epochs=100), policy)

    calls = {
        c.node: c for r in roles_of(often.graph(), {"policy": SHAPE}, replace(WORK, prompts=10**6)) for c in r.calls
    }
    assert calls["update"].sequences == 2 * 10**8 and calls["update"].steps == 100


# --------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize("name", ["branches", "moves", "seed", "alternatives", "alternative_branches", "finished"])
@pytest.mark.parametrize("value", ["x", 1.5, True, None, [1], 10**30])
def test_effort_is_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"Effort needs a whole number for {name}; found"):
        Effort(**{name: value})


@pytest.mark.parametrize("path", [None, 3, b"runs", ["runs"]])
def test_a_run_is_named_by_a_path(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"needs the path of a run's folder; found"):
        fr.Workload.of_run(path)


@pytest.mark.parametrize("last", ["x", 1.5, None, True])
def test_steps_of_a_run_are_a_whole_number(last: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a whole number of steps as last; found"):
        fr.Workload.of_run(tmp_path, last=last)


LENGTHS = {"prompt": {"tokens": [61], "counts": [16]}, "response": {"tokens": [12], "counts": [40]}}
RUN: dict[str, Any] = {"data": {"prompts": {"batch": 4}}}


def run_folder(folder: Path, *, info: Any = RUN, lengths: Any = LENGTHS, metrics: str = "") -> Path:
    """What `Workload.of_run` reads of a run's folder."""
    event = {"what": "compute", "node": "rollout", "step": 3, "start_s": 0.0, "end_s": 1.0,
             "attributes": {"kind": "rollout", "lengths": lengths}}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "trace.jsonl").write_text(f"{json.dumps(event)}\n")
    (folder / "metrics.jsonl").write_text(metrics)
    return folder


@pytest.mark.parametrize(
    "info",
    [
        [],
        None,
        5,
        {},
        {"data": "x"},
        {"data": [1]},
        {"data": {"p": [1]}},
        {"data": {"p": {"batch": "x"}}},
        {"data": None},
    ],
)
def test_a_run_whose_facts_were_changed_is_refused(info: Any, tmp_path: Path) -> None:
    with pytest.raises(FlowError, match=r"does not say how many prompts|run.json' is a JSON object; found"):
        fr.Workload.of_run(run_folder(tmp_path, info=info))


@pytest.mark.parametrize("count", ["x", None, float("inf"), [1]])
def test_lengths_that_are_no_histogram_are_refused(count: Any, tmp_path: Path) -> None:
    lengths = {**LENGTHS, "response": {"tokens": [12], "counts": [count]}}
    with pytest.raises(FlowError, match="lengths of step 3 .* are no histogram"):
        fr.Workload.of_run(run_folder(tmp_path, lengths=lengths))


@pytest.mark.parametrize(
    ("metrics", "rounds"),
    [
        ('{"step": 3, "a/tried": 6, "a/groups": 4}', 1.5),
        ('{"step": "x", "a/tried": 6, "a/groups": 4}', 1.0),
        ('{"step": 3, "a/tried": "x", "a/groups": 4}', 1.0),
        ('{"step": 3, "a/tried": NaN, "a/groups": 4}', 1.0),
        ('{"step": 3, "a/tried": 6, "a/groups": -4}', 1.0),
    ],
)
def test_rounds_are_those_that_were_counted(metrics: str, rounds: float, tmp_path: Path) -> None:
    assert fr.Workload.of_run(run_folder(tmp_path, metrics=metrics + "\n")).rounds == rounds


# ------------------------------------------------------------------------------------------------------------ clusters


def test_bytes_written_as_a_float_are_whole_and_survive_files(tmp_path: Path) -> None:
    cluster = fr.Cluster.named("2xA100-80G").with_memory(device_bytes=1.5e11, host_bytes=2e12)  # type: ignore[arg-type]
    assert type(cluster.device.memory_bytes) is type(cluster.host.memory_bytes) is int
    cluster.to_toml(tmp_path / "c.toml")
    assert fr.Cluster.from_toml(tmp_path / "c.toml") == cluster
    plan = planned(cluster=cluster)
    assert fr.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("value", [1.5e11 + 0.5, True, "80e9", 1e31])
def test_bytes_that_are_no_whole_number_are_refused(value: Any) -> None:
    cluster = fr.Cluster.named("2xA100-80G")
    with pytest.raises(ConfigError, match="memory_bytes"):
        cluster.with_memory(device_bytes=value)
    with pytest.raises(ConfigError, match="memory_bytes"):
        cluster.with_memory(host_bytes=value)


def test_a_device_has_a_name_and_an_uplink_whole_devices() -> None:
    with pytest.raises(ConfigError, match="Device needs text for name"):
        Device(5, 2**35, 1e14, 1e12)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pcie_shared_by"):
        Host(2**40, 25e9, pcie_shared_by=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 1, "nodes": 2}, "ranks from 2, one on each of its nodes"),
        ({"ranks": 10**6}, "to 65,536; found 1000000"),
        ({"sizes_bytes": (1e9,), "times_s": (1e-9,)}, "1e\\+09 bytes in 1e-09 s, and no machine takes that"),
        ({"sizes_bytes": (1.0, 1e9), "times_s": (1e-9, 1e-6)}, "1e\\+09 bytes in 1e-06 s"),
        ({"times_s": (1e9,)}, "1e\\+06 bytes in 1e\\+09 s"),
    ],
)
def test_a_measurement_that_no_machine_gives_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    one = {"operation": "all_gather", "ranks": 2, "nodes": 1, "sizes_bytes": (1e6,), "times_s": (1e-3,), **changes}
    with pytest.raises(ConfigError, match=message):
        Measured(**one)
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in one.items())
    (tmp_path / "c.toml").write_text(f"{fr.Cluster.named('2xA100-80G').to_toml()}\n[[measured]]\n{lines}")
    with pytest.raises(ConfigError, match=rf"measured\[0\]|{message}"):
        fr.Cluster.from_toml(tmp_path / "c.toml")


JUNK: list[Any] = [None, 5, "x", [1], (1,)]


@pytest.mark.parametrize("name", ["device", "host", "efficiency", "overheads", "measured", "calibrated_at", "notes"])
def test_parts_of_a_cluster_are_what_they_are_called(name: str) -> None:
    cluster = fr.Cluster.named("2xA100-80G")
    for junk in JUNK:
        with pytest.raises(ConfigError, match=name):
            replace(cluster, **{name: junk})


@pytest.mark.parametrize("seconds", [8.0, 1e29])
def test_a_start_of_a_message_in_another_unit_is_refused(seconds: float, tmp_path: Path) -> None:
    cluster = replace(fr.Cluster.named("2xA100-80G"), alpha_s=seconds)
    cluster.to_toml(tmp_path / "c.toml")
    for call in (lambda: planned(cluster=cluster), lambda: fr.Cluster.from_toml(tmp_path / "c.toml")):
        with pytest.raises(ConfigError, match=r"alpha_s is in seconds, and .* is too much for that"):
            call()


def test_nodes_too_large_for_the_search_are_refused_at_once() -> None:
    cluster = replace(fr.Cluster.named("8xA100-80G"), devices_per_node=129)
    with pytest.raises(ConfigError, match="nodes of up to 128 devices"):
        planned(cluster=cluster)


@pytest.mark.parametrize("rate", [900e9, 8e12])
def test_a_measurement_of_a_fast_link_is_taken(rate: float) -> None:
    assert Measured("all_gather", 8, 1, (1e6, 1e9), (2e-6, 1e9 / rate)).time_s(1e9) == pytest.approx(1e9 / rate)


# ------------------------------------------------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": (3,)}, r"tensor_parallel=\(3,\)\) leaves 'gen' no layout.* 4 attention heads do not divide by 3"),
        ({"train_tensor_parallel": (3,)}, r"train_tensor_parallel=\(3,\)\) leaves 'policy' no layout"),
        ({"tensor_parallel": (16,)}, "tensor parallelism stays inside a node, and one has 8 devices"),
        ({"tensor_parallel": (5, 7)}, "do not divide by 5; .* do not divide by 7. Offer 1 as well"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cluster", ["8xA100-80G", "16xA100-80G"])
def test_degrees_that_cut_nothing_are_no_matter_of_memory(cluster: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(cluster=cluster, choices=Choices(**changes))


def test_a_degree_that_cuts_on_fewer_devices_of_a_node_is_taken() -> None:
    six = replace(SHAPE, heads=6, kv_heads=6, ffn=96)
    for per_node in (6, 8):
        cluster = replace(fr.Cluster.named("8xA100-80G"), devices_per_node=per_node)
        found = planned(models={"policy": six}, cluster=cluster, choices=Choices(tensor_parallel=(3,)))
        assert next(step.layout.tp for step in found.steps if step.node == "rollout" and step.layout) == 3


def test_a_layout_that_is_asked_for_needs_no_degree_on_offer() -> None:
    found = planned(choices=Choices(tensor_parallel=(16,)), placement="gen:d2 + policy:f2")
    assert str(found.placement).count("gen:d2") == 1


@pytest.mark.parametrize("changes", [{"is_norm_fp32": True}, {"qk_norm": "full"}, {"style": "gpt2"}])
def test_tensor_parallelism_is_not_spoken_of_where_it_is_not_offered(changes: dict[str, Any]) -> None:
    """Layers as Llama's are cut in training, others are not: on two devices there is one layout of shards."""

    def said(shape: ModelShape) -> str:
        larger, work = replace(shape, hidden=512, layers=4, ffn=1024), fr.Workload(16, *2 * (fr.Lengths.fixed(64),))
        text = str(explain(*problem_of(small, models={"policy": larger}, cluster="2xA100-80G", workload=work, tie=0.0)))
        return next(line for line in text.splitlines() if line.startswith("    layout f2"))

    assert said(replace(SHAPE, **changes)) == "    layout f2; there is no other"
    assert said(SHAPE).startswith("    layout f2; next best t2")


# ------------------------------------------------------------------------------------------------------------- configs


QWEN = {
    "model_type": "qwen3", "hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "num_attention_heads": 4,
    "num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": False,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral", "smollm3", "gemma2"])
def test_kinds_of_layers_that_are_not_known_are_named(kind: str) -> None:
    layers = [FULL, "linear_attention", 7, "linear_attention"]
    with pytest.raises(
        ConfigError, match=r"layer_types are full_attention and sliding_attention; found 'linear_attention', 7$"
    ):
        ModelShape.from_config({**QWEN, "model_type": kind, "sliding_window": 16, "layer_types": layers})
    with pytest.raises(ConfigError, match="layer_types is a list with the kind of each layer; found 'full'"):
        ModelShape.from_config({**QWEN, "model_type": kind, "sliding_window": 16, "layer_types": "full"})


def test_kinds_of_layers_say_which_have_a_window() -> None:
    windows = {**QWEN, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
    assert ModelShape.from_config(windows).windowed_layers == (2, 3)
    assert ModelShape.from_config({**windows, "layer_types": [SLIDING, FULL, FULL, SLIDING]}).windowed_layers == (0, 3)
    assert ModelShape.from_config({**QWEN, "layer_types": [FULL] * 4}) == ModelShape.from_config(QWEN)
    with pytest.raises(ConfigError, match="names each of the 4 layers"):
        ModelShape.from_config({**windows, "layer_types": [SLIDING]})


@pytest.mark.parametrize("text", ["[]", "null", "3", '"qwen2"', "true"])
def test_a_config_that_is_no_object_is_called_so(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    for name in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ConfigError, match=r"a model's config, is a JSON object with its model_type; found"):
            planned(models={"policy": name})


def test_an_empty_name_is_not_this_folder() -> None:
    with pytest.raises(ConfigError, match="model 'policy': needs a published name, .* found ''"):
        planned(models={"policy": ""})


# ------------------------------------------------------------------------------------------------- sequences too long


def test_sequences_beyond_the_positions_of_a_model_are_said() -> None:
    long = fr.Workload(4, fr.Lengths.fixed(1000), fr.Lengths.of([4, 25]))
    plan = planned(workload=long)
    said = (
        "sequences of up to 1,025 tokens (a prompt of 1,000 and a response of 25) are longer than 'policy' was made for: "
        "max_position_embeddings is 1,024"
    )
    assert context_lines(plan) == [said]
    assert f"\nnote: {said}" in str(plan) and f"  warning: {said}" in str(explain_plan(plan))
    assert context_lines(planned(workload=replace(long, prompt_lengths=fr.Lengths.fixed(999)))) == []
    assert context_lines(planned(models={"policy": replace(SHAPE, context=0)}, workload=long)) == []
    assert context_lines(replace(plan, workload=None)) == []


def test_models_of_one_length_share_a_line() -> None:
    shapes = {"policy": SHAPE, "ref": SHAPE}
    plan = planned(grpo, models=shapes, workload=fr.Workload(4, fr.Lengths.fixed(1024), fr.Lengths.fixed(8)))
    (line,) = context_lines(plan)
    assert "longer than 'policy', 'ref' were made for" in line
    differ = planned(grpo, models={**shapes, "ref": replace(SHAPE, context=512)}, workload=plan.workload)
    assert [line.rpartition(" ")[2] for line in context_lines(differ)] == ["512", "1,024"]


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({}, 0),
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 4096),
        (
            {
                "max_position_embeddings": 4096,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
            },
            16384,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
    ],
)
def test_positions_of_a_config(changes: dict[str, Any], context: int) -> None:
    assert ModelShape.from_config({**QWEN, **changes}).context == context


def test_positions_of_known_models() -> None:
    assert ModelShape.of("meta-llama/Meta-Llama-3-8B").context == 8192
    assert ModelShape.of("openai-community/gpt2").context == 1024
    with pytest.raises(ConfigError, match="context of at least 0"):
        replace(SHAPE, context=-1)


# --------------------------------------------------------------------------------------------------------------- plans


def setting(value: Any) -> Callable[[Any, Any], None]:
    return lambda inner, key: inner.__setitem__(key, value)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (("steps", 0, "predicted", "seconds"), -1, "predicted.seconds of step 'rollout' is seconds from 0"),
        (("steps", 0, "predicted", "start_s"), -1, "predicted.start_s of step 'rollout' is seconds from 0"),
        (("steps", 0, "predicted", "seconds"), float("nan"), "seconds"),
        (("steps", 0, "predicted", "start_s"), 1e3, "step 'rollout' ends at 1000.0 s, and the whole"),
        (("steps", -1, "predicted", "start_s"), 0.0, "begins at 0 s, and '.*', which it waits for, ends at"),
        (("steps", 0, "predicted", "slot_utilization"), 1.5, "slot_utilization of step 'rollout' is a part, 0 to 1"),
        (("steps", 0, "predicted", "slot_utilization"), -0.5, "slot_utilization of step 'rollout' is a part, 0 to 1"),
        (("predicted", "latency_s"), 1e-9, "the whole, 'predicted.latency_s'"),
        (("predicted", "bound_s"), 1e9, "takes less than 'predicted.bound_s'"),
        (("predicted", "critical_path"), ["rolout"], "names 'rolout', which is no step; did you mean 'rollout'"),
        (("searched", "bound_s"), -1.0, "searched.bound_s is at least 0"),
        (("searched", "unfit"), -1, "searched.unfit is at least 0"),
        (("searched", "tie"), 1.0, "searched.tie is a part"),
        (("searched", "headroom"), -0.1, "searched.headroom is a part"),
    ],
)  # fmt: skip
def test_times_that_cannot_be_are_refused(made: fr.Plan, at: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fr.Plan.from_json(damaged(made.to_json(), at, setting(value)))


def test_alternatives_that_cannot_be_are_refused(made: fr.Plan) -> None:
    assert made.searched is not None and made.searched.alternatives
    text = damaged(made.to_json(), ("searched", "alternatives", 0, "seconds"), setting(-1.0))
    with pytest.raises(ConfigError, match="searched.seconds of the alternative '.*' is at least 0; found -1"):
        fr.Plan.from_json(text)


EVIL = "\x1b[2J\x00\u202e\u2028evil\nmore"
SHOWN = r"\x1b[2J\x00\u202e\u2028evil\nmore"


def renamed(plan: fr.Plan) -> fr.Plan:
    """Names that a terminal would obey wherever a file may have names."""
    first = plan.steps[0]
    steps = (replace(first, name=EVIL, node=EVIL, reads=(EVIL,), settings=((EVIL, EVIL), *first.settings)),)
    rest = tuple(
        replace(one, after=tuple(EVIL if name == first.name else name for name in one.after)) for one in plan.steps[1:]
    )
    cluster = replace(plan.cluster, device=replace(plan.cluster.device, name=EVIL))
    meshes = tuple((EVIL, mesh) for _, mesh in plan.meshes)
    path = tuple(EVIL if name == first.name else name for name in plan.predicted.critical_path)
    return replace(
        plan, name=EVIL, steps=(*steps, *rest), cluster=cluster, meshes=meshes, operator_hashes=((EVIL, EVIL),),
        predicted=replace(plan.predicted, critical_path=path),
    )  # fmt: skip


def is_harmless(text: str) -> bool:
    return all(one == "\n" or one.isprintable() for one in text)


def test_names_from_files_are_printed_escaped(made: fr.Plan) -> None:
    evil = fr.Plan.from_json(renamed(made).to_json())
    texts = [str(evil), str(explain_plan(evil)), str(diff(made, evil)), str(diff(evil, made))]
    assert all(map(is_harmless, texts))
    assert all(r"\x1b[2J" in text for text in texts)
    assert f"  + {SHOWN}" in texts[2] and f"  - {SHOWN}" in texts[3]
    assert not diff(made, evil).is_equal


def test_an_audit_is_printed_escaped() -> None:
    part = Part(f"{EVIL}.weight", (4, 4), "float32", devices=1, copies=1, whole_bytes=64, param_bytes=64)
    assert is_harmless(str(Audit(EVIL, (part,), is_predicted=True)))
    assert is_harmless(str(audit_layout(SHAPE, fr.Layout.parse("f2"), name=EVIL)))


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain", "plain"), ("naïve 漢字 é", "naïve 漢字 é"), ("a\tb", r"a\tb"), ("a\nb", r"a\nb"), ("\x7f\x9b", r"\x7f\x9b"),
     ("\u202eabc\u2069", r"\u202eabc\u2069"), ("", ""), ("\\x1b", "\\x1b")],
)  # fmt: skip
def test_what_is_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown
    lines = escaped(f"{text}\n", keep="\n")
    assert lines == f"{text if text.count(chr(10)) else shown}\n"


# ------------------------------------------------------------------------------------------------------------ adapters


def test_a_rank_above_the_smallest_matrix_is_refused() -> None:
    SHAPE.check_rank(32)
    with pytest.raises(
        ConfigError, match=r"rank 33 is above .* model.layers.0.self_attn.k_proj.weight of 32 x 64; .* at most 32"
    ):
        SHAPE.check_rank(33)
