"""Slots: where the boxes of a model's tensors lie in the storage of one device.

The planner speaks of tensors by their Hugging Face names. An engine may store them otherwise: q, k and v in one matrix, rows of
the vocabulary padded, a tied head under the name of the embedding. A `Recipe` says how; `lay` turns it into slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flowrl.errors import ConfigError
from flowrl.planner.boxes import Box, Holding, Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A block of a local tensor.

    Example:
        Region("model.layers.0.self_attn.qkv_proj.weight", start=(1792, 0), shape=(256, 3584))     # k, below q
    """

    storage: str
    """Name of the local tensor."""
    start: Shape
    """First element, counted in the local tensor."""
    shape: Shape

    def inside(self, outer: Box, box: Box) -> Region:
        """The part of this region that holds `box`, where the region holds `outer`."""
        if box == outer:
            return self
        start = tuple(at + low - first for at, (low, _), (first, _) in zip(self.start, box, outer, strict=True))
        return Region(self.storage, start, tuple(stop - low for low, stop in box))

    def is_contiguous(self, whole: Shape) -> bool:
        """Whether its elements follow each other in a local tensor of the shape `whole`: below the first dimension with more than
        one index, it takes all of every dimension."""
        has_begun = False
        for size, full in zip(self.shape, whole, strict=True):
            if has_begun and size != full:
                return False
            has_begun = has_begun or size > 1
        return True


@dataclass(frozen=True, slots=True)
class Slot:
    """A box of a tensor and the region that holds it."""

    box: Box
    region: Region


@dataclass(frozen=True, slots=True)
class Shelf:
    """All that one device holds of a model."""

    slots: Mapping[str, tuple[Slot, ...]]
    """By tensor; a tensor of which the device holds nothing is left out."""
    shapes: Mapping[str, Shape]
    """Of each local tensor, by its name."""
    fills: tuple[Region, ...] = ()
    """What belongs to no tensor, such as padded rows; set to zero."""


@dataclass(frozen=True, slots=True)
class Join:
    """Modules that an engine keeps as one, one above the other.

    Example:
        Join("qkv_proj", ("q_proj", "k_proj", "v_proj"))
    """

    into: str
    parts: tuple[str, ...]


VLLM_JOINS = (Join("qkv_proj", ("q_proj", "k_proj", "v_proj")), Join("gate_up_proj", ("gate_proj", "up_proj")))
"""How vLLM's Llama and Qwen2 modules join what Transformers keeps apart."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a side stores the tensors that the planner lists. The default stores each under its own name."""

    joins: tuple[Join, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    """(tensor, name of the local tensor), such as an embedding that a last stage keeps as its head."""

    def storage_of(self, name: str) -> tuple[str, int]:
        """Name of the local tensor, and the place of the tensor among those that share it."""
        for tensor, storage in self.renames:
            if name == tensor:
                return storage, 0
        words = name.split(".")
        for join in self.joins:
            if len(words) > 1 and words[-2] in join.parts:
                return ".".join([*words[:-2], join.into, words[-1]]), join.parts.index(words[-2])
        return name, 0


@dataclass(slots=True)
class _Stored:
    """A local tensor while it is laid out: the blocks stacked in it so far."""

    axis: int
    parts: list[tuple[int, Tensor, tuple[Box, ...]]] = field(default_factory=list)


def lay(tensors: Iterable[Tensor], holding: Holding, rank: int, recipe: Recipe | None = None) -> Shelf:
    """Where a rank's boxes lie. The boxes of a tensor, and tensors that are joined, follow each other along the dimension that
    tensor parallelism cuts, as `torch.cat` would put them; where it cuts none, along the first.

    Errors: ConfigError for tensors that share a local tensor and do not fit together.
    """
    recipe = recipe or Recipe()
    stored: dict[str, _Stored] = {}
    for tensor in tensors:
        boxes = holding.boxes(tensor, rank)
        if boxes:
            name, place = recipe.storage_of(tensor.name)
            stored.setdefault(name, _Stored(tensor.split_axis or 0)).parts.append((place, tensor, boxes))
    slots: dict[str, tuple[Slot, ...]] = {}
    shapes: dict[str, Shape] = {}
    fills: list[Region] = []
    for name, one in stored.items():
        shape: Shape | None = None
        for _, tensor, boxes in sorted(one.parts, key=lambda part: part[0]):
            found = []
            for box in boxes:
                region, shape = _stacked(name, box, shape, one.axis)
                found.append(Slot(box, region))
            slots[tensor.name] = tuple(found)
            padded = _padding(tensor, holding, name, shape)
            if padded is not None and shape is not None:
                fills.append(padded)
                shape = (shape[0] + padded.shape[0], *shape[1:])
        shapes[name] = shape or ()
    return Shelf(slots, shapes, tuple(fills))


def _stacked(name: str, box: Box, above: Shape | None, axis: int) -> tuple[Region, Shape]:
    """The region of a box that goes behind what is stacked already, and the shape of both."""
    sizes = tuple(stop - start for start, stop in box)
    if above is None:
        return Region(name, (0,) * len(sizes), sizes), sizes
    if len(above) != len(sizes) or any(
        a != b for at, (a, b) in enumerate(zip(above, sizes, strict=True)) if at != axis
    ):
        raise ConfigError(
            f"blocks of shapes {above} and {sizes} do not fit into one local tensor '{name}' along {axis}"
        )
    start = tuple(above[at] if at == axis else 0 for at in range(len(sizes)))
    shape = tuple(size + above[at] if at == axis else size for at, size in enumerate(sizes))
    return Region(name, start, sizes), shape


def _padding(tensor: Tensor, holding: Holding, name: str, shape: Shape | None) -> Region | None:
    """The rows that an engine adds to a vocabulary on this rank; see [Note: Padded vocabulary] in `flowrl.planner.boxes`."""
    if tensor.kind not in ("embedding", "head") or holding.vocab_multiple == 1 or holding.layout.fsdp > 1 or not shape:
        return None
    padded = math.ceil(tensor.shape[0] / holding.vocab_multiple) * holding.vocab_multiple
    rows = math.ceil(padded / holding.layout.tp) - shape[0]
    if rows <= 0:
        return None
    return Region(name, (shape[0], *(0 for _ in shape[1:])), (rows, *shape[1:]))
