"""What each parameter of a model takes on one device, and what of it is not really sharded.

The values here are filled from two sides: `flowrl.planner.audit` predicts them from a shape and a layout, and
`flowrl.engines.audit` reads them off a module that is there. The rules by which something is found are the same for both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowrl.cost.text import aligned, size_text
from flowrl.schema.escaped import escaped

FULL, HALF = "float32", "bfloat16"
ITEM_BYTES = {FULL: 4, HALF: 2}
SHOWN = 4
"""Modules that a finding names."""


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter, as one device has it.

    Example:
        Part("lm_head.weight", (152064, 3584), "float32", devices=8, copies=8, whole_bytes=2179989504,
             param_bytes=2179989504, grad_bytes=2179989504, optimizer_bytes=4359979008)      # not sharded at all
    """

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    dtype: str
    devices: int
    """That share the parameter."""
    copies: int
    """Of these, how many hold what this one holds: 1 where it is cut over all, `devices` where each has the whole."""
    whole_bytes: int
    """Of the whole parameter, once."""
    param_bytes: int
    """On this device."""
    grad_bytes: int = 0
    grad_dtype: str = ""
    """Empty where there is no gradient."""
    optimizer_bytes: int = 0
    uneven_bytes: int = 0
    """What the fullest device has over an even share of the parameter: its rows do not divide."""
    state_excess_bytes: int = 0
    """Optimizer state of elements that this device does not hold."""
    host_bytes: int = 0
    """On the host of the device, for this device."""
    is_trained: bool = True
    whole_fix: str = ""
    """What to do where it is whole on each device, when that is known; "": `fully_shard` was not called on its module."""

    @property
    def device_bytes(self) -> int:
        return self.param_bytes + self.grad_bytes + self.optimizer_bytes

    @property
    def is_whole(self) -> bool:
        """Whether each of several devices has all of it."""
        return 1 < self.devices == self.copies

    @property
    def module(self) -> str:
        """What it is counted with: `model.embed_tokens`, `model.layers.*.mlp`."""
        return module_of(self.name)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be."""

    kind: str
    """`replicated`, `replicated_frozen`, `frozen_fp32`, `fp32_leftover`, `uneven`, `state_not_sharded`, `gradient_dtype`."""
    modules: tuple[str, ...]
    num_tensors: int
    wasted_bytes: int
    """On this device."""
    what: str
    fix: str
    is_problem: bool
    """Whether it wastes more than the audit's `worth`; else it is a remark."""

    def __str__(self) -> str:
        names = ", ".join(self.modules[:SHOWN])
        more = f" and {len(self.modules) - SHOWN} more" if len(self.modules) > SHOWN else ""
        count = f"{self.num_tensors} tensor{'' if self.num_tensors == 1 else 's'}"
        return (
            f"{self.kind}: {names}{more} ({count}): {self.what}; {size_text(self.wasted_bytes)} per device. {self.fix}"
        )


@dataclass(frozen=True, slots=True)
class Group:
    """The parameters of one module, or of the same module of all layers."""

    module: str
    count: int
    """Layers; 1 outside of them."""
    parts: tuple[Part, ...]

    def total(self, of: Callable[[Part], int]) -> int:
        return sum(map(of, self.parts))

    @property
    def how(self) -> str:
        """`1/8`, `whole`, `1/4 in 2 copies`; where its parts differ, each."""
        return ", ".join(dict.fromkeys(_how(part) for part in self.parts))


