"""A data set for a flow's input, and the place where a run is in it.

Example:
    Data(rows)                      list of dicts, Arrow table, Hugging Face data set, RowBatch, JSONL or Parquet path
      .schema                       what it offers to the flow
      .next(count)                  the next rows; every row once per epoch, reshuffled by (seed, epoch)
      .state() / .restore(state)    where it is
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flowrl.errors import ConfigError, DataError, SchemaError
from flowrl.schema.columns import TableSchema, nearest
from flowrl.schema.ragged import Ragged
from flowrl.schema.standard import STANDARD
from flowrl.schema.types import PROMPT, RAGGED, ColumnType
from flowrl.store.rows import RowBatch

ALL = "all"
"""Batch size that means every row, in the order given, each time."""


class Data:
    """A data set and a cursor in it.

    Example:
        Data([{"prompt": "2+2=", "answer": "4"}, {"prompt": "1+2=", "answer": "3"}], batch=2)
        Data("train.jsonl", columns={"prompt": "question", "answer": "answer"}, batch=64)
        Data(heldout, batch="all")                       # every row, each time: an evaluation

    Columns with a standard name have their standard type; others belong to the prompt and take their dtype from the data.
    """

    def __init__(
        self,
        rows: Any,
        *,
        batch: int | str | None = None,
        shuffle: bool = True,
        name: str = "",
        columns: Sequence[str] | Mapping[str, str] | None = None,
        types: Mapping[str, ColumnType] | None = None,
        seed: int = 0,
    ) -> None:
        """Args:
            rows: list of dicts, `pyarrow.Table`, Hugging Face data set, `RowBatch`, path of a JSONL or Parquet file.
            batch: rows a step takes; "all" takes every row each time, in the order given; None leaves it to the run.
            shuffle: reshuffle before each epoch, by (seed, name, epoch).
            name: of the flow's input; the run sets it.
            columns: those to keep, or new name to name in the data.
            types: of columns whose type the name and the values do not tell.
            seed: of the shuffling; the run sets it.

        Errors: DataError for no rows, missing values, repeated ids, columns that cannot be stored; ConfigError for options.
        """
        if batch is not None and batch != ALL and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
            raise ConfigError(f"batch is a number of rows, at least 1, or 'all'; found {batch!r}")
        self.batch = batch
        self.shuffle = bool(shuffle)
        self.name = name
        self.seed = int(seed)
        self.rows: RowBatch = _identified(_read(rows, columns, dict(types or {})))
        self._units = _units(self.rows)
        self._epoch = 0
        self._place = 0
        """Rows (or units of rows) of the epoch already given."""
        self._order: np.ndarray | None = None

    @classmethod
    def of(cls, value: Any, *, name: str = "") -> Data:
        """`value` itself when it is a `Data`, else a `Data` made from it."""
        return value if isinstance(value, Data) else cls(value, name=name)

    @property
    def schema(self) -> TableSchema:
        """Columns a flow may read from it."""
        return self.rows.schema

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Data({len(self)} rows: {', '.join(self.rows.names)}; batch={self.batch!r}, shuffle={self.shuffle})"

    def opened(self, *, seed: int, name: str | None = None) -> Data:
        """The same rows with a cursor of their own at the beginning, so that two runs never share one."""
        fresh = type(self).__new__(type(self))  # a subclass stays one
        fresh.__dict__.update(self.__dict__)
        fresh.seed, fresh.name = int(seed), self.name if name is None else name
        fresh._epoch, fresh._place, fresh._order = 0, 0, None
        return fresh

    def with_default_batch(self, batch: int) -> Data:
        """The same data set with a cursor of its own and, where it has no batch size, this one."""
        fresh = self.opened(seed=self.seed)
        fresh.batch = batch if self.batch is None else self.batch
        return fresh

    def next(self, count: int | None = None) -> RowBatch:
        """The next `count` rows (None: the batch size), running on into the next epoch where one ends.

        Rows of one preference pair (equal `pair_id`) come together, as do recorded responses to one prompt (equal
        `prompt_id`): as many whole units as fit in `count`, at least one, and none of them twice.
        """
        if count is None:
            count = len(self) if self.batch in (None, ALL) else int(self.batch or 0)
            if self.batch == ALL:
                self._epoch += 1
                return self.rows
        if count < 1:
            raise ConfigError(f"next needs a number of rows of at least 1; found {count!r}")
        return self.rows.take(
            self._next_singles(count) if self._units is None else self._next_units(self._units, count)
        )

    def _next_singles(self, count: int) -> np.ndarray:
        taken: list[np.ndarray] = []
        while count > 0:
            part = self._current_order()[self._place : self._place + count]
            taken.append(part)
            count -= len(part)
            self._advance(len(part), len(self))
        return np.concatenate(taken)

    def _next_units(self, units: list[np.ndarray], room: int) -> np.ndarray:
        taken: dict[int, np.ndarray] = {}
        while room > 0:
            number = int(self._current_order()[self._place])
            # at the end of an epoch: a unit twice would be one of twice the size, with every response in it doubled
            if taken and (len(units[number]) > room or number in taken):
                break
            taken[number] = units[number]
            room -= len(units[number])
            self._advance(1, len(units))
        return np.concatenate(list(taken.values()))

    def _advance(self, by: int, of: int) -> None:
        self._place += by
        if self._place == of:
            self._epoch, self._place, self._order = self._epoch + 1, 0, None

    def _current_order(self) -> np.ndarray:
        if self._order is None:
            count = len(self) if self._units is None else len(self._units)
            if self.shuffle:
                # the name keeps two inputs with the same rows from walking in step
                key = [self.seed & 0xFFFFFFFFFFFFFFFF, zlib.crc32(self.name.encode()), self._epoch]
                self._order = np.random.default_rng(key).permutation(count)
            else:
                self._order = np.arange(count)
        return self._order

    @property
    def epoch(self) -> int:
        """Epochs finished."""
        return self._epoch

    def state(self) -> dict[str, Any]:
        """Where it is: enough for `restore` to go on with the very next row."""
        return {
            "epoch": self._epoch,
            "place": self._place,
            "seed": self.seed,
            "name": self.name,
            "shuffle": self.shuffle,
            "num_rows": len(self),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Errors: DataError when the data set is another one."""
        if state["num_rows"] != len(self) or bool(state["shuffle"]) != self.shuffle:
            raise DataError(
                f"data set '{self.name}' was saved with {state['num_rows']} rows and shuffle={state['shuffle']}; "
                f"this one has {len(self)} and shuffle={self.shuffle}. Resume with the same data"
            )
        self.seed, self.name = int(state["seed"]), str(state["name"])
        self._epoch, self._place, self._order = int(state["epoch"]), int(state["place"]), None


