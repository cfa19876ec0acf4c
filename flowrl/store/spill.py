"""Segments as files: Arrow IPC streams that are whole or not there.

    <first>-<uid>.arrow            columns of one compression: none, LZ4 or Zstandard, as Arrow itself has them
    <first>-<uid>.zstd.arrow       columns of another one: a stream has one compression for all
    <first>-<uid>.filtered.arrow   columns that are shuffled before they are compressed, each as one binary value

The stream format and not the file format, since a stream needs no footer. Files without filtered columns can be read by any
Arrow: `pyarrow.ipc.open_stream`. A file is written aside, synced and renamed, so what has the final name is complete. A file
is mapped when it is read, and columns that nobody asked for are neither read nor decompressed.

Metadata of the schema, key `flowrl.segment`, JSON:
    {"format": 1, "first": 512, "rows": 256, "columns": {"response_ids": ["TOKEN.i32", "lz4"], ...}}
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from flowrl.errors import ConfigError, FlowError, MissingExtra, StoreError
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import TOKEN, ColumnType
from flowrl.store.codecs import CODECS, FILTERED, decode_buffer, encode_buffer
from flowrl.store.columns import NUMPY_DTYPES, Values, from_arrow, is_list_column, readonly, to_arrow
from flowrl.store.folders import sync_folder

FORMAT = 1
"""Of the files; grows when an older version could not read them."""
KEY = b"flowrl.segment"
FEW = 64 << 10
"""Bytes up to which columns that need no codec go into the stream of those that have one: a file and its sync cost more."""

_KINDS = ("none", "lz4", "zstd", "filtered")
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_OFFSETS = "flowrl.offsets."
"""Prefix of the fields that hold row lengths in a stream of filtered columns."""


# ------------------------------------------------------------------------------------------------------------- writing


def write_segment(
    path: Path,
    columns: Mapping[str, Values],
    types: Mapping[str, ColumnType],
    num_rows: int,
    codecs: Mapping[str, str],
    *,
    first: int,
) -> tuple[int, list[Path]]:
    """Write some columns of neighbouring rows; returns the bytes on disk and the files, the first of which is `path`.

    Args:
        columns: in their stored form, `num_rows` long.
        codecs: by column, see `flowrl.store.codecs`; a column without one is stored as it is.
        first: row number of the first row.

    Errors: StoreError when the disk is full or not writable (nothing is left of the files then); ConfigError for an unknown
    codec; MissingExtra for one that needs blosc2.
    """
    written: list[tuple[Path, Path]] = []
    done: list[Path] = []
    try:
        for kind, names in _streams(columns, types, codecs).items():
            final = path if not written else path.with_name(f"{path.stem}.{kind}.arrow")
            aside = final.with_name(final.name + ".part")
            written.append((aside, final))
            described = {name: [str(types[name]), codecs.get(name, "none")] for name in names}
            head = {"format": FORMAT, "first": first, "rows": num_rows, "columns": described}
            if kind == "filtered":
                made = _filtered(columns, types, codecs, names, head)
            else:
                made = _ordinary(columns, types, names, head)
            with open(aside, "wb") as file:
                _write_stream(file, made, None if kind in ("none", "filtered") else kind)
                file.flush()
                os.fsync(file.fileno())
        for aside, final in written:
            os.replace(aside, final)
            done.append(final)
        sync_folder(path.parent)
        return sum(file.stat().st_size for file in done), done
    except OSError as error:
        _remove([*(aside for aside, _ in written), *done])
        if isinstance(error, FlowError):
            raise
        raise _refused(error, path, columns) from error
    except BaseException:
        _remove([*(aside for aside, _ in written), *done])
        raise


def bytes_alone(
    columns: Mapping[str, Values], types: Mapping[str, ColumnType], num_rows: int, codecs: Mapping[str, str]
) -> dict[str, int]:
    """What each column would take in a file of its own. Of a file, Arrow says only what all columns take together."""
    sizes = {}
    for name, values in columns.items():
        one = {name: values}
        for kind, names in _streams(one, types, codecs).items():
            described = {name: [str(types[name]), codecs.get(name, "none")]}
            head = {"format": FORMAT, "first": 0, "rows": num_rows, "columns": described}
            made = (
                _filtered(one, types, codecs, names, head) if kind == "filtered" else _ordinary(one, types, names, head)
            )
            sink = pa.MockOutputStream()
            _write_stream(sink, made, None if kind in ("none", "filtered") else kind)
            sizes[name] = sink.size()
    return sizes


def _streams(
    columns: Mapping[str, Values], types: Mapping[str, ColumnType], codecs: Mapping[str, str]
) -> dict[str, list[str]]:
    """Columns by the stream they go into."""
    streams: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for name in columns:
        codec = codecs.get(name, "none")
        if codec not in CODECS:
            raise ConfigError(f"column '{name}' needs one of the codecs {', '.join(CODECS)}; found '{codec}'")
        if codec in FILTERED:
            # text and bits are not made of numbers that could be shuffled
            plain = codec.rpartition("-")[2]
            codec = plain if types[name].dtype in ("str", "bytes", "bool") else "filtered"
        streams[codec].append(name)
    compressed = next((kind for kind in ("lz4", "zstd") if streams[kind]), None)
    if compressed and streams["none"] and sum(_nbytes(columns[name]) for name in streams["none"]) <= FEW:
        streams[compressed] += streams.pop("none")
    return {kind: names for kind, names in streams.items() if names} or {"none": []}


def _nbytes(values: Values) -> int:
    flat = values.values if isinstance(values, Ragged) else values
    nbytes: int = flat.nbytes
    if flat.dtype == object:
        nbytes = sum(map(len, flat.tolist()))
    return nbytes + (values.offsets.nbytes if isinstance(values, Ragged) else 0)


def _ordinary(
    columns: Mapping[str, Values], types: Mapping[str, ColumnType], names: Sequence[str], head: dict[str, Any]
) -> pa.RecordBatch:
    arrays = []
    for name in names:
        try:
            arrays.append(to_arrow(columns[name], types[name]))
        except (UnicodeError, pa.ArrowInvalid):
            if types[name].dtype != "str":
                raise
            # a lone surrogate is not UTF-8, and still must come back as it was
            head["columns"][name].append("surrogates")
            arrays.append(to_arrow(_text_to_bytes(columns[name]), replace(types[name], dtype="bytes")))
    schema = pa.schema([pa.field(name, array.type) for name, array in zip(names, arrays, strict=True)])
    return pa.RecordBatch.from_arrays(arrays, schema=schema.with_metadata({KEY: json.dumps(head)}))


def _filtered(
    columns: Mapping[str, Values],
    types: Mapping[str, ColumnType],
    codecs: Mapping[str, str],
    names: Sequence[str],
    head: dict[str, Any],
) -> pa.RecordBatch:
    """One row of binary values. A column's entry grows by the shape of its values and, for lists, the field of its offsets."""
    fields: dict[str, Any] = {}
    known: list[np.ndarray] = []
    for name in names:
        values = columns[name]
        flat = values.values if isinstance(values, Ragged) else values
        raw = np.ascontiguousarray(flat).reshape(-1).view(np.uint8)
        fields[name] = encode_buffer(raw, codecs[name], itemsize=flat.dtype.itemsize, inner=flat.shape[1:])
        head["columns"][name].append(list(flat.shape))
        if isinstance(values, Ragged):
            place = next((i for i, other in enumerate(known) if np.array_equal(other, values.offsets)), len(known))
            if place == len(known):
                known.append(values.offsets)
                fields[f"{_OFFSETS}{place}"] = encode_buffer(values.lengths.view(np.uint8), "lz4", itemsize=8)
            head["columns"][name].append(f"{_OFFSETS}{place}")
    schema = pa.schema([pa.field(name, pa.large_binary()) for name in fields])
    arrays = [_binary(value) for value in fields.values()]
    return pa.RecordBatch.from_arrays(arrays, schema=schema.with_metadata({KEY: json.dumps(head)}))


