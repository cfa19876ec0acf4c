"""FLOPs as PyTorch's own counter sees them, and bytes that autograd keeps of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from flowrl.cost.flops import forward_flops, train_flops  # noqa: E402
from flowrl.cost.memory import activation_token_bytes  # noqa: E402
from flowrl.cost.shapes import ModelShape  # noqa: E402

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 24}),
    ("gemma2", {"head_dim": 24, "sliding_window": 4096}),
    ("phi3", {}),
    ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    ("deepseek_v3", LATENT),
]
ROWS, LENGTH = 2, 48


@pytest.mark.parametrize(("kind", "changes"), KINDS, ids=[f"{kind}-{at}" for at, (kind, _) in enumerate(KINDS)])
def test_work_is_what_the_counter_of_torch_counts(kind: str, changes: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(kind, **(SIZES | changes))
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config(config)
    ids = torch.randint(3, 128, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as forward:
        logits = model(ids, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.float().logsumexp(-1).sum().backward()

    work = forward_flops(shape, [LENGTH] * ROWS)
    beside = sum(weight.num_params for weight in shape.modules() if weight.kind == "norm" or weight.is_bias)
    not_products = (
        2 * beside * ROWS * LENGTH
    )  # norms and biases, which the formula leaves in and the counter leaves out
    counted = forward.get_total_flops()
    assert counted == work.matmul - not_products + 2 * work.attention  # eager code does not skip the masked half
    # Training: three times the forward pass.
    whole = counted + backward.get_total_flops()
    expected = train_flops(shape, [LENGTH] * ROWS, recompute=False) - 3 * not_products + 3 * work.attention
    assert whole == pytest.approx(expected, rel=2e-3)


def test_frozen_matrices_save_a_third_and_attention_nothing() -> None:
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False)
    shape = ModelShape.from_config(config)
    embedded = torch.randn(ROWS, LENGTH, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    lora = shape.with_lora(1)
    work = forward_flops(lora, [LENGTH] * ROWS)
    norms = sum(weight.num_params for weight in shape.modules() if weight.kind == "norm")
    expected = train_flops(lora, [LENGTH] * ROWS, recompute=False) - 3 * work.adapters + 3 * work.attention
    assert counter.get_total_flops() == expected - 2 * 2 * norms * ROWS * LENGTH


def kept_bytes(config: Any, tokens: int, change: Callable[[Any], None] | None = None) -> float:
    """Bytes of different tensors that autograd keeps of one bf16 layer, without its weights, per token.

    `change` is done to the model before, in place.
    """
    config._attn_implementation = "sdpa"
    sizes: dict[int, int] = {}
    kept: list[Any] = []

    def keep(tensor: Any) -> Any:
        kept.append(tensor)  # a storage that is freed could give its address to another
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).model
    if change is not None:
        change(model)
    hidden = torch.randn(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(tokens)[None]
    rotary = model.rotary_emb(hidden, positions)
    beside = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *rotary)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.layers[0](hidden, position_embeddings=rotary, position_ids=positions)
    return sum(size for storage, size in sizes.items() if storage not in beside) / tokens


WIDE = SIZES | {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 8}),
        ("mistral", {}),
        ("smollm3", {}),
        ("qwen2", {"num_key_value_heads": 1}),
        ("qwen3", {"head_dim": 128}),
        ("olmo2", {}),
    ],
)
def test_a_layer_keeps_what_autograd_saves(kind: str, changes: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(kind, **(WIDE | changes))
    assert kept_bytes(config, 64) == activation_token_bytes(ModelShape.from_config(config))


@pytest.mark.parametrize(("kind", "norms"), [("gemma", 2), ("gemma2", 4)])
def test_norms_that_add_one_to_their_weight_keep_the_sum_besides(kind: str, norms: int) -> None:
    config = transformers.AutoConfig.for_model(kind, **WIDE, head_dim=64)
    beside = norms * 4 * 512 / 64  # once per layer, not per token: here of 64 tokens
    assert kept_bytes(config, 64) - beside == activation_token_bytes(ModelShape.from_config(config))


def test_routing_adds_little_to_what_experts_keep() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64}
    config = transformers.AutoConfig.for_model("qwen3_moe", **WIDE, **experts)
    config._experts_implementation = "grouped_mm"
    assert kept_bytes(config, 64) == pytest.approx(activation_token_bytes(ModelShape.from_config(config)), rel=0.01)
