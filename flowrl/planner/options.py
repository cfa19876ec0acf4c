"""The ways in which a role can run on a mesh, and which of them are worth looking at.

An option is a layout and its settings (tokens of a micro-batch, recomputation, class of offload, the engine's share of memory)
with what they cost: seconds of each call, bytes on a device between and during its calls, bytes on hosts. Of the options with one
layout only those are kept that no other one beats or equals in everything (Pareto). What a role costs depends on how many devices
its mesh has and over how many nodes they go, never on which ones, so options are made once for each size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from flowrl.cost.collectives import Ring
from flowrl.cost.generation import EngineConstants, Replica, generate
from flowrl.cost.memory import (
    MemoryConstants,
    activation_token_bytes,
    engine_weight_bytes,
    logit_bytes,
    train_memory,
)
from flowrl.cost.offload import ADAM_FP32, Offload, OffloadConstants, OptimizerState, state_cost
from flowrl.cost.shapes import ModelShape
from flowrl.cost.train import TrainConstants, score_s, train_step
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.roles import Call, Role
from flowrl.planner.workload import Workload

Setting = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Choices:
    """What the planner may choose from, and the calibrated numbers it counts with."""

    micro_batch_tokens: tuple[int, ...] = (4096, 8192, 16384, 32768)
    """Per device. The longest sequence sets the least."""
    recompute: tuple[bool, ...] = (True, False)
    offload: tuple[Offload, ...] = tuple(Offload)
    optimizers: tuple[OptimizerState, ...] = (ADAM_FP32,)
    """The one the user asked for, then those whose other numerics the user consents to."""
    utilization: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
    """Shares of a device's memory for an engine."""
    tensor_parallel: tuple[int, ...] = (1, 2, 4, 8)
    loss: str = "cross_entropy"
    logit_chunk: int | None = 1024
    memory: MemoryConstants = field(default_factory=MemoryConstants)
    train: TrainConstants = field(default_factory=TrainConstants)
    engine: EngineConstants = field(default_factory=EngineConstants)
    moving: OffloadConstants = field(default_factory=OffloadConstants)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a role on a mesh.

    Example:
        Option("ref", Layout.parse("f8"), seconds=(19.4,), static_bytes=2.0e9, dynamic_bytes=6.1e9,
               settings=(("micro_batch_tokens", 8192), ("offload", "none")))
    """

    role: str
    layout: Layout
    seconds: tuple[float, ...]
    """Of each call of the role, in their order; copies from and to hosts included."""
    static_bytes: float
    """On each device while others of the set work."""
    dynamic_bytes: float
    """On each device during its own calls, besides the static ones."""
    host_bytes: float = 0.0
    """On all hosts of the mesh together."""
    numerics: int = 0
    """0: what the user asked for; above: how far down the list of optimizers."""
    handover_bytes: float = 0.0
    """On each device, besides the static ones, while new weights wait for their engine: shards of the trainer, weights of the
    engine."""
    is_on_host: bool = False
    """Its weights must be loaded from the hosts before they can be handed out."""
    has_context: bool = False
    """It runs in processes that keep a device context."""
    settings: tuple[tuple[str, Setting], ...] = ()

    @property
    def peak_bytes(self) -> float:
        return self.static_bytes + self.dynamic_bytes

    @property
    def costs(self) -> tuple[float, ...]:
        """What one option can be better in than another: lower is better in each."""
        return (*self.seconds, self.static_bytes, self.dynamic_bytes, self.host_bytes, self.numerics, self.handover_bytes,
                self.is_on_host)  # fmt: skip


def all_options(role: Role, cluster: Cluster, mesh: Mesh, workload: Workload, choices: Choices) -> tuple[Option, ...]:
    """Every option of a role on a mesh that fits its devices alone; none when nothing does."""
    if role.is_engine:
        found = _engine(role, cluster, mesh, workload, choices)
    elif role.is_trained:
        found = _trained(role, cluster, mesh, workload, choices)
    else:
        found = _frozen(role, cluster, mesh, workload, choices)
    context = choices.memory.context_bytes
    capacity = cluster.device.memory_bytes
    return tuple(one for one in found if one.peak_bytes + context * one.has_context <= capacity)


def pareto(options: Sequence[Option]) -> tuple[Option, ...]:
    """Without the options that another one of the same layout beats or equals in everything.

    Of equals, the first stays. The fastest come first.
    """
    kept: list[tuple[Option, tuple[float, ...]]] = []
    ranked = sorted(enumerate(options), key=lambda item: (sum(item[1].seconds), item[1].costs, item[0]))
    for _, one in ranked:
        costs = one.costs
        if not any(other.layout == one.layout and beats(mine, costs) for other, mine in kept):
            kept.append((one, costs))
    return tuple(one for one, _ in kept)


def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether `one` is nowhere higher."""
    return all(a <= b for a, b in zip(one, other, strict=True))