def _binary(value: bytes | np.ndarray) -> pa.Array:
    """A column of one binary value, which is not copied."""
    bounds = pa.py_buffer(np.array([0, len(value)], np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, bounds, pa.py_buffer(value)])


def _text_to_bytes(values: Values) -> Values:
    flat = values.values if isinstance(values, Ragged) else values
    made = np.empty(len(flat), object)
    made[:] = [text.encode(errors="surrogatepass") for text in flat.tolist()]
    return Ragged(made, values.offsets) if isinstance(values, Ragged) else made


def _bytes_to_text(values: Values) -> Values:
    flat = values.values if isinstance(values, Ragged) else values
    made = np.empty(len(flat), object)
    made[:] = [piece.decode(errors="surrogatepass") for piece in flat.tolist()]
    return Ragged(made, values.offsets) if isinstance(values, Ragged) else made


def _write_stream(file: BinaryIO | pa.NativeFile, batch: pa.RecordBatch, compression: str | None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression and pa.Codec(*_IPC_CODECS[compression]))
    with pa.ipc.new_stream(file, batch.schema, options=options) as writer:
        writer.write_batch(batch)


_IPC_CODECS: dict[str, tuple[Any, ...]] = {"lz4": ("lz4",), "zstd": ("zstd", 1)}


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


