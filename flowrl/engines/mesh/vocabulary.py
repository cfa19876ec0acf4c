"""Log-probabilities and entropies from a head that is cut by tokens, without whole rows of the vocabulary.

    each rank     logits of its tokens, in slices: the largest, a sum of exponentials, a moment, the target if it is there
    every rank    these few numbers of all ranks, put together in the order of ranks: the same everywhere, to the bit
    each rank     gradients of its rows of the head, and its part of those of the hidden states, which are added

This is the parallel cross-entropy of Megatron-LM (arXiv 1909.08053, section 3), which takes the largest logit of all ranks before
it adds exponentials. Here each rank adds up against its own largest one and the sums are rescaled (arXiv 1805.02867), so that
one exchange for all tokens is enough.

[Note: Slices]
No more logits are there at once than a slice of tokens times a rank's part of the vocabulary. If there are several slices, the
backward pass computes logits again, from hidden states and head alone; a single one is kept, in the type it was computed in.

[Note: Who needs whole rows]
A loss that reads the live column `logits`, and the sampler, which draws from all tokens. They call the head as a module, which
gathers. So does everything where the head is whole on every rank, because the group does not divide its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowrl.engines.forward import LEAST_LOG_P, Forward

LEAST = torch.finfo(torch.float32).min
"""Stands for the largest of no logits, or of some that are all -inf: differences from it are no NaN."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadPart:
    """A rank's rows of a head."""

    weight: Tensor
    """[rows, H]"""
    bias: Tensor | None
    group: dist.ProcessGroup
    vocab_size: int
    """Of the tokenizer; the rows of all ranks together may be more."""

    @classmethod
    def of(cls, head: nn.Module | None, vocab_size: int) -> HeadPart | None:
        """None for one that is not cut by rows. Call it where parameters are gathered over fsdp."""
        weight = getattr(head, "weight", None)
        if not isinstance(head, nn.Linear) or not isinstance(weight, DTensor):
            return None
        if weight.device_mesh.mesh_dim_names != ("tp",) or not weight.placements[0].is_shard(0):
            return None
        bias: Any = head.bias
        own_bias = bias.to_local() if isinstance(bias, DTensor) else bias
        return cls(weight.to_local(), own_bias, weight.device_mesh.get_group(), vocab_size)

    def num_ids(self, rank: int) -> int:
        """Of the rows of a rank, those with a token of the tokenizer."""
        rows = self.weight.shape[0]
        return min(rows, max(0, self.vocab_size - rank * rows))

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """([T] place among this rank's rows, any for those of others, [T] whether it is here). IndexError: no such token."""
        rows, rank = self.weight.shape[0], dist.get_rank(self.group)
        # a look-up, so that all ranks refuse an id that none has
        owners = torch.arange(self.vocab_size, device=targets.device).div_(rows, rounding_mode="floor")
        is_here = owners[targets] == rank
        return (targets - rank * rows).masked_fill_(~is_here, 0), is_here

    def gather(self, x: Tensor) -> Tensor:
        """[ranks, ...] of all ranks, in their order."""
        found = x.new_empty((dist.get_world_size(self.group), *x.shape))
        if x.numel():
            dist.all_gather(list(found.unbind()), x.contiguous(), group=self.group)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """What the ranks found of each token, put together. All [T] fp32."""

    most: Tensor
    log_total: Tensor
    """Logarithm of the sum of exp(logit - most)."""
    chosen: Tensor
    """The target's logit."""
    entropy: Tensor | None

    @classmethod
    def of(cls, parts: Tensor) -> Sums:
        """From [ranks, 3 or 4, T]: see `sums_of_part`."""
        most = parts[:, 0].amax(0)
        shift = (parts[:, 0] - most).clamp_min_(LEAST_LOG_P)
        scale = shift.exp()
        total = (parts[:, 1] * scale).sum(0)
        log_total = total.log()
        entropy = None
        if parts.shape[1] > 3:
            moment = ((parts[:, 3] + parts[:, 1] * shift) * scale).sum(0)
            entropy = log_total - moment / total
        return cls(most, log_total, parts[:, 2].sum(0), entropy)


def sums_of_part(logits: Tensor, place: Tensor, is_here: Tensor, *, with_entropy: bool) -> Tensor:
    """[3 or 4, T] of a rank's logits [T, rows] fp32, which are used up.

    In this order: the largest logit, the sum of exp(logit - largest), the target's logit or 0, and with an entropy the sum of
    exp(logit - largest)·(logit - largest).
    """
    found = logits.new_zeros((4 if with_entropy else 3, len(logits)))
    if logits.shape[1] == 0:
        found[0] = LEAST
        return found
    most = torch.amax(logits, -1, out=found[0]).clamp_min_(LEAST)
    found[2] = logits.gather(-1, place[:, None])[:, 0].masked_fill_(~is_here, 0)
    logits.sub_(most[:, None])
    if not with_entropy:
        torch.sum(logits.exp_(), -1, out=found[1])
        return found
    powers = logits.clamp_min_(LEAST_LOG_P).exp()
    torch.sum(powers, -1, out=found[1])
    torch.sum(powers.mul_(logits), -1, out=found[3])
    return found


def scaled(raw: Tensor, temperature: Tensor | None, *, copies: bool = False) -> Tensor:
    """[T, rows] fp32 divided by temperature [T]; in place where types allow and `copies` does not forbid."""
    logits = raw.to(torch.float32, copy=copies)
    return logits if temperature is None else logits.div_(temperature[:, None])


