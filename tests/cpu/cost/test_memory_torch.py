"""Bytes of a loss and of whole passes as PyTorch's memory tracker sees them on fake tensors, and what adapters change.

The tracker sees tensors that operators give back. What a kernel allocates for itself and frees before it returns is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed._tools.mem_tracker import MemTracker  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from flowrl.cost.flops import train_flops  # noqa: E402
from flowrl.cost.memory import LogitBytes, MemoryConstants, activation_token_bytes, logit_bytes  # noqa: E402
from flowrl.cost.shapes import ModelShape  # noqa: E402
from tests.cpu.cost.test_flops_torch import WIDE, kept_bytes  # noqa: E402


def peak_bytes(tracker: Any) -> int:
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return int(found["Total"])


# ------------------------------------------------------------------------------------------------------------ losses

Loss = Callable[[Any, Any, Any], None]


def cross_entropy(hidden: Any, head: Any, labels: Any) -> None:
    logits = hidden @ head.T
    F.cross_entropy(logits.float(), labels).backward()


def cross_entropy_freed(hidden: Any, head: Any, labels: Any) -> None:
    F.cross_entropy((hidden @ head.T).float(), labels).backward()


def logsumexp(hidden: Any, head: Any, labels: Any) -> None:
    logits = hidden @ head.T
    (logits.gather(-1, labels[:, None])[:, 0] - logits.logsumexp(-1)).sum().backward()


def log_softmax_no_grad(hidden: Any, head: Any, labels: Any) -> None:
    with torch.no_grad():
        logits = hidden @ head.T
        logits.float().log_softmax(-1).gather(-1, labels[:, None])


def logsumexp_no_grad(hidden: Any, head: Any, labels: Any) -> None:
    with torch.no_grad():
        logits = hidden @ head.T
        logits.gather(-1, labels[:, None])[:, 0] - logits.logsumexp(-1)


LOSSES: tuple[Loss, ...] = (cross_entropy, cross_entropy_freed, logsumexp, log_softmax_no_grad, logsumexp_no_grad)


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Meta-Llama-3-8B", "gemma-2-2b", "Llama-2-7b-hf"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda one: one.__name__)
def test_logits_take_what_the_tracker_sees(loss: Loss, name: str) -> None:
    """With the vocabulary and hidden size of four models, which nobody allocates."""
    shape, tokens = ModelShape.of(name), 16_384
    with FakeTensorMode():
        hidden = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
        head = torch.randn(shape.vocab, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(tokens, dtype=torch.long)
        given = [hidden, head, labels]
        tracker = MemTracker()
        tracker.track_external(*given)
        with tracker:
            loss(hidden, head, labels)
    found = peak_bytes(tracker) - sum(tensor.nbytes for tensor in given)
    assert found == pytest.approx(logit_bytes(shape, tokens, loss=loss.__name__, chunk=None), rel=0.03)


def test_every_loss_is_measured() -> None:
    assert {loss.__name__ for loss in LOSSES} == set(LogitBytes.__dataclass_fields__)


# ------------------------------------------------------------------------------------------------------ whole passes


NARROW = WIDE | {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 2048,
}


@pytest.mark.filterwarnings("ignore:Expected a tensor")  # the tracker meets a gradient that has just been dropped
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("kind", "changes"), [("llama", {}), ("qwen2", {}), ("qwen3", {"head_dim": 64}), ("olmo2", {}), ("mistral", {})]
)
def test_a_training_pass_takes_what_the_tracker_sees(kind: str, changes: dict[str, Any], recompute: bool) -> None:
    tokens = 128
    config = transformers.AutoConfig.for_model(kind, **NARROW | changes)
    config._attn_implementation = "sdpa"
    # real tensors: Transformers repeats key-value heads and makes a mask where it believes to be traced
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, positions = torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens)[None]
    for weight in model.parameters():  # gradients are state, and not counted here
        weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    tracker = MemTracker()
    tracker.track_external(model, ids, positions)
    with tracker:
        hidden = model.model(ids, position_ids=positions, use_cache=False).last_hidden_state
        F.cross_entropy(model.lm_head(hidden).float()[0], ids[0]).backward()
    weights = sum(weight.nbytes for weight in model.parameters())
    found = peak_bytes(tracker) - weights - ids.nbytes - positions.nbytes
    shape = ModelShape.from_config(config)
    layer = activation_token_bytes(shape) * tokens
    logits = logit_bytes(shape, tokens, loss="cross_entropy_freed", chunk=None)
    # once, whatever the layers: the last norm, its output, the residual stream, cosines and sines; the formulas leave it out
    per_norm = MemoryConstants().norm_activation + (2 if shape.is_norm_fp32 else 0)
    once = tokens * ((per_norm + 2) * shape.hidden + 4 + 4 * shape.head_dim)
    if not recompute:
        assert once < 8 / 16 * layer  # less than 2 % of the layers' in a model of 28 layers
        assert found == pytest.approx(shape.layers * layer + logits + once, rel=0.005)
        return
    inputs = 2 * shape.hidden * shape.layers * tokens
    # the logits are gone when the last layer is recomputed; counting both is an upper estimate
    assert max(logits, layer) + inputs <= found <= inputs + layer + logits


# --------------------------------------------------------------------------------------------------------- adapters


class Adapted(nn.Module):  # type: ignore[misc]
    """A frozen matrix with a low-rank adapter beside it."""

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        like = base.weight
        self.a = nn.Linear(base.in_features, rank, bias=False, dtype=like.dtype)
        self.b = nn.Linear(rank, base.out_features, bias=False, dtype=like.dtype)

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.b(self.a(x))


def adapt(model: Any, shape: ModelShape) -> None:
    """Adapters on the targets of a shape, in place; all else is frozen."""
    assert shape.lora is not None
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in shape.lora.targets:
                setattr(module, name, Adapted(child, shape.lora.rank))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_work_with_adapters_is_what_the_counter_counts(kind: str) -> None:
    rows, length, rank = 2, 48, 4
    changes = {"head_dim": 64} if kind == "qwen3" else {}
    config = transformers.AutoConfig.for_model(kind, **NARROW | changes)
    config._attn_implementation = "eager"
    shape = ModelShape.from_config(config).with_lora(rank)
    model = transformers.AutoModelForCausalLM.from_config(config)
    adapt(model, shape)
    assert sum(weight.numel() for weight in model.parameters() if weight.requires_grad) == shape.lora_params()
    embedded = torch.randn(rows, length, config.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    attention = 3 * 4 * shape.heads * shape.head_dim * shape.layers * rows * length**2  # eager: the masked half too
    beside = sum(weight.num_params for weight in shape.modules() if weight.kind == "norm" or weight.is_bias)
    expected = train_flops(shape, [length] * rows, recompute=False) + attention / 2 - 4 * beside * rows * length
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "olmo2"])
def test_a_layer_with_adapters_keeps_what_autograd_saves(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **WIDE)
    shape = ModelShape.from_config(config).with_lora(16)
    found = kept_bytes(config, 64, change=lambda model: adapt(model, shape))
    assert found == activation_token_bytes(shape) < activation_token_bytes(ModelShape.from_config(config))
    fewer = ModelShape.from_config(config).with_lora(16, ("q_proj", "v_proj"))
    assert kept_bytes(config, 64, change=lambda model: adapt(model, fewer)) <= activation_token_bytes(fewer)
