"""Every parameter's name and shape is that of Transformers' own module, built on the meta device."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flowrl.cost.configs import FAMILIES, known_models  # noqa: E402
from flowrl.cost.shapes import ModelShape  # noqa: E402

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
}
GPT2 = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 128,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 24}),
    ("mistral", {}),
    ("smollm3", {}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32, "attention_bias": True}),
    ("gemma", {"head_dim": 24}),
    ("gemma2", {"head_dim": 24}),
    ("gemma3_text", {"head_dim": 24}),
    ("phi3", {}),
    ("olmo2", {}),
    ("starcoder2", {}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    ("gpt2", {}),
    ("gpt2", {"n_inner": 100}),
    ("mixtral", {"num_local_experts": 4}),
    ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32}),
    ("qwen2_moe", {"num_experts": 4, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
    ("qwen3_moe", {"num_experts": 16, "moe_intermediate_size": 24, "head_dim": 32, "mlp_only_layers": [1]}),
    ("deepseek_v2", LATENT | {"first_k_dense_replace": 1, "q_lora_rank": None}),
    ("deepseek_v2", LATENT | {"q_lora_rank": 16}),
    (
        "deepseek_v3",
        LATENT | {"q_lora_rank": 16, "first_k_dense_replace": 2, "n_group": 2, "topk_group": 1, "attention_bias": True},
    ),
]
IDS = [f"{kind}-{number}" for number, (kind, _) in enumerate(CASES)]


def config_of(kind: str, changes: dict[str, Any]) -> Any:
    fields = (GPT2 if kind == "gpt2" else SMALL) | changes
    return transformers.AutoConfig.for_model(kind, **fields)


def tensors_of(config: Any, maker: Any = None) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = (maker or transformers.AutoModelForCausalLM).from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


@pytest.mark.parametrize(("kind", "changes"), CASES, ids=IDS)
def test_every_parameter_is_named_and_shaped_as_in_transformers(kind: str, changes: dict[str, Any]) -> None:
    config = config_of(kind, changes)
    shape = ModelShape.from_config(config)
    assert {weight.name: weight.shape for weight in shape.modules()} == tensors_of(config)


@pytest.mark.parametrize(("kind", "changes"), CASES, ids=IDS)
def test_the_saved_form_of_a_config_gives_the_same_shape(kind: str, changes: dict[str, Any]) -> None:
    config = config_of(kind, changes)
    assert ModelShape.from_config(config.to_dict()) == ModelShape.from_config(config)


def test_every_architecture_is_compared() -> None:
    assert {kind for kind, _ in CASES} == set(FAMILIES)


def test_the_reward_head_is_that_of_the_sequence_classifier() -> None:
    config = config_of("llama", {"num_labels": 1})
    shape = ModelShape.from_config(config).with_head("reward")
    found = tensors_of(config, transformers.AutoModelForSequenceClassification)
    assert {weight.name: weight.shape for weight in shape.modules()} == found


def test_the_value_head_is_that_of_the_token_classifier() -> None:
    config = config_of("qwen2", {"num_labels": 1})
    shape = ModelShape.from_config(config).with_head("value")
    found = tensors_of(config, transformers.AutoModelForTokenClassification)
    assert {weight.name: weight.shape for weight in shape.modules()} == found


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-30B-A3B", "google/gemma-3-1b-pt", "deepseek-ai/DeepSeek-V3"]
)
def test_known_models_have_the_tensors_of_transformers(name: str) -> None:
    fields = dict(known_models()[name])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    assert {weight.name: weight.shape for weight in ModelShape.of(name).modules()} == tensors_of(config)
