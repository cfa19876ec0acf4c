"""Files of segments: what was written is read, and whatever is not a whole file of a table is a StoreError that names it."""

import errno
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from flowrl.errors import ConfigError, MissingExtra, StoreError
from flowrl.schema import SAMPLE, TOKEN, TURN, ColumnType, Ragged
from flowrl.store import codecs, spill
from flowrl.store.codecs import CODECS
from flowrl.store.rows import RowBatch
from flowrl.store.spill import read_segment, segment_rows, write_segment
from tests.null.store.strategies import TYPES, batch_of, row_lists

AVAILABLE = CODECS if codecs.has_blosc2() else codecs.PLAIN
with_blosc2 = pytest.mark.skipif(not codecs.has_blosc2(), reason="needs blosc2")
KINDS: dict[str, ColumnType] = {
    "reward": SAMPLE.f32,
    "text": SAMPLE.str,
    "blob": SAMPLE.bytes,
    "response_ids": TOKEN.i32,
    "rollout_logprobs": TOKEN.f32,
    "loss_mask": TOKEN.bool,
    "teacher_logits": TOKEN.f16[4],
    "step_text": TURN.str,
}


def batch(num_rows: int = 12) -> RowBatch:
    random = np.random.default_rng(1)
    lengths = random.integers(0, 9, num_rows)
    return RowBatch.from_rows(
        [
            {
                "reward": float(row),
                "text": f"text of row {row}",
                "blob": random.bytes(row),
                "response_ids": random.integers(0, 99, n, np.int32),
                "rollout_logprobs": random.normal(size=n).astype(np.float32),
                "loss_mask": random.random(n) < 0.5,
                "teacher_logits": random.normal(size=(n, 4)).astype(np.float16),
                "step_text": ["ä", "b"][: row % 3],
            }
            for row, n in enumerate(lengths.tolist())
        ],
        KINDS,
    )


def write(path: Path, rows: RowBatch, wanted: dict[str, str] | None = None, first: int = 0) -> tuple[int, list[Path]]:
    columns: dict[str, Any] = {name: rows[name] for name in rows.names}
    return write_segment(path, columns, rows.types, len(rows), wanted or {}, first=first)


def same(found: Any, wanted: Any) -> bool:
    """Of the same dtype and shape, bit for bit."""
    if isinstance(wanted, Ragged):
        return (
            isinstance(found, Ragged)
            and np.array_equal(found.offsets, wanted.offsets)
            and same(found.values, wanted.values)
        )
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    return found.tolist() == wanted.tolist() if wanted.dtype == object else found.tobytes() == wanted.tobytes()


def check(found: dict[str, Any], rows: RowBatch) -> None:
    assert set(found) == set(rows.names)
    for name in rows.names:
        assert same(found[name], rows[name]), name


MIXED = {
    "text": "zstd",
    "response_ids": "lz4",
    "rollout_logprobs": "shuffle-lz4",
    "teacher_logits": "delta-shuffle-zstd",
}

# ------------------------------------------------------------------------------------------------------------ and back


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(rows=row_lists, picked=st.lists(st.sampled_from(AVAILABLE), min_size=len(TYPES), max_size=len(TYPES)))
def test_any_rows_come_back_with_any_codecs(tmp_path: Path, rows: list[dict[str, Any]], picked: list[str]) -> None:
    wanted = batch_of(rows)
    stored, files = write(tmp_path / "0-1.arrow", wanted, dict(zip(TYPES, picked, strict=True)), first=7)
    check(read_segment(files), wanted)
    assert stored == sum(file.stat().st_size for file in files)
    assert files[0] == tmp_path / "0-1.arrow"
    assert [segment_rows(file) for file in files] == [(7, len(wanted))] * len(files)
    for file in files:
        file.unlink()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("codec", AVAILABLE)
def test_odd_floats_come_back_bit_for_bit(tmp_path: Path, codec: str) -> None:
    patterns = np.array([0x7E01, 0xFE23, 0x7C01, 0x7C00, 0xFC00, 0x8000, 0, 1], np.uint16).view(np.float16)
    columns: dict[str, Any] = {"top": Ragged(patterns.reshape(4, 2), np.array([0, 1, 1, 4])), "one": patterns[:3]}
    types = {"top": TOKEN.f16[2], "one": SAMPLE.f16}
    _, files = write_segment(tmp_path / "0-1.arrow", columns, types, 3, dict.fromkeys(columns, codec), first=0)
    found = read_segment(files)
    assert all(same(found[name], columns[name]) for name in columns)