# ------------------------------------------------------------------------------------------------- reading the data


def _read(rows: Any, columns: Sequence[str] | Mapping[str, str] | None, types: dict[str, ColumnType]) -> RowBatch:
    """Any of the accepted forms as a batch with types."""
    if isinstance(rows, Data):
        rows = rows.rows
    if isinstance(rows, str | Path):
        rows = _read_file(Path(rows))
    if isinstance(rows, RowBatch):
        found = (
            rows
            if columns is None
            else rows.select(_sources(columns, rows.names).values()).rename(
                {old: new for new, old in _sources(columns, rows.names).items()}
            )
        )
        return _not_empty(found.as_types(types))
    values = _by_column(rows, columns)
    kinds = {name: types[name] if name in types else _type_of(name, column) for name, column in values.items()}
    for name in types:
        if name not in kinds:
            raise DataError(f"types names '{name}', which the data lacks; {nearest(name, kinds)}")
    try:
        return _not_empty(RowBatch(values, kinds))
    except SchemaError as error:
        raise DataError(str(error)) from error


def _read_file(path: Path) -> Any:
    if not path.exists():
        raise DataError(
            f"there is no file '{path}'; a data set is a list of dicts, an Arrow table, or a JSONL or Parquet path"
        )
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        try:
            return pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"'{path}' cannot be read as Parquet: {error}") from error
    if path.suffix not in (".jsonl", ".ndjson", ".json"):
        raise DataError(f"'{path}' is not a .jsonl or .parquet file; read it yourself and pass a list of dicts")
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: not a JSON object per line: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: each line is a JSON object; found {type(row).__name__}")
            rows.append(row)
    return rows


def _sources(columns: Sequence[str] | Mapping[str, str] | None, known: Iterable[str]) -> dict[str, str]:
    """New name to name in the data."""
    known = list(known)
    if columns is None:
        return {name: name for name in known}
    if isinstance(columns, str):
        raise ConfigError(f"columns is a list of names, or new name to old name; found {columns!r}")
    wanted = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    for old in wanted.values():
        if old not in known:
            raise DataError(f"the data has no column '{old}'; {nearest(old, known)}")
    return wanted


def _by_column(rows: Any, columns: Sequence[str] | Mapping[str, str] | None) -> dict[str, Any]:
    if isinstance(rows, pa.Table | pa.RecordBatch):
        return {new: rows.column(old) for new, old in _sources(columns, rows.schema.names).items()}
    names = getattr(rows, "column_names", None)
    if names is not None:  # a Hugging Face data set, without importing the library
        if isinstance(names, Mapping):
            raise DataError(
                f"this is several data sets in one ({', '.join(names)}); choose a split: data['{next(iter(names), 'train')}']"
            )
        values = {new: list(rows[old]) for new, old in _sources(columns, names).items()}
        for new, column in values.items():
            if None in column:
                raise DataError(f"column '{new}' is None in row {column.index(None)}; fill it in or drop the row")
        return values
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise DataError(
            f"a data set is a list of dicts, an Arrow table, a Hugging Face data set, a RowBatch, or the path of a JSONL or "
            f"Parquet file; found {type(rows).__name__}"
        )
    return _from_dicts(list(rows), columns)


