"""Rows to batches: one call copies all columns of a batch from where they lie into one block of memory.

    gather = Gather(columns)                       # once for a set of rows: where each row of each column lies
    batch = gather.padded(rows, take=staging.take) # dict of arrays [M, L, *inner], zeros to the right, and "mask" [M, L]
    batch = gather.packed(rows)                    # dict of arrays [T, *inner], and "cu_seqlens" [M + 1] int32

Two implementations, equal bit for bit: `numba_path` (compiled, lets other threads run) and `numpy_path`. Rows are read by
address, so nothing here knows of tables, segments or processes; whoever builds a `Gather` keeps their memory alive
(`GatherColumn.keep`, `Plan.keep`).

Shape letters: N rows that can be asked for, M rows of a batch, L the longest of them, T values of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from flowrl.errors import ConfigError, DataError, MissingExtra, SchemaError
from flowrl.schema.columns import nearest
from flowrl.schema.types import TOKEN, ColumnType
from flowrl.store.columns import NUMPY_DTYPES
from flowrl.store.kernels import numpy_path
from flowrl.store.kernels.plan import ALIGN, BITS, ENDS, FIXED, LIST, Form, Output, Plan

KERNELS = ("auto", "numba", "numpy")

Take = Callable[[int], np.ndarray]
"""Gives a writable uint8 array of at least so many bytes that starts at a multiple of 64. The arrays of a batch are views of
it: it may be used again when they are gone."""


@dataclass(frozen=True, slots=True)
class GatherColumn:
    """Where the rows of one column lie. Numbers and booleans only; text has no fixed width and is not gathered.

    Example:
        GatherColumn("reward", SAMPLE.f32, address=base + 4 * np.arange(n), keep=block)
        GatherColumn("response_ids", TOKEN.i32, address=base + 4 * offsets[:-1], length=np.diff(offsets), keep=block)
    """

    name: str
    type: ColumnType
    address: np.ndarray
    """int64 [N]: of each row's first value, in bytes."""
    length: np.ndarray | None = None
    """int64 [N]: values of each row; None for a column with one value per row. Equal for all TOKEN columns."""
    bits: bool = False
    """Booleans stored one bit a value, least significant first, each row from a byte boundary; what is left of its last
    byte is zero."""
    inner: tuple[int, ...] = ()
    """Shape of one value."""
    keep: Any = None
    """Whatever keeps the memory at `address` where it is."""


class Gather:
    """Columns of N rows, ready to be copied into batches. Threads may share one.

    Errors: SchemaError for a text column, or TOKEN columns of different lengths.
    """

    def __init__(self, columns: Sequence[GatherColumn] | Plan, kernel: str = "auto") -> None:
        self._plan = columns if isinstance(columns, Plan) else plan_of(tuple(columns))
        self.kernel = choose(kernel)
        self._path = _numba() if self.kernel == "numba" else numpy_path

    def __len__(self) -> int:
        """N"""
        return self._plan.num_rows

    def padded(self, rows: np.ndarray, *, multiple: int = 1, take: Take | None = None) -> dict[str, np.ndarray]:
        """The given rows, filled with zeros on the right up to the longest.

        Args:
            rows: int64 [M], each from 0 to N - 1 (checked); they may repeat.
            multiple: L is rounded up to a multiple of this, for each column.
            take: where the bytes come from; None makes new ones.

        Returns what `flowrl.store.loader.padded` returns for the same rows: columns in their order, list columns as
        [M, L, *inner] with "mask" [M, L] after the first TOKEN column and "<column>.mask" after every other list column.

        Errors: DataError for a row number out of range.
        """
        return self._gather(rows, multiple, False, take)

    def packed(self, rows: np.ndarray, *, take: Take | None = None) -> dict[str, np.ndarray]:
        """The given rows end to end.

        Returns what `flowrl.store.loader.packed` returns for the same rows: list columns as [T, *inner] with "cu_seqlens"
        [M + 1] int32 after the first TOKEN column and "<column>.cu_seqlens" after every other list column.

        Errors: DataError for a row number out of range, or 2^31 values and more of one column.
        """
        return self._gather(rows, 1, True, take)

    def _gather(self, rows: np.ndarray, multiple: int, is_packed: bool, take: Take | None) -> dict[str, np.ndarray]:
        plan = self._plan
        if rows.dtype != _INT64 or not rows.flags.c_contiguous:
            rows = np.ascontiguousarray(rows, np.int64)
        sizes = np.empty((len(plan.form.table) + 1, 2), np.int64)
        wrong = self._path.measure(plan, rows, multiple, is_packed, sizes)
        if wrong >= 0:
            raise DataError(f"a batch was asked for row {rows[wrong]} of {plan.num_rows} rows")
        placed = sizes.tolist()
        nbytes = placed[-1][0]
        block = aligned(nbytes) if take is None else take(nbytes)
        if is_packed and nbytes > _MOST:
            self._refuse_long(placed)
        if not self._path.fill(plan, rows, is_packed, sizes, block):
            base = block.__array_interface__["data"][0]
            raise ConfigError(
                f"a batch needs {nbytes} bytes that start at a multiple of {ALIGN}; take gave {len(block)} at {base}"
            )
        count, made, array = len(rows), {}, np.ndarray
        arrays = plan.form.packed if is_packed else plan.form.padded
        for (name, dtype, what, inner), (offset, along) in zip(arrays, placed, strict=False):
            if what == _PADDED:
                made[name] = array((count, along, *inner), dtype, block, offset)
            elif what == _PACKED:
                made[name] = array((along, *inner), dtype, block, offset)
            else:
                made[name] = array((count, *inner) if what == _PER_ROW else (count + 1,), dtype, block, offset)
        return made

    def _refuse_long(self, placed: list[list[int]]) -> None:
        for (name, *_), (_, along) in zip(self._plan.form.packed, placed, strict=False):
            if along > _MOST:
                raise DataError(
                    f"column '{name}' has {along} values in one batch; int32 bounds end at 2^31. Make it smaller"
                )