@pytest.mark.parametrize("codec", AVAILABLE)
def test_columns_without_values_keep_their_shape(tmp_path: Path, codec: str) -> None:
    empty = np.zeros(3, np.int64)
    columns: dict[str, Any] = {
        "ids": Ragged(np.zeros(0, np.int32), empty),
        "top": Ragged(np.zeros((0, 64), np.float16), empty),
        "open": Ragged(np.zeros((0, 0), np.float32), empty),
        "deep": Ragged(np.zeros((0, 2, 3), np.float64), empty),
        "steps": Ragged(np.zeros(0, object), empty),
    }
    types = {"ids": TOKEN.i32, "top": TOKEN.f16[64], "open": TOKEN.f32["k"], "deep": TURN.f64[2, 3], "steps": TURN.str}
    _, files = write_segment(tmp_path / "0-1.arrow", columns, types, 2, dict.fromkeys(columns, codec), first=0)
    found = read_segment(files)
    for name in columns:
        assert same(found[name], columns[name]), name


def test_text_that_is_no_utf8_comes_back(tmp_path: Path) -> None:
    odd = np.array(["a", "\ud800b", "", "ä€😀"], object)
    columns: dict[str, Any] = {
        "text": odd,
        "steps": Ragged(odd, np.array([0, 3, 3, 4, 4])),
        "plain": np.array(list("abcd"), object),
    }
    types = {"text": SAMPLE.str, "steps": TURN.str, "plain": SAMPLE.str}
    _, files = write_segment(tmp_path / "0-1.arrow", columns, types, 4, {"text": "zstd"}, first=0)
    found = read_segment(files)
    assert all(same(found[name], columns[name]) for name in columns)


def test_token_columns_share_their_offsets_over_files_and_cannot_be_written_to(tmp_path: Path) -> None:
    wanted = {k: v for k, v in MIXED.items() if v in AVAILABLE}
    _, files = write(tmp_path / "0-1.arrow", batch(), wanted)
    assert len(files) == (3 if codecs.has_blosc2() else 2)
    found: dict[str, Any] = read_segment(files)
    tokens = [found[name] for name, kind in KINDS.items() if kind.granularity is TOKEN]
    assert all(column.offsets is tokens[0].offsets for column in tokens)
    for column in tokens:
        with pytest.raises(ValueError, match="read-only"):
            column.values[:1] = 0


def test_values_outlive_their_file(tmp_path: Path) -> None:
    _, files = write(tmp_path / "0-1.arrow", batch())
    found = read_segment(files)
    files[0].unlink()
    check(found, batch())


# ------------------------------------------------------------------------------------------------------ other readers


@pytest.mark.parametrize("codec", codecs.PLAIN)
def test_any_arrow_reads_files_without_filtered_columns(tmp_path: Path, codec: str) -> None:
    rows = batch()
    _, (file,) = write(tmp_path / "0-1.arrow", rows, dict.fromkeys(KINDS, codec))
    with open(file, "rb") as opened:
        table = pa.ipc.open_stream(opened).read_all()
    assert table.schema.field("text").type == pa.large_string()
    assert table.schema.field("response_ids").type == pa.large_list(pa.int32())
    assert table["response_ids"].to_pylist() == [list(row) for row in rows["response_ids"].to_list()]
    assert table["text"].to_pylist() == rows["text"].tolist()
    assert table["blob"].to_pylist() == rows["blob"].tolist()


@pytest.mark.parametrize("codec", [c for c in AVAILABLE if c != "none"])
def test_every_codec_saves_bytes_on_disk(tmp_path: Path, codec: str) -> None:
    flat = np.repeat(np.arange(2000, dtype=np.float32), 8).reshape(-1, 8)
    columns, types = {"top": Ragged(flat, np.array([0, 500, 2000]))}, {"top": TOKEN.f32[8]}
    plain, _ = write_segment(tmp_path / "0-1.arrow", columns, types, 2, {}, first=0)
    stored, _ = write_segment(tmp_path / "0-2.arrow", columns, types, 2, {"top": codec}, first=0)
    assert stored < 0.5 * plain


def test_a_small_plain_column_needs_no_file_of_its_own_and_a_large_one_has_one(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"a": np.zeros(30_000, np.float32), "b": np.zeros(30_000, np.float32)}
    types = dict.fromkeys(columns, SAMPLE.f32)
    _, files = write_segment(tmp_path / "0-1.arrow", columns, types, 30_000, {"a": "zstd"}, first=0)
    assert [file.name for file in files] == ["0-1.arrow", "0-1.zstd.arrow"]
    few = {name: values[:300] for name, values in columns.items()}
    _, files = write_segment(tmp_path / "0-2.arrow", few, types, 300, {"a": "zstd"}, first=0)
    assert [file.name for file in files] == ["0-2.arrow"]


