"""Layouts: how the weights of one model lie on the ranks of a mesh."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from flowrl.errors import ConfigError, TextError
from flowrl.schema.fields import MOST_DIGITS, shown

MOST_DEVICES = 65_536
"""Of a layout and of a cluster: what counts device by device is done in seconds, and no job is larger."""
LETTERS = {"d": "dp", "f": "fsdp", "t": "tp", "p": "pp"}
ORDERS = ("mod", "div")
_PART = re.compile(r"([a-z])([0-9]+)")


class Coordinate(NamedTuple):
    """Where a rank stands along each axis of a layout."""

    dp: int
    pp: int
    fsdp: int
    tp: int


def parse_error(text: str, at: int, length: int, message: str) -> TextError:
    """An error that shows the text and points at the place."""
    return TextError(f"{message}\n    {text}\n    {' ' * at}{'^' * max(1, length)}")


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes along which weights are copied or cut.

    `dp` copies them, `fsdp` cuts the first dimension of every tensor, `tp` cuts matrices by rows or columns, `pp` deals out
    layers. Where `fsdp` and `tp` cut the same dimension, `tp` cuts first and `fsdp` cuts its block.

    [Note: Order of ranks]
    Ranks count through the axes dp, pp, fsdp, tp, the last one fastest ("mod": the tp index is rank mod tp). With
    tp_order="div" the tp axis is the slowest instead (the tp index is rank div (size / tp)): an FSDP shard then lies more
    often inside the tensor-parallel block of the same device, but the ranks of a tp group stand far apart.

    Example:
        Layout(dp=4, tp=2)               # "d4t2"
        Layout(fsdp=8)                   # "f8"
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    tp_order: Literal["mod", "div"] = "mod"

    def __post_init__(self) -> None:
        for name in LETTERS.values():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"Layout needs a whole number of at least 1 for {name}; found {value!r}")
        if self.size > MOST_DEVICES:
            raise ConfigError(f"a layout is for {MOST_DEVICES:,} devices at most; found {shown(self.size)}")
        if self.tp_order not in ORDERS:
            raise ConfigError(f"tp_order is 'mod' or 'div'; found {self.tp_order!r}")
        if self.tp == 1 and self.tp_order != "mod":
            object.__setattr__(self, "tp_order", "mod")  # the two orders are one: equal layouts compare equal

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read "d4t2", "f8", "t8@div" (letters in any order, each once). Raises `TextError` that points at the place."""
        if not isinstance(text, str):
            raise TextError(f"a layout is text such as d4t2 or f8; found {shown(text)} ({type(text).__name__})")
        body, mark, order = text.partition("@")
        if mark and order not in ORDERS:
            raise parse_error(text, len(body) + 1, len(order), "after '@' stands the order of ranks, 'mod' or 'div'")
        sizes: dict[str, int] = {}
        at = 0
        while at < len(body) or not body:
            part = _PART.match(body, at)
            if part is None or part[1] not in LETTERS:
                raise parse_error(text, at, 1, "a layout is letters d, f, t or p, each with a size, such as d4t2 or f8")
            if LETTERS[part[1]] in sizes:
                raise parse_error(text, at, len(part[0]), f"'{part[1]}' is given twice")
            if len(part[2]) > MOST_DIGITS:
                raise parse_error(text, at + 1, len(part[2]), f"a layout is for {MOST_DEVICES:,} devices at most")
            if int(part[2]) < 1:
                raise parse_error(text, at + 1, len(part[2]), "a size is at least 1")
            sizes[LETTERS[part[1]]] = int(part[2])
            at = part.end()
        return cls(**sizes, tp_order="div" if order == "div" else "mod")

    def __str__(self) -> str:
        parts = [f"{letter}{getattr(self, name)}" for letter, name in LETTERS.items() if getattr(self, name) > 1]
        return ("".join(parts) or "d1") + ("@div" if self.tp_order == "div" else "")

    @property
    def size(self) -> int:
        """Ranks of the layout."""
        return self.dp * self.fsdp * self.tp * self.pp

    def coordinate(self, rank: int) -> Coordinate:
        """See [Note: Order of ranks]. Raises `ConfigError` when the layout has no such rank."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"layout {self} has ranks 0 to {self.size - 1}; found {rank}")
        if self.tp_order == "div":
            tp, rest = divmod(rank, self.size // self.tp)
        else:
            rest, tp = divmod(rank, self.tp)
        rest, fsdp = divmod(rest, self.fsdp)
        dp, pp = divmod(rest, self.pp)
        return Coordinate(dp, pp, fsdp, tp)

    def rank(self, at: Coordinate) -> int:
        """The rank at a coordinate; the inverse of `coordinate`."""
        rest = (at.dp * self.pp + at.pp) * self.fsdp + at.fsdp
        return at.tp * (self.size // self.tp) + rest if self.tp_order == "div" else rest * self.tp + at.tp

    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the blocks of one copy, in the order of their blocks."""
        starts = [rank for rank in range(self.size) if self.coordinate(rank).tp == 0]
        return tuple(
            tuple(self.rank(self.coordinate(start)._replace(tp=tp)) for tp in range(self.tp)) for start in starts
        )

    def ordered(self, tp_order: Literal["mod", "div"]) -> Layout:
        """The same layout with another order of ranks."""
        return replace(self, tp_order=tp_order)
