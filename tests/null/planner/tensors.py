"""Tensors of models, written down here apart from the cost formulas, so that the two can disagree."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    kind: str = "up"
    split_axis: int | None = None
    layer: int | None = None
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Llama:
    """Llama and Qwen2 models by their published sizes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    has_bias: bool = False
    is_tied: bool = False

    def tensors(self) -> Iterator[Tensor]:
        h, width = self.hidden, self.hidden // self.heads
        yield Tensor("model.embed_tokens.weight", (self.vocab, h), "embedding", 0)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            for kind, rows in (("q", h), ("k", self.kv_heads * width), ("v", self.kv_heads * width)):
                yield Tensor(f"{at}.self_attn.{kind}_proj.weight", (rows, h), kind, 0, layer)
                if self.has_bias:
                    yield Tensor(f"{at}.self_attn.{kind}_proj.bias", (rows,), kind, 0, layer)
            yield Tensor(f"{at}.self_attn.o_proj.weight", (h, h), "o", 1, layer)
            yield Tensor(f"{at}.mlp.gate_proj.weight", (self.ffn, h), "gate", 0, layer)
            yield Tensor(f"{at}.mlp.up_proj.weight", (self.ffn, h), "up", 0, layer)
            yield Tensor(f"{at}.mlp.down_proj.weight", (h, self.ffn), "down", 1, layer)
            yield Tensor(f"{at}.input_layernorm.weight", (h,), "norm", None, layer)
            yield Tensor(f"{at}.post_attention_layernorm.weight", (h,), "norm", None, layer)
        yield Tensor("model.norm.weight", (h,), "norm")
        if not self.is_tied:
            yield Tensor("lm_head.weight", (self.vocab, h), "head", 0)


MODELS = {
    "Llama-3-8B": Llama(4096, 32, 32, 8, 14336, 128256),
    "Llama-2-70B": Llama(8192, 80, 64, 8, 28672, 32000),
    "Llama-3-70B": Llama(8192, 80, 64, 8, 28672, 128256),
    "Qwen2.5-0.5B": Llama(896, 24, 14, 2, 4864, 151936, has_bias=True, is_tied=True),
    "Qwen2.5-7B": Llama(3584, 28, 28, 4, 18944, 152064, has_bias=True),
    "Qwen2.5-32B": Llama(5120, 64, 40, 8, 27648, 152064, has_bias=True),
}
