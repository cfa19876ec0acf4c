"""One column's values: brought into the form a batch stores, and to Arrow and back.

    one value per row            np.ndarray [N, *inner]
    a list per row               Ragged, values [T, *inner]        (TURN, TOKEN, and an inner length of "*")
    text, bytes                  the same, as object arrays of str or bytes, never None

Nothing here guesses: what does not fit the declared type is refused with the column, the row and what was found there.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from flowrl.errors import DataError, SchemaError
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import PROMPT, RAGGED, ColumnType

Values = np.ndarray | Ragged
"""What a batch stores for one column."""

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_), "u8": np.dtype(np.uint8), "i32": np.dtype(np.int32), "i64": np.dtype(np.int64),
    "f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64),
    "str": np.dtype(object), "bytes": np.dtype(object),
}  # fmt: skip


def is_list_column(kind: ColumnType) -> bool:
    """Whether a value of this type is a list of its own length per row (stored as `Ragged`)."""
    return kind.granularity.is_ragged or kind.inner[:1] == (RAGGED,)


def inner_lengths(kind: ColumnType) -> tuple[int | str, ...]:
    """Lengths of the fixed dimensions of one stored value, named ones included."""
    return kind.inner[1:] if kind.inner[:1] == (RAGGED,) else kind.inner


def check_storable(name: str, kind: ColumnType) -> None:
    """Refuse types that nest one list of its own length in another."""
    if not isinstance(kind, ColumnType):
        raise SchemaError(f"column '{name}' needs a column type such as fr.SAMPLE.f32; found {kind!r}")
    lists = int(kind.granularity.is_ragged) + sum(1 for length in kind.inner if length == RAGGED)
    if lists > 1 or RAGGED in kind.inner[1:]:
        raise SchemaError(
            f"column '{name}' has type {kind}: lists of lists of different lengths are not stored; "
            "use one value per row, turn or token, or a fixed inner length"
        )
    if any(isinstance(length, int) and length < 1 for length in kind.inner):
        raise SchemaError(f"column '{name}' has type {kind}; an inner length is at least 1")


def readonly(values: Any) -> Any:
    """The same values as a read-only view: a write through it raises. Arrays and `Ragged` only; others pass through."""
    if isinstance(values, Ragged):
        if not values.values.flags.writeable and not values.offsets.flags.writeable:
            return values
        return Ragged(_view(values.values), _view(values.offsets))
    return _view(values) if isinstance(values, np.ndarray) else values


def _view(array: np.ndarray) -> np.ndarray:
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def seal(array: np.ndarray) -> np.ndarray:
    """An array nobody can change any more.

    One that owns its memory is marked read-only in place, so that a later write by whoever made it raises; a view of
    writable memory is copied, since its owner could still write.
    """
    if not array.flags.writeable and _base_is_sealed(array):
        return array
    if array.base is not None:
        array = array.copy()
    array.flags.writeable = False
    return array


def _base_is_sealed(array: np.ndarray) -> bool:
    base = array.base
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return False
        base = base.base
    return True  # what is not NumPy's (an Arrow buffer, bytes) handed out a read-only array itself


def to_stored(name: str, values: Any, kind: ColumnType, num_rows: int) -> tuple[Values, ColumnType]:
    """The stored form of a column and its type with inner lengths filled in.

    Args:
        values: NumPy array, `Ragged`, Arrow array, or a list with one value (or one list, or one array) per row.
        num_rows: rows the column must have.

    Errors: SchemaError for a wrong length, dtype or shape; DataError for a missing value, with its row.
    """
    check_storable(name, kind)
    if isinstance(values, pa.Array | pa.ChunkedArray):
        values = from_arrow(name, values, kind)
    stored: Values = _to_ragged(name, values, kind) if is_list_column(kind) else _to_array(name, values, kind)
    if len(stored) != num_rows:
        raise SchemaError(f"column '{name}' needs one value per row ({num_rows}); found {len(stored)}")
    flat = stored.values if isinstance(stored, Ragged) else stored
    return stored, with_lengths(name, kind, flat)


def with_lengths(name: str, kind: ColumnType, flat: np.ndarray) -> ColumnType:
    """The type with inner lengths as `flat` [T, *inner] has them. Errors: SchemaError when they are not those asked for."""
    asked = inner_lengths(kind)
    found = flat.shape[1:]
    if len(asked) != len(found) or any(
        isinstance(a, int) and a != f for a, f in zip(asked, found, strict=len(asked) == len(found))
    ):
        raise SchemaError(
            f"column '{name}' has type {kind}, so each value needs shape {_shape(asked)}; found {_shape(found)}"
        )
    if 0 in found:  # no values, so a named length is still unknown
        return kind
    lead = kind.inner[:1] if kind.inner[:1] == (RAGGED,) else ()
    return replace(kind, inner=(*lead, *found)) if found else kind


def _shape(lengths: Sequence[int | str]) -> str:
    return "(" + ", ".join(str(n) for n in lengths) + ")" if lengths else "() (one number or text)"


def _refuse_single(name: str, values: Any) -> None:
    if values is None or isinstance(values, str | bytes | bool | int | float) or np.ndim(values) == 0:
        raise SchemaError(
            f"column '{name}' needs one value per row; found the single value {values!r}. "
            f"For the same value in each row use np.full(len(rows), {values!r})"
        )


def _to_array(name: str, values: Any, kind: ColumnType) -> np.ndarray:
    if isinstance(values, Ragged):
        raise SchemaError(
            f"column '{name}' has type {kind}, one value per row; found a list per row ({values!r}). "
            "Reduce it (.sum(), .mean()) or declare a TOKEN or TURN column"
        )
    if not isinstance(values, np.ndarray | list | tuple):
        if isinstance(values, dict | set) or not isinstance(values, Iterable) or isinstance(values, str | bytes):
            _refuse_single(name, values) if not isinstance(values, dict | set) else None
            raise SchemaError(f"column '{name}' needs an array or a list of values; found {type(values).__name__}")
        values = list(values) if not hasattr(values, "__array__") else _as_array(name, values, "its values")
    if isinstance(values, np.ndarray) and values.ndim == 0:
        _refuse_single(name, values.item())
    if kind.dtype in ("str", "bytes"):
        return seal(_texts(name, values, kind))
    if isinstance(values, list | tuple):
        values = _natural(name, values)
    return seal(_cast(name, values, kind) if len(values) else _empty(kind, values))


def _empty(kind: ColumnType, found: np.ndarray) -> np.ndarray:
    """No values, in the column's shape; whatever dtype NumPy gave to "nothing" does not matter."""
    asked = inner_lengths(kind)
    shape = found.shape[1:] if found.ndim == 1 + len(asked) else (0,) * len(asked)
    return np.zeros(
        (0, *(a if isinstance(a, int) else n for a, n in zip(asked, shape, strict=True))), NUMPY_DTYPES[kind.dtype]
    )


