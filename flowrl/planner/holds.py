"""What a role holds, by category: the parts of an option's bytes, and which of them may be moved to the hosts and back.

    parameters   shards of a trainer's or a scorer's weights
    gradients    of all parameters
    optimizer    master copy and moments
    gathered     layers whose shards are together, for a moment
    activations  what a pass keeps; of an engine, with its graphs
    logits
    weights      of an engine, in its own layout
    cache        keys and values
    buffers      gradients in a reduction, buckets of streamed state
    context      what a device context takes

A hold's `what` is "<role> <category>". The parts add to the option's bytes.

[Note: State that moves]
A `State` is what is moved as one: it is on a device while some call uses it, and between two uses either stays or goes to the
hosts and comes back. Parked training state is two of them. Forward passes and handovers use the parameters alone; gradients and
optimizer are there for the update only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowrl.cost.memory import engine_weight_bytes, train_memory
from flowrl.cost.offload import Offload, OptimizerState, state_cost
from flowrl.cost.shapes import ModelShape
from flowrl.mesh import Mesh
from flowrl.planner.options import Choices, Option
from flowrl.planner.problem import Problem
from flowrl.planner.roles import Call, Role
from flowrl.planner.train_options import forward_parts

CATEGORIES = (
    "parameters", "gradients", "optimizer", "gathered", "activations", "logits", "weights", "cache", "buffers", "context",
)  # fmt: skip
Parts = dict[str, float]
"""Bytes by category."""


@dataclass(frozen=True, slots=True)
class State:
    """State of a role that may be moved; see [Note: State that moves]."""

    role: str
    name: str
    """`parameters`, `training state`, `weights`."""
    parts: tuple[tuple[str, float], ...]
    """Bytes on each device by category, with what the allocator takes over them."""
    moved_bytes: float
    """By each device, one way."""
    host_bytes: float
    """On all hosts of the mesh together, while it has a place there."""
    calls: tuple[str, ...]
    """That use it, by their nodes."""
    writers: tuple[str, ...]
    """Of these, those after which the copy on the hosts is old."""
    is_handed_over: bool = False
    """Whether new weights are read from it on their way to an engine."""

    @property
    def device_bytes(self) -> float:
        return sum(count for _, count in self.parts)


@dataclass(frozen=True, slots=True)
class Held:
    """An option's bytes by category. Those of devices are bytes of each one, those of hosts of all together."""

    at_rest: Parts
    working: Parts
    """During its calls, besides those at rest and the states in use. Of a trainer: while it trains."""
    on_host: Parts
    states: tuple[State, ...] = ()
    passing: Parts | None = None
    """Of a trainer: during its forward passes, which keep no gradients and one layer's activations. None: `working`."""

    def during(self, work: str) -> Parts:
        """During a call of some work: `generate`, `forward` or `train`."""
        return self.working if work == "train" or self.passing is None else self.passing


def held(problem: Problem, role: Role, mesh: Mesh, option: Option) -> Held:
    """What a role holds on its mesh."""
    settings = dict(option.settings)
    if role.is_engine:
        return _engine(problem, role, mesh, option, settings)
    if role.is_trained:
        return _trained(problem, role, mesh, option, settings)
    return _frozen(problem, role, mesh, option, settings)


def moves_s(problem: Problem, role: Role, option: Option, call: Call) -> float:
    """Of an option's seconds of a call, those of parked state on its way: there are steps of their own for them."""
    settings, shape, link = dict(option.settings), role.shape, problem.cluster.host_link.bytes_s
    shards = _shards(option)
    if not role.is_trained:
        if settings.get("offload") != Offload.PARK.value:
            return 0.0
        size = _engine_weights(problem, role, option) if role.is_engine else 2.0 * shape.params() / shards
        return call.share * size / link
    offload, park = Offload(settings["offload"]), bool(settings.get("park_weights"))
    if offload is not Offload.PARK and not park:
        return 0.0
    keep = problem.choices.moving
    if call.work != "train":
        element = keep.weight_bytes if park else keep.stored_bytes
        return call.share * element * shape.params() / shards / link
    cost = state_cost(shape, problem.cluster, shards=shards, offload=offload, park_weights=park,
                      state=_state(problem.choices, settings), constants=keep)  # fmt: skip
    return call.share * cost.move_s


