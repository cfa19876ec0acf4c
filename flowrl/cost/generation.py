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


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of a sampling engine on `tensor_parallel` neighbouring devices.

    Example:
        Replica(ModelShape.of("Qwen2.5-32B"), Cluster.named("16xH100-80G"), tensor_parallel=4)
    """

    shape: ModelShape
    cluster: Cluster
    tensor_parallel: int = 1
    constants: EngineConstants = EngineConstants()

    def __post_init__(self) -> None:
        if not 1 <= self.tensor_parallel <= self.cluster.num_devices:
            raise ConfigError(
                f"a replica has 1 to {self.cluster.num_devices} devices on this cluster; found {self.tensor_parallel}"
            )

    def prefill_s(self, lengths: Sequence[int]) -> float:
        """Reading prompts: `C_f/(tp·F·eta_fwd) + 2·L·t_ar(2·h·T)` and traffic; a prompt's whole length is read, nothing is
        shared."""
        reading = forward_s(self.shape, self.cluster, self.tensor_parallel, lengths, with_logits=False)
        return reading + self._exchange_s(sum(lengths))

    def decode_step_s(self, batch: int, context: float) -> float:
        """One token for each of `batch` sequences with `context` tokens on average.

            max( (2·N_read + b·c·kv) / (tp·B_hbm·eta_read),
                 (2·N_mm·b + 4·a·d·L·c·b) / (tp·F·eta_decode) )  +  2·L·t_ar(2·h·b)  +  overhead

        N_read are the weights that are read: N_mm, and of experts those that at least one of the tokens goes to. Layers with a
        window see no more than the window.
        """
        if batch <= 0:
            return 0.0
        shape, device, efficiency = self.shape, self.cluster.device, self.cluster.efficiency
        seen = self._seen(context)
        kv = shape.kv_token_bytes(element_bytes=self.constants.cache_bytes, tensor_parallel=self.tensor_parallel)
        read = self.constants.weight_bytes * weights_read(shape, batch) + batch * seen * kv
        flops = batch * (2.0 * shape.matmul_params() + 4 * shape.heads * attention_width(shape) * shape.layers * seen)
        memory_s = read / (self.tensor_parallel * device.hbm_bytes_s * efficiency.decode_hbm)
        compute_s = flops / (self.tensor_parallel * device.peak_flops * efficiency.decode_flops)
        return max(memory_s, compute_s) + self._exchange_s(batch) + self.constants.step_overhead_s

    def capacity_tokens(self, memory: MemoryConstants | None = None) -> float:
        """Tokens the cache holds."""
        found = cache_capacity_tokens(
            self.shape,
            self.cluster,
            utilization=self.constants.utilization,
            tensor_parallel=self.tensor_parallel,
            constants=memory,
        )
        return found * 2 / self.constants.cache_bytes

    def max_batch(self, mean_tokens: float, memory: MemoryConstants | None = None) -> int:
        """Sequences of `mean_tokens` tokens (prompt and response) that run at once; ConfigError when not even one fits."""
        fits = int(self.capacity_tokens(memory) // mean_tokens)
        if fits < 1:
            raise ConfigError(
                f"the cache of {self.tensor_parallel} devices holds {self.capacity_tokens(memory):.0f} tokens, a sequence has "
                f"{mean_tokens:.0f}; use more tensor parallelism, shorter sequences or a higher utilization"
            )
        return min(fits, self.constants.max_sequences)

    def _seen(self, context: float) -> float:
        """Tokens a layer looks at, on average over layers."""
        shape = self.shape
        if shape.window is None or not shape.windowed_layers:
            return context
        windowed = len(shape.windowed_layers)
        return ((shape.layers - windowed) * context + windowed * min(context, shape.window)) / shape.layers

    def _exchange_s(self, tokens: float) -> float:
        """All-reduces after attention and feed-forward of each layer, bf16."""
        ring = Ring.neighbours(self.cluster, self.tensor_parallel)
        return 2 * self.shape.layers * ring.all_reduce_s(2 * self.shape.hidden * tokens)


def weights_read(shape: ModelShape, batch: int) -> float:
    """Parameters a decode step reads. Of E experts, b tokens that choose k each at random touch `E·(1 - (1 - k/E)^b)`."""
    if shape.experts is None:
        return float(shape.matmul_params())
    share = shape.experts.num_active / shape.experts.num_experts
    touched = 1 - (1 - share) ** batch
    return shape.matmul_params() + (touched - share) * shape.expert_params()


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
    finish_s = [0.0] * len(prompts)
    prefill_s = decode_s = 0.0
    steps = 0
    for first in range(min(replicas, len(prompts))):
        mine = range(first, len(prompts), replicas)
        prefill_s = max(prefill_s, replica.prefill_s([prompts[row] for row in mine]))
        ends, last = _decode(replica, [prompts[row] for row in mine], [responses[row] for row in mine], slots)
        for row, end in zip(mine, ends, strict=True):
            finish_s[row] = end
        decode_s, steps = max(decode_s, max(ends)), max(steps, last)
    return Generation(prefill_s, decode_s, steps, sum(responses) / (slots * replicas * steps), tuple(finish_s))


def _decode(replica: Replica, prompts: Sequence[int], responses: Sequence[int], slots: int) -> tuple[list[float], int]:
    """When each response ends, seconds, and the steps of all."""
    running: list[tuple[int, int]] = []  # (the step after which a response ends, its row)
    offsets = (
        0  # of the running: prompt less the step at which it started, so that contexts sum to batch · step + offsets
    )
    ends = [0.0] * len(responses)
    now_s, step, waiting = 0.0, 0, 0
    while running or waiting < len(responses):
        while len(running) < slots and waiting < len(responses):
            heapq.heappush(running, (step + responses[waiting], waiting))
            offsets += prompts[waiting] - step
            waiting += 1
        until = running[0][0]
        context = (step + until) / 2 + offsets / len(running)
        now_s += (until - step) * replica.decode_step_s(len(running), context)
        step = until
        while running and running[0][0] == step:
            _, row = heapq.heappop(running)
            offsets -= prompts[row] - (step - responses[row])
            ends[row] = now_s
    return ends, step


def waves_s(replica: Replica, prompt: float, response: float, sequences: float, *, max_batch: int) -> float:
    """Decoding in closed form, when all lengths are equal: `sequences/b` waves of full batches, parts counting as parts.

    A lower estimate than `generate`, where the last wave takes its full number of steps.
    """
    batch = min(max_batch, math.ceil(sequences))
    return sequences / batch * response * replica.decode_step_s(batch, prompt + response / 2)