def _natural(name: str, values: Sequence[Any], row: int | None = None) -> np.ndarray:
    """NumPy's own reading of a list of numbers or equal-shaped arrays; `row` when they all belong to one row."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise SchemaError(f"column '{name}' needs values of one shape in all rows: {error}") from error
    if array.dtype == object:
        for place, value in enumerate(values):
            if value is None:
                where = f"row {place}" if row is None else f"row {row}, place {place}"
                raise DataError(f"column '{name}' has no value in {where}; fill it or drop the row")
    return array


def _to_ragged(name: str, values: Any, kind: ColumnType) -> Ragged:
    if isinstance(values, Ragged):
        flat, offsets = values.values, values.offsets
    else:
        _refuse_single(name, values) if not isinstance(values, Iterable) or isinstance(values, str | bytes) else None
        flat, offsets = _flatten(name, list(values), kind)
    if kind.dtype in ("str", "bytes"):
        flat = _texts(name, flat, kind)
    else:
        flat = _cast(name, flat, kind) if len(flat) else _empty(kind, flat)
    return Ragged(seal(flat), seal(offsets))


def _flatten(name: str, rows: list[Any], kind: ColumnType) -> tuple[np.ndarray, np.ndarray]:
    is_text = kind.dtype in ("str", "bytes")
    offsets = np.zeros(len(rows) + 1, np.int64)
    parts = []
    for index, row in enumerate(rows):
        if row is None:
            raise DataError(f"column '{name}' has no value in row {index}; use an empty list if nothing is meant")
        if not isinstance(row, Sequence | np.ndarray) and hasattr(row, "__array__"):
            row = _as_array(name, row, f"row {index}")
        is_list = row.ndim > 0 if isinstance(row, np.ndarray) else isinstance(row, Sequence)
        if isinstance(row, str | bytes) or not is_list:
            raise SchemaError(f"column '{name}' has type {kind}, a list per row; row {index} is {reprlib.repr(row)}")
        if is_text:
            part = np.empty(len(row), object)
            part[:] = list(row)
        else:
            part = row if isinstance(row, np.ndarray) else _natural(name, row, index)
        offsets[index + 1] = offsets[index] + len(part)
        if len(part):
            parts.append(part)
    if not parts:
        return np.zeros(0, NUMPY_DTYPES[kind.dtype]), offsets
    try:
        return np.concatenate(parts), offsets
    except ValueError as error:  # inner shapes differ between rows
        raise SchemaError(f"column '{name}' needs values of one shape in all rows: {error}") from error


def _as_array(name: str, value: Any, where: str) -> np.ndarray:
    """A tensor of another library as an array. Errors: SchemaError when NumPy has no such numbers."""
    try:
        return np.asarray(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise SchemaError(
            f"column '{name}' was given a {type(value).__name__} in {where} that NumPy cannot take: {error}. For a torch tensor: "
            ".detach().cpu().float()"
        ) from error


def _texts(name: str, values: Any, kind: ColumnType) -> np.ndarray:
    wanted = str if kind.dtype == "str" else bytes
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise SchemaError(f"column '{name}' has type {kind}, one value each; found an array of shape {values.shape}")
    if isinstance(values, np.ndarray) and values.dtype == object and set(map(type, values.tolist())) <= {wanted}:
        return values
    texts = np.empty(len(values), object)
    for row, value in enumerate(values.tolist() if isinstance(values, np.ndarray) else values):
        if value is None:
            raise DataError(
                f"column '{name}' has no value in row {row}; use an empty {wanted.__name__} if that is meant"
            )
        if not isinstance(value, wanted):
            raise SchemaError(
                f"column '{name}' has type {kind}; row {row} is {value!r} ({type(value).__name__}). "
                f"Convert it first, or declare the column with the dtype it has"
            )
        texts[row] = str(value) if isinstance(value, str) else bytes(value)  # np.str_ becomes a plain str
    return texts


def _cast(name: str, array: np.ndarray, kind: ColumnType) -> np.ndarray:
    """Widen, or narrow where nothing is lost but the last digits of a float; everything else is refused."""
    wanted = NUMPY_DTYPES[kind.dtype]
    if array.dtype == wanted:
        return array
    found = array.dtype.kind
    if found == "b" or (found in "iu" and wanted.kind == "f"):
        return array.astype(wanted)
    if found in "iu" and wanted.kind in "iu":
        limits = np.iinfo(wanted)
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            raise SchemaError(
                f"column '{name}' has type {kind}, {limits.min} to {limits.max}; found values from {array.min()} to "
                f"{array.max()}. Declare it i64"
            )
        return array.astype(wanted)
    if found == "f" and wanted.kind == "f":
        with np.errstate(over="ignore"):
            cast = array.astype(wanted)
        if wanted.itemsize < array.dtype.itemsize and bool((np.isinf(cast) & np.isfinite(array)).any()):
            raise SchemaError(
                f"column '{name}' has type {kind}, which cannot hold {np.abs(array).max()}; declare it f64"
            )
        return cast
    raise SchemaError(f"column '{name}' has type {kind}; found {_dtype_found(array)}. {_remedy(found, kind)}")


def _dtype_found(array: np.ndarray) -> str:
    if array.dtype != object:
        return f"dtype {array.dtype}"
    values = array.reshape(-1).tolist()
    odd = next((v for v in values if not isinstance(v, int | float | bool)), None)
    if odd is None:  # numbers throughout: one is too large for NumPy, or they came as objects
        large = next((v for v in values if isinstance(v, int) and not -(2**63) <= v < 2**63), None)
        return "numbers in an array of objects" if large is None else f"{large}, beyond 64 bits"
    return f"{odd!r} ({type(odd).__name__})"


def _remedy(found: str, kind: ColumnType) -> str:
    if kind.dtype == "bool":
        return "Compare (values != 0) to get booleans"
    if found == "f" and kind.is_numeric:
        return "Round it yourself (np.rint(x).astype(np.int64)), or declare a float column"
    return "Convert it first, or declare the column with the dtype it has"


# ------------------------------------------------------------------------------------------------------------ Arrow


def to_arrow(values: Values, kind: ColumnType) -> pa.Array:
    """The Arrow form of a stored column; numbers are not copied, booleans become bits, text is copied."""
    flat = values.values if isinstance(values, Ragged) else values
    array = _flat_to_arrow(flat, kind)
    if isinstance(values, Ragged):
        return pa.LargeListArray.from_arrays(pa.array(values.offsets), array)
    return array


def _flat_to_arrow(flat: np.ndarray, kind: ColumnType) -> pa.Array:
    item = ColumnType(PROMPT, kind.dtype).to_arrow()
    if flat.dtype == object or 0 in flat.shape[1:]:
        # text, or no values of a length that is not known yet: the declared type says how lists nest
        inner = ColumnType(PROMPT, kind.dtype, inner_lengths(kind)).to_arrow()
        return pa.array(flat.tolist(), inner)
    array = pa.array(np.ascontiguousarray(flat).reshape(-1), item)
    for length in reversed(flat.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, length)
    return array


def from_arrow(name: str, array: pa.Array | pa.ChunkedArray, kind: ColumnType) -> Values:
    """The stored form of an Arrow column; numbers are not copied when the column is one chunk.

    Errors: DataError for a missing value (a nullable int64 would otherwise pass through float64 and merge ids),
    SchemaError for another Arrow type than the column's.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
        if isinstance(array, pa.ChunkedArray):  # text beyond the limit of 32-bit offsets stays chunked
            array = pa.concat_arrays([chunk.cast(kind.to_arrow()) for chunk in array.chunks])
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    _refuse_nulls(name, array)
    if not is_list_column(kind):
        return _flat_from_arrow(name, array, kind)
    if not (
        pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type)
    ):
        raise SchemaError(f"column '{name}' has type {kind}, a list per row; found the Arrow type {array.type}")
    if pa.types.is_fixed_size_list(array.type):
        offsets = np.arange(len(array) + 1, dtype=np.int64) * array.type.list_size
        flat = array.flatten()
    else:
        offsets = np.asarray(array.offsets, dtype=np.int64)
        flat = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        offsets = offsets - offsets[0] if offsets[0] else offsets
    _refuse_nulls(name, flat)
    return Ragged(_flat_from_arrow(name, flat, kind), offsets)


def _refuse_nulls(name: str, array: pa.Array) -> None:
    if array.null_count:
        row = int(np.flatnonzero(~np.asarray(array.is_valid()))[0])
        raise DataError(f"column '{name}' has no value in row {row}; fill it or drop the row")


def _flat_from_arrow(name: str, array: pa.Array, kind: ColumnType) -> np.ndarray:
    shape: list[int] = []
    while pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
        _refuse_nulls(name, array)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        if len(array) == 0:  # no values of a length that is not known yet
            return np.zeros(
                (0, *(n if isinstance(n, int) else 0 for n in inner_lengths(kind))), NUMPY_DTYPES[kind.dtype]
            )
        raise SchemaError(f"column '{name}' has type {kind}; found lists inside ({array.type})")
    found: np.ndarray = array.to_numpy(zero_copy_only=False)
    return found.reshape(-1, *shape) if shape else found
