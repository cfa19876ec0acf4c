"""Options of models that are trained, and of those that only make forward passes.

What depends on the tokens of a micro-batch (products, gathers, activations) and what depends on the class of offload (state,
copies) are counted apart, each once, and then put together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flowrl.cost.memory import TrainMemory, activation_token_bytes, logit_bytes, train_memory
from flowrl.cost.offload import Offload, OptimizerState, StateCost, state_cost
from flowrl.cost.shapes import ModelShape
from flowrl.cost.train import TrainStep, can_split, forward_pass_s, is_cut_in_training, train_step
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.choices import Choices, Option, Setting
from flowrl.planner.roles import Call, Role
from flowrl.planner.workload import Workload

PARTIAL = (Offload.CPU_OPTIMIZER, Offload.STREAM_OPTIMIZER)
"""Classes that leave weights on the device; these can be parked besides."""


def layouts(
    shape: ModelShape, cluster: Cluster, mesh: Mesh, choices: Choices, asked: Layout | None
) -> tuple[Layout, ...]:
    """How weights can be cut: over all devices, or over those of a node with a replica in each, with and without tensor
    parallelism.

    Tensor parallelism stays inside a node; heads and feed-forward blocks must divide, and the engine must know how to cut the
    model. Stages are not offered: a trainer's bubble and its memory have formulas (`flowrl.cost.train`), its handover of weights
    has none.
    """
    per_node = cluster.devices_per_node
    found: list[Layout] = []
    degrees = choices.train_tensor_parallel if asked is None else (asked.tp,)
    for tp in sorted(degrees):
        node = min(per_node, mesh.size)
        inside = tp == 1 or (node % tp == 0 and is_cut_in_training(shape) and can_split(shape, tp))
        if not inside or mesh.size % tp:
            continue
        cuts = (mesh.size, per_node) if mesh.size > per_node else (mesh.size,)
        found += [Layout(dp=mesh.size // cut, fsdp=cut // tp, tp=tp) for cut in cuts]
    if asked is None:
        return tuple(found)
    wanted = asked.pp == 1 and asked.size == mesh.size and any(one.tp == asked.tp for one in found)
    return (asked,) if wanted else ()


def micro_batches(choices: Choices, workload: Workload, tp: int = 1) -> tuple[int, ...]:
    """Tokens of a micro-batch, which tp devices work on together: never less than the longest sequence."""
    return tuple(sorted({max(tokens * tp, workload.longest) for tokens in choices.micro_batch_tokens}))


def trained_options(
    role: Role, cluster: Cluster, mesh: Mesh, workload: Workload, choices: Choices, asked: Layout | None = None
) -> Iterator[Option]:
    """Every layout, size of a micro-batch, optimizer, class of offload, with and without recomputation."""
    for layout in layouts(role.shape, cluster, mesh, choices, asked):
        where = _Where(role.shape, cluster, mesh, workload, choices, layout)
        held = [
            _Held(rank, state, offload, park, where.state(state, offload, park))
            for rank, state in enumerate(choices.optimizers)
            for offload in choices.offload
            for park in ((False, True) if offload in PARTIAL else (False,))
        ]
        for tokens in micro_batches(choices, workload, layout.tp):
            forward_s = {call.node: where.forward_s(call, tokens) for call in role.calls if call.work == "forward"}
            work = [_Work.of(role, where, tokens, recompute, forward_s) for recompute in choices.recompute]
            for state in held:
                for one in work:
                    used = one.memory.with_state(state.cost)
                    if used.total_bytes <= choices.room_bytes(cluster):  # else nothing else of it matters
                        yield _option(role, where, one, state, used)


@dataclass(frozen=True, slots=True)
class _Where:
    """A model under a layout."""

    shape: ModelShape
    cluster: Cluster
    mesh: Mesh
    workload: Workload
    choices: Choices
    layout: Layout

    @property
    def shards(self) -> int:
        """Devices over which one copy of the weights is cut."""
        return self.layout.fsdp * self.layout.tp

    def state(self, state: OptimizerState, offload: Offload, park: bool) -> StateCost:
        nodes = len(self.mesh.nodes(self.cluster.devices_per_node))
        return state_cost(self.shape, self.cluster, shards=self.shards, nodes=nodes, offload=offload, park_weights=park,
                          state=state, constants=self.choices.moving)  # fmt: skip

    def forward_s(self, call: Call, tokens: int) -> float:
        """Seconds of a forward pass over a call's sequences."""
        return forward_pass_s(self.shape, self.cluster, self.mesh, self.workload.totals(call.sequences), tokens=tokens,
                              shards=self.layout.fsdp, tensor_parallel=self.layout.tp,
                              sequence_parallel=self.choices.sequence_parallel)  # fmt: skip

    def settings(self, tokens: int) -> tuple[tuple[str, Setting], ...]:
        found: tuple[tuple[str, Setting], ...] = (("micro_batch_tokens", tokens),)
        if self.layout.tp > 1:
            found = (*found, ("sequence_parallel", self.choices.sequence_parallel))
        return found


@dataclass(frozen=True, slots=True)
class _Held:
    """Where the state of training lies, and what that costs."""

    numerics: int
    state: OptimizerState
    offload: Offload
    park: bool
    cost: StateCost