def _refused(error: OSError, path: Path, columns: Mapping[str, Values]) -> StoreError:
    needed = sum(map(_nbytes, columns.values())) / (1 << 20)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        try:
            free = f"{shutil.disk_usage(path.parent).free / (1 << 20):.0f} MiB free"
        except OSError:
            free = "free space unknown"
        remedy = f"up to {needed:.1f} MiB needed, {free}; make space, lower max_bytes=, or choose another path="
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "let this user write there, or choose another path="
    elif error.errno == errno.ENOENT:
        remedy = "the folder is not there; was the table's folder removed while the table was in use?"
    else:
        remedy = "is the disk in order?"
    return StoreError(f"rows cannot be written to {path}: {error.strerror or error}; {remedy}")


# ------------------------------------------------------------------------------------------------------------- reading


def read_segment(paths: Path | Sequence[Path], columns: Sequence[str] | None = None) -> dict[str, Values]:
    """Columns of a segment, read-only, by name in the order asked for; those without a codec are views of the mapped file.

    Args:
        paths: the files that `write_segment` returned.
        columns: None reads all.

    Errors: StoreError naming the file when it is missing, not whole, or not a segment, and when a column is in none of the
    files; MissingExtra for columns that need blosc2.
    """
    paths = [paths] if isinstance(paths, Path) else list(paths)
    found: dict[str, Values] = {}
    kinds: dict[str, ColumnType] = {}
    held: list[str] = []
    for path in paths:
        head = None
        with _naming(path), pa.memory_map(os.fspath(path)) as file:
            head = _Head.read(path, file)
            wanted = [name for name in head.columns if columns is None or name in columns]
            if wanted or columns is None:
                found.update(_read_columns(file, head, wanted))
        held += head.columns
        kinds.update(head.types)
    missing = [name for name in columns or () if name not in found]
    if missing:
        raise StoreError(
            f"{', '.join(map(str, paths))} has no column '{missing[0]}'; it has {', '.join(held) or 'none'}. Was a file of the "
            "segment left out?"
        )
    _share_offsets(found, kinds)
    return {name: readonly(found[name]) for name in (found if columns is None else dict.fromkeys(columns))}


def segment_rows(path: Path) -> tuple[int, int]:
    """Number of the first row of a file, and how many rows it has. Errors: as `read_segment`."""
    with _naming(path), pa.memory_map(os.fspath(path)) as file:
        head = _Head.read(path, file)
    return head.first, head.rows