def _shards(option: Option) -> int:
    """Devices that have the weights together; the others hold copies."""
    return option.layout.size // option.layout.dp


def _fitted(parts: Parts, total: float) -> Parts:
    """The parts of a sum that is known: what the parts lack is in buffers, and they never exceed it."""
    sum_bytes = sum(parts.values())
    if sum_bytes > total:
        return {name: count * total / sum_bytes for name, count in parts.items() if count}
    found = {**parts, "buffers": parts.get("buffers", 0.0) + total - sum_bytes}
    return {name: count for name, count in found.items() if count > 0}


# ------------------------------------------------------------------------------------------------------------- engines


def _engine_weights(problem: Problem, role: Role, option: Option) -> float:
    return engine_weight_bytes(role.shape, tensor_parallel=option.layout.tp, pipeline=option.layout.pp,
                               weight_bytes=problem.choices.engine.weight_bytes)  # fmt: skip


def _engine(problem: Problem, role: Role, mesh: Mesh, option: Option, settings: Mapping[str, object]) -> Held:
    size = _engine_weights(problem, role, option)
    total, extra = option.static_bytes + option.dynamic_bytes, problem.choices.memory.engine_bytes
    parts = {"activations": min(extra, max(0.0, total - size))}
    parts["cache"] = max(0.0, total - size - parts["activations"])
    weights = {"weights": min(size, total)}
    if settings.get("offload") == Offload.PARK.value:
        calls = tuple(call.node for call in role.calls)
        state = State(role.name, "weights", tuple(weights.items()), size, option.host_bytes, calls, ())
        return Held({}, _fitted(parts, total - weights["weights"]), {}, (state,))
    if role.weights_from:  # they come anew in every step
        return Held({}, _fitted({**weights, **parts}, total), {})
    return Held(_fitted(weights, option.static_bytes), _fitted(parts, option.dynamic_bytes), {})


# ------------------------------------------------------------------------------------------------------------ training


def _state(choices: Choices, settings: Mapping[str, object]) -> OptimizerState:
    return next(one for one in choices.optimizers if one.name == settings["optimizer"])


def _training_state(shape: ModelShape, choices: Choices, settings: Mapping[str, object]) -> tuple[Parts, Parts]:
    """(on devices, on hosts) while it trains, of all shards together, as `flowrl.cost.offload` counts it.

    Weights are as wide as the class of offload has them, gradients as the optimizer's state says; the rest of a parameter's bytes
    is the optimizer's.
    """
    keep, state = choices.moving, _state(choices, settings)
    trained = float(shape.trainable_params())
    frozen = 0.0 if shape.lora is None else keep.weight_bytes * shape.params()
    everything = frozen + state.total_bytes * trained
    gradients = state.gradient_bytes * trained
    wide = keep.stored_bytes if state.gradient_bytes >= keep.stored_bytes else keep.weight_bytes
    whole = {"parameters": frozen + wide * trained, "gradients": gradients}
    whole["optimizer"] = everything - sum(whole.values())
    match Offload(str(settings["offload"])):
        case Offload.NONE | Offload.PARK:
            return whole, {}
        case Offload.STREAM_ALL:
            return {}, whole
    narrow = {"parameters": frozen + keep.weight_bytes * trained, "gradients": gradients}
    return narrow, {"optimizer": state.optimizer_bytes * trained}