def locate(
    root: np.ndarray, buffers: np.ndarray, lines: np.ndarray, low: int, high: int, matrix: np.ndarray, at: int
) -> bool:
    """See `numpy_path.locate`; by the kernel that "auto" means."""
    path: Any = _numba() if choose() == "numba" else numpy_path
    found: bool = path.locate(root, buffers, lines, low, high, matrix, at)
    return found


def gather_padded(
    columns: Sequence[GatherColumn],
    rows: np.ndarray,
    *,
    multiple: int = 1,
    take: Take | None = None,
    kernel: str = "auto",
) -> dict[str, np.ndarray]:
    """`Gather.padded` for one batch."""
    return Gather(columns, kernel).padded(rows, multiple=multiple, take=take)


def gather_packed(
    columns: Sequence[GatherColumn], rows: np.ndarray, *, take: Take | None = None, kernel: str = "auto"
) -> dict[str, np.ndarray]:
    """`Gather.packed` for one batch."""
    return Gather(columns, kernel).packed(rows, take=take)


def choose(name: str = "auto") -> str:
    """The kernel to use: "numba" or "numpy".

    "auto" is numba where it can be imported. Imports numba when it is chosen.

    Errors: ConfigError for another name; MissingExtra when numba is asked for by name and cannot be imported.
    """
    if name not in KERNELS:
        raise ConfigError(f"a kernel is one of {', '.join(KERNELS)}; found {name!r}; {nearest(str(name), KERNELS)}")
    if name == "auto":
        name = _forced
    if name == "auto":
        return "numpy" if isinstance(_numba(), ImportError) else "numba"
    if name == "numba" and isinstance(found := _numba(), ImportError):
        raise MissingExtra(
            f"compiled kernels need numba ({found}); install it with: pip install 'flowrl[kernels]'"
        ) from found
    return name


