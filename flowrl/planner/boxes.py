"""Boxes: axis-aligned blocks of a tensor, and which of them a rank holds under a layout.

A box is one half-open interval (start, stop) per dimension. What a rank holds of a tensor is a tuple of boxes that do not
overlap: one for most tensors, one per matrix where several matrices are joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.mesh import Layout

Box = tuple[tuple[int, int], ...]
Boxes = tuple[Box, ...]


class Tensor(Protocol):
    """What the arithmetic needs to know of one parameter."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str:
        """`k` and `v` (blocks of key and value heads), `qkv` (the three joined), `embedding` and `head` (rows are tokens) are
        treated as their names say; every other kind by its `split_axis` and `parts` alone."""
        ...

    @property
    def layer(self) -> int | None:
        """The layer it belongs to; None for the embedding, the last norm and the head."""
        ...

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes of the matrices joined along `split_axis`; empty for one matrix."""
        ...

    @property
    def split_axis(self) -> int | None:
        """The dimension that tensor parallelism cuts; None where every rank holds the whole."""
        ...


@dataclass(frozen=True, slots=True)
class Holding:
    """How one side of a move holds a model: a layout, and the devices of its ranks.

    Example:
        Holding(Layout.parse("f8"), devices=range(8))
        Holding(Layout.parse("d4t2"), devices=range(8), kv_heads=8, vocab_multiple=64)
    """

    layout: Layout
    devices: Sequence[int]
    """Device of each rank; any order, so that a rank need not be on the device with its number."""
    kv_heads: int | None = None
    """Key and value heads of the model; needed where `tp` cuts attention."""
    vocab_multiple: int = 1
    """The engine pads the rows of the embedding and the head to this multiple before it cuts them. Padding does not move."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; needed where `pp` deals out layers. See `even_stages`."""
    is_tied: bool = False
    """Whether the head is the embedding, which is listed once: the last stage then holds the embedding too."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        layout = self.layout
        if len(self.devices) != layout.size or len(set(self.devices)) != layout.size:
            raise ConfigError(f"layout {layout} needs {layout.size} different devices; found {list(self.devices)}")
        if self.vocab_multiple < 1:
            raise ConfigError(f"vocab_multiple is at least 1; found {self.vocab_multiple}")
        if layout.pp > 1 and len(self.stage_layers) != layout.pp:
            raise ConfigError(f"layout {layout} needs stage_layers with {layout.pp} counts; found {self.stage_layers}")
        kv, tp = self.kv_heads, layout.tp
        if kv is not None and (kv < 1 or (kv % tp and tp % kv)):
            raise ConfigError(f"tp {tp} must divide {kv} key-value heads or be a multiple of them")

    def boxes(self, tensor: Tensor, rank: int) -> Boxes:
        """What a rank holds of a tensor; empty when it holds nothing."""
        at = self.layout.coordinate(rank)
        if not self._is_in_stage(tensor, at.pp):
            return ()
        return _fsdp_rows(self._tp_blocks(tensor, at.tp), self.layout.fsdp, at.fsdp, tensor.split_axis)

    def _is_in_stage(self, tensor: Tensor, stage: int) -> bool:
        if self.layout.pp == 1:
            return True
        last = self.layout.pp - 1
        if tensor.layer is None:
            if tensor.kind in ("embedding", "position"):
                return stage == 0 or (self.is_tied and tensor.kind == "embedding" and stage == last)
            return stage == last
        first = sum(self.stage_layers[:stage])
        if tensor.layer >= sum(self.stage_layers):
            raise ConfigError(
                f"{tensor.name} is in layer {tensor.layer}; the stages have {sum(self.stage_layers)} layers"
            )
        return first <= tensor.layer < first + self.stage_layers[stage]

    def _tp_blocks(self, tensor: Tensor, tp: int) -> Boxes:
        """What tensor parallelism leaves to one of its ranks, before `fsdp` cuts it."""
        whole = tuple((0, size) for size in tensor.shape)
        axis = tensor.split_axis
        if axis is None or self.layout.tp == 1:
            return (whole,)
        size = tensor.shape[axis]
        parts = tensor.parts or (size,)
        if sum(parts) != size:
            raise ConfigError(f"the parts {parts} of {tensor.name} do not add to its {size} along dimension {axis}")
        found, start = [], 0
        for index, part in enumerate(parts):
            low, high = self._interval(
                tensor, part, tp, is_kv=tensor.kind in ("k", "v") or (tensor.kind == "qkv" and index > 0)
            )
            found.append((*whole[:axis], (start + low, start + high), *whole[axis + 1 :]))
            start += part
        return tuple(box for box in found if not is_empty(box))

    def _interval(self, tensor: Tensor, size: int, tp: int, *, is_kv: bool) -> tuple[int, int]:
        """The part of `size` that a tensor-parallel rank holds."""
        ranks = self.layout.tp
        if tensor.kind in ("embedding", "head"):
            # [Note: Padded vocabulary] the engine cuts the padded rows evenly; the rows that exist are what is counted
            padded = math.ceil(size / self.vocab_multiple) * self.vocab_multiple
            step = math.ceil(padded / ranks)
            return min(tp * step, size), min((tp + 1) * step, size)
        if is_kv:
            if self.kv_heads is None:
                raise ConfigError(
                    f"{tensor.name} is cut by heads over tp {ranks}; give kv_heads, the model's key-value heads"
                )
            if ranks > self.kv_heads:  # heads are repeated: ranks // kv_heads neighbours hold the same one
                tp, ranks = tp // (ranks // self.kv_heads), self.kv_heads
        if size % ranks:
            raise ConfigError(
                f"{tensor.name} has {size} along the dimension that tp cuts, which {ranks} does not divide"
            )
        return tp * (size // ranks), (tp + 1) * (size // ranks)


def holding_of(shape: ModelShape, layout: Layout, devices: Sequence[int]) -> Holding:
    """How a model lies under a layout; stages have its layers evenly."""
    stages = even_stages(shape.layers, layout.pp) if layout.pp > 1 else ()
    return Holding(layout, devices, kv_heads=shape.kv_heads, stage_layers=stages, is_tied=shape.tied)


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each pipeline stage, as vLLM deals them: what does not divide goes one each to the stages before the last,
    from behind."""
    each, rest = divmod(layers, stages)
    return tuple(each + (stages - 1 - rest <= stage < stages - 1) for stage in range(stages))


def chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """The interval that `torch.chunk` gives part `index`: all of ceil(size / parts), the last ones shorter or empty.

    Example:
        [chunk(0, 10, 4, i) for i in range(4)]   # (0, 3), (3, 6), (6, 9), (9, 10)
    """
    step = math.ceil((stop - start) / parts)
    return min(start + index * step, stop), min(start + (index + 1) * step, stop)


def _fsdp_rows(blocks: Boxes, parts: int, index: int, axis: int | None) -> Boxes:
    """What FSDP leaves to one of its ranks: a chunk of the first dimension of the local tensor that the blocks make up.

    Blocks of joined matrices lie one after the other along `axis`. Along dimension 0 the rows run through all of them; along
    another dimension each has the same rows. A scalar is not cut.
    """
    if parts == 1 or not blocks or not blocks[0]:
        return blocks
    if axis not in (0, None):
        cut: Boxes = tuple((chunk(*rows, parts, index), *rest) for rows, *rest in blocks)
        return tuple(box for box in cut if not is_empty(box))
    low, high = chunk(0, sum(stop - start for (start, stop), *_ in blocks), parts, index)
    found, passed = [], 0
    for (start, stop), *rest in blocks:
        first, last = start + max(low - passed, 0), start + min(high - passed, stop - start)
        if first < last:
            found.append(((first, last), *rest))
        passed += stop - start
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------- arithmetic


def is_empty(box: Box) -> bool:
    return any(start >= stop for start, stop in box)


def volume(box: Box) -> int:
    """Elements of a box; 1 for a scalar's."""
    return math.prod(max(stop - start, 0) for start, stop in box)


def intersect(one: Box, other: Box) -> Box | None:
    """What two boxes share, or None."""
    shared: list[tuple[int, int]] = []
    for (start, stop), (low, high) in zip(one, other, strict=True):
        start, stop = max(start, low), min(stop, high)
        if start >= stop:
            return None  # most pairs end here, at the first dimension
        shared.append((start, stop))
    return tuple(shared)


def subtract(box: Box, hole: Box) -> Iterator[Box]:
    """Boxes that cover `box` without `hole`, which lies inside it; at most two for each dimension."""
    rest = list(box)
    for axis, ((start, stop), (low, high)) in enumerate(zip(box, hole, strict=True)):
        if start < low:
            yield (*rest[:axis], (start, low), *rest[axis + 1 :])
        if high < stop:
            yield (*rest[:axis], (high, stop), *rest[axis + 1 :])
        rest[axis] = (low, high)


def without(boxes: Sequence[Box], held: Sequence[Box]) -> list[Box]:
    """What is left of boxes when what is held is taken away."""
    left = list(boxes)
    for hole in held:
        kept: list[Box] = []
        for box in left:
            shared = intersect(box, hole)
            kept.extend((box,) if shared is None else subtract(box, shared))
        left = kept
    return left
