"""Values of other types, and numbers that make no sense, in what people write for the planner: each is a ConfigError."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flowrl as fr
from flowrl.cost.shapes import Experts, LatentAttention, LoRA, ModelShape
from flowrl.errors import ConfigError, FlowError
from flowrl.mesh.links import Measured
from flowrl.planner.choices import Choices
from flowrl.planner.workload_text import read_parts
from tests.null.breaking.pieces import length, trained

JUNK: list[Any] = [
    None,
    0,
    -1,
    1.5,
    math.nan,
    math.inf,
    10**30,
    10**5000,
    "",
    "x",
    b"x",
    [],
    {},
    (),
    True,
    [1],
    object,
    lambda: 0,
]
IDS = [str(number) for number in range(len(JUNK))]

SHAPE = ModelShape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=256)


@fr.flow
def sampling(prompts, policy):
    return trained(length(fr.rollout(policy, prompts, n=2)), policy)


EXPERTS, LATENT = Experts(4, 2, 32), LatentAttention(8, 4, 4, 8)


def fields_of(what: str, owner: Any, *names: str) -> dict[str, Callable[[Any], object]]:
    """Ways to give a field of an object another value."""
    return {f"{what} {name}": lambda one, name=name: replace(owner, **{name: one}) for name in names}


CALLS: dict[str, Callable[[Any], object]] = {
    "tokens": lambda one: fr.Lengths(one, (1.0,)),
    "weights": lambda one: fr.Lengths((8,), one),
    "a token": lambda one: fr.Lengths((8, one), (1.0, 1.0)),
    "rounds": lambda one: fr.Workload(4, fr.Lengths.fixed(8), fr.Lengths.fixed(8), rounds=one),
    "lengths": lambda one: fr.Workload(4, fr.Lengths.fixed(8), one),
    "mean": lambda one: fr.Lengths.lognormal(one, 0.5, 16),
    "cap": lambda one: fr.Lengths.lognormal(8, 0.5, one),
    "cluster": fr.Cluster.named,
    "cluster file": fr.Cluster.from_toml,
    "layout": fr.Layout.parse,
    "placement": fr.Placement.parse,
    **fields_of("shape", SHAPE, "hidden", "layers", "heads", "vocab", "norms", "style", "windowed_layers"),
    **fields_of("experts", EXPERTS, "num_experts", "num_active", "ffn"),
    **fields_of("latent", LATENT, "kv_rank", "rope_dim", "value_dim"),
    **fields_of("choices", Choices(), "micro_batch_tokens", "offload", "optimizers", "utilization", "train", "moving", "rows"),
    "rank": LoRA,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_such_value_is_refused(name: str) -> None:
    refused = 0
    for junk in JUNK:
        try:
            CALLS[name](junk)
        except FlowError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name}: {type(junk).__name__}") from error
    assert refused >= len(JUNK) - 4  # 1.5, True, () and 0 may be values


@pytest.mark.parametrize("name", ["prompts", "group_size"])
@pytest.mark.parametrize("value", [10**30, 10**9, 1.5, True, "8", math.nan])
def test_counts_of_a_workload_are_whole_numbers_that_can_be_drawn(name: str, value: Any) -> None:
    with pytest.raises(ConfigError):
        fr.Workload(
            **{
                "prompts": 4,
                "prompt_lengths": fr.Lengths.fixed(8),
                "response_lengths": fr.Lengths.fixed(8),
                name: value,
            }
        )


@pytest.mark.parametrize("key", [None, 0, 1.5, True, b"policy", ("policy",), object])
def test_models_are_named_by_text(key: Any) -> None:
    workload = fr.Workload(4, fr.Lengths.fixed(8), fr.Lengths.fixed(8))
    with pytest.raises(ConfigError, match="by the names of the flow's inputs"):
        fr.plan(sampling, models={key: SHAPE, "policy": SHAPE}, cluster="1xA100-80G", workload=workload)


@pytest.mark.parametrize("name", ["2056xA100-80G", "65536xA100-80G"])
def test_a_cluster_too_large_for_the_search_is_refused_at_once(name: str) -> None:
    workload = fr.Workload(4, fr.Lengths.fixed(8), fr.Lengths.fixed(8))
    with pytest.raises(ConfigError, match="up to 256 nodes"):
        fr.plan(sampling, models={"policy": SHAPE}, cluster=name, workload=workload)


@pytest.mark.parametrize("name", ["sequence_parallel", "logit_chunk"])
@pytest.mark.parametrize("value", ["x", 1.5, object(), 10**30])
def test_a_choice_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Choices(**{name: value})


def test_as_many_sizes_of_micro_batches_as_nobody_tries_are_refused() -> None:
    with pytest.raises(ConfigError, match="64 values of micro_batch_tokens at most"):
        Choices(micro_batch_tokens=tuple(range(1, 3001)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 10**29}, "layers"),
        ({"layers": 20_000}, "layers from 1 to 10,000"),
        ({"positions": -1}, "positions"),
        ({"window": 0}, "a window is at least 1 token"),
        ({"window": 4, "windowed_layers": (7,)}, "the model has layers 0 to 1; found"),
        ({"windowed_layers": (0,)}, "no window"),
        ({"experts": Experts(4, 2, 32, dense_layers=(9,))}, "the model has layers 0 to 1; found"),
    ],
)
def test_a_shape_that_no_model_has_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SHAPE, **changes)


@pytest.mark.parametrize("values", [(7, 3, -5), (7, 3, 0), (0, 0, 5), (3, 4, 5)])
def test_experts_that_are_none_are_refused(values: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="experts need"):
        Experts(*values)


# ------------------------------------------------------------------------------------------------------------- configs


CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 32,
    "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CONFIG if name != "model_type"])
@pytest.mark.parametrize("value", [-1, 1.5, "x", "8", {}, math.nan, math.inf, 10**30, 10**5000, [1.5]], ids=range(10))
def test_a_value_of_a_config_that_makes_no_sense_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        ModelShape.from_config({**CONFIG, name: value})


@pytest.mark.parametrize(
    "name", ["num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "decoder_sparse_step"]
)
def test_zero_of_a_config_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ModelShape.from_config({**CONFIG, name: 0})


def test_names_of_layers_are_as_many_as_layers() -> None:
    gemma = {"model_type": "gemma2", "head_dim": 16, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
             "num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": 256}  # fmt: skip
    with pytest.raises(ConfigError, match="names each of the 4 layers"):
        ModelShape.from_config({**gemma, "layer_types": ["sliding_attention"]})


# ------------------------------------------------------------------------------------------------------------- clusters


NAMES = ("nodes", "devices_per_node", "memory_bytes", "peak_flops", "train", "decode_hbm", "train_layer_s", "alpha_s")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["9" * 400, "nan", "inf", "-1", "true", "[]", '"x"', "1e308", "100_000_000_000"])
def test_a_figure_of_a_cluster_that_makes_no_sense_is_named(name: str, value: str, tmp_path: Path) -> None:
    lines = fr.Cluster.named("8xA100-80G").to_toml().splitlines()
    changed = [f"{name} = {value}" if line.startswith(f"{name} =") else line for line in lines]
    (tmp_path / "c.toml").write_text("\n".join(changed))
    if value == "100_000_000_000" and name in ("memory_bytes", "peak_flops", "train_layer_s", "alpha_s"):
        return
    with pytest.raises(ConfigError, match=name if "devices" not in name and name != "nodes" else "devices|nodes"):
        fr.Cluster.from_toml(tmp_path / "c.toml")


@pytest.mark.parametrize("name", ["train", "forward", "decode_hbm", "nvlink"])
def test_an_efficiency_of_nothing_is_refused(name: str) -> None:
    cluster = fr.Cluster.named("1xA100-80G")
    with pytest.raises(ConfigError, match=f"Efficiency.{name} is a fraction of a peak"):
        replace(cluster.efficiency, **{name: 1e-300})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operation": "x"}, "no operation 'x'"),
        ({"ranks": -1}, "ranks and nodes of at least 1"),
        ({"nodes": 0}, "ranks and nodes of at least 1"),
        ({"ranks": 1.5}, "a whole number for ranks"),
        ({"sizes_bytes": (math.nan,)}, "sizes_bytes"),
        ({"times_s": (1e308,)}, "times_s"),
        ({"times_s": (True,)}, "times_s"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(Measured("all_gather", 8, 1, (1e6,), (1e-3,)), **changes)


# ------------------------------------------------------------------------------------------------------------- workload


TEXTS = [
    "prompts = true", "prompts = nan", "rounds = inf", "rounds = " + "9" * 400, "prompts = " + "9" * 5000, "a = " + "[" * 50_000,
    "prompt_tokens = {tokens = [1.5], weights = [1]}", "prompt_tokens = {tokens = ['1'], weights = ['2']}",
    "prompt_tokens = {tokens = [inf], weights = [1]}", "prompt_tokens = {tokens = '12', weights = '34'}",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_workload_in_a_file_that_makes_no_sense_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "work.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"work\.toml"):
        read_parts(tmp_path / "work.toml")