class _naming(contextlib.AbstractContextManager[None]):
    """Whatever goes wrong with a file becomes a StoreError that names it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, MissingExtra):
            return
        if isinstance(error, MemoryError) and not isinstance(error, pa.ArrowException):
            return  # Arrow's own is a length that was damaged to something enormous
        if isinstance(error, StoreError) and str(self._path) in str(error):
            return
        if isinstance(error, FileNotFoundError):
            raise StoreError(
                f"{self._path} is not there: was the file removed, or the table's folder moved without its segments?"
            ) from error
        if isinstance(error, PermissionError):
            raise StoreError(f"{self._path} cannot be read: let this user read it") from error
        raise StoreError(
            f"{self._path} is damaged or not a segment of a table ({error}); restore it from a copy, or drop its rows"
        ) from error


@dataclass(frozen=True, slots=True)
class _Head:
    """What the schema of a file says about it."""

    path: Path
    first: int
    rows: int
    columns: dict[str, list[Any]]
    """By name: type, codec, and what their stream needs besides."""
    fields: list[str]

    @property
    def types(self) -> dict[str, ColumnType]:
        return {name: ColumnType.parse(entry[0]) for name, entry in self.columns.items()}

    @property
    def is_filtered(self) -> bool:
        return any(_is_filtered(entry) for entry in self.columns.values())

    @classmethod
    def read(cls, path: Path, file: pa.MemoryMappedFile) -> _Head:
        if file.size() < len(_END) or file.read_at(len(_END), file.size() - len(_END)) != _END:
            raise StoreError("it has no end")
        with pa.ipc.open_stream(file) as reader:
            schema = reader.schema
        found = (schema.metadata or {}).get(KEY)
        if found is None:
            raise StoreError(f"{path} is an Arrow stream, but not a segment of a table: it has no '{KEY.decode()}'")
        head = json.loads(found)
        if head["format"] != FORMAT:
            raise StoreError(
                f"{path} was written as format {head['format']} of a table's files; this version of FlowRL reads "
                f"{FORMAT}. Read it with the version that wrote it, or install a newer one"
            )
        return cls(path, head["first"], head["rows"], head["columns"], schema.names)


def _is_filtered(entry: Sequence[Any]) -> bool:
    return len(entry) > 2 and isinstance(entry[2], list)


def _read_columns(file: pa.MemoryMappedFile, head: _Head, names: Sequence[str]) -> dict[str, Values]:
    fields = list(names)
    if head.is_filtered:
        fields += sorted({head.columns[name][3] for name in names if len(head.columns[name]) > 3})
    batch = _read_batch(file, [head.fields.index(field) for field in fields])
    if head.is_filtered:
        if names and batch.num_rows != 1:
            raise StoreError(f"{batch.num_rows} values for each column, not one")
        return _unfiltered(batch, head, names)
    if names and batch.num_rows != head.rows:
        raise StoreError(f"{batch.num_rows} rows, and {head.rows} were written")
    made: dict[str, Values] = {}
    for name in names:
        kind = head.types[name]
        is_odd = "surrogates" in head.columns[name]
        values = from_arrow(name, batch.column(name), replace(kind, dtype="bytes") if is_odd else kind)
        made[name] = _bytes_to_text(values) if is_odd else values
    return made


def _read_batch(file: pa.MemoryMappedFile, fields: list[int]) -> pa.RecordBatch:
    """The stream's one batch, with the given fields; the stream must end properly after it."""
    file.seek(0)
    # an empty list of fields means all of them to Arrow
    with pa.ipc.open_stream(file, options=pa.ipc.IpcReadOptions(included_fields=fields or [0])) as reader:
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            raise StoreError("it ends before its rows") from None
        end = file.tell()
    if file.size() - end != len(_END) or file.read_at(len(_END), end) != _END:
        raise StoreError("it does not end where its rows do")
    batch.validate(full=True)
    return batch


def _unfiltered(batch: pa.RecordBatch, head: _Head, names: Sequence[str]) -> dict[str, Values]:
    offsets: dict[str, np.ndarray] = {}
    made: dict[str, Values] = {}
    for name in names:
        kind, codec, shape, *rest = head.columns[name]
        dtype = NUMPY_DTYPES[ColumnType.parse(kind).dtype]
        raw_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        stored = _value(batch, name)
        raw = decode_buffer(stored, codec, raw_bytes, itemsize=dtype.itemsize, inner=tuple(shape[1:]))
        flat = raw.view(dtype).reshape(shape)
        if not is_list_column(ColumnType.parse(kind)):
            if len(flat) != head.rows:
                raise StoreError(f"column '{name}' has {len(flat)} values for {head.rows} rows")
            made[name] = flat
            continue
        if rest[0] not in offsets:
            lengths = decode_buffer(_value(batch, rest[0]), "lz4", 8 * head.rows, itemsize=8)
            bounds = np.zeros(head.rows + 1, np.int64)
            np.cumsum(lengths.view(np.int64), out=bounds[1:])
            offsets[rest[0]] = bounds
        made[name] = Ragged(flat, offsets[rest[0]])
    return made


def _value(batch: pa.RecordBatch, field: str) -> np.ndarray:
    """The bytes of a column of one binary value, as they lie in the file."""
    array = batch.column(field)
    _, bounds, data = array.buffers()
    start, stop = np.frombuffer(bounds, np.int64)[array.offset : array.offset + 2].tolist()
    if data is None:
        return np.zeros(0, np.uint8)
    return np.frombuffer(data, np.uint8)[start:stop]


def _share_offsets(columns: dict[str, Values], kinds: Mapping[str, ColumnType]) -> None:
    """Lists of one length each, as TOKEN columns are, get one array of offsets."""
    shared: np.ndarray | None = None
    for name, values in columns.items():
        if kinds[name].granularity is TOKEN and isinstance(values, Ragged):
            if shared is None:
                shared = values.offsets
            elif np.array_equal(shared, values.offsets):
                columns[name] = Ragged(values.values, shared)
