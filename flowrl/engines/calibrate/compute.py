"""What a device computes: products, a few transformer layers, a loss, and a decode step, each as (work, seconds)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModel, LlamaConfig

from flowrl.cost.flops import forward_flops, train_flops
from flowrl.cost.memory import activation_token_bytes
from flowrl.cost.shapes import ModelShape
from flowrl.engines.calibrate.effort import Effort, LayerShape
from flowrl.engines.calibrate.loss import chunked_loss
from flowrl.engines.calibrate.timing import seconds

SMALL_VOCAB = 32
"""Of models whose embedding is not used."""


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def products(device: torch.device, effort: Effort) -> list[tuple[float, float]]:
    """(FLOP, seconds) of each product, on random numbers: zeros would be faster."""
    found = []
    for m, n, k in effort.products:
        left = torch.randn(m, k, device=device, dtype=dtype_of(device))
        right = torch.randn(n, k, device=device, dtype=dtype_of(device)).t()
        out = torch.empty(m, n, device=device, dtype=dtype_of(device))

        def work(left: Tensor = left, right: Tensor = right, out: Tensor = out) -> None:
            torch.mm(left, right, out=out)

        found.append((2.0 * m * n * k, seconds(work, device, rounds=effort.rounds, calls=10)))
    return found


def copy_bytes_s(device: torch.device, effort: Effort) -> float:
    """Bytes read and written per second by a copy inside the device's memory."""
    source = torch.empty(effort.copy_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * effort.copy_bytes / seconds(lambda: target.copy_(source), device, rounds=effort.rounds, calls=5)


def stack(shape: LayerShape, num_layers: int, *, recompute: bool) -> Any:
    """Layers of Transformers' own code, in memory of the default device; with `recompute` each is computed again in the backward
    pass."""
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=SMALL_VOCAB,
        max_position_embeddings=2**15,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = AutoModel.from_config(config)
    if recompute:
        for index, layer in enumerate(model.layers):
            model.layers[index] = checkpoint_wrapper(layer)
    return model


def layers(device: torch.device, effort: Effort) -> dict[str, list[tuple[float, float, float]]]:
    """`forward` and `train` -> (FLOP, bytes kept for a backward pass without recomputation, seconds) of each shape.

    `train` is a forward pass, the same again, and a backward pass; weights and gradients are in the dtype of compute.
    """
    found: dict[str, list[tuple[float, float, float]]] = {"forward": [], "train": []}
    lengths = [effort.sequence] * effort.rows
    for one in effort.layers:
        with torch.device(device):
            model = stack(one, effort.num_layers, recompute=True).to(dtype_of(device))
            states = torch.randn(effort.rows, effort.sequence, one.hidden, dtype=dtype_of(device))
        shape = ModelShape.from_config(model.config)
        kept = float(shape.layers * activation_token_bytes(shape) * sum(lengths))
        forward, train = passes(model, states)
        took = seconds(forward, device, rounds=effort.rounds, calls=2)
        found["forward"].append((forward_flops(shape, lengths).total, kept, took))
        took = seconds(train, device, rounds=effort.rounds, calls=2)
        found["train"].append((train_flops(shape, lengths), kept, took))
    return found


def passes(model: nn.Module, states: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """A forward pass without gradients, and one with its backward pass, over states [B, L, h]."""
    up = torch.randn_like(states)

    @torch.no_grad()
    def forward() -> None:
        model(inputs_embeds=states)

    def train() -> None:
        leaf = states.detach().requires_grad_()
        model(inputs_embeds=leaf).last_hidden_state.backward(up)
        model.zero_grad(set_to_none=True)

    return forward, train


def loss(device: torch.device, effort: Effort) -> dict[str, tuple[float, float, float]]:
    """`forward` and `train` -> (FLOP, logits, seconds) of a head and a loss in chunks."""
    hidden, tokens = effort.layers[-1].hidden // 2, 4 * effort.chunk
    dtype = dtype_of(device)
    head = nn.Linear(hidden, effort.vocab, bias=False, device=device, dtype=dtype)
    states = torch.randn(tokens, hidden, device=device, dtype=dtype)
    labels = torch.randint(effort.vocab, (tokens,), device=device)

    @torch.no_grad()
    def forward() -> None:
        chunked_loss(head, states, labels, effort.chunk)

    def train() -> None:
        chunked_loss(head, states.detach().requires_grad_(), labels, effort.chunk).backward()
        head.zero_grad(set_to_none=True)

    once, logits = 2.0 * hidden * effort.vocab * tokens, float(effort.vocab * tokens)
    return {
        "forward": (once, logits, seconds(forward, device, rounds=effort.rounds)),
        "train": (4 * once, logits, seconds(train, device, rounds=effort.rounds)),
    }


def decode(device: torch.device, effort: Effort) -> list[tuple[int, float, float]]:
    """(sequences, bytes read, seconds) of a decode step through layers of the largest shape, at each batch size.

    The weights of all matrices and the keys and values of the context are read once. On a GPU the step is a replayed graph, as
    engines do it; scheduling and sampling are not in it.
    """
    one, dtype = effort.layers[-1], dtype_of(device)
    size, head_dim = torch.finfo(dtype).bits // 8, one.hidden // one.heads
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    kv = one.kv_heads * head_dim
    sides = (
        (one.hidden + 2 * kv, one.hidden),
        (one.hidden, one.hidden),
        (2 * one.ffn, one.hidden),
        (one.hidden, one.ffn),
    )
    weights = [[torch.randn(*side, **made) * 0.02 for side in sides] for _ in range(effort.num_layers)]
    found = []
    for batch in effort.decode_batches:
        cache_shape = (batch, one.kv_heads, effort.decode_context, head_dim)
        caches = [[torch.randn(cache_shape, **made) for _ in range(2)] for _ in range(effort.num_layers)]
        states = torch.randn(batch, one.hidden, **made)

        def step(states: Tensor = states, caches: list[list[Tensor]] = caches) -> Tensor:
            for (qkv, out, up, down), (keys, values) in zip(weights, caches, strict=True):
                # the queries that share a key-value head stand as its sequence
                query = (states @ qkv.t())[:, : one.hidden].view(-1, one.kv_heads, one.heads // one.kv_heads, head_dim)
                seen = nn.functional.scaled_dot_product_attention(query, keys, values)
                states = states + seen.reshape(-1, one.hidden) @ out.t()
                gate, kept = (states @ up.t()).chunk(2, -1)
                states = states + (nn.functional.silu(gate) * kept) @ down.t()
            return states

        with torch.no_grad():
            work = _graphed(step) if device.type == "cuda" else step
            took = seconds(work, device, rounds=effort.rounds, calls=5)
        read = sum(weight.numel() for layer in weights for weight in layer)
        read += sum(cache.numel() for layer in caches for cache in layer)
        found.append((batch, float(read * size), took))
    return found


def _graphed(work: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
