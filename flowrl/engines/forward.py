"""Forward passes over padded blocks: the model's outputs at chosen positions, and numbers made from logits.

[Note: Only the positions asked for meet the vocabulary]
Logits are by far the largest tensor of a language model (T x V). The transformer runs on whole blocks, and only the hidden
states that predict a token of interest go through the output layer, in slices that are recomputed in the backward pass
when they would be large. Where an architecture does something of its own to hidden states or logits (a soft cap, a
scale), found out by a probe when the model is opened, its own forward runs and a hook cuts the positions out before the
output layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from flowrl.engines.heads import find_head
from flowrl.engines.modules import output_layer
from flowrl.engines.packed import can_pack, pack_block, run_packed
from flowrl.engines.packing import Batch
from flowrl.engines.prefix import can_split, run_split, split_block
from flowrl.errors import EngineError

SLICE_ELEMENTS = 2**26
"""Most logits (tokens x vocabulary) held at once: 256 MiB in fp32."""


LEAST_LOG_P = -1e4
"""exp of this is exactly 0 in every float type, so a token that cannot be drawn (logit -inf) adds 0 to an entropy, not NaN."""


class TokenStats(torch.autograd.Function):
    """Log-probability of the target and entropy from logits, saving one [T, V] tensor instead of one per operation.

    With x the logits of one token, p = softmax(x), H its entropy and y the target:
    d log p_y / d x_j = 1[j = y] - p_j and d H / d x_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        logz = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - logz
        entropy = None
        if with_entropy:
            log_p = (logits - logz[:, None]).clamp_min_(LEAST_LOG_P)
            entropy = log_p.exp().mul_(log_p).sum(-1).neg_()
        ctx.save_for_backward(logits, targets, logz, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        logits, targets, logz, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logz)
        log_p = logits - logz[:, None]
        p = log_p.exp()
        if entropy is not None and grad_entropy is not None:
            scale = (
                log_p.clamp_min_(LEAST_LOG_P)
                .add_(entropy[:, None])
                .mul_(-grad_entropy[:, None])
                .sub_(grad_logprobs[:, None])
            )
            grad = p.mul_(scale)
        else:
            grad = p.mul_(-grad_logprobs[:, None])
        grad.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])
        return grad, None, None


