"""The tensors that the cost formulas list are tensors that a layout can hold."""

from collections.abc import Sequence

import pytest

from flowrl.cost.shapes import ModelShape
from flowrl.mesh import Layout
from flowrl.planner.boxes import Holding, Tensor, volume
from flowrl.planner.reshard import reshard
from tests.null.planner.tensors import MODELS

NAMES = {
    "Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "Llama-2-70B": "meta-llama/Llama-2-70b-hf",
    "Qwen2.5-0.5B": "Qwen/Qwen2.5-0.5B",
    "Qwen2.5-7B": "Qwen/Qwen2.5-7B",
    "Qwen2.5-32B": "Qwen/Qwen2.5-32B",
}


@pytest.mark.parametrize(("ours", "published"), NAMES.items())
def test_two_lists_of_one_model_agree(ours: str, published: str) -> None:
    def rows(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
        return sorted((one.name, one.shape, one.kind, one.split_axis, one.layer) for one in tensors)

    assert rows(ModelShape.of(published).modules()) == rows(list(MODELS[ours].tensors()))


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "microsoft/Phi-3-mini-4k-instruct", "openai-community/gpt2",
        "google/gemma-3-1b-pt", "deepseek-ai/DeepSeek-V2-Lite", "HuggingFaceTB/SmolLM2-135M",
    ],
)  # fmt: skip
def test_models_of_other_kinds(name: str) -> None:
    """Mixtures of experts, joined matrices, transposed ones, latent attention; three heads and one key-value head."""
    shape = ModelShape.of(name)
    tp = next(size for size in (2, 3) if shape.heads % size == 0)
    tensors = [one for one in shape.modules() if one.layer in (None, 0, 1)]
    layout = Layout(dp=2, tp=tp)
    target = Holding(layout, range(layout.size), kv_heads=shape.kv_heads, vocab_multiple=64)
    found = reshard(tensors, Holding(Layout(fsdp=layout.size), range(layout.size)), target)
    for one in tensors:
        blocks = [sum(volume(box) for box in target.boxes(one, rank)) for rank in range(tp)]
        whole = volume(tuple((0, size) for size in one.shape))
        assert sum(blocks) >= whole
        assert one.split_axis is None or shape.kv_heads < tp or sum(blocks) == whole
    assert 0 < found.received_bytes <= found.need_bytes