@dataclass(frozen=True, slots=True)
class Audit:
    """All parameters of a model on one device. `str` is the table with what was found."""

    title: str
    parts: tuple[Part, ...]
    is_predicted: bool
    worth: float = 0.01
    """Share of all bytes on the device that a finding must waste to be a problem."""

    @property
    def device_bytes(self) -> int:
        """Parameters, gradients and optimizer state on this device. No activations, nothing that is gathered for a moment."""
        return sum(part.device_bytes for part in self.parts)

    @property
    def host_bytes(self) -> int:
        return sum(part.host_bytes for part in self.parts)

    @property
    def groups(self) -> tuple[Group, ...]:
        """By module, in the order in which they occur."""
        found: dict[str, list[Part]] = {}
        for part in self.parts:
            found.setdefault(part.module, []).append(part)
        return tuple(
            Group(name, len({_layer(part.name) for part in mine}), tuple(mine)) for name, mine in found.items()
        )

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is not really sharded, or wider than it needs to be; what wastes most comes first."""
        least = self.worth * (self.device_bytes + self.host_bytes)
        found = [one for rule in RULES if (one := rule(self.parts, least)) is not None]
        return tuple(sorted(found, key=lambda one: (-one.wasted_bytes, one.kind)))

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if one.is_problem)

    def __str__(self) -> str:
        said = "predicted" if self.is_predicted else "measured"
        host = f", {size_text(self.host_bytes)} on its host" if self.host_bytes else ""
        head = (
            f"sharding audit: {self.title}\n{said}: {size_text(self.device_bytes)} of weights, gradients and optimizer state "
            f"on a device{host}"
        )
        return escaped("\n".join([head, "", *self._table(), "", *self._said()]), keep="\n")

    def _table(self) -> list[str]:
        columns: tuple[tuple[str, Callable[[Part], int]], ...] = (
            ("whole", lambda part: part.whole_bytes),
            ("weights", lambda part: part.param_bytes),
            ("gradients", lambda part: part.grad_bytes),
            ("optimizer", lambda part: part.optimizer_bytes),
            ("on device", lambda part: part.device_bytes),
        )
        if self.host_bytes:
            columns += (("on host", lambda part: part.host_bytes),)
        rows = [("module", "x", *(name for name, _ in columns), "device has")]
        groups = self.groups
        for one in groups:
            sizes = (_or_nothing(one.total(of)) for _, of in columns)
            rows.append((one.module, str(one.count) if one.count > 1 else "", *sizes, one.how))
        everything = Group("all", 1, self.parts)
        rows.append(("all", "", *(_or_nothing(everything.total(of)) for _, of in columns), ""))
        return aligned(rows, "lr" + "r" * len(columns) + "l")

    def _said(self) -> list[str]:
        problems = self.problems
        remarks = [one for one in self.findings if not one.is_problem]
        if not problems and not remarks:
            return ["nothing found: everything that can be cut is cut"]
        lines = [f"{len(problems)} problem{'' if len(problems) == 1 else 's'}:" if problems else "no problems"]
        lines += [f"  {one}" for one in problems]
        if remarks:
            lines += [f"remarks (below {self.worth:.0%} of the device's bytes):", *(f"  {one}" for one in remarks)]
        return lines


def module_of(name: str) -> str:
    """The module a parameter is counted with: its own, layers told apart by nothing.

    `model.layers.3.mlp.up_proj.weight` -> `model.layers.*.mlp`; `lm_head.weight` -> `lm_head`; adapters of a layer -> `lora`.
    """
    pieces = name.split(".")
    at = next((index for index, piece in enumerate(pieces) if piece.isdigit()), None)
    is_adapter = any(piece.startswith("lora_") for piece in pieces)
    if at is None:
        return "lora" if is_adapter else ".".join(pieces[:-1]) or name
    below = ["lora"] if is_adapter else pieces[at + 1 : at + 2] if len(pieces) > at + 2 else []
    return ".".join([*pieces[:at], "*", *below])


def _layer(name: str) -> str:
    found = re.search(r"(?:^|\.)(\d+)\.", name)
    return found[1] if found else ""


def _how(part: Part) -> str:
    if part.devices == 1 or part.is_whole:
        return "whole"
    cut = f"1/{part.devices // part.copies}"
    return cut if part.copies == 1 else f"{cut} in {part.copies} copies"


def _or_nothing(num_bytes: int) -> str:
    return size_text(num_bytes) if num_bytes else ""


# --------------------------------------------------------------------------------------------------------------- rules


def _finding(kind: str, parts: Sequence[Part], wasted: float, what: str, fix: str, least: float) -> Finding | None:
    if not parts:
        return None
    modules = tuple(dict.fromkeys(part.module for part in parts))
    return Finding(kind, modules, len(parts), round(wasted), what, fix, wasted > least)


def _whole(kind: str, parts: Sequence[Part], what: str, otherwise: str, least: float) -> Finding | None:
    """Whole on each of several devices. `otherwise` is the fix where a part has none of its own."""
    mine = [part for part in parts if part.is_whole]
    devices = max((part.devices for part in mine), default=0)
    wasted = sum((part.device_bytes + part.host_bytes) * (1 - 1 / part.devices) for part in mine)
    fix = "; ".join(dict.fromkeys(part.whole_fix or otherwise for part in mine))
    return _finding(kind, mine, wasted, f"{what} on each of {devices} devices", fix, least)


def _replicated(parts: Sequence[Part], least: float) -> Finding | None:
    """Trained and whole on each of several devices."""
    fix = "Wrap the root too: fully_shard(model) after its layers"
    return _whole("replicated", [part for part in parts if part.is_trained], "whole", fix, least)


def _replicated_frozen(parts: Sequence[Part], least: float) -> Finding | None:
    """Never trained, and whole on each of several devices all the same."""
    frozen = [part for part in parts if not part.is_trained]
    fix = "Shard frozen weights like trained ones (fully_shard), or cut them by tensor parallelism"
    return _whole("replicated_frozen", frozen, "frozen, and whole", fix, least)


def _frozen_fp32(parts: Sequence[Part], least: float) -> Finding | None:
    """Frozen weights in fp32: nothing is added to them, so bf16 loses nothing that the forward pass would use."""
    mine = [part for part in parts if not part.is_trained and part.dtype == FULL and len(part.shape) > 1]
    wasted = sum((part.param_bytes + part.host_bytes) / 2 for part in mine)
    fix = "Load frozen weights in bf16, in which they are multiplied"
    return _finding("frozen_fp32", mine, wasted, "frozen weights in fp32", fix, least)


def _fp32_leftover(parts: Sequence[Part], least: float) -> Finding | None:
    """Trained in fp32 while most of what is trained is bf16."""
    trained = [part for part in parts if part.is_trained]
    half = sum(part.whole_bytes // ITEM_BYTES[HALF] for part in trained if part.dtype == HALF)
    full = [part for part in trained if part.dtype == FULL]
    if half <= sum(part.whole_bytes // ITEM_BYTES[FULL] for part in full):
        return None
    wasted = sum((part.param_bytes + part.grad_bytes) / 2 for part in full)
    fix = "Give them the type of the others, or keep them on purpose"
    return _finding("fp32_leftover", full, wasted, "fp32, while the others are bf16", fix, least)


def _uneven(parts: Sequence[Part], least: float) -> Finding | None:
    """Rows that do not divide: the fullest device has more than an even share, and others are padded to it."""
    mine = [part for part in parts if part.uneven_bytes > 0]
    wasted = sum(
        part.uneven_bytes * (part.device_bytes + part.host_bytes) / part.param_bytes
        if part.param_bytes
        else part.uneven_bytes
        for part in mine
    )
    fix = "Pad the vocabulary, or choose a number of shards that divides the rows"
    return _finding("uneven", mine, wasted, "rows do not divide over the shards, and shards are padded", fix, least)


def _state_not_sharded(parts: Sequence[Part], least: float) -> Finding | None:
    """Optimizer state of elements that the device does not hold."""
    mine = [part for part in parts if part.state_excess_bytes > 0]
    wasted = sum(part.state_excess_bytes for part in mine)
    fix = "Make the optimizer after fully_shard, from the sharded parameters"
    return _finding("state_not_sharded", mine, wasted, "optimizer state larger than the shard", fix, least)


def _gradient_dtype(parts: Sequence[Part], least: float) -> Finding | None:
    """Gradients wider than the weights they belong to."""
    mine = [part for part in parts if part.grad_dtype == FULL and part.dtype == HALF]
    wasted = sum(part.grad_bytes / 2 for part in mine)
    fix = "Reduce in fp32 and keep in bf16, or keep them on purpose (sums over many micro-batches)"
    return _finding("gradient_dtype", mine, wasted, "fp32 gradients of bf16 weights", fix, least)


RULES = (
    _replicated,
    _replicated_frozen,
    _frozen_fp32,
    _fp32_leftover,
    _uneven,
    _state_not_sharded,
    _gradient_dtype,
)