def _trained(problem: Problem, role: Role, mesh: Mesh, option: Option, settings: Mapping[str, object]) -> Held:
    keep, shape, shards = problem.choices, role.shape, _shards(option)
    offload, park, tp = Offload(str(settings["offload"])), bool(settings.get("park_weights")), option.layout.tp
    used = train_memory(
        shape,
        problem.cluster,
        shards=option.layout.fsdp,
        tokens=int(str(settings["micro_batch_tokens"])),
        recompute=bool(settings["recompute"]),
        loss=keep.loss,
        chunk=keep.logit_chunk,
        tensor_parallel=tp,
        sequence_parallel=keep.sequence_parallel and tp > 1,
        offload=offload,
        park_weights=park,
        state=_state(keep, settings),
        constants=keep.memory,
        moving=keep.moving,
    )
    more, copies = keep.memory.fragmentation, mesh.size / shards
    whole, outside = _training_state(shape, keep, settings)
    state = {name: count / shards * more for name, count in whole.items()}
    passing = {
        "gathered": used.gather_bytes * more,
        "activations": used.activation_bytes * more,
        "logits": used.logit_bytes * more,
        "buffers": (used.gradient_bytes + max(0.0, used.state_bytes - sum(whole.values()) / shards)) * more,
    }
    on_host = {name: count * copies for name, count in outside.items()}
    states = (
        _states(role, option, whole, state, copies, is_all=offload is Offload.PARK)
        if park or offload is Offload.PARK
        else ()
    )
    moving = {name for one in states for name, _ in one.parts}
    resident = {"parameters": state.pop("parameters", 0.0)} if not states and offload is not Offload.NONE else {}
    if offload is Offload.NONE:
        resident, state = state, {}
    working = {**{name: count for name, count in state.items() if name not in moving}, **passing}
    left = option.dynamic_bytes - sum(one.device_bytes for one in states)
    fitted = _fitted(working, left)
    forward = _forward(problem, role, option, settings)
    passes = forward if sum(forward.values()) < sum(fitted.values()) else None
    return Held(_fitted(resident, option.static_bytes), fitted, on_host, states, passes)


def _states(
    role: Role, option: Option, whole: Parts, state: Parts, copies: float, *, is_all: bool
) -> tuple[State, ...]:
    """The states of parked training state: parameters, and with `is_all` what only the update needs."""
    trains = tuple(call.node for call in role.calls if call.work == "train")
    every = tuple(call.node for call in role.calls)
    shards = _shards(option)
    parameters = (("parameters", state["parameters"]),)
    size = whole["parameters"]
    found = [
        State(role.name, "parameters", parameters, size / shards, size * copies, every, trains, is_handed_over=True)
    ]
    if is_all:
        rest = tuple((name, count) for name, count in state.items() if name != "parameters" and count)
        size = sum(whole.values()) - whole["parameters"]
        found.append(State(role.name, "training state", rest, size / shards, size * copies, trains, trains))
    return tuple(found)


# ------------------------------------------------------------------------------------------------------- forward passes


def _forward(problem: Problem, role: Role, option: Option, settings: Mapping[str, object]) -> Parts:
    """What a forward pass holds besides the shards, on each device, with what the allocator takes over it."""
    tokens, more = int(str(settings["micro_batch_tokens"])), problem.choices.memory.fragmentation
    found = forward_parts(role.shape, problem.choices, tokens=tokens, tp=option.layout.tp)
    return {name: count * more for name, count in found.items() if count}


def _frozen(problem: Problem, role: Role, mesh: Mesh, option: Option, settings: Mapping[str, object]) -> Held:
    more, size = problem.choices.memory.fragmentation, 2.0 * role.shape.params() / _shards(option)
    working = _forward(problem, role, option, settings)
    weights = {"parameters": size * more}
    if settings.get("offload") != Offload.PARK.value:
        return Held(_fitted(weights, option.static_bytes), _fitted(working, option.dynamic_bytes), {})
    calls = tuple(call.node for call in role.calls)
    state = State(role.name, "parameters", tuple(weights.items()), size, option.host_bytes, calls, ())
    return Held({}, _fitted(working, option.dynamic_bytes - state.device_bytes), {}, (state,))
