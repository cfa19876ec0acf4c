"""Data sets that are none: one error that names the column, the row or the line."""

import pytest

import flowrl as fr
from flowrl.errors import DataError


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{3: 1}], "column names are text; found 3"),
        ([{"prompt": "a", "z": 2**70}], "'z' holds 1180591620717411303424, beyond 64 bits"),
        ([{"prompt": "a"}, {"prompt": "\ud800"}], "'prompt' holds half a character .* in row 1"),
    ],
)
def test_values_that_no_column_holds(rows, reason):
    with pytest.raises(DataError, match=reason):
        fr.Data(rows)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n\xff\xfe\n', "a.jsonl:2: not a JSON object"),
        ("a.jsonl", b'{"prompt": ' + b"[" * 100_000, "a.jsonl:1: not a JSON object"),
        ("a.parquet", b"not parquet", "cannot be read as Parquet"),
    ],
)
def test_files_that_are_not_what_they_are_called(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        fr.Data(str(tmp_path / name))