def _from_dicts(rows: list[Any], columns: Sequence[str] | Mapping[str, str] | None) -> dict[str, Any]:
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"row {index} of the data is {type(row).__name__}; each row is a dict of column to value")
    if not rows:
        raise DataError(_NO_ROWS)
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        if not isinstance(name, str):
            raise DataError(f"column names are text; found {name!r} ({type(name).__name__})")
    wanted = _sources(columns, names)
    for index, row in enumerate(rows):
        for old in wanted.values():
            if old not in row or row[old] is None:
                what = "is None" if old in row else "is missing"
                raise DataError(
                    f"column '{old}' {what} in row {index}; fill it in, drop the row, or leave it out with columns="
                )
    return {new: [row[old] for row in rows] for new, old in wanted.items()}


_NO_ROWS = "the data set has no rows; a flow needs at least one"


def _not_empty(rows: RowBatch) -> RowBatch:
    if len(rows) == 0:
        raise DataError(_NO_ROWS)
    for name in rows.names:
        if rows.types[name].dtype == "str" and not isinstance(rows[name], Ragged):
            _refuse_half_characters(name, rows[name])
    return rows


def _refuse_half_characters(name: str, texts: np.ndarray) -> None:
    # JSON may escape half of a surrogate pair; no tokenizer and no file takes it
    for row, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"column '{name}' holds half a character ({text[error.start]!r}) in row {row}; clean the text, e.g. "
                'text.encode(errors="replace").decode()'
            ) from error


# -------------------------------------------------------------------------------------------------------------- types


def _type_of(name: str, values: Any) -> ColumnType:
    """Type of a data set's column: by name if it is a standard one, else PROMPT with the dtype of its values."""
    if name in STANDARD:
        _refuse_messages(name, values)
        return _int_ids(name, values) or STANDARD[name].type
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return _arrow_type(name, values.type)
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype != object:
        return ColumnType(PROMPT, _numpy_dtype(name, values.dtype))
    first = next((value for value in values if not _is_empty_list(value)), [0])
    if _is_list(first):
        inner = [item for value in values for item in value]
        if any(_is_list(item) for item in inner):
            raise _not_storable(name, first)
        return ColumnType(PROMPT, _python_dtype(name, inner, small="i32", fraction="f32"), (RAGGED,))
    return ColumnType(PROMPT, _python_dtype(name, values, small="i64", fraction="f64"))


def _refuse_messages(name: str, values: Any) -> None:
    """Errors: DataError where text is asked for and chat messages are given."""
    if STANDARD[name].type.dtype != "str":
        return
    if isinstance(values, pa.Array | pa.ChunkedArray):
        is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
        first = values[0].as_py() if is_list and len(values) and pa.types.is_struct(values.type.value_type) else ()
    else:
        first = values[0] if len(values) else ()
    found: Any = first if _is_list(first) else ()
    if len(found) and isinstance(found[0], Mapping):
        raise _not_storable(name, found)


def _int_ids(name: str, values: Any) -> ColumnType | None:
    # ids are text or whole numbers that are never missing; numbers become text in _identified
    if name not in ("prompt_id", "sample_id", "pair_id", "source_id"):
        return None
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return ColumnType(STANDARD[name].type.granularity, "i64") if pa.types.is_integer(values.type) else None
    whole = all(isinstance(value, int | np.integer) and not isinstance(value, bool) for value in values)
    return ColumnType(STANDARD[name].type.granularity, "i64") if whole else None


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


def _is_empty_list(value: Any) -> bool:
    return _is_list(value) and len(value) == 0


def _python_dtype(name: str, values: Iterable[Any], *, small: str, fraction: str) -> str:
    found: set[str] = set()
    for value in values:
        if isinstance(value, bool | np.bool_):
            found.add("bool")
        elif isinstance(value, int | np.integer):
            if not -(2**63) <= value < 2**63:
                raise DataError(f"column '{name}' holds {value}, beyond 64 bits; make it text or a float")
            found.add(small if -(2**31) <= value < 2**31 else "i64")
        elif isinstance(value, float | np.floating):
            found.add(fraction)
        elif isinstance(value, str | bytes):
            found.add("str" if isinstance(value, str) else "bytes")
        else:
            raise _not_storable(name, value)
    for dtype in ("f64", "f32", "i64", "i32"):
        if dtype in found and found <= {dtype, "i64", "i32"}:
            return dtype
    if len(found) > 1:
        raise DataError(f"column '{name}' mixes {' and '.join(sorted(found))}; make all its values one of them")
    return found.pop() if found else small


