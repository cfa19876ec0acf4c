"""Time of sampling: prefill, one decode step, and a whole batch of responses of given lengths.

[Note: Lengths, not their mean]
The responses of a batch end at different steps, and the last ones run almost alone. At the same mean length a spread of
lengths can double the time. So the input is every length (or a sample drawn from a histogram), never a mean.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flowrl.cost.collectives import Ring
from flowrl.cost.compute import forward_s
from flowrl.cost.flops import attention_width
from flowrl.cost.memory import MemoryConstants, cache_capacity_tokens
from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """Calibrated numbers of a sampling engine."""

    step_overhead_s: float = 1.5e-3
    """Scheduling, sampling and launches of one decode step. Assumed."""
    max_sequences: int = 1024
    """Sequences an engine runs at once, whatever the cache holds."""
    weight_bytes: float = 2
    cache_bytes: float = 2
    """Of one element of the cache."""
    utilization: float = 0.9
    """Part of the device's memory that the engine may use."""
    prefill_tokens: int = 8192
    """Of prompts that a pipeline takes at once. Assumed."""
    stage_bytes: float = 4
    """Per token and hidden unit that a stage sends to the next: hidden state and residual, bf16."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of a sampling engine on `tensor_parallel · pipeline` neighbouring devices.

    Example:
        Replica(ModelShape.of("Qwen2.5-32B"), Cluster.named("16xH100-80G"), tensor_parallel=4)
        Replica(ModelShape.of("DeepSeek-V3"), Cluster.named("16xH200"), tensor_parallel=8, pipeline=2)

    [Note: A pipeline of stages]
    With `pipeline` stages, as many micro-batches are under way, each on another stage, so that no stage waits. A running sequence
    gets one token per cycle, in which its micro-batch passes all stages. So a cycle takes what one step with the whole model on
    `tensor_parallel` devices and one micro-batch takes; the other stages work for other sequences meanwhile. Each stage adds its
    overhead and what it sends on. Stages count as equal, though the first has the embedding and the last the head.

    Experts are cut by tensor parallelism as other matrices are. Expert parallelism, and experts that get more tokens than others,
    are not modelled.
    """

    shape: ModelShape
    cluster: Cluster
    tensor_parallel: int = 1
    constants: EngineConstants = EngineConstants()
    pipeline: int = 1

    def __post_init__(self) -> None:
        found = self.tensor_parallel, self.pipeline
        if min(found) < 1 or self.num_devices > self.cluster.num_devices or self.pipeline > self.shape.layers:
            raise ConfigError(
                f"a replica has 1 to {self.cluster.num_devices} devices on this cluster, and a layer for each stage; found "
                f"tensor_parallel={found[0]}, pipeline={found[1]} for {self.shape.layers} layers"
            )

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.pipeline

    def prefill_s(self, lengths: Sequence[int]) -> float:
        """Reading prompts: `C_f/(tp·F·eta_fwd) + 2·L·t_ar(2·h·T)` and the rest; a prompt's whole length is read, nothing is
        shared.

        A pipeline of pp stages takes `prefill_tokens` at a time: `(all of this)/pp · (1 + (pp-1)/m)` for m times, and what stages
        send on.
        """
        tokens, stages = sum(lengths), self.pipeline
        reading = forward_s(self.shape, self.cluster, self.tensor_parallel, lengths, with_logits=False)
        whole = reading + self._exchange_s(tokens)
        if stages == 1:
            return whole
        times = max(1, math.ceil(tokens / self.constants.prefill_tokens))
        sent_s = float(self._send_s(np.array([tokens / times]))[0])
        return whole / stages * (1 + (stages - 1) / times) + sent_s

    def decode_step_s(self, batch: int, context: float) -> float:
        """One token for each of `batch` sequences with `context` tokens on average.

            max( (2·N_read + b·c·kv) / (tp·B_hbm·eta_read),
                 (2·N_mm·b + 4·a·d·L·c·b) / (tp·F·eta_decode) )  +  2·L·t_ar(2·h·b)  +  overhead

        N_read are the weights that are read: N_mm, and of experts those that at least one of the tokens goes to. Layers with a
        window see no more than the window. With pp stages, b is a micro-batch, `ceil(batch/pp)`, and a cycle adds
        `pp·(t_send(4·h·b) + overhead)` (see [Note: A pipeline of stages]).
        """
        return float(self.decode_steps_s(np.array([batch]), np.array([context]))[0]) if batch > 0 else 0.0

    def decode_steps_s(self, batches: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        """Seconds of a step, for each of several pairs of a batch of at least one sequence and a context."""
        shape, device, efficiency = self.shape, self.cluster.device, self.cluster.efficiency
        together = np.ceil(batches / self.pipeline)
        seen = self._seen(contexts)
        kv = shape.kv_token_bytes(element_bytes=self.constants.cache_bytes, tensor_parallel=self.tensor_parallel)
        read = self.constants.weight_bytes * weights_read(shape, together) + together * seen * kv
        flops = together * (
            2.0 * shape.matmul_params() + 4 * shape.heads * attention_width(shape) * shape.layers * seen
        )
        memory_s = read / (self.tensor_parallel * device.hbm_bytes_s * efficiency.decode_hbm)
        compute_s = flops / (self.tensor_parallel * device.peak_flops * efficiency.decode_flops)
        ring = Ring.neighbours(self.cluster, self.tensor_parallel)
        exchange_s = 2 * shape.layers * ring.all_reduces_s(2 * shape.hidden * together)
        step_s = np.maximum(memory_s, compute_s) + exchange_s + self.pipeline * self.constants.step_overhead_s
        return np.asarray(step_s if self.pipeline == 1 else step_s + self._send_s(together))

    def capacity_tokens(self, memory: MemoryConstants | None = None) -> float:
        """Tokens the cache holds."""
        found = cache_capacity_tokens(
            self.shape,
            self.cluster,
            utilization=self.constants.utilization,
            tensor_parallel=self.tensor_parallel,
            pipeline=self.pipeline,
            weight_bytes=self.constants.weight_bytes,
            constants=memory,
        )
        return found * 2 / self.constants.cache_bytes

    def max_batch(self, mean_tokens: float, memory: MemoryConstants | None = None) -> int:
        """Sequences of `mean_tokens` tokens (prompt and response) that run at once; ConfigError when not even one fits."""
        fits = int(self.capacity_tokens(memory) // mean_tokens)
        if fits < 1:
            raise ConfigError(
                f"the cache of {self.num_devices} devices holds {self.capacity_tokens(memory):.0f} tokens, a sequence has "
                f"{mean_tokens:.0f}; use more tensor parallelism, shorter sequences or a higher utilization"
            )
        return min(fits, self.constants.max_sequences)

    def _seen(self, contexts: np.ndarray) -> np.ndarray:
        """Tokens a layer looks at, on average over layers."""
        shape = self.shape
        if shape.window is None or not shape.windowed_layers:
            return contexts
        windowed = len(shape.windowed_layers)
        full = (shape.layers - windowed) * contexts
        return np.asarray((full + windowed * np.minimum(contexts, shape.window)) / shape.layers)

    def _exchange_s(self, tokens: float) -> float:
        """All-reduces after attention and feed-forward of each layer, bf16."""
        ring = Ring.neighbours(self.cluster, self.tensor_parallel)
        return 2 * self.shape.layers * ring.all_reduce_s(2 * self.shape.hidden * tokens)

    def _send_s(self, tokens: np.ndarray) -> np.ndarray:
        """What all stages send, one after the other; the last one sends the sampled tokens back, counted as the same."""
        per_node, tp = self.cluster.devices_per_node, self.tensor_parallel
        nodes = [stage * tp // per_node for stage in range(self.pipeline)]
        across = sum(here != nodes[(stage + 1) % self.pipeline] for stage, here in enumerate(nodes))
        sizes = self.constants.stage_bytes * self.shape.hidden * tokens
        found = np.zeros(len(tokens))
        for count, link in ((across, self.cluster.across), (self.pipeline - across, self.cluster.inside)):
            found += count * (link.latency_s + sizes / link.bytes_s)
        return found


def weights_read(shape: ModelShape, batch: np.ndarray | float) -> np.ndarray:
    """Parameters a decode step reads. Of E experts, b tokens that choose k each at random touch `E·(1 - (1 - k/E)^b)`."""
    if shape.experts is None:
        return np.full(np.shape(batch), float(shape.matmul_params()))
    share = shape.experts.num_active / shape.experts.num_experts
    touched = 1 - (1 - share) ** batch
    return np.asarray(shape.matmul_params() + (touched - share) * shape.expert_params())


@dataclass(frozen=True, slots=True)
class Generation:
    """Sampling one batch, on the replica that ends last."""

    prefill_s: float
    decode_s: float
    steps: int
    slot_utilization: float
    """Tokens sampled over slots times steps, of all replicas: 1 when every slot works to the end."""
    finish_s: tuple[float, ...]
    """When each response ends, from the start of decoding, in the order given."""

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def generate(
    replica: Replica,
    prompts: Sequence[int],
    responses: Sequence[int],
    *,
    replicas: int = 1,
    max_batch: int | None = None,
) -> Generation:
    """Sample responses of known lengths: slots are filled in order, and refilled as responses end.

    Args:
        prompts: tokens of each prompt.
        responses: tokens of each response, at least 1.
        replicas: copies that share the batch: copy i takes responses i, i + replicas, ...
        max_batch: slots of one copy; left out, as many sequences of mean length as its cache holds.

    From one end to the next the batch stays the same and a step takes what it takes at the mean context halfway, which is exact
    while a step stays bound by memory or by arithmetic. Evictions when long sequences outgrow the cache are not modelled, and
    prefill is counted before decoding.
    """
    if not prompts or len(prompts) != len(responses) or min(responses) < 1 or min(prompts) < 0 or replicas < 1:
        raise ConfigError(
            f"generation needs a prompt for each response of at least one token, and a replica; found {len(prompts)} "
            f"prompts, {len(responses)} responses, {replicas} replicas"
        )
    mean = (sum(prompts) + sum(responses)) / len(prompts)
    slots = max_batch if max_batch is not None else replica.max_batch(mean)
    if slots < 1:
        raise ConfigError(f"generation needs at least one slot; found {slots}")
    finish_s = np.zeros(len(prompts))
    prefill_s = decode_s = 0.0
    steps = 0
    for first, part in enumerate(_events(tuple(prompts), tuple(responses), replicas, slots)):
        prefill_s = max(prefill_s, replica.prefill_s(part.prompts))
        times = np.cumsum(part.steps * replica.decode_steps_s(part.batches, part.contexts))
        finish_s[first::replicas] = times[part.ends]
        decode_s, steps = max(decode_s, float(times[-1])), max(steps, int(part.steps.sum()))
    used = sum(responses) / (slots * replicas * steps)
    return Generation(prefill_s, decode_s, steps, used, tuple(finish_s.tolist()))


@dataclass(frozen=True, slots=True)
class _Events:
    """What one copy of an engine does, whatever a step takes: stretches of steps with the same batch."""

    prompts: tuple[int, ...]
    steps: np.ndarray
    """Of each stretch."""
    batches: np.ndarray
    contexts: np.ndarray
    """Mean tokens of the running sequences, halfway through the stretch."""
    ends: np.ndarray
    """Of each response, the stretch with which it ends."""


@lru_cache(maxsize=128)
def _events(prompts: tuple[int, ...], responses: tuple[int, ...], replicas: int, slots: int) -> tuple[_Events, ...]:
    """Of every copy that has something to do. Cached: engines differ in what a step takes, not in what happens."""
    made = _all_at_once if slots * replicas >= len(prompts) else _refilled
    return tuple(
        made(prompts[first::replicas], responses[first::replicas], slots)
        for first in range(min(replicas, len(prompts)))
    )


def _all_at_once(prompts: tuple[int, ...], responses: tuple[int, ...], slots: int) -> _Events:
    """A slot for each sequence: they end in the order of their lengths."""
    lengths = np.array(responses)
    until, ends = np.unique(lengths, return_inverse=True)
    before = np.concatenate(([0], until[:-1]))
    gone = np.concatenate(([0], np.cumsum(np.bincount(ends))[:-1]))
    batches = len(lengths) - gone
    read = np.bincount(ends, weights=np.array(prompts, np.float64))
    offsets = sum(prompts) - np.concatenate(([0.0], np.cumsum(read)[:-1]))
    return _Events(prompts, until - before, batches, (before + until) / 2 + offsets / batches, ends)


def _refilled(prompts: tuple[int, ...], responses: tuple[int, ...], slots: int) -> _Events:
    """Fewer slots than sequences: who ends makes room for the next in order."""
    count = len(responses)
    # (the step after which a response ends, its row) as one number; the first `slots` start at once
    running = [responses[row] * count + row for row in range(min(slots, count))]
    heapq.heapify(running)
    # prompts of the running less the step at which each started, so that contexts sum to batch · step + offsets
    offsets, waiting = sum(prompts[: len(running)]), len(running)
    ends = [0] * count
    stretches: list[tuple[int, int, float]] = []
    step = 0
    while running:
        until = running[0] // count
        batch = len(running)
        context = (step + until) / 2 + offsets / batch
        while running and running[0] // count == until:
            row = running[0] % count
            ends[row] = len(stretches)
            offsets -= prompts[row] - (until - responses[row])
            if waiting < count:
                heapq.heapreplace(running, (until + responses[waiting]) * count + waiting)
                offsets += prompts[waiting] - until
                waiting += 1
            else:
                heapq.heappop(running)
        stretches.append((until - step, batch, context))
        step = until
    steps, batches, contexts = zip(*stretches, strict=True)
    return _Events(prompts, np.array(steps), np.array(batches), np.array(contexts), np.array(ends))


def waves_s(replica: Replica, prompt: float, response: float, sequences: float, *, max_batch: int) -> float:
    """Decoding in closed form, when all lengths are equal: `sequences/b` waves of full batches, parts counting as parts.

    A lower estimate than `generate`, where the last wave takes its full number of steps.
    """
    batch = min(max_batch, math.ceil(sequences))
    return sequences / batch * response * replica.decode_step_s(batch, prompt + response / 2)