# ------------------------------------------------------------------------------------------------------------- subsets


def garble(file: Path, pattern: bytes) -> None:
    """Overwrite the one place where `pattern` lies."""
    held = file.read_bytes()
    assert held.count(pattern) == 1
    file.write_bytes(held.replace(pattern, b"\xee" * len(pattern)))


@pytest.mark.parametrize("codec", [c for c in AVAILABLE if c != "none"])
def test_only_what_is_asked_for_is_decoded(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    columns: dict[str, Any] = {name: np.repeat(random.integers(0, 99, 500, np.int32), 4) for name in ("a", "b")}
    _, (file,) = write_segment(
        tmp_path / "0-1.arrow",
        columns,
        dict.fromkeys(columns, SAMPLE.i32),
        2000,
        dict.fromkeys(columns, codec),
        first=0,
    )
    # spoil b: what lies in the last part of the stream, before its end
    held = bytearray(file.read_bytes())
    held[-300:-8] = b"\xee" * 292
    file.write_bytes(held)
    assert list(read_segment([file], ["a"])) == ["a"]
    assert same(read_segment([file], ["a"])["a"], columns["a"])
    with pytest.raises(StoreError, match=r"0-1\.arrow is damaged"):
        read_segment([file], ["b"])


def test_a_plain_column_is_a_view_of_the_file_and_others_are_not_read(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"a": np.zeros(500_000), "b": np.ones(500_000)}
    _, files = write_segment(tmp_path / "0-1.arrow", columns, dict.fromkeys(columns, SAMPLE.f64), 500_000, {}, first=0)
    before = pa.total_allocated_bytes()
    found = read_segment(files, ["b"])
    assert pa.total_allocated_bytes() - before < 100_000
    assert found["b"][-1] == 1.0


def test_columns_come_in_the_order_asked_for_and_files_without_one_are_not_decoded(tmp_path: Path) -> None:
    wanted = {"text": "zstd", "response_ids": "lz4"}
    _, files = write(tmp_path / "0-1.arrow", batch(), wanted)
    found = read_segment(files, ["text", "response_ids", "text"])
    assert list(found) == ["text", "response_ids"]
    assert read_segment(files, []) == {}


def test_a_column_that_is_nowhere_is_named_with_those_that_are(tmp_path: Path) -> None:
    _, files = write(tmp_path / "0-1.arrow", batch())
    with pytest.raises(StoreError, match=r"0-1\.arrow has no column 'values'; it has reward, text"):
        read_segment(files, ["reward", "values"])


# --------------------------------------------------------------------------------------------------------- bad files


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("written")
    wanted = {k: v for k, v in MIXED.items() if v in AVAILABLE}
    _, files = write(
        folder / "0-1.arrow", batch(5).select(["text", "response_ids", "teacher_logits", "reward"]), wanted
    )
    return files


def test_a_file_torn_at_any_byte_is_refused(written: list[Path], tmp_path: Path) -> None:
    for file in written:
        whole = file.read_bytes()
        torn = tmp_path / file.name
        for end in range(len(whole)):
            torn.write_bytes(whole[:end])
            with pytest.raises(StoreError) as caught:
                read_segment(torn)
            assert str(torn) in str(caught.value)
        torn.write_bytes(whole)
        read_segment(torn)


def test_values_that_look_like_an_end_are_none(tmp_path: Path) -> None:
    marks = np.full(64, 0x00000000FFFFFFFF, np.int64)
    _, (file,) = write_segment(tmp_path / "0-1.arrow", {"a": marks}, {"a": SAMPLE.i64}, 64, {}, first=0)
    whole = file.read_bytes()
    for end in range(len(whole) - 8 * 66, len(whole)):
        file.write_bytes(whole[:end])
        with pytest.raises(StoreError, match=r"0-1\.arrow is damaged"):
            read_segment(file)


def test_bytes_after_the_end_are_refused(written: list[Path], tmp_path: Path) -> None:
    for file in written:
        longer = tmp_path / file.name
        longer.write_bytes(file.read_bytes() + b"\0")
        with pytest.raises(StoreError, match="has no end"):
            read_segment(longer)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(which=st.integers(0, 2), at=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_changed_byte_is_an_error_of_ours_or_read(
    written: list[Path], tmp_path: Path, which: int, at: float, value: int
) -> None:
    file = written[which % len(written)]
    held = bytearray(file.read_bytes())
    held[int(at * len(held))] = value
    changed = tmp_path / "0-1.arrow"
    changed.write_bytes(held)
    try:
        read_segment(changed)
    except StoreError as error:
        assert str(changed) in str(error)


def foreign(folder: Path) -> Iterator[Path]:
    table = pa.table({"reward": [1.0]})
    for name, content in [("empty", b""), ("text", b"hello, world. " * 50), ("zeros", bytes(5000))]:
        (folder / name).write_bytes(content)
        yield folder / name
    with pa.OSFile(str(folder / "file"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    yield folder / "file"
    with pa.OSFile(str(folder / "stream"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    yield folder / "stream"
    for name, head in [("list", "[]"), ("json", "{"), ("keys", "{}"), ("kind", json.dumps({"format": 1, "first": 0}))]:
        schema = table.schema.with_metadata({spill.KEY: head})
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            stream.write_table(table.replace_schema_metadata({spill.KEY: head}))
        yield folder / name
    yield folder


def test_files_of_others_are_refused_by_name(tmp_path: Path) -> None:
    for file in foreign(tmp_path):
        with pytest.raises(StoreError) as caught:
            read_segment(file)
        assert str(file) in str(caught.value)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"0-1\.arrow is not there"):
        read_segment(tmp_path / "0-1.arrow")
    with pytest.raises(StoreError, match="is not there"):
        segment_rows(tmp_path / "0-1.arrow")


def test_a_later_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "FORMAT", 9)
    _, files = write(tmp_path / "0-1.arrow", batch())
    monkeypatch.undo()
    with pytest.raises(StoreError, match=r"0-1\.arrow was written as format 9 .* reads 1.*newer"):
        read_segment(files)


# ------------------------------------------------------------------------------------------------- writing that fails


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_refused_write_leaves_nothing(
    tmp_path: Path, number: int, step: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    owner: Any = os if step != "open" else spill
    real = open if step == "open" else getattr(os, step)

    def refusing(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(number, os.strerror(number))
        return real(*given, **named)

    monkeypatch.setattr(owner, step, refusing, raising=False)
    with pytest.raises(StoreError) as caught:
        write(tmp_path / "0-1.arrow", batch(), {"text": "zstd", "response_ids": "lz4"})
    monkeypatch.undo()
    assert calls >= call
    assert list(tmp_path.iterdir()) == []
    said = str(caught.value)
    assert str(tmp_path / "0-1.arrow") in said
    assert os.strerror(number) in said
    if number in (errno.ENOSPC, errno.EDQUOT):
        assert "MiB needed" in said
        assert "MiB free" in said
    if number in (errno.EACCES, errno.EROFS):
        assert "let this user write" in said


def test_a_file_that_may_not_grow_leaves_nothing(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"a": np.random.default_rng(3).random(100_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(StoreError, match="MiB needed"):
            write_segment(tmp_path / "0-1.arrow", columns, {"a": SAMPLE.f64}, 100_000, {}, first=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_explained(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="the folder is not there"):
        write(tmp_path / "gone" / "0-1.arrow", batch())


def test_an_unknown_codec_names_the_column(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="column 'text' .*'snappy'"):
        write(tmp_path / "0-1.arrow", batch(), {"text": "snappy"})
    assert list(tmp_path.iterdir()) == []


@with_blosc2
def test_without_blosc2_other_columns_are_read_and_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    _, files = write(tmp_path / "0-1.arrow", batch(), {"teacher_logits": "delta-bitshuffle-lz4"})
    monkeypatch.setitem(sys.modules, "blosc2", None)
    assert same(read_segment(files, ["response_ids"])["response_ids"], batch()["response_ids"])
    with pytest.raises(MissingExtra, match=r"flowrl\[codecs\]"):
        read_segment(files, ["teacher_logits"])
    codecs._parameters.cache_clear()
    with pytest.raises(MissingExtra, match=r"flowrl\[codecs\]"):
        write(tmp_path / "0-2.arrow", batch(), {"teacher_logits": "delta-bitshuffle-lz4"})
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_what_is_committed_was_synced_before_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def noted(*given: Any, _name: str = name, _real: Any = real) -> Any:
            steps.append(_name)
            return _real(*given)

        monkeypatch.setattr(os, name, noted)
    write(tmp_path / "0-1.arrow", batch(), {"text": "zstd", "response_ids": "lz4"})
    assert steps == ["fsync", "fsync", "replace", "replace", "fsync"]
