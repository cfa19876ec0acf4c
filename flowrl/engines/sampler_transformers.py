"""Sampling with a Transformers module: batched, with a key-value cache, on the module the trainer trains or on its own.

    requests -> batches of a token budget -> prefill each distinct prompt once -> repeat the cache for its responses
             -> one token for all rows per forward -> rows that ended leave the batch

[Note: A draw belongs to its key]
Token t of a response is drawn with number t of a stream that the request's key seeds, by inverse transform on the
cumulative probabilities. So the draw does not depend on which other requests share the batch, on their order or on when
they end. (The probabilities themselves may differ between batches by rounding, about 1e-6 in fp32.)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from flowrl.engines.modules import embedding_rows
from flowrl.engines.protocol import Sampled, SampleRequest, SamplingOptions
from flowrl.errors import ConfigError, DataError, EngineError, StaleWeightsError
from flowrl.model import Model, Tokenizer
from flowrl.schema.columns import nearest

COMPACT_SHARE = 8
"""Rows that ended are taken out of the batch when they are at least one in so many."""

ROOM = 64
"""Fewest tokens a growing cache makes room for."""


def uniforms(numbers: Sequence[int], count: int) -> np.ndarray:
    """[B, count] float64 in [0, 1): the first `count` numbers of the stream of each seed (SplitMix64, Steele et al. 2014).

    The first numbers of a stream do not depend on `count`.
    """
    seeds = np.array(numbers, np.uint64)[:, None]
    place = np.arange(1, count + 1, dtype=np.uint64)[None, :]
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is meant
        z = seeds + place * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits: Tensor, uniform: Tensor, options: SamplingOptions) -> tuple[Tensor, Tensor]:
    """One token per row: ([B] int64 ids, [B] float32 nats under the distribution drawn from).

    Args:
        logits: [B, V] fp32.
        uniform: [B] float64 in [0, 1).
    """
    if options.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        if options.temperature != 1:
            logits = logits / options.temperature
        if options.top_k > 0 or options.top_p < 1:
            logits = restrict(logits, options.top_k, options.top_p)
        # fp64, because rounding of a long fp32 sum would shift the borders between tokens
        cumulative = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
        tokens = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    logprobs = logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    return tokens, logprobs


def restrict(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """[B, V] with minus infinity outside the `top_k` likeliest tokens and, of those, outside the fewest likeliest whose
    probabilities add up to `top_p` (Holtzman et al., arXiv 1904.09751)."""
    ordered, index = logits.sort(stable=True, dim=-1, descending=True)
    if top_k > 0:
        ordered[:, top_k:] = -torch.inf
    if top_p < 1:
        p = ordered.softmax(-1)
        ordered = ordered.masked_fill(p.cumsum(-1) - p >= top_p, -torch.inf)
        ordered[:, 0] = logits.amax(-1)  # the likeliest always stays
    return torch.empty_like(logits).scatter_(-1, index, ordered)


class GrowingLayer(DynamicLayer):
    """Keys and values of one attention layer with room ahead: a step writes its own part instead of copying all there is."""

    room_keys: Tensor | None = None
    room_values: Tensor
    used = 0

    def __init__(self, most: int) -> None:
        """
        Args:
            most: tokens it will hold in the end.
        """
        super().__init__()
        self.most = most

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [B, heads, q, D]; return all there is so far."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        start, end = self.used, self.used + key_states.shape[-2]
        if self.room_keys is None or self.room_keys.shape[-2] < end:
            room = max(end, min(self.most, end + max(ROOM, end // 2)))
            self.room_keys = self._moved(self.keys if start else None, key_states, room)
            self.room_values = self._moved(self.values if start else None, value_states, room)
        self.room_keys[..., start:end, :] = key_states
        self.room_values[..., start:end, :] = value_states
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep (or repeat) rows of the batch."""
        if self.room_keys is not None:
            room = self.room_keys.shape[-2]
            self.room_keys = self._moved(self.keys[indices], self.keys, room)
            self.room_values = self._moved(self.values[indices], self.values, room)
            self._show(self.used)

    def _moved(self, old: Tensor | None, like: Tensor, room: int) -> Tensor:
        shape = like.shape if old is None else old.shape
        new = like.new_empty((*shape[:-2], room, shape[-1]))
        if old is not None:
            new[..., : self.used, :] = old
        return new

    def _show(self, end: int) -> None:
        assert self.room_keys is not None
        self.used = end
        self.keys, self.values = self.room_keys[..., :end, :], self.room_values[..., :end, :]


