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
from flowrl.engines.calibrate.timing import busy, seconds

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


def layers(device: torch.device, effort: Effort) -> dict[str, list[tuple[float, float, float, float]]]:
    """`forward` and `train` -> (FLOP of products with weights, FLOP of attention, bytes kept for a backward pass without
    recomputation, seconds) of each shape.

    `train` is a forward pass, the same again, and a backward pass; weights and gradients are in the dtype of compute.
    """
    found: dict[str, list[tuple[float, float, float, float]]] = {"forward": [], "train": []}
    lengths = [effort.sequence] * effort.rows
    for one in effort.layers:
        with torch.device(device):
            model = stack(one, effort.num_layers, recompute=True).to(dtype_of(device))
            states = torch.randn(effort.rows, effort.sequence, one.hidden, dtype=dtype_of(device))
        shape = ModelShape.from_config(model.config)
        kept = float(shape.layers * activation_token_bytes(shape) * sum(lengths))
        flops, times = forward_flops(shape, lengths), train_flops(shape, lengths) / forward_flops(shape, lengths).total
        forward, train = passes(model, states)
        took = busy(forward, device, rounds=effort.rounds)
        found["forward"].append((flops.matmul, flops.attention, kept, took))
        took = busy(train, device, rounds=effort.rounds)
        found["train"].append((times * flops.matmul, times * flops.attention, kept, took))
    return found


def attention(device: torch.device, effort: Effort) -> dict[str, tuple[float, float]]:
    """`forward` and `train` -> (FLOP, seconds) of causal attention alone, with the heads of the largest shape."""
    one, dtype = effort.layers[-1], dtype_of(device)
    sides = (effort.rows, one.heads, effort.sequence, one.hidden // one.heads)
    query, key, value = (torch.randn(*sides, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    up = torch.randn(*sides, device=device, dtype=dtype)

    def attend() -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    @torch.no_grad()
    def forward() -> None:
        attend()

    def train() -> None:
        with torch.no_grad():
            attend()
        torch.autograd.grad(attend(), (query, key, value), up)

    flops = 2.0 * effort.rows * one.hidden * effort.sequence**2
    return {
        "forward": (flops, busy(forward, device, rounds=effort.rounds)),
        "train": (4 * flops, busy(train, device, rounds=effort.rounds)),
    }


def adam_bytes_s(device: torch.device, effort: Effort) -> float:
    """Bytes per second of a step of fp32 Adam on the device: four numbers of each parameter are read, three written."""
    count, parts = effort.adam_params, 16
    weights = [nn.Parameter(torch.randn(count // parts, device=device)) for _ in range(parts)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=True)
    return 28 * count / busy(optimizer.step, device, rounds=effort.rounds)


def passes(model: nn.Module, states: Tensor, *, keep: bool = False) -> tuple[Callable[[], None], Callable[[], None]]:
    """A forward pass without gradients, and one with its backward pass, over states [B, L, h].

    `keep`: gradients stay, and the next are added to them, as in all micro-batches of a step but the first.
    """
    up = torch.randn_like(states)

    @torch.no_grad()
    def forward() -> None:
        model(inputs_embeds=states)

    def train() -> None:
        leaf = states.detach().requires_grad_()
        model(inputs_embeds=leaf).last_hidden_state.backward(up)
        if not keep:
            model.zero_grad(set_to_none=True)

    return forward, train


def loss(device: torch.device, effort: Effort) -> dict[str, list[tuple[float, float, float]]]:
    """`forward` and `train` -> (FLOP, logits, seconds) of a head and a loss in chunks, of a narrow model and a wide one."""
    found: dict[str, list[tuple[float, float, float]]] = {"forward": [], "train": []}
    tokens, dtype = 2 * effort.chunk, dtype_of(device)
    for hidden in (effort.layers[0].hidden, effort.layers[-1].hidden):
        head = nn.Linear(hidden, effort.vocab, bias=False, device=device, dtype=dtype)
        states = torch.randn(tokens, hidden, device=device, dtype=dtype)
        labels = torch.randint(effort.vocab, (tokens,), device=device)

        @torch.no_grad()
        def forward(head: nn.Linear = head, states: Tensor = states, labels: Tensor = labels) -> None:
            chunked_loss(head, states, labels, effort.chunk)

        def train(head: nn.Linear = head, states: Tensor = states, labels: Tensor = labels) -> None:
            chunked_loss(head, states.detach().requires_grad_(), labels, effort.chunk).backward()
            head.zero_grad(set_to_none=True)

        once, logits = 2.0 * hidden * effort.vocab * tokens, float(effort.vocab * tokens)
        found["forward"].append((once, logits, busy(forward, device, rounds=effort.rounds)))
        found["train"].append((4 * once, logits, busy(train, device, rounds=effort.rounds)))
    return found


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