# ------------------------------------------------------------------------------------------------------------- engines


def _engine(role: Role, cluster: Cluster, mesh: Mesh, workload: Workload, choices: Choices) -> Iterator[Option]:
    shape, capacity = role.shape, cluster.device.memory_bytes
    known: dict[tuple[int, int, Call], float] = {}
    for tp in choices.tensor_parallel:
        if mesh.size % tp or tp > cluster.devices_per_node or not _splits(shape, tp):
            continue
        replicas = mesh.size // tp
        weights = engine_weight_bytes(shape, tensor_parallel=tp)
        for share in choices.utilization:
            replica = Replica(shape, cluster, tp, replace(choices.engine, utilization=share))
            if replica.capacity_tokens(choices.memory) < workload.longest:
                continue
            seconds = tuple(_generate_s(replica, call, workload, replicas, choices, known) for call in role.calls)
            settings: tuple[tuple[str, Setting], ...] = (("utilization", share),)
            used = share * capacity
            layout = Layout(dp=replicas, tp=tp)
            if role.weights_from:  # sleeps without weights: new ones come in every step
                yield Option(role.name, layout, seconds, 0.0, used, handover_bytes=weights, settings=settings)
                continue
            yield Option(role.name, layout, seconds, weights, used - weights, settings=(*settings, ("offload", "none")))
            load_s = weights / cluster.host_link.bytes_s
            parked = tuple(time + call.share * load_s for time, call in zip(seconds, role.calls, strict=True))
            settings = (*settings, ("offload", "park"))
            yield Option(role.name, layout, parked, 0.0, used, 2.0 * shape.params() * replicas, settings=settings)


def _splits(shape: ModelShape, tp: int) -> bool:
    """Whether heads and the feed-forward block divide over `tp` devices."""
    kv = shape.kv_heads
    return shape.heads % tp == 0 and (kv % tp == 0 or tp % kv == 0) and shape.ffn % tp == 0


def _generate_s(
    replica: Replica,
    call: Call,
    workload: Workload,
    replicas: int,
    choices: Choices,
    known: dict[tuple[int, int, Call], float],
) -> float:
    prompts, responses = workload.sequences(call.sequences)
    mean = (sum(prompts) + sum(responses)) / len(prompts)
    # more slots than sequences change nothing; the cache holds the longest sequence, so a slot there is
    slots = min(replica.max_batch(mean, choices.memory), math.ceil(call.sequences / replicas))
    key = (replica.tensor_parallel, slots, call)
    if key not in known:
        known[key] = generate(replica, prompts, responses, replicas=replicas, max_batch=slots).total_s
    return call.share * known[key]


# ------------------------------------------------------------------------------------------------------------ training


def _trained(role: Role, cluster: Cluster, mesh: Mesh, workload: Workload, choices: Choices) -> Iterator[Option]:
    for shards in _cuts(cluster, mesh):
        for tokens in micro_batches(choices, workload):
            for rank, state in enumerate(choices.optimizers):
                for offload in choices.offload:
                    is_partial = offload in (Offload.CPU_OPTIMIZER, Offload.STREAM_OPTIMIZER)
                    for park in (False, True) if is_partial else (False,):
                        for recompute in choices.recompute:
                            train = _Train(role, cluster, mesh, workload, choices, shards, tokens, state, offload, park)
                            yield train.option(recompute, rank)


def _cuts(cluster: Cluster, mesh: Mesh) -> tuple[int, ...]:
    """Numbers of shards: over all devices, or over those of a node with a replica in each."""
    per_node = cluster.devices_per_node
    return (mesh.size, per_node) if mesh.size > per_node else (mesh.size,)


def micro_batches(choices: Choices, workload: Workload) -> tuple[int, ...]:
    """Tokens of a micro-batch: never less than the longest sequence."""
    return tuple(sorted({max(tokens, workload.longest) for tokens in choices.micro_batch_tokens}))