@dataclass(frozen=True, slots=True)
class _Work:
    """What the calls of a role take with one size of micro-batch, whatever the class of offload."""

    tokens: int
    recompute: bool
    memory: TrainMemory
    steps: tuple[TrainStep | float, ...]
    """Of each call: one optimizer step, or the seconds of a forward pass."""

    @classmethod
    def of(cls, role: Role, where: _Where, tokens: int, recompute: bool, forward_s: Mapping[str, float]) -> _Work:
        choices, layout = where.choices, where.layout
        memory = train_memory(
            where.shape,
            where.cluster,
            shards=layout.fsdp,
            tokens=tokens,
            recompute=recompute,
            loss=choices.loss,
            chunk=choices.logit_chunk,
            tensor_parallel=layout.tp,
            sequence_parallel=choices.sequence_parallel and layout.tp > 1,
            constants=choices.memory,
            moving=choices.moving,
        )
        steps: list[TrainStep | float] = []
        for call in role.calls:
            if call.work == "forward":
                steps.append(forward_s[call.node])
                continue
            lengths = where.workload.totals(max(1, math.ceil(call.sequences / call.steps)))
            steps.append(
                train_step(
                    where.shape,
                    where.cluster,
                    where.mesh,
                    lengths,
                    tokens=tokens,
                    shards=layout.fsdp,
                    tensor_parallel=layout.tp,
                    sequence_parallel=choices.sequence_parallel,
                    recompute=recompute,
                    constants=choices.train,
                    moving=choices.moving,
                )
            )
        return cls(tokens, recompute, memory, tuple(steps))


def _option(role: Role, where: _Where, work: _Work, held: _Held, used: TrainMemory) -> Option:
    keep, shape = where.choices, where.shape
    static = used.idle_bytes * keep.memory.fragmentation
    own = used.total_bytes - keep.memory.context_bytes - static
    element = keep.moving.weight_bytes if held.park else keep.moving.stored_bytes
    shard = element * shape.params() / where.shards
    # weights that lie on the host come in before a forward pass of their own; they are not written back
    load_s = 0.0 if held.cost.idle_bytes else shard / where.cluster.host_link.bytes_s
    # shards of the weights stay after the update until the engine has them, where none are at rest there
    is_parked = held.park or held.offload is Offload.PARK
    seconds: list[float] = []
    for call, step in zip(role.calls, work.steps, strict=True):
        if isinstance(step, float):
            seconds.append(call.share * (step + load_s))
        else:
            whole = step.with_state(held.cost)
            seconds.append(call.share * (call.steps * (whole.total_s - whole.move_s) + whole.move_s))
    settings: tuple[tuple[str, Setting], ...] = (
        *where.settings(work.tokens),
        ("recompute", work.recompute),
        ("offload", held.offload.value),
        ("park_weights", held.park),
        ("optimizer", held.state.name),
    )
    return Option(
        role.name,
        where.layout,
        tuple(seconds),
        static_bytes=static,
        dynamic_bytes=max(0.0, own),
        host_bytes=used.host_bytes * where.layout.dp,
        numerics=held.numerics,
        handover_bytes=shard * keep.memory.fragmentation if is_parked else 0.0,
        is_on_host=held.offload is Offload.STREAM_ALL,
        has_context=True,
        settings=settings,
    )


def frozen_options(
    role: Role, cluster: Cluster, mesh: Mesh, workload: Workload, choices: Choices, asked: Layout | None = None
) -> Iterator[Option]:
    """A model that is never trained: bf16 shards, on the device or parked on the hosts between its calls."""
    shape, keep = role.shape, choices.memory
    for layout in layouts(shape, cluster, mesh, choices, asked):
        where, tp = _Where(shape, cluster, mesh, workload, choices, layout), layout.tp
        weights = 2.0 * shape.params() / where.shards
        held = weights * keep.fragmentation
        load_s = weights / cluster.host_link.bytes_s
        for tokens in micro_batches(choices, workload, tp):
            own = sum(forward_parts(shape, choices, tokens=tokens, tp=tp).values()) * keep.fragmentation
            seconds = tuple(call.share * where.forward_s(call, tokens) for call in role.calls)
            parked = tuple(time + call.share * load_s for time, call in zip(seconds, role.calls, strict=True))
            size = where.settings(tokens)
            yield Option(role.name, layout, seconds, held, own, has_context=True, settings=(*size, ("offload", "none")))
            yield Option(role.name, layout, parked, 0.0, own + held, weights * mesh.size, has_context=True,
                         settings=(*size, ("offload", "park")))  # fmt: skip


def forward_parts(shape: ModelShape, choices: Choices, *, tokens: int, tp: int) -> dict[str, float]:
    """Bytes by category that a forward pass takes on each device besides the shards, as its tensors have them: two layers and the
    ends gathered, one layer's activations, logits."""
    is_split = choices.sequence_parallel and tp > 1
    layer = activation_token_bytes(shape, tensor_parallel=tp, sequence_parallel=is_split, constants=choices.memory)
    logits = logit_bytes(shape, tokens, loss="log_softmax_no_grad", chunk=choices.logit_chunk, tensor_parallel=tp,
                         constants=choices.memory)  # fmt: skip
    gathered = (2 * 2 * shape.layer_params() + 2 * shape.root_params()) / tp
    return {"gathered": gathered, "activations": tokens * layer, "logits": logits}
