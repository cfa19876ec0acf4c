"""`flowrl table`: look at rows that were recorded, kept or exported, and take them elsewhere."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from flowrl.cli import OK, PROBLEMS
from flowrl.cli.commands import table as aligned
from flowrl.cli.sources import ColumnFacts, Facts, Source, names_at, open_one
from flowrl.errors import ConfigError, FlowError
from flowrl.schema.columns import nearest
from flowrl.trace import to_json

WIDTH = 120
"""Characters in a line."""

CELL = 32
"""Of them for a value, where values of a row stand side by side."""

TITLES = ("column", "type", "raw", "stored", "ratio", "codec", "tier", "rows")
"""Of what `stats` prints of a column; those where no column has anything are left out."""

OUTPUTS = (".parquet", ".arrow", ".jsonl", ".csv")


def list_tables(target: str | None, *, as_json: bool) -> int:
    """A line for each table. Of several, one that cannot be read or has gone is named with the reason on stderr."""
    found: list[Facts] = []
    failed: list[str] = []
    for name in names_at(target):
        try:
            with closing(open_one(name)) as source:
                found.append(source.facts())
        except FlowError as error:
            if name == target:
                raise
            failed.append(f"{name}: {error}")
    if as_json:
        told = [
            {"table": f.table, "rows": f.rows, "columns": list(f.columns), "raw_bytes": f.raw_bytes,
             "stored_bytes": f.stored_bytes, "tiers": f.tiers}
            for f in found
        ]  # fmt: skip
        print(json.dumps(told, indent=2))
    elif found:
        lines = [["table", "rows", "columns", "raw", "stored", "tiers"]]
        for f in found:
            counts = [str(f.rows), str(len(f.columns)), size(f.raw_bytes), size(f.stored_bytes)]
            lines.append([f.table, *counts, " ".join(f.tiers)])
        print(aligned(lines, right=True))
    elif target is None and not failed:
        print("there are no tables in shared memory")
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    return PROBLEMS if failed else OK


def head(target: str, count: int, columns: str | None) -> int:
    """The first rows."""
    if count < 1:
        raise ConfigError(f"-n takes a number of at least 1; found {count}")
    with closing(open_one(target)) as source:
        names = _columns(source, columns)
        batches = list(_rows(source.reader(names), 0, count))
        print_rows(
            pa.Table.from_batches(batches, batches[0].schema) if batches else source.reader(names).schema.empty_table()
        )
    return OK


def stats(target: str, *, as_json: bool) -> int:
    """What is stored, and how."""
    with closing(open_one(target)) as source:
        found = source.facts()
    if as_json:
        print(json.dumps(_as_json(found), indent=2))
        return OK
    counts = ", ".join(f"{name} {value}" for name, value in found.counts.items() if name != "finished" or value)
    print(f"{found.table}: {found.rows} rows{f' ({counts})' if counts else ''}")
    tiers = ", ".join(f"{tier} {size(number)}" for tier, number in found.tiers.items())
    print(f"{size(found.raw_bytes)} of values, {size(found.stored_bytes)} stored{f' ({tiers})' if tiers else ''}\n")
    lines = [_cells(name, column) for name, column in found.columns.items()]
    shown = [title for title in TITLES if not lines or any(line[title] for line in lines)]
    print(aligned([shown, *([line[title] for title in shown] for line in lines)]))
    return OK


def _cells(name: str, column: ColumnFacts) -> dict[str, str]:
    """A line of `stats`, by title."""
    return {
        "column": name,
        "type": column.type,
        "raw": size(column.raw_bytes),
        "stored": "" if column.stored_bytes is None else size(column.stored_bytes),
        "ratio": f"{column.raw_bytes / column.stored_bytes:.2f}" if column.stored_bytes else "",
        "codec": "+".join(column.codecs),
        "tier": "+".join(column.tiers),
        "rows": "" if column.rows is None else str(column.rows),
    }


def _as_json(found: Facts) -> dict[str, Any]:
    columns = {
        name: {
            "type": column.type, "raw_bytes": column.raw_bytes, "stored_bytes": column.stored_bytes,
            "ratio": round(column.raw_bytes / column.stored_bytes, 4) if column.stored_bytes else None,
            "codecs": column.codecs, "tiers": column.tiers, "rows": found.rows if column.rows is None else column.rows,
        }
        for name, column in found.columns.items()
    }  # fmt: skip
    return {
        "table": found.table, "rows": found.rows, **found.counts, "raw_bytes": found.raw_bytes,
        "stored_bytes": found.stored_bytes, "tiers": found.tiers, "columns": columns,
    }  # fmt: skip


def sql(target: str, query: str) -> int:
    """The answer to a query, in which the table is called `rows`."""
    from flowrl.store.interop import query_rows

    with closing(open_one(target)) as source:
        print_rows(query_rows(source.reader, source.columns, query))
    return OK


# -------------------------------------------------------------------------------------------------------------- export


def export(target: str, out: str, columns: str | None, rows: str | None) -> int:
    """Write rows to a file of the kind its name says."""
    path = Path(out)
    if path.suffix not in OUTPUTS:
        raise ConfigError(f"the name to write to ends in one of {', '.join(OUTPUTS)}; found '{out}'")
    if path.exists():
        raise ConfigError(f"'{out}' exists already; remove it first, or choose another name")
    with closing(open_one(target)) as source:
        names = _columns(source, columns)
        start, stop = _span(rows, source)
        schema = source.reader(names).schema
        _check(schema, path.suffix)
        chosen = pa.RecordBatchReader.from_batches(schema, _rows(source.reader(names), start, stop))
        count = _write(chosen, path)
    print(
        f"{count} row{'' if count == 1 else 's'} of {len(names)} column{'' if len(names) == 1 else 's'} written to {out}"
    )
    return OK


def _columns(source: Source, asked: str | None) -> list[str]:
    known = source.columns
    if asked is None:
        return known
    names = [name.strip() for name in asked.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"'{source.name}' has no column '{name}' with a value in every row; {nearest(name, known)}"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"--columns names a column twice: {asked}")
    return names


def _span(asked: str | None, source: Source) -> tuple[int, int | None]:
    """First row and the one after the last, from `A:B`."""
    if asked is None:
        return 0, None
    found = re.fullmatch(r"(-?\d+)?:(-?\d+)?", asked)
    if found is None:
        raise ConfigError(f"--rows takes FIRST:STOP, such as 0:100, 100: or -10:; found '{asked}'")
    first, stop = (None if text is None else int(text) for text in found.groups())
    if (first or 0) >= 0 and (stop is None or stop >= 0):
        return first or 0, stop
    start, end, _ = slice(first, stop).indices(source.facts().rows)
    return start, end


def _rows(batches: pa.RecordBatchReader, start: int, stop: int | None) -> Iterator[pa.RecordBatch]:
    """Rows `start` to `stop`; what comes after is not read."""
    seen = 0
    if stop is not None and stop <= start:
        return
    for batch in batches:
        first = max(start - seen, 0)
        last = batch.num_rows if stop is None else min(stop - seen, batch.num_rows)
        if first < last:
            yield batch.slice(first, last - first)
        seen += batch.num_rows
        if stop is not None and seen >= stop:
            return


def _check(schema: pa.Schema, suffix: str) -> None:
    if suffix == ".csv":
        lists = [field.name for field in schema if pa.types.is_nested(field.type) or _is_bytes(field.type)]
        if lists:
            raise ConfigError(
                f"a .csv file holds numbers and text, no lists and no bytes: leave out {', '.join(lists)} with --columns, or "
                "export to .parquet"
            )
    if suffix == ".jsonl":
        raw = [field.name for field in schema if _is_bytes(_leaf(field.type))]
        if raw:
            raise ConfigError(f"JSON holds no bytes: leave out {', '.join(raw)} with --columns, or export to .parquet")


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _leaf(kind: pa.DataType) -> pa.DataType:
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind


def _write(rows: pa.RecordBatchReader, path: Path) -> int:
    """Write to a file that appears when it is complete. Returns: rows written."""
    from flowrl.store.interop import write_parquet, written_aside

    counted = _Counted(rows)
    passed = pa.RecordBatchReader.from_batches(rows.schema, counted)
    if path.suffix == ".parquet":
        write_parquet(passed, path)
        return counted.rows
    with written_aside(path) as aside:
        if path.suffix == ".arrow":
            with pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as writer:
                for batch in passed:
                    writer.write_batch(batch)
        elif path.suffix == ".csv":
            _write_csv(passed, aside)
        else:
            with open(aside, "w", encoding="utf-8") as file:
                for batch in passed:
                    file.writelines(
                        json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) + "\n"
                        for row in batch.to_pylist()
                    )
    return counted.rows


def _write_csv(rows: pa.RecordBatchReader, path: Path) -> None:
    from pyarrow import csv

    plain = pa.schema([field.with_type(pa.float32()) if field.type == pa.float16() else field for field in rows.schema])
    with csv.CSVWriter(str(path), plain) as writer:
        for batch in rows:
            arrays = [column.cast(field.type) for column, field in zip(batch.columns, plain, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=plain))


class _Counted:
    def __init__(self, batches: pa.RecordBatchReader) -> None:
        self._batches, self.rows = batches, 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            self.rows += batch.num_rows
            yield batch


# ------------------------------------------------------------------------------------------------------------ printing


def print_rows(rows: pa.Table) -> None:
    """Side by side where they fit into a line, otherwise value under value."""
    names = list(rows.schema.names)
    values = [[row[name] for name in names] for row in rows.to_pylist()]
    lines = [names, *([cell(value, CELL) for value in row] for row in values)]
    text = aligned(lines)
    if max(map(len, text.splitlines())) <= WIDTH:
        print(text)
        return
    wide = max(map(len, names))
    for number, row in enumerate(values):
        print(f"{'' if number == 0 else chr(10)}row {number}")
        for name, value in zip(names, row, strict=True):
            print(f"  {name:<{wide}}  {cell(value, WIDTH - wide - 4)}".rstrip())
    if not values:
        print(f"no rows; columns: {', '.join(names)}")


def cell(value: Any, room: int) -> str:
    """A value in one line of at most `room` characters; of a longer list or text, its beginning and how long it is."""
    if isinstance(value, str):
        text, length = json.dumps(value, ensure_ascii=False)[1:-1], f"{len(value)} characters"
    elif isinstance(value, bytes):
        text, length = repr(value[:room]), f"{len(value)} bytes"
        text = text if len(value) <= room else text + " "
    elif isinstance(value, list):
        text, length = f"[{', '.join(_items(value, room))}]", f"{len(value)} values"
    else:
        text, length = _plain(value), ""
    if len(text) <= room:
        return text
    tail = f" ... ({length})" if length else " ..."
    return text[: max(room - len(tail), 0)] + tail


def _items(values: Sequence[Any], room: int) -> list[str]:
    """As many as can be seen, and one more."""
    found: list[str] = []
    seen = 0
    for value in values:
        found.append(cell(value, room))
        seen += len(found[-1]) + 2
        if seen > room + 2:
            break
    return found


def _plain(value: Any) -> str:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def size(number: int) -> str:
    """E.g. `1.5 MiB`."""
    amount = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
