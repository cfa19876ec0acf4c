"""Column types: dtype + granularity + inner shape.

    SAMPLE.f32            one float per response
    TOKEN.f32             one float per response token (ragged over rows)
    TOKEN.i32[64]         64 integers per response token
    TOKEN.f32["k"]        an inner length that a configuration value decides
    PROMPT.i32["*"]       a list of its own length per prompt (prompt_ids)

Shape letters used in names across the project:
    P = prompts   G = responses of one prompt   N = rows (responses)   T = tokens   V = vocabulary   K = inner width
"""

from __future__ import annotations

import builtins
import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flowrl.errors import SchemaError

if TYPE_CHECKING:
    import pyarrow as pa

DTYPES = ("bool", "u8", "i32", "i64", "f16", "f32", "f64", "str", "bytes")
"""Element types a column may have. `str` is text, `bytes` is anything else (images, pickles are refused)."""

RAGGED = "*"
"""Inner dimension whose length differs from row to row."""


class Granularity(enum.Enum):
    """What one value of a column belongs to. Coarse to fine: PROMPT, SAMPLE, TURN, TOKEN."""

    PROMPT = "PROMPT"
    """The input row; equal for all responses of one prompt."""
    SAMPLE = "SAMPLE"
    """One response."""
    TURN = "TURN"
    """One turn or reasoning step of a response; a list per row."""
    TOKEN = "TOKEN"
    """One response token; a list per row."""

    @property
    def is_ragged(self) -> bool:
        return self in (Granularity.TURN, Granularity.TOKEN)

    @property
    def bool(self) -> ColumnType:
        return ColumnType(self, "bool")

    @property
    def u8(self) -> ColumnType:
        return ColumnType(self, "u8")

    @property
    def i32(self) -> ColumnType:
        return ColumnType(self, "i32")

    @property
    def i64(self) -> ColumnType:
        return ColumnType(self, "i64")

    @property
    def f16(self) -> ColumnType:
        return ColumnType(self, "f16")

    @property
    def f32(self) -> ColumnType:
        return ColumnType(self, "f32")

    @property
    def f64(self) -> ColumnType:
        return ColumnType(self, "f64")

    @property
    def str(self) -> ColumnType:
        return ColumnType(self, "str")

    @property
    def bytes(self) -> ColumnType:
        return ColumnType(self, "bytes")

    def __repr__(self) -> builtins.str:
        return self._name_


PROMPT, SAMPLE, TURN, TOKEN = Granularity.PROMPT, Granularity.SAMPLE, Granularity.TURN, Granularity.TOKEN
COARSE_TO_FINE = (PROMPT, SAMPLE, TURN, TOKEN)