class VocabularyStats(torch.autograd.Function):
    """Log-probability of the target and entropy, of hidden states and a rank's part of the head.

    With x the logits of one token, p = softmax(x), H its entropy and y the target:
    d log p_y / d x_j = 1[j = y] - p_j and d H / d x_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        part: HeadPart,
        cuts: list[slice],
        keeps: bool,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        place, is_here = part.places(targets)
        ctx.num_ids = part.num_ids(dist.get_rank(part.group))
        found, kept = [], None
        for cut in cuts:
            raw = _raw(hidden[cut], weight, bias, ctx.num_ids)
            kept = raw if keeps else None
            logits = scaled(raw, None if temperature is None else temperature[cut], copies=keeps)
            del raw
            found.append(sums_of_part(logits, place[cut], is_here[cut], with_entropy=with_entropy))
            del logits  # before the next ones are there
        mine = torch.cat(found, 1) if found else hidden.new_zeros((4 if with_entropy else 3, 0), dtype=torch.float32)
        sums = Sums.of(part.gather(mine))
        ctx.group, ctx.cuts = part.group, cuts
        logz = sums.most + sums.log_total
        ctx.save_for_backward(hidden, weight, bias, place, is_here, temperature, logz, sums.entropy, kept)
        return sums.chosen - sums.most - sums.log_total, sums.entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, place, is_here, temperature, logz, entropy, kept = ctx.saved_tensors
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(tensor, memory_format=torch.contiguous_format) if needed else None
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        grad_logprobs, grad_entropy = grads
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logz)
        ids = ctx.num_ids
        for cut in ctx.cuts if ids else ():
            raw = _raw(hidden[cut], weight, bias, ids) if kept is None else kept
            scale = None if temperature is None else temperature[cut]
            log_p = scaled(raw, scale, copies=kept is not None).sub_(logz[cut, None])
            del raw
            grad = _grad_of_logits(
                log_p,
                grad_logprobs[cut, None],
                None if grad_entropy is None else grad_entropy[cut, None],
                None if entropy is None else entropy[cut, None],
            )
            del log_p
            grad.scatter_add_(-1, place[cut, None], (grad_logprobs[cut] * is_here[cut])[:, None])
            grad = (grad if scale is None else grad.div_(scale[:, None])).to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(grad, weight[:ids], out=of_hidden[cut])
            if of_weight is not None:
                of_weight[:ids].addmm_(grad.T, hidden[cut])
            if of_bias is not None:
                of_bias[:ids] += grad.sum(0)
            del grad
        if of_hidden is not None and of_hidden.numel():
            dist.all_reduce(of_hidden, group=ctx.group)
        return of_hidden, of_weight, of_bias, None, None, None, None, None, None


def _raw(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: int) -> Tensor:
    return nn.functional.linear(hidden, weight[:ids], None if bias is None else bias[:ids])


def _grad_of_logits(
    log_p: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor | None, entropy: Tensor | None
) -> Tensor:
    """Without what the target itself gets. Columns are [T, 1]; `log_p` is used up."""
    if grad_entropy is None or entropy is None:
        return log_p.exp_().mul_(-grad_logprobs)
    p = log_p.exp()
    slope = log_p.clamp_min_(LEAST_LOG_P).add_(entropy).mul_(-grad_entropy).sub_(grad_logprobs)
    return p.mul_(slope)


def stats_of_part(
    part: HeadPart,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    cuts: list[slice],
    *,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """([T] log-probabilities, [T] entropies or None), the same on all ranks of the group, which all call it with the same tokens.

    Errors: IndexError for a target that is no token of the tokenizer.
    """
    keeps = len(cuts) == 1 and torch.is_grad_enabled()
    found: tuple[Tensor, Tensor | None] = VocabularyStats.apply(
        hidden, part.weight, part.bias, targets, temperature, part, cuts, keeps, with_entropy
    )
    return found


@torch.no_grad()
def top_of_part(part: HeadPart, hidden: Tensor, temperature: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """([T, k] ids, [T, k] log-probabilities), likeliest first, without gradient: the likeliest of each rank's likeliest."""
    rows, size, rank = part.weight.shape[0], dist.get_world_size(part.group), dist.get_rank(part.group)
    counts = [min(k, part.num_ids(other)) for other in range(size)]
    logits = scaled(_raw(hidden, part.weight, part.bias, part.num_ids(rank)), temperature)
    best = logits.topk(counts[rank], -1)
    padding = (0, max(counts) - counts[rank])
    values = part.gather(nn.functional.pad(best.values, padding))
    ids = part.gather(nn.functional.pad(best.indices + rank * rows, padding))
    none = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    sums = Sums.of(part.gather(sums_of_part(logits, none, none.bool(), with_entropy=False)))
    of_all, ids_of_all = (
        torch.cat([each[other, :, :count] for other, count in enumerate(counts)], -1) for each in (values, ids)
    )
    top = of_all.topk(k, -1)
    return ids_of_all.gather(-1, top.indices), top.values - (sums.most + sums.log_total)[:, None]


class VocabularyForward(Forward):
    """A `Forward` whose head may be cut by tokens. All ranks of the group call it with the same tokens."""

    def stats(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | None, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        part = self._part()
        if part is None:
            return super().stats(hidden, targets, temperature, with_entropy=with_entropy)
        cuts = [cut for _, cut in self.slices(len(targets))]
        return stats_of_part(part, hidden, targets, temperature, cuts, with_entropy=with_entropy)

    def top(self, hidden: Tensor, temperature: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
        part = self._part()
        return super().top(hidden, temperature, k) if part is None else top_of_part(part, hidden, temperature, k)

    def _part(self) -> HeadPart | None:
        is_plain = self.split and self.kind == "lm"
        return HeadPart.of(self.output, self.vocab_size) if is_plain else None
