"""Parameter counts: published totals, the closed form, and what heads, adapters and experts change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from flowrl.cost.configs import known_models
from flowrl.cost.shapes import Experts, ModelShape
from flowrl.errors import ConfigError

PUBLISHED = {
    "Meta-Llama-3-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-2-7b-hf": 6_738_415_616,
    "Llama-2-70b-hf": 68_976_648_192,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b-pt": 999_885_952,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "gpt2": 124_439_808,
    "SmolLM2-135M": 134_515_008,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-V3": 671_026_404_352,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_the_published_number_of_parameters(name: str) -> None:
    assert ModelShape.of(name).params() == PUBLISHED[name]


def shapes() -> st.SearchStrategy[ModelShape]:
    return st.builds(
        lambda kv, groups, **rest: ModelShape(heads=kv * groups, kv_heads=kv, **rest),
        kv=st.integers(1, 8),
        groups=st.integers(1, 4),
        hidden=st.integers(1, 512),
        layers=st.integers(1, 6),
        head_dim=st.integers(1, 64),
        ffn=st.integers(1, 512),
        vocab=st.integers(1, 1000),
        tied=st.booleans(),
        qkv_bias=st.booleans(),
    )


@given(shapes())
def test_the_tensors_add_up_to_the_closed_form(s: ModelShape) -> None:
    h, a, kv, d, f = s.hidden, s.heads, s.kv_heads, s.head_dim, s.ffn
    layer = 2 * h * a * d + 2 * h * kv * d + 3 * h * f + 2 * h + ((a + 2 * kv) * d if s.qkv_bias else 0)
    assert s.layer_params() == s.layer_params(0) == layer
    assert s.params() == s.layers * layer + s.vocab * h * (1 if s.tied else 2) + h
    assert s.matmul_params() == s.params() - (0 if s.tied else s.vocab * h)
    assert s.root_params() == s.params() - s.layers * layer


@given(shapes(), st.integers(1, 16))
def test_an_adapter_has_rank_times_inputs_and_outputs(s: ModelShape, rank: int) -> None:
    h, q, kv, f = s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim, s.ffn
    with_lora = s.with_lora(rank)
    assert with_lora.lora_params() == s.layers * rank * (2 * (h + q) + 2 * (h + kv) + 3 * (h + f))
    assert with_lora.params() == s.params()
    assert with_lora.trainable_params() == with_lora.lora_params()
    assert s.trainable_params() == s.params()


def test_a_score_head_takes_the_place_of_the_head() -> None:
    lm = ModelShape.of("Meta-Llama-3-8B")
    assert lm.with_head("reward").params() == lm.params() - lm.embedding_params() + lm.hidden
    assert lm.with_head("value").params() == lm.with_head("reward").params() + 1
    tied = ModelShape.of("Qwen2.5-0.5B")
    assert tied.with_head("reward").params() == tied.params() + tied.hidden
    assert tied.with_head("reward").matmul_params() == tied.params() - tied.embedding_params() + tied.hidden
    trained = lm.with_head("value").with_lora(8)
    assert trained.trainable_params() == trained.lora_params() + lm.hidden + 1


def test_of_the_experts_only_the_chosen_ones_work() -> None:
    shape = ModelShape.of("Qwen3-30B-A3B")
    assert shape.active_params() == 3_353_032_704
    assert shape.expert_params() == 48 * 128 * 3 * 2048 * 768
    all_active = replace(shape, experts=replace(shape.experts, num_active=128))
    assert all_active.active_params() == shape.params()


def test_the_largest_layer_is_a_sparse_one() -> None:
    shape = ModelShape.of("DeepSeek-V3")
    assert shape.layer_params(0) < shape.layer_params(3) == shape.layer_params()
    assert sum(shape.layer_params(layer) for layer in range(61)) + shape.root_params() == shape.params()


def test_the_cache_holds_repeated_heads_beyond_their_number() -> None:
    shape = ModelShape.of("Qwen2.5-7B")  # 4 key-value heads
    assert shape.kv_token_bytes() == shape.kv_token_bytes(tensor_parallel=4) == 57_344
    assert shape.kv_token_bytes(tensor_parallel=8) == 2 * 57_344
    assert shape.kv_token_bytes(element_bytes=1) == 57_344 / 2
    latent = ModelShape.of("DeepSeek-V3")
    assert latent.kv_token_bytes() == 61 * (512 + 64) * 2
    assert latent.kv_token_bytes(tensor_parallel=8) == 8 * latent.kv_token_bytes()


def test_the_split_axis_follows_the_layout_of_the_matrix() -> None:
    by_name = {weight.name: weight for weight in ModelShape.of("gpt2").modules()}
    assert by_name["transformer.h.0.attn.c_attn.weight"].split_axis == 1  # stored [in, out]
    assert by_name["transformer.h.0.attn.c_attn.weight"].parts == (768, 768, 768)
    assert by_name["transformer.h.0.attn.c_proj.weight"].split_axis == 0
    assert by_name["transformer.h.0.attn.c_attn.bias"].split_axis == 0
    assert by_name["transformer.h.0.attn.c_proj.bias"].split_axis is None
    moe = {weight.name: weight for weight in ModelShape.of("Qwen3-30B-A3B").modules()}
    assert moe["model.layers.0.mlp.experts.gate_up_proj"].split_axis == 1
    assert moe["model.layers.0.mlp.experts.down_proj"].split_axis == 2
    assert moe["model.layers.0.mlp.gate.weight"].split_axis is None


@pytest.mark.parametrize("name", sorted(known_models()))
def test_every_tensor_has_a_name_of_its_own_and_known_parts(name: str) -> None:
    weights = ModelShape.of(name).modules()
    assert len({weight.name for weight in weights}) == len(weights)
    for weight in weights:
        if weight.parts:
            assert sum(weight.parts) in weight.shape


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(ConfigError, match=r"no shapes for model_type 'bert'; known are deepseek_v2"):
        ModelShape.from_config({"model_type": "bert"})
    with pytest.raises(ConfigError, match="pass its text_config"):
        ModelShape.from_config({"model_type": "gemma3", "text_config": {}})
    with pytest.raises(ConfigError, match="needs num_attention_heads"):
        ModelShape.from_config({"model_type": "llama", "hidden_size": 8})
    with pytest.raises(ConfigError, match="no shape is known for 'nobody/model'"):
        ModelShape.of("nobody/model")
    with pytest.raises(ConfigError, match=r"LoRA targets c_attn, which this model does not have .* q_proj"):
        ModelShape.of("SmolLM2-135M").with_lora(8, ("q_proj", "c_attn")).lora_params()
    with pytest.raises(ConfigError, match="multiple of kv_heads"):
        replace(ModelShape.of("SmolLM2-135M"), kv_heads=2)
    with pytest.raises(ConfigError, match="num_active"):
        Experts(num_experts=4, num_active=5, ffn=8)


def test_usual_adapters_are_on_the_matrices_that_a_model_has():
    def targets(name):
        return ModelShape.of(name).with_lora(16).lora.targets

    assert targets("Qwen2.5-7B") == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert targets("Qwen3-30B-A3B") == ("q_proj", "k_proj", "v_proj", "o_proj")  # experts are tensors of three axes
    assert targets("gpt2") == ("c_attn", "c_proj", "c_fc")
    mixture = ModelShape.of("Qwen3-30B-A3B").with_lora(16)
    h, q, kv = mixture.hidden, mixture.heads * mixture.head_dim, mixture.kv_heads * mixture.head_dim
    assert mixture.lora_params() == mixture.layers * 16 * (2 * (h + q) + 2 * (h + kv))
    with pytest.raises(ConfigError, match="LoRA targets gate_proj, which this model does not have"):
        ModelShape.of("Qwen3-30B-A3B").with_lora(16, ("q_proj", "gate_proj")).lora_params()


@pytest.mark.parametrize(
    ("variant", "known"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("google/gemma-2-2b-it", "google/gemma-2-2b"),
        ("google/gemma-3-1b-it", "google/gemma-3-1b-pt"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
    ],
)
def test_variants_have_the_shape_of_their_model(variant, known):
    assert ModelShape.of(variant) == ModelShape.of(known)


@pytest.mark.parametrize(
    "other", ["mistralai/Mistral-7B-Instruct-v0.3", "Qwen/Qwen3-4B-Instruct-2507", "you/Qwen2.5-7B"]
)
def test_other_releases_are_other_models(other):
    with pytest.raises(ConfigError, match=r"no shape is known for .*; did you mean .*--model NAME=FOLDER/config.json"):
        ModelShape.of(other)


def test_a_config_without_a_kind_says_so():
    with pytest.raises(ConfigError, match="the config has no model_type"):
        ModelShape.from_config({"hidden_size": 8})