@dataclass(frozen=True, slots=True)
class ColumnType:
    """Type of a column.

    Example:
        ColumnType(TOKEN, "f32", inner=(64,))      # written TOKEN.f32[64]
    """

    granularity: Granularity
    dtype: str
    inner: tuple[int | str, ...] = ()
    """Fixed inner lengths, names of configuration values that decide them, or "*" for a list of its own length."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise SchemaError(f"a column needs one of the dtypes {', '.join(DTYPES)}; found '{self.dtype}'")

    def __getitem__(self, inner: int | str | tuple[int | str, ...]) -> ColumnType:
        return replace(self, inner=inner if isinstance(inner, tuple) else (inner,))

    @property
    def is_numeric(self) -> bool:
        return self.dtype not in ("str", "bytes")

    def resolve(self, names: dict[str, object]) -> ColumnType:
        """The same type with named inner lengths replaced from a configuration."""
        return replace(self, inner=tuple(_resolve_length(n, names) for n in self.inner))

    def accepts(self, found: ColumnType) -> bool:
        """Whether a column of type `found` may be read where this type is asked for.

        A PROMPT value may be read as SAMPLE (each response has one), integer widths and float widths may differ, bool
        may be read as a number. Nothing else converts silently.
        """
        grain = found.granularity is self.granularity or (found.granularity is PROMPT and self.granularity is SAMPLE)
        return grain and _widens(self.dtype, found.dtype) and _same_inner(self.inner, found.inner)

    def column(self, name: str) -> Asked:
        """Read this type from the column `name`, whatever the parameter is called."""
        return Asked(self, column=name)

    def named_by(self, config: str) -> Asked:
        """Read the column whose name the configuration value `config` holds, e.g. `by="reward"`."""
        return Asked(self, named_by=config)

    def or_broadcast(self, name: str) -> Asked:
        """Read the column of the parameter's name or, where it is not there, the coarser column `name` repeated."""
        return Asked(self, broadcast=name)

    def or_live(self, name: str) -> Asked:
        """In a loss: read the stored column or, where it is not there, the live column `name` without gradient."""
        return Asked(self, live=name)

    def optional(self) -> Asked:
        """Read the column if it is there; the parameter gets None otherwise."""
        return Asked(self, is_optional=True)

    def to_arrow(self) -> pa.DataType:
        """The Arrow type: lists are large_list, fixed inner lengths are fixed_size_list."""
        import pyarrow as pa

        plain = {
            "bool": pa.bool_(), "u8": pa.uint8(), "i32": pa.int32(), "i64": pa.int64(), "f16": pa.float16(),
            "f32": pa.float32(), "f64": pa.float64(), "str": pa.large_string(), "bytes": pa.large_binary(),
        }  # fmt: skip
        lowered = plain[self.dtype]
        for length in reversed(self.inner):
            lowered = pa.list_(lowered, length) if isinstance(length, int) else pa.large_list(lowered)
        return pa.large_list(lowered) if self.granularity.is_ragged else lowered

    def __str__(self) -> str:
        inner = "".join(f"[{n if isinstance(n, int) else repr(n)}]" for n in self.inner[:1])
        if len(self.inner) > 1:
            inner = f"[{', '.join(str(n) if isinstance(n, int) else repr(n) for n in self.inner)}]"
        return f"{self.granularity.value}.{self.dtype}{inner}"

    __repr__ = __str__

    @classmethod
    def parse(cls, text: str) -> ColumnType:
        """Read what `str()` wrote, e.g. `TOKEN.f32[64]`."""
        head, _, rest = text.strip().partition("[")
        grain, _, dtype = head.partition(".")
        if grain not in Granularity.__members__ or (rest and not rest.endswith("]")):
            raise SchemaError(f"a column type looks like TOKEN.f32 or TOKEN.i32[64]; found '{text}'")
        inner: list[int | str] = []
        for part in filter(None, (p.strip() for p in rest[:-1].split(","))):
            inner.append(int(part) if part.isdigit() else part.strip("'\""))
        return cls(Granularity[grain], dtype, tuple(inner))


@dataclass(frozen=True, slots=True)
class Asked:
    """How a parameter of an operator or a loss is filled when plain "column of the same name" is not enough."""

    type: ColumnType | None = None
    column: str = ""
    named_by: str = ""
    broadcast: str = ""
    live: str = ""
    is_optional: bool = False


def _resolve_length(length: int | str, names: dict[str, object]) -> int | str:
    if isinstance(length, int) or length == RAGGED:
        return length
    value = names.get(length, length)
    return value if isinstance(value, int) else length


_RANK = {"bool": 0, "u8": 1, "i32": 1, "i64": 1, "f16": 2, "f32": 2, "f64": 2}


def _widens(asked: str, found: str) -> bool:
    # Reading widens only: bool < integers < floats. Text and bytes stand apart.
    if asked in _RANK and found in _RANK:
        return _RANK[asked] >= _RANK[found]
    return asked == found


def _same_inner(asked: tuple[int | str, ...], found: tuple[int | str, ...]) -> bool:
    if len(asked) != len(found):
        return False
    return all(a == f or isinstance(a, str) or isinstance(f, str) for a, f in zip(asked, found, strict=True))