_forced = "auto"


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Let "auto" mean this kernel, in all threads. For tests and measurements."""
    global _forced
    before, _forced = _forced, choose(name)
    try:
        yield
    finally:
        _forced = before


@lru_cache(maxsize=1)
def _numba() -> Any:
    """The module, or why it cannot be imported."""
    try:
        from flowrl.store.kernels import numba_path
    except ImportError as error:
        return error
    return numba_path


def packer(num_rows: int) -> Any:
    """`flowrl.store.kernels.packing`, to write so many more rows of arrays; None when NumPy is to do it.

    With "auto", NumPy writes the first rows of a process: to load compiled code, or even compile it, takes the time of
    writing very many.
    """
    global _packed_rows
    if _forced == "numpy":
        return None
    if _forced == "auto" and _packed_rows < _FEW_ROWS:
        _packed_rows += num_rows
        return None
    return _packing()


_packed_rows, _FEW_ROWS = 0, 512


@lru_cache(maxsize=1)
def _packing() -> Any:
    """The module; None when it cannot be imported, or objects of Python are not laid out as it needs."""
    try:
        from flowrl.store.kernels import packing
    except ImportError:
        return None
    return packing


_INT64 = np.dtype(np.int64)
_MOST = int(np.iinfo(np.int32).max)
_PER_ROW, _PADDED, _PACKED, _BOUNDS = range(4)


def _view(output: Output, is_packed: bool) -> tuple[str, np.dtype[Any], int, tuple[int, ...]]:
    """Name, dtype, how its shape is made, shape of one value."""
    if output.what == ENDS and is_packed:
        return output.packed_name, np.dtype(np.int32), _BOUNDS, ()
    how = _PER_ROW if output.what == FIXED else _PACKED if is_packed else _PADDED
    return output.name, output.dtype, how, output.inner


def plan_of(columns: tuple[GatherColumn, ...]) -> Plan:
    """The plan of columns that lie anywhere. Errors: as `Gather`."""
    form = form_of(columns)
    for output in form.outputs:
        if output.column >= 0 and output.axis >= 0:
            length, wanted = columns[output.column].length, columns[form.keys[output.axis]].length
            if length is not wanted and not np.array_equal(length, wanted):  # type: ignore[arg-type]
                raise SchemaError(
                    f"TOKEN columns of a row have one value per response token; '{output.name}' has others"
                )
    lines = [column.address for column in columns]
    lines += [length for key in form.keys if (length := columns[key].length) is not None]
    counts = set(map(len, lines))
    if len(counts) > 1:
        raise SchemaError(f"columns to be gathered have the same rows; found {sorted(counts)} of them")
    matrix = np.empty((form.lines, counts.pop() if counts else 0), np.int64)
    for number, line in enumerate(lines):
        matrix[number] = line
    return Plan(form, matrix, [column.keep for column in columns])


_forms: dict[tuple[Any, ...], tuple[Form, tuple[ColumnType, ...]]] = {}
_MOST_FORMS = 256


def form_of(columns: tuple[GatherColumn, ...]) -> Form:
    """What batches of such columns consist of; of a column's `length` only whether there is one matters."""
    # types are compared by identity, which is faster; those of a form are kept, so that no other comes to have their ids
    key = tuple([(c.name, id(c.type), c.length is None, c.bits, c.inner) for c in columns])
    known = _forms.get(key)
    if known is None:
        known = _form(columns), tuple([c.type for c in columns])
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        _forms[key] = known
    return known[0]


def _form(columns: tuple[GatherColumn, ...]) -> Form:
    outputs: list[Output] = []
    axes: list[int] = []
    token = -1
    for number, column in enumerate(columns):
        dtype = NUMPY_DTYPES[column.type.dtype]
        if not column.type.is_numeric:
            raise SchemaError(f"column '{column.name}' is {column.type}; text has no fixed width and is not gathered")
        if column.length is None:
            outputs.append(Output(column.name, FIXED, -1, dtype, column.inner, number))
            continue
        is_token = column.type.granularity is TOKEN
        axis, is_first = (token, False) if is_token and token >= 0 else (len(axes), True)
        if is_first:
            axes.append(number)
            token = axis if is_token else token
        outputs.append(Output(column.name, BITS if column.bits else LIST, axis, dtype, column.inner, number))
        if is_first:
            mask, bounds = (f"{'' if is_token else column.name + '.'}{end}" for end in ("mask", "cu_seqlens"))
            outputs.append(Output(mask, ENDS, axis, np.dtype(np.bool_), (), -1, bounds))
    return Form(outputs, axes, *([_view(output, is_packed) for output in outputs] for is_packed in (False, True)))


def aligned(nbytes: int) -> np.ndarray:
    """New memory, uint8 [nbytes], that starts at a multiple of 64. Its contents are undefined."""
    room = np.empty(nbytes + 63, np.uint8)
    start = -room.__array_interface__["data"][0] % 64
    return room[start : start + nbytes]