def _not_storable(name: str, value: Any) -> DataError:
    hint = "turn it into text (json.dumps), or leave it out with columns="
    first = value[0] if _is_list(value) and len(value) else value
    if isinstance(first, Mapping) and "role" in first:
        hint = _of_messages(name)
    shown = repr(value)
    return DataError(
        f"column '{name}' holds {shown[:60]}{'...' if len(shown) > 60 else ''} ({type(value).__name__}); a column holds "
        f"numbers, text, or a list of them. {hint[0].upper()}{hint[1:]}"
    )


def _of_messages(name: str) -> str:
    return (
        f"chat messages become a prompt with adapters.datasets.data(dataset, messages='{name}') of flowrl_operators, which "
        "applies the chat template (tokenizer=) where there is more than one"
    )


def _numpy_dtype(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.kind == "b":
        return "bool"
    if dtype.kind in "iu":
        return "i32" if dtype.itemsize <= 4 and dtype != np.uint32 else "i64"
    if dtype.kind == "f" and dtype.itemsize <= 8:
        return {2: "f16", 4: "f32", 8: "f64"}[dtype.itemsize]
    if dtype.kind == "U":
        return "str"
    raise DataError(f"column '{name}' has dtype {dtype}, which a column cannot hold; convert it to numbers or text")


def _arrow_type(name: str, kind: pa.DataType) -> ColumnType:
    t = pa.types
    if t.is_dictionary(kind):
        return _arrow_type(name, kind.value_type)
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        inner = _arrow_type(name, kind.value_type)
        if inner.inner:
            raise DataError(f"column '{name}' holds {kind}; lists of lists are not stored. Leave it out with columns=")
        return ColumnType(PROMPT, inner.dtype, (RAGGED,))
    tests = (
        (t.is_boolean, "bool"), (t.is_uint8, "u8"), (t.is_float16, "f16"), (t.is_float32, "f32"), (t.is_float64, "f64"),
        (t.is_int64, "i64"), (t.is_uint32, "i64"), (t.is_uint64, "i64"), (t.is_integer, "i32"),
        (t.is_string, "str"), (t.is_large_string, "str"), (t.is_binary, "bytes"), (t.is_large_binary, "bytes"),
    )  # fmt: skip
    for test, dtype in tests:
        if test(kind):
            return ColumnType(PROMPT, dtype)
    is_message = t.is_struct(kind) and kind.get_field_index("role") >= 0
    hint = _of_messages(name) if is_message else "leave it out with columns="
    raise DataError(
        f"column '{name}' holds {kind}; a column holds numbers, text, or a list of them. {hint[0].upper()}{hint[1:]}"
    )


# ----------------------------------------------------------------------------------------------------------- identity


def _identified(rows: RowBatch) -> RowBatch:
    """The rows with text ids: made from the row number where there are none, refused where they repeat."""
    for name in ("prompt_id", "sample_id", "pair_id", "source_id"):
        if name in rows and rows.types[name].dtype != "str":
            if rows.types[name].dtype not in ("i32", "i64"):
                raise DataError(f"column '{name}' is an identity: text or whole numbers; found {rows.types[name]}")
            rows = rows.with_column(name, [str(value) for value in rows[name].tolist()], STANDARD[name].type)
    if "prompt_id" not in rows:
        ids = rows["pair_id"] if "pair_id" in rows else [str(number) for number in range(len(rows))]
        made = rows.with_column("prompt_id", ids, STANDARD["prompt_id"].type)
        rows = made.select(("prompt_id", *rows.names))
    # where each row is a response, its prompt may repeat and the response has an identity of its own
    key = "prompt_id" if not _are_responses(rows) else "sample_id" if "sample_id" in rows else ""
    if key:
        for group in rows.group_indices(key):
            if len(group) > 1:
                raise DataError(
                    f"rows {group[0]} and {group[1]} both have {key} {rows[key][group[0]]!r}; each row needs its own "
                    f"(leave the column out to number the rows)"
                )
    return rows


def _are_responses(rows: RowBatch) -> bool:
    return any(kind.granularity is not PROMPT for kind in rows.types.values())


def _units(rows: RowBatch) -> list[np.ndarray] | None:
    """Row numbers that must come together: a pair, or the responses to one prompt; None when each row stands alone."""
    if "pair_id" in rows:
        return rows.group_indices("pair_id")
    if not _are_responses(rows):
        return None
    groups = rows.group_indices("prompt_id")
    return groups if len(groups) < len(rows) else None