@dataclass(frozen=True, slots=True)
class _Train:
    role: Role
    cluster: Cluster
    mesh: Mesh
    workload: Workload
    choices: Choices
    shards: int
    tokens: int
    state: OptimizerState
    offload: Offload
    park: bool

    def option(self, recompute: bool, rank: int) -> Option:
        keep, shape = self.choices, self.role.shape
        used = train_memory(
            shape,
            self.cluster,
            shards=self.shards,
            tokens=self.tokens,
            recompute=recompute,
            loss=keep.loss,
            chunk=keep.logit_chunk,
            offload=self.offload,
            park_weights=self.park,
            state=self.state,
            constants=keep.memory,
            moving=keep.moving,
        )
        replicas = self.mesh.size // self.shards
        static = used.idle_bytes * keep.memory.fragmentation
        own = used.total_bytes - keep.memory.context_bytes - static
        settings: dict[str, Setting] = {
            "micro_batch_tokens": self.tokens,
            "recompute": recompute,
            "offload": self.offload.value,
            "park_weights": self.park,
            "optimizer": self.state.name,
        }
        return Option(
            self.role.name,
            Layout(dp=replicas, fsdp=self.shards),
            tuple(self._call_s(call, recompute) for call in self.role.calls),
            static_bytes=static,
            dynamic_bytes=max(0.0, own),
            host_bytes=used.host_bytes * replicas,
            numerics=rank,
            handover_bytes=self._handover_bytes(),
            is_on_host=self.offload is Offload.STREAM_ALL,
            has_context=True,
            settings=tuple(settings.items()),
        )

    def _call_s(self, call: Call, recompute: bool) -> float:
        keep = self.choices
        if call.work == "forward":
            return call.share * (self._forward_s(call) + self._load_s())
        lengths = self.workload.totals(max(1, math.ceil(call.sequences / call.steps)))
        step = train_step(
            self.role.shape,
            self.cluster,
            self.mesh,
            lengths,
            tokens=self.tokens,
            shards=self.shards,
            recompute=recompute,
            offload=self.offload,
            park_weights=self.park,
            state=self.state,
            constants=keep.train,
            moving=keep.moving,
        )
        return call.share * (call.steps * (step.total_s - step.move_s) + step.move_s)

    def _handover_bytes(self) -> float:
        """Shards of the weights that stay after the update until the engine has them, where none are at rest there."""
        keep = self.choices
        if not (self.park or self.offload is Offload.PARK):
            return 0.0
        element = keep.moving.weight_bytes if self.park else keep.moving.stored_bytes
        return element * self.role.shape.params() / self.shards * keep.memory.fragmentation

    def _forward_s(self, call: Call) -> float:
        return forward_s(self.role.shape, self.cluster, self.mesh, self.workload.totals(call.sequences), self.tokens,
                         self.shards)  # fmt: skip

    def _load_s(self) -> float:
        """Weights that lie on the host come in before a forward pass of their own; they are not written back."""
        keep, shape = self.choices.moving, self.role.shape
        held = state_cost(shape, self.cluster, shards=self.shards, offload=self.offload, park_weights=self.park,
                          state=self.state, constants=keep)  # fmt: skip
        if held.idle_bytes:
            return 0.0
        element = keep.weight_bytes if self.park else keep.stored_bytes
        return element * shape.params() / self.shards / self.cluster.host_link.bytes_s


# ------------------------------------------------------------------------------------------------------- forward passes


def forward_s(
    shape: ModelShape, cluster: Cluster, mesh: Mesh, lengths: Sequence[int], tokens: int, shards: int
) -> float:
    """A forward pass over sequences with sharded weights, `tokens` at a time on each device.

    `max(C_f/(G·F·eta_fwd), m·t_ag(2·N)) + first gather`.
    """
    count = max(1, math.ceil(sum(lengths) / (mesh.size * tokens)))
    ring = Ring.of(cluster, Mesh(mesh.first, shards))
    gather_s = ring.all_gather_s(2.0 * shape.params())
    first_s = ring.all_gather_s(2.0 * (shape.root_params() + shape.layer_params(0)))
    return max(score_s(shape, cluster, mesh.size, lengths), count * gather_s) + first_s


def _frozen(role: Role, cluster: Cluster, mesh: Mesh, workload: Workload, choices: Choices) -> Iterator[Option]:
    """A model that is never trained: bf16 shards, on the device or parked on the hosts between its calls."""
    shape, keep = role.shape, choices.memory
    for shards in _cuts(cluster, mesh):
        weights = 2.0 * shape.params() / shards
        replicas = mesh.size // shards
        load_s = weights / cluster.host_link.bytes_s
        for tokens in micro_batches(choices, workload):
            layers = 2 * 2 * shape.layer_params() + 2 * shape.root_params()
            layer = activation_token_bytes(shape, constants=keep) * tokens
            logits = logit_bytes(shape, tokens, loss="log_softmax_no_grad", chunk=choices.logit_chunk, constants=keep)
            own = (layers + layer + logits) * keep.fragmentation
            seconds = tuple(
                call.share * forward_s(shape, cluster, mesh, workload.totals(call.sequences), tokens, shards)
                for call in role.calls
            )
            parked = tuple(time + call.share * load_s for time, call in zip(seconds, role.calls, strict=True))
            layout, held = Layout(dp=replicas, fsdp=shards), weights * keep.fragmentation
            size = ("micro_batch_tokens", tokens)
            settings: tuple[tuple[str, Setting], ...] = (size, ("offload", "none"))
            yield Option(role.name, layout, seconds, held, own, has_context=True, settings=settings)
            settings = (size, ("offload", "park"))
            yield Option(role.name, layout, parked, 0.0, own + held, weights * mesh.size, has_context=True,
                         settings=settings)  # fmt: skip