def new_cache(module: nn.Module, most: int) -> DynamicCache:
    """An empty cache of the layers the module needs (full, sliding, recurrent), full ones with room ahead for `most` tokens."""
    config = getattr(module, "config", None)
    cache = DynamicCache(config=config) if hasattr(config, "get_text_config") else DynamicCache()
    cache.layers = [GrowingLayer(most) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Requests of one batch and how long each may get."""

    order: list[int]
    limits: list[int]


class TransformersSampler:
    """The `Sampler` protocol on a Transformers module."""

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Tokenizer,
        model: Model,
        *,
        name: str = "model",
        max_context: int | None = None,
        shared: bool = False,
    ) -> None:
        """
        Args:
            shared: `module` is the trainer's own, so that loading weights only takes note of their version.
        """
        if model.sampler_options:
            raise ConfigError(
                f"the transformers sampler of model '{name}' has no options; found {', '.join(sorted(model.sampler_options))}; "
                "they belong to sampler='vllm'"
            )
        self.name = name
        self.version = 0
        self.module = module
        self.tokenizer = tokenizer
        self.budget = model.sample_batch_tokens
        self.max_context = max_context
        self.shared = shared
        self._stale = ""
        accepts = inspect.signature(module.forward).parameters
        # recurrent models call it so
        self.cache_name = "cache_params" if "cache_params" in accepts else "past_key_values"
        self.takes_padding = all(hasattr(layer, "batch_select_indices") for layer in new_cache(module, 1).layers)
        """False for recurrent models, which carry padding on in their state: their batches hold prompts of one length."""
        missing = [p for p in ("attention_mask", "position_ids", "past_key_values", "use_cache") if p not in accepts]
        if missing and not any(p.kind is p.VAR_KEYWORD for p in accepts.values()):
            raise EngineError(
                f"model '{name}': sampling calls forward() with a key-value cache as Transformers models have it; "
                f"{type(module).__name__}.forward lacks {', '.join(missing)}"
            )
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in accepts else {}

    # --- the protocol ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, requests: Sequence[SampleRequest], options: SamplingOptions) -> list[Sampled]:
        """One response per request, in order.

        Errors: StaleWeightsError after a failed `load`; DataError naming a prompt that is empty or does not fit.
        """
        if self._stale:
            raise StaleWeightsError(
                f"the sampler of model '{self.name}' has no usable weights: {self._stale}; load all of them"
            )
        self.module.eval()
        answers: list[Sampled | None] = [None] * len(requests)
        for plan in self._batches(requests):
            chosen = [requests[i] for i in plan.order]
            for i, answer in zip(plan.order, Decoding(self, chosen, plan.limits, options).run(), strict=True):
                answers[i] = answer
        return [answer for answer in answers if answer is not None]

    @torch.no_grad()
    def load(self, named: Iterable[tuple[str, Any]], version: int) -> None:
        """Overwrite all parameters in place. Errors: EngineError naming a missing, unknown or misshapen one; the sampler then
        refuses to sample until a full load."""
        if self.shared:
            self.version = version
            return
        self._stale = "a load did not finish"
        own = dict(self.module.named_parameters())
        aliases = dict(self.module.named_parameters(remove_duplicate=False))
        waiting = dict.fromkeys(own)
        for name, tensor in named:
            if name not in aliases:
                raise EngineError(
                    f"weights for '{name}' came; the sampler of model '{self.name}' has no such; {nearest(name, own)}"
                )
            if tuple(tensor.shape) != tuple(aliases[name].shape):
                raise EngineError(
                    f"weights for '{name}' came with shape {tuple(tensor.shape)}; the sampler of model '{self.name}' "
                    f"has {tuple(aliases[name].shape)}"
                )
            aliases[name].copy_(tensor)
            waiting.pop(name, None)
        if waiting:
            raise EngineError(
                f"no weights came for '{next(iter(waiting))}' ({len(waiting)} of {len(own)} parameters are missing); "
                f"the sampler of model '{self.name}' needs all of them"
            )
        self._stale = ""
        self.version = version

    def close(self) -> None:
        """Nothing is held between calls."""

    # --- batches -----------------------------------------------------------------------------------------------------

    def _batches(self, requests: Sequence[SampleRequest]) -> Iterator[Plan]:
        """Requests of similar prompt length together, at most the budget of tokens at once."""
        limits = [self._limit(request) for request in requests]
        order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].prompt_ids), -limits[i]))
        taken: list[int] = []
        prompt = response = 0
        for i in order:
            wider = max(response, limits[i])
            longest = prompt or len(requests[i].prompt_ids)
            apart = not self.takes_padding and longest != len(requests[i].prompt_ids)
            if taken and (apart or (len(taken) + 1) * (longest + wider) > self.budget):
                yield Plan(taken, [limits[j] for j in taken])
                taken, wider, longest = [], limits[i], len(requests[i].prompt_ids)
            taken.append(i)
            prompt, response = longest, wider
        if taken:
            yield Plan(taken, [limits[j] for j in taken])

    def _limit(self, request: SampleRequest) -> int:
        length = len(request.prompt_ids)
        who = f"prompt '{request.key.prompt_id}' of model '{self.name}'"
        if length == 0:
            raise DataError(f"{who} is empty; give it at least one token (a begin-of-sequence token will do)")
        if request.max_tokens < 1:
            raise ConfigError(f"{who} asks for {request.max_tokens} tokens; max_tokens must be at least 1")
        if self.max_context is None:
            return request.max_tokens
        if length >= self.max_context:
            raise DataError(
                f"{who} has {length} tokens and the model's context holds {self.max_context}, which leaves no room for a "
                "response; drop or shorten such prompts"
            )
        return min(request.max_tokens, self.max_context - length)


class Decoding:
    """One batch being sampled. Shapes: B rows still in the batch, P prompt length with left padding."""

    def __init__(
        self,
        sampler: TransformersSampler,
        requests: Sequence[SampleRequest],
        limits: list[int],
        options: SamplingOptions,
    ) -> None:
        self.sampler = sampler
        self.requests = requests
        self.options = options
        self.limits = limits
        self.most = max(limits)
        module = sampler.module
        self.device = next(module.parameters()).device
        self.cache = new_cache(module, max(len(r.prompt_ids) for r in requests) + self.most)
        is_full = all(isinstance(layer, GrowingLayer) for layer in self.cache.layers)
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", "")
        self.ready_mask = is_full and implementation == "sdpa"
        """The attention takes a boolean mask as it is, which saves making one per step."""
        self.mask: Tensor | None = None
        self.position = torch.zeros(0)

    def run(self) -> list[Sampled]:
        """Sample until every row has ended."""
        sampler, options, device = self.sampler, self.options, self.device
        B, V = len(self.requests), sampler.tokenizer.vocab_size
        logits = self._prefill()
        noise = torch.from_numpy(uniforms([r.key.number() for r in self.requests], self.most)).to(device)
        ends = torch.zeros(V, dtype=torch.bool, device=device)
        ends[[i for i in sampler.tokenizer.eos_ids if 0 <= i < V]] = True
        ids = torch.zeros(B, self.most, dtype=torch.int64, device=device)
        logprobs = torch.zeros(B, self.most, dtype=torch.float32, device=device)
        lengths = np.array(self.limits)
        stopped = np.zeros(B, bool)
        limits = np.array(self.limits)
        where = np.arange(B)
        """Request of each row of the batch."""
        where_t = torch.arange(B, device=device)
        done = np.zeros(B, bool)
        watch = StopStrings(options.stop, sampler.tokenizer) if options.stop else None
        for t in range(self.most):
            tokens, chosen = draw(logits, noise[:, t], options)
            ids[where_t, t] = tokens
            logprobs[where_t, t] = chosen
            ended = ends[tokens].cpu().numpy() & ~done
            if watch is not None:
                ended |= watch.found(ids, where, t, ended | done)
            stopped[where[ended]] = True
            lengths[where[ended]] = t + 1
            done |= ended | (limits[where] <= t + 1)
            left = len(done) - int(done.sum())
            if left == 0:
                break
            if (len(done) - left) * COMPACT_SHARE >= len(done):
                keep = np.flatnonzero(~done)
                keep_t = torch.from_numpy(keep).to(device)
                where, done = where[keep], done[keep]
                where_t, noise, tokens = where_t[keep_t], noise[keep_t], tokens[keep_t]
                self._keep(keep_t)
            logits = self._step(tokens, t)
        return self._answers(ids, logprobs, lengths, stopped)

    def _prefill(self) -> Tensor:
        """Run every distinct prompt once, then repeat its cache for each of its responses. [B, V] logits."""
        index: dict[tuple[int, ...], int] = {}
        which = [index.setdefault(tuple(r.prompt_ids), len(index)) for r in self.requests]
        longest = max(map(len, index))
        padded = np.zeros((len(index), longest), np.int64)
        present = np.zeros((len(index), longest), bool)
        for row, prompt in enumerate(index):
            padded[row, longest - len(prompt) :] = prompt
            present[row, longest - len(prompt) :] = True
        self._check_ids(padded)
        ids = torch.from_numpy(padded).to(self.device)
        options: dict[str, Any] = dict(self.sampler._keep_last)
        if not present.all():
            mask = torch.from_numpy(present).to(self.device)
            options["attention_mask"] = mask.long()
            options["position_ids"] = torch.from_numpy(np.maximum(present.cumsum(1) - 1, 0)).to(self.device)
            more = torch.ones(len(index), self.most, dtype=torch.bool, device=self.device)
            self.mask = torch.cat([mask, more], 1)
        logits = self._logits(ids, options)
        self.position = torch.tensor([[len(prompt)] for prompt in index], device=self.device)
        if len(index) < len(which):
            rows = torch.tensor(which, device=self.device)
            logits = logits[rows]
            self._keep(rows)
        self.length = longest
        return logits

    def _step(self, tokens: Tensor, t: int) -> Tensor:
        options: dict[str, Any] = {"position_ids": self.position + t}
        if self.mask is not None:
            seen = self.mask[:, : self.length + t + 1]
            options["attention_mask"] = seen[:, None, None, :] if self.ready_mask else seen.long()
        return self._logits(tokens[:, None], options)

    def _logits(self, ids: Tensor, options: dict[str, Any]) -> Tensor:
        options[self.sampler.cache_name] = self.cache
        output = self.sampler.module(input_ids=ids, use_cache=True, **options)
        logits: Tensor = output.logits
        # rows of a padded vocabulary beyond the tokenizer's are no tokens
        return logits[:, -1, : self.sampler.tokenizer.vocab_size].float()

    def _keep(self, rows: Tensor) -> None:
        """Select (or repeat) rows of the batch."""
        for layer in self.cache.layers:
            # recurrent layers have the second name only
            getattr(layer, "batch_select_indices", layer.reorder_cache)(rows)
        self.position = self.position[rows]
        if self.mask is not None:
            self.mask = self.mask[rows]

    def _check_ids(self, padded: np.ndarray) -> None:
        known = embedding_rows(self.sampler.name, self.sampler.module)
        if padded.max() >= known or padded.min() < 0:
            row = int(np.argmax((padded >= known).any(1) | (padded < 0).any(1)))
            raise DataError(
                f"a prompt of model '{self.sampler.name}' holds token id {int(padded[row].max())}, and the model knows "
                f"ids 0 to {known - 1}; its tokens come from another tokenizer"
            )

    def _answers(self, ids: Tensor, logprobs: Tensor, lengths: np.ndarray, stopped: np.ndarray) -> list[Sampled]:
        if not bool(logprobs.isfinite().all()):
            raise EngineError(
                f"model '{self.sampler.name}' gives probabilities that are not finite; its weights or its precision are at fault"
            )
        ids_list, logprobs_list = ids.tolist(), logprobs.tolist()
        return [
            Sampled(
                ids=ids_list[i][:length],
                logprobs=logprobs_list[i][:length],
                finish_reason="stop" if stopped[i] else "length",
            )
            for i, length in enumerate(lengths.tolist())
        ]


class StopStrings:
    """Finds rows whose text contains a stop string, without decoding whole responses at every token."""

    def __init__(self, stop: Sequence[str], tokenizer: Tokenizer) -> None:
        self.stop = tuple(s for s in stop if s)
        self.tokenizer = tokenizer
        # a token adds at least one byte to the text, special tokens apart, so a match ends inside a window of this many
        self.window = 2 * max((len(s.encode()) for s in self.stop), default=0) + 8

    def found(self, ids: Tensor, where: np.ndarray, t: int, skip: np.ndarray) -> np.ndarray:
        """[B] bool: rows whose text of tokens 0..t contains a stop string; rows of `skip` are not looked at."""
        hit = np.zeros(len(where), bool)
        start = max(0, t + 1 - self.window)
        recent = ids[:, start : t + 1].cpu()
        for row in np.flatnonzero(~skip):
            text = self.tokenizer.decode(recent[where[row]].tolist())
            if any(s in text for s in self.stop):
                whole = text if start == 0 else self.tokenizer.decode(ids[where[row], : t + 1].tolist())
                hit[row] = any(s in whole for s in self.stop)
        return hit