def token_stats(logits: Tensor, targets: Tensor, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """([T] log-probability of `targets`, [T] entropy or None), nats, from logits [T, V] fp32."""
    found: tuple[Tensor, Tensor | None] = TokenStats.apply(logits, targets, with_entropy)
    return found


class Forward:
    """A module with what is known about how to run it."""

    def __init__(self, name: str, module: nn.Module, *, head: str, vocab_size: int) -> None:
        self.name = name
        self.module = module
        self.kind = head
        self.vocab_size = vocab_size
        self.output: nn.Module | None
        self.split = True
        if head == "lm":
            self.output = output_layer(module)
            self.split = self.output is not None and _is_plain(module, self.output)
        else:
            self.output = find_head(module)
        self.accepts = frozenset(inspect.signature(module.forward).parameters)
        self.shares_prompts = self.split and can_split(getattr(module, "base_model", module), vocab_size, self.device)
        """Whether a prompt may run once for all rows that begin with it (see `flowrl.engines.prefix`)."""
        self.packs = self.split and can_pack(getattr(module, "base_model", module), vocab_size, self.device)
        """Whether short rows may share a line of a block (see `flowrl.engines.packed`)."""
        self.loose_ends: list[Tensor] | None = None
        """Gets outputs of the backbone that nothing reads, where somebody must know of them."""

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def hidden_of(self, batch: Batch) -> Tensor:
        """[T, H]: what the output layer gets to predict the block's tokens of interest (see `hidden`)."""
        row_T = torch.from_numpy(batch.row_T).to(self.device)
        split = split_block(batch.ids, batch.prompt_B, batch.length_B, 0) if self.shares_prompts else None
        if split is None:
            return self._whole_rows(batch, row_T)
        states = run_split(self.module.base_model, split, self.device, self.loose_ends)
        inside_T = batch.position_T - split.start_B[batch.row_T]
        return states[row_T, torch.from_numpy(inside_T).to(self.device)]

    def _whole_rows(self, batch: Batch, row_T: Tensor) -> Tensor:
        packed = pack_block(batch.ids, batch.length_B, 0) if self.packs else None
        if packed is None:
            position_T = torch.from_numpy(batch.position_T).to(self.device)
            return self.hidden(torch.from_numpy(batch.ids).to(self.device), row_T, position_T)
        states = run_packed(self.module.base_model, packed, self.device)
        line_T = torch.from_numpy(packed.line_B[batch.row_T]).to(self.device)
        place_T = torch.from_numpy(packed.start_B[batch.row_T] + batch.position_T).to(self.device)
        return states[line_T, place_T]

    def hidden(self, ids: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """What the output layer gets at (row, position): [T, H]; or logits [T, W] where the module must do both."""
        if self.split:
            base: Any = self.module.base_model
            states: Tensor = base(input_ids=ids, use_cache=False)[0]
            return states[rows, positions]
        options = {"use_cache": False} if "use_cache" in self.accepts else {}
        with _cut(self.output, rows, positions) as fired:
            logits = logits_of(self.module(input_ids=ids, **options))
        return logits[0] if fired else logits[rows, positions]

    def logits(self, hidden: Tensor, temperature: Tensor | None) -> Tensor:
        """[T, V] fp32 over the ids of the tokenizer only, divided by temperature [T]; `hidden` from above."""
        raw = self.output(hidden) if self.split and self.output is not None else hidden
        logits = raw[:, : self.vocab_size].float()
        return logits if temperature is None else logits / temperature[:, None]

    def scalars(self, hidden: Tensor) -> Tensor:
        """[T] fp32: the value or reward head."""
        assert self.output is not None
        found: Tensor = self.output(hidden)
        return found[:, 0].float()

    def stats(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | None, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """([T] log-probabilities, [T] entropies or None) in slices of bounded size, recomputed in the backward pass."""

        def one(hidden: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return token_stats(self.logits(hidden, temperature), targets, with_entropy=with_entropy)

        cuts = self.slices(len(targets))
        if len(cuts) <= 1:
            return one(hidden, targets, temperature)
        parts = []
        for _, cut in cuts:
            inputs = (hidden[cut], targets[cut], None if temperature is None else temperature[cut])
            parts.append(checkpoint(one, *inputs, use_reentrant=False) if torch.is_grad_enabled() else one(*inputs))
        entropy = torch.cat([e for _, e in parts if e is not None]) if with_entropy else None
        return torch.cat([p for p, _ in parts]), entropy

    def top(self, hidden: Tensor, temperature: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
        """([T, k] ids, [T, k] log-probabilities), likeliest first, of as many tokens as a slice has."""
        logits = self.logits(hidden, temperature)
        top = logits.topk(k, -1)
        return top.indices, top.values - logits.logsumexp(-1, keepdim=True)

    def slices(self, num_tokens: int) -> list[tuple[int, slice]]:
        """(start, slice) of runs of tokens whose logits are not too large together."""
        size = max(1, SLICE_ELEMENTS // self.vocab_size)
        return [(start, slice(start, start + size)) for start in range(0, num_tokens, size)]

    def require(self, columns: Collection[str]) -> None:
        """Errors: EngineError when the model's head cannot compute one of these live columns."""
        needs = {"values": "value", "scores": "reward"}
        for column in sorted(columns):
            if (needed := needs.get(column, "lm")) != self.kind:
                raise EngineError(
                    f"the loss reads the live column '{column}', which a model with head='{needed}' computes; model "
                    f"'{self.name}' has head='{self.kind}'; open it with fr.Model(..., head='{needed}') or change the loss"
                )


def logits_of(output: Any) -> Tensor:
    """[B, L, V] from whatever a module returns."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None:
        logits = output[0]
    found: Tensor = logits
    return found


@contextmanager
def _cut(output: nn.Module | None, rows: Tensor, positions: Tensor) -> Iterator[list[bool]]:
    """While open, the output layer sees hidden [1, T, H] at (row, position) instead of [B, L, H]; the list fills when it did."""
    fired: list[bool] = []
    if output is None:
        yield fired
        return

    def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        fired.append(True)
        return (inputs[0][rows, positions][None], *inputs[1:])

    handle = output.register_forward_pre_hook(select, prepend=True)  # before hooks that cut its input for other ranks
    try:
        yield fired
    finally:
        handle.remove()


@torch.no_grad()
def _is_plain(module: nn.Module, output: nn.Module) -> bool:
    """Whether logits are exactly `output(base_model(ids))`: checked on hidden states so large that a cap or scale shows."""
    if not isinstance(module, PreTrainedModel) or module.base_model is module:
        return False
    base = module.base_model
    device = next(module.parameters()).device
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    seen: list[Tensor] = []
    large: list[Tensor] = []

    def swap(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(inputs[0])
        noise = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(0))
        large.append(1e3 * noise.to(inputs[0]))
        return (large[0], *inputs[1:])

    handle = output.register_forward_pre_hook(swap, prepend=True)
    try:
        logits = logits_of(module(input_ids=ids, use_cache=False))
    finally:
        handle.remove()
    if not seen:
        return False
    hidden = base(input_ids=ids, use_cache=False)[0]
    if not isinstance(hidden, Tensor) or hidden.shape != seen[0].shape:
        return False
    expected = output(large[0])
    return torch.allclose(hidden, seen[0], rtol=1e-4, atol=1e-5) and torch.allclose(
        logits, expected.to(logits.dtype), rtol=1e-3
    )
