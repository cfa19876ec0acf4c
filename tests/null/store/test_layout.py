"""Columns of every type lie in a block and come back bit for bit."""

import pickle
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from flowrl.errors import DataError, FlowError, SchemaError, StoreError
from flowrl.schema import PROMPT, SAMPLE, TOKEN, TURN, ColumnType
from flowrl.schema.ragged import Ragged
from flowrl.store import kernels
from flowrl.store.codecs import encode_buffer
from flowrl.store.columns import NUMPY_DTYPES
from flowrl.store.kernels import choose, forced
from flowrl.store.layout import ALIGN, Buffer, ColumnLayout, Prepared, decode, merge, places, prepare, prepare_rows
from flowrl.store.rows import RowBatch
from tests.null.store.strategies import TYPES, batch_of, row_lists


def prepared_of(batch: RowBatch) -> Prepared:
    return prepare({name: batch[name] for name in batch.names}, batch.types, len(batch))


def written(prepared: Prepared) -> np.ndarray:
    """A block of exactly the needed size, full of rubbish before."""
    root = np.full(prepared.nbytes, 0xAB, np.uint8)
    prepared.write(root)
    root.flags.writeable = False
    return root


def read(layouts: tuple[ColumnLayout, ...], root: np.ndarray, num_rows: int) -> RowBatch:
    cache: dict[int, np.ndarray] = {}
    columns = {layout.name: decode(layout, root, num_rows, offsets_cache=cache) for layout in layouts}
    return RowBatch(columns, {layout.name: layout.type for layout in layouts}, num_rows)


def through(prepared: Prepared) -> RowBatch:
    return read(prepared.layouts, written(prepared), prepared.num_rows)


def bits_of(values: Any) -> list[bytes]:
    flat = values.values if isinstance(values, Ragged) else values
    return flat.tolist() if flat.dtype == object else [flat.tobytes()]


@given(row_lists)
def test_every_type_comes_back(rows: list[dict[str, Any]]) -> None:
    batch = batch_of(rows)
    prepared = prepared_of(batch)
    assert through(prepared).equals(batch)
    assert prepared.raw_bytes == batch.nbytes
    assert prepared.num_rows == len(batch)


@given(row_lists)
def test_rows_are_prepared_as_their_batch_is(rows: list[dict[str, Any]]) -> None:
    batch, prepared = batch_of(rows), prepare_rows(rows, TYPES)
    assert through(prepared).equals(batch)
    assert prepared.layouts == prepared_of(batch).layouts
    assert prepared.raw_bytes == batch.nbytes


@given(row_lists)
def test_arrays_in_rows_are_taken_as_they_are(rows: list[dict[str, Any]]) -> None:
    dtypes = {"prompt_ids": "i4", "response_ids": "i4", "loss_mask": "?", "step_value": "f8"}
    arrays = [{n: np.array(v, dtypes[n]) if n in dtypes else v for n, v in row.items()} for row in rows]
    for row in arrays:
        row["teacher_ids"] = np.array(row["teacher_ids"], np.int32).reshape(-1, 3)
    prepared = prepare_rows(arrays, TYPES)
    assert through(prepared).equals(RowBatch.from_rows(arrays, TYPES))
    assert through(prepared).equals(batch_of(rows))


def test_good_rows_make_no_batch_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowBatch, "from_rows", None)
    rows = [{**GOOD, "mask": np.ones(3, np.bool_), "text": "ä", "list": [1, 2, 3], "prompt_ids": GOOD["ids"]}] * 3
    types = {
        "ids": TOKEN.i32, "logprobs": TOKEN.f32, "reward": SAMPLE.f32, "mask": TOKEN.bool, "text": SAMPLE.str,
        "list": TOKEN.i32, "prompt_ids": PROMPT.i32["*"],
    }  # fmt: skip
    assert through(prepare_rows(rows, types))["list"].to_list() == [[1, 2, 3]] * 3


@given(row_lists)
def test_layouts_go_through_json(rows: list[dict[str, Any]]) -> None:
    layouts = prepared_of(batch_of(rows)).layouts
    assert tuple(ColumnLayout.from_json(layout.to_json()) for layout in layouts) == layouts


@given(st.lists(row_lists, min_size=1, max_size=3))
def test_neighbours_merge_into_what_one_append_would_have_made(parts: list[list[dict[str, Any]]]) -> None:
    prepared = [prepared_of(batch_of(rows)) for rows in parts]
    merged = merge([(p.layouts, written(p), p.num_rows) for p in prepared])
    together = batch_of([row for rows in parts for row in rows])
    assert through(merged).equals(together)
    assert merged.layouts == prepared_of(together).layouts


@given(row_lists)
def test_buffers_are_aligned_and_do_not_overlap(rows: list[dict[str, Any]]) -> None:
    prepared = prepared_of(batch_of(rows))
    buffers = {(b.offset, b.offset + b.stored) for layout in prepared.layouts for b in layout.buffers}
    end = 0
    for start, stop in sorted(buffers):
        assert start % ALIGN == 0
        assert start >= end or start == stop
        end = max(end, stop)
    assert end <= prepared.nbytes and prepared.nbytes % ALIGN == 0


ODD: dict[str, tuple[ColumnType, list[Any]]] = {
    "surrogates": (SAMPLE.str, ["\ud800", "a\udfff", "\ud83d\ude00", "😀", "", "\0"]),
    "texts with surrogates": (TURN.str, [["\ud800", ""], [], ["ä", "\udc00"]]),
    "prompts with surrogates": (PROMPT.str, ["\ud800" * 40] * 9),
    "bytes": (SAMPLE.bytes, [b"\xff\x00", b"", b"\x80"]),
    "lists of bytes": (TURN.bytes, [[b"\xff", b""], []]),
    "u8": (TOKEN.u8, [[255, 0], [], [7]]),
    "lists of prompt texts": (PROMPT.str["*"], [["a long enough text", "b"]] * 30 + [["a", "long enough text"]] * 30),
    "inner": (TOKEN.f16[2, 3], [np.arange(12).reshape(2, 2, 3).tolist(), [], np.ones((1, 2, 3)).tolist()]),
    "inner booleans": (TOKEN.bool[3], [[[True, False, True]] * 3, [], [[False, True, True]]]),
    "prompt lists of booleans": (PROMPT.bool["*"], [[True] * 500] * 20),
    "a named length": (TOKEN.f32["k"], [[[1.0, 2.0]], []]),
    "a named length not yet known": (TOKEN.f32["k"], [[], []]),
    "a named length not yet known of prompts": (PROMPT.i32["*", "k"], [[], [], []]),
    "empty rows only": (TOKEN.bool, [[], [], []]),
    "no rows": (TOKEN.i32, []),
    "no texts": (SAMPLE.str, []),
    "no prompts": (PROMPT.f32[4], []),
    "fixed": (SAMPLE.i64[2, 2], [[[1, 2], [3, 4]]] * 3),
    "prompts' vectors": (PROMPT.f64[8], [[0.5] * 8] * 40 + [[-0.0] * 8] * 40 + [[0.0] * 8] * 40),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_values_come_back(name: str) -> None:
    kind, values = ODD[name]
    batch = RowBatch({"x": values}, {"x": kind}, len(values))
    for prepared in (prepared_of(batch), prepare_rows([{"x": value} for value in values], {"x": kind})):
        found = through(prepared)
        assert found.equals(batch)
        assert found.types == batch.types
        assert bits_of(found["x"]) == bits_of(batch["x"])


@pytest.mark.parametrize(("dtype", "kind"), [("u2", "f16"), ("u4", "f32"), ("u8", "f64")])
def test_payloads_of_nan_are_kept(dtype: str, kind: str) -> None:
    ones = np.array([2 ** (8 * int(dtype[1])) - 1 - payload for payload in range(6)], dtype)  # six different NaN
    floats = ones.view(f"f{dtype[1]}")
    for granularity in (PROMPT, SAMPLE, TOKEN):
        column = ColumnType(granularity, kind)
        values = Ragged(floats, np.array([0, 2, 2, 6])) if granularity is TOKEN else floats
        batch = RowBatch({"x": values}, {"x": column})
        found = through(prepared_of(batch))["x"]
        assert bits_of(found) == [ones.tobytes()]


def test_numbers_are_views_of_the_block_and_token_columns_share_their_offsets() -> None:
    batch = RowBatch(
        {"a": [[1, 2], [3]], "b": [[0.5, 1.0], [2.0]], "r": [1.0, 2.0]},
        {"a": TOKEN.i32, "b": TOKEN.f32, "r": SAMPLE.f32},
    )
    prepared = prepared_of(batch)
    root = written(prepared)
    found = read(prepared.layouts, root, 2)
    assert found["a"].offsets is found["b"].offsets
    assert prepared.layouts[0].buffers[1] == prepared.layouts[1].buffers[1]
    for array in (found["a"].values, found["b"].values, found["r"], found["a"].offsets):
        assert np.shares_memory(array, root)
        assert not array.flags.writeable


@given(row_lists)
def test_compressed_columns_are_decoded_and_have_no_places(rows: list[dict[str, Any]]) -> None:
    batch = batch_of(rows)
    prepared = prepared_of(batch)
    root = written(prepared)
    for layout in prepared.layouts:
        first, *others = layout.buffers
        itemsize = 1 if layout.encoding in ("bits", "text", "texts") else NUMPY_DTYPES[layout.type.dtype].itemsize
        raw = root[first.offset : first.offset + first.stored]
        kept = np.frombuffer(encode_buffer(raw, "lz4", itemsize=itemsize, inner=layout.inner), np.uint8)
        buffer = Buffer(prepared.nbytes, len(kept), "lz4", first.stored)
        encoded = layout._replace(buffers=(buffer, *others))
        assert ColumnLayout.from_json(encoded.to_json()) == encoded
        found = read((encoded,), np.concatenate([root, kept]), len(rows))
        assert found.equals(batch.select(layout.name))
        assert places(encoded, root, len(rows)) is None


# ---------------------------------------------------------------------------------------------- once for equal rows


def prompts(texts: list[str]) -> list[dict[str, Any]]:
    return [
        {"prompt_id": "p", "prompt": text, "prompt_ids": np.frombuffer(text.encode(), np.uint8).astype(np.int32)}
        for text in texts
    ]


PROMPTS = {"prompt_id": PROMPT.str, "prompt": PROMPT.str, "prompt_ids": PROMPT.i32["*"]}


def test_what_a_prompts_responses_share_is_stored_once() -> None:
    rows = prompts(["a question of some length " * 20] * 8)
    prepared = prepare_rows(rows, PROMPTS)
    assert [layout.once for layout in prepared.layouts] == [False, True, True]  # a short id is not worth an index
    assert prepared.layouts[1].buffers[-1] == prepared.layouts[2].buffers[-1]  # one index for both
    assert prepared.nbytes < prepared.raw_bytes / 5
    assert through(prepared).equals(RowBatch.from_rows(rows, PROMPTS))
    assert prepared_of(RowBatch.from_rows(rows, PROMPTS)).layouts == prepared.layouts


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30))
def test_prompts_that_differ_inside_one_prompt_id_are_kept(letters: list[str]) -> None:
    rows = prompts([letter * 200 for letter in letters])
    prepared = prepare_rows(rows, PROMPTS)
    found = through(prepared)
    assert found.equals(RowBatch.from_rows(rows, PROMPTS))
    assert found["prompt"].tolist() == [letter * 200 for letter in letters]


def test_values_without_bytes_are_counted_all_the_same() -> None:
    values = Ragged(np.zeros((3, 0), np.float32), np.array([0, 1, 3]))
    prepared = prepare({"x": values}, {"x": PROMPT.f32["*", "k"]}, 2)
    assert decode(prepared.layouts[0], written(prepared), 2).offsets.tolist() == [0, 1, 3]  # type: ignore[union-attr]


def test_samples_are_never_stored_once() -> None:
    rows = [{"x": "the same text " * 50} for _ in range(20)]
    assert not prepare_rows(rows, {"x": SAMPLE.str}).layouts[0].once


# ------------------------------------------------------------------------------------------------------- bad rows

GOOD: dict[str, Any] = {"ids": np.arange(3, dtype=np.int32), "logprobs": np.zeros(3, np.float32), "reward": 1.0}
BAD: dict[str, dict[str, Any]] = {
    "missing": {"ids": GOOD["ids"], "logprobs": GOOD["logprobs"]},
    "unknown": {**GOOD, "extra": 1},
    "none": {**GOOD, "reward": None},
    "none list": {**GOOD, "ids": None},
    "other length": {**GOOD, "logprobs": np.zeros(2, np.float32)},
    "floats for integers": {**GOOD, "ids": np.zeros(3, np.float32)},
    "too large": {**GOOD, "ids": np.array([2**40, 1, 2])},
    "a single value": {**GOOD, "ids": np.array(5, np.int32)},
    "a text": {**GOOD, "ids": "abc"},
    "a matrix": {**GOOD, "ids": np.zeros((3, 2), np.int32)},
    "a list for a number": {**GOOD, "reward": [1.0]},
    "a text for a number": {**GOOD, "reward": "1"},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_refused_as_a_batch_refuses_them(name: str) -> None:
    types = {"ids": TOKEN.i32, "logprobs": TOKEN.f32, "reward": SAMPLE.f32}
    for rows in ([GOOD, BAD[name]], [BAD[name]], [BAD[name], GOOD]):
        with pytest.raises(FlowError) as expected:
            RowBatch.from_rows(rows, types)
        with pytest.raises(type(expected.value)) as found:
            prepare_rows(rows, types)
        assert str(found.value) == str(expected.value)


CONVERTED: dict[str, dict[str, Any]] = {
    "wider integers": {**GOOD, "ids": np.arange(3)},
    "lists": {**GOOD, "ids": [1, 2, 3], "logprobs": (0.5, 1.0, 2.0)},
    "not contiguous": {
        **GOOD,
        "logprobs": np.zeros((3, 2), np.float32)[:, 0],
        "ids": np.arange(6, dtype=np.int32)[::2],
    },
    "swapped bytes": {**GOOD, "logprobs": np.ones(3, ">f4")},
    "no values": {"ids": np.array([]), "logprobs": [], "reward": np.float64(0.1)},
    "another order": {"reward": True, "logprobs": np.zeros(3, np.float16), "ids": np.zeros(3, np.uint8)},
}


@pytest.mark.parametrize("name", CONVERTED)
def test_rows_are_converted_as_a_batch_converts_them(name: str) -> None:
    types = {"ids": TOKEN.i32, "logprobs": TOKEN.f32, "reward": SAMPLE.f32}
    for rows in ([GOOD, CONVERTED[name]], [CONVERTED[name]] * 2):
        batch, prepared = RowBatch.from_rows(rows, types), prepare_rows(rows, types)
        assert through(prepared).equals(batch)
        assert list(prepared.types) == list(types)


def test_types_that_cannot_be_stored_are_refused() -> None:
    with pytest.raises(SchemaError, match="lists of lists"):
        prepare_rows([{"x": np.zeros(2, np.float32)}], {"x": TOKEN.f32["*"]})
    with pytest.raises(SchemaError, match="identifier"):
        prepare_rows([{"no name": np.zeros(2, np.float32)}], {"no name": TOKEN.f32})
    with pytest.raises(SchemaError, match="each value needs shape"):
        prepare_rows([{"x": "text"}], {"x": SAMPLE.str[2]})
    with pytest.raises(DataError, match="row 0 has a column 'x' without type"):
        prepare_rows([{"x": 1}], {})
    assert prepare_rows([], {}).nbytes == 0
    assert prepare_rows([{}, {}], {}).num_rows == 2


# --------------------------------------------------------------------------------- compiled code that looks at arrays

needs_numba = pytest.mark.skipif(choose() != "numba", reason="numba is not installed, or compiles nothing")

ARRAYS: dict[str, ColumnType] = {
    "ids": TOKEN.i32, "logprobs": TOKEN.f16, "mask": TOKEN.bool, "top": TOKEN.f32[2, "k"], "marks": TOKEN.bool[3],
    "prompt": PROMPT.i64["*"], "prompt_mask": PROMPT.bool["*"], "image": PROMPT.u8["*", 5], "other": SAMPLE.f64["*"],
}  # fmt: skip


class Special(np.ndarray):
    """What NumPy's own arrays do, and is another type."""


def odd_array(array: np.ndarray, how: str) -> Any:
    """The same values in another form."""
    if how == "strided":
        return np.repeat(array, 2, axis=0)[::2]
    if how == "column-major":
        return np.asfortranarray(array)
    if how == "read-only":
        array.flags.writeable = False
    elif how == "swapped":
        return array.astype(array.dtype.newbyteorder("S"))
    elif how == "pickled":  # has a dtype object of its own
        return pickle.loads(pickle.dumps(array))
    elif how == "unaligned":
        room = np.zeros(array.nbytes + 1, np.uint8)
        made = room[1:].view(array.dtype).reshape(array.shape)
        made[...] = array
        return made
    elif how == "special":
        return array.view(Special)
    elif how == "objects":
        return array.astype(object)
    elif how == "wider":
        return array.astype(np.float64)
    elif how == "list":
        return array.tolist()
    elif how == "single":
        return np.array(array.sum(), array.dtype)
    elif how == "deeper":
        return array[..., None]
    elif how == "flatter" and array.ndim > 1:
        return np.ascontiguousarray(array[..., 0])
    elif how == "narrower":
        return np.ascontiguousarray(array[..., :-1])
    elif how == "shorter":
        return array[1:]
    elif how == "none":
        return None
    elif how == "twos" and array.dtype == np.bool_:  # true, too
        return (array.view(np.uint8) * 2).view(np.bool_)
    return array


HOWS = (
    "strided", "column-major", "read-only", "swapped", "pickled", "unaligned", "special", "objects", "wider", "list",
    "single", "deeper", "flatter", "narrower", "shorter", "none", "twos",
)  # fmt: skip


def array_rows(random: np.random.Generator, count: int, longest: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        tokens = int(random.integers(0, longest + 1)) if random.random() < 0.8 else 0
        row: dict[str, Any] = {}
        for name, kind in ARRAYS.items():
            if rows and kind.granularity is PROMPT and random.random() < 0.7:
                known = rows[-1][name]
                row[name] = known if random.random() < 0.5 else known.copy()
                continue
            length = tokens if kind.granularity is TOKEN else int(random.integers(0, longest + 1))
            inner = {"top": (2, 3), "marks": (3,), "image": (5,)}.get(name, ())
            row[name] = random.integers(0, 2, (length, *inner)).astype(NUMPY_DTYPES[kind.dtype])
        rows.append(row)
    return rows


def outcome(kernel: str, rows: list[dict[str, Any]]) -> Any:
    """Layouts, sizes and bytes, or the error."""
    with forced(kernel):
        try:
            prepared = prepare_rows(rows, ARRAYS)
        except FlowError as error:
            return type(error), str(error)
        return prepared.layouts, prepared.raw_bytes, prepared.nbytes, written(prepared).tobytes()


@needs_numba
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 20),
    st.sampled_from([0, 1, 9, 70, 300]),
    st.lists(st.tuples(st.integers(0, 19), st.sampled_from(list(ARRAYS)), st.sampled_from(HOWS)), max_size=3),
)
def test_compiled_code_writes_what_numpy_writes(seed: int, count: int, longest: int, odd: Any) -> None:
    rows = array_rows(np.random.default_rng(seed), count, longest)
    for place, name, how in odd:
        row = rows[place % count]
        if isinstance(row[name], np.ndarray):
            row[name] = odd_array(row[name].copy(), how)
    assert outcome("numba", rows) == outcome("numpy", rows)


@needs_numba
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_another_form_are_as_numpy_has_them(name: str, how: str) -> None:
    for which in ([0], [3], [0, 1, 2, 3, 4]):
        rows = array_rows(np.random.default_rng(7), 5, 90)
        for place in which:
            rows[place][name] = odd_array(rows[place][name].copy(), how)
        assert outcome("numba", rows) == outcome("numpy", rows)


@needs_numba
@pytest.mark.parametrize("as_list", ["", "ids", "logprobs"])
def test_as_many_values_in_other_rows_are_refused(as_list: str) -> None:
    rows = array_rows(np.random.default_rng(7), 2, 0)
    for row, ids, others in zip(rows, (2, 3), (3, 2), strict=True):
        shapes = {"ids": (ids,), "logprobs": (others,), "mask": (ids,), "top": (ids, 2, 3), "marks": (ids, 3)}
        row |= {name: np.ones(shape, NUMPY_DTYPES[ARRAYS[name].dtype]) for name, shape in shapes.items()}
        if as_list:
            row[as_list] = row[as_list].tolist()
    found = outcome("numba", rows)
    assert found == outcome("numpy", rows)
    assert issubclass(found[0], FlowError)


@needs_numba
@pytest.mark.parametrize("how", ["", "read-only", "pickled", "unaligned", "twos"])
def test_good_arrays_are_not_left_to_numpy(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = array_rows(np.random.default_rng(3), 4, 90)
    rows = [{name: odd_array(array.copy(), how) for name, array in row.items()} for row in rows]
    expected = outcome("numpy", rows)
    monkeypatch.setattr("flowrl.store.layout._Builder.add_list", None)
    assert outcome("numba", rows) == expected


@needs_numba
def test_the_arrays_of_prepared_rows_stay_alive() -> None:
    rows = array_rows(np.random.default_rng(5), 30, 200)
    expected = outcome("numpy", rows)
    with forced("numba"):
        prepared = prepare_rows(rows, ARRAYS)
    rows.clear()
    assert array_rows(np.random.default_rng(6), 30, 200)  # takes the memory, were it free
    assert written(prepared).tobytes() == expected[-1]


def test_numpy_writes_the_first_rows_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_packed_rows", 0)
    monkeypatch.setattr(kernels, "_packing", lambda: "loaded")
    assert [kernels.packer(256) for _ in range(4)] == [None, None, "loaded", "loaded"]
    with forced("numpy"):
        assert kernels.packer(256) is None


def test_without_numba_numpy_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "flowrl.store.kernels.packing", raising=False)
    monkeypatch.delattr(kernels, "packing", raising=False)
    monkeypatch.setattr(kernels, "_packed_rows", 1 << 20)
    kernels._packing.cache_clear()
    try:
        rows = array_rows(np.random.default_rng(5), 3, 20)
        assert kernels.packer(3) is None
        assert outcome("auto", rows) == outcome("numpy", rows)
    finally:
        kernels._packing.cache_clear()


# -------------------------------------------------------------------------------------------------- wrong blocks


def test_a_block_that_is_too_small_is_refused() -> None:
    prepared = prepare_rows([GOOD], {"ids": TOKEN.i32, "logprobs": TOKEN.f32, "reward": SAMPLE.f32})
    with pytest.raises(StoreError, match=f"need a block of {prepared.nbytes} bytes"):
        prepared.write(np.zeros(prepared.nbytes - 1, np.uint8))
    with pytest.raises(StoreError, match="not the one the layout was written for"):
        decode(prepared.layouts[2], np.zeros(8, np.uint8), 1)


@pytest.mark.parametrize("kernel", ["numpy", pytest.param("numba", marks=needs_numba)])
def test_a_block_that_cannot_be_written_is_refused(kernel: str) -> None:
    with forced(kernel):
        prepared = prepare_rows([GOOD], {"ids": TOKEN.i32, "logprobs": TOKEN.f32, "reward": SAMPLE.f32})
    sealed = np.zeros(prepared.nbytes, np.uint8)
    sealed.flags.writeable = False
    for into in (sealed, np.zeros(2 * prepared.nbytes, np.uint8)[::2]):
        with pytest.raises(StoreError, match="one run of bytes that may be written"):
            prepared.write(into)


def test_only_segments_of_the_same_columns_merge() -> None:
    one, other = (prepare_rows([{name: 1.0}], {name: SAMPLE.f32}) for name in "ab")
    with pytest.raises(StoreError, match="the same columns"):
        merge([(one.layouts, written(one), 1), (other.layouts, written(other), 1)])


# ------------------------------------------------------------------------------------------------------- places


@given(row_lists)
def test_places_are_where_the_values_lie(rows: list[dict[str, Any]]) -> None:
    batch = batch_of(rows)
    prepared = prepared_of(batch)
    root = written(prepared)
    base = root.__array_interface__["data"][0]
    for layout in prepared.layouts:
        found = places(layout, root, len(rows))
        if layout.type.dtype in ("str", "bytes"):
            assert found is None
            continue
        assert found is not None
        values = batch[layout.name]
        for row in range(len(rows)):
            at = int(found.address[row]) - base
            if found.bits:
                count = len(values[row])
                packed = root[at : at + (count + 7) // 8]
                assert (
                    np.unpackbits(packed, count=count, bitorder="little").astype(bool).tolist() == values[row].tolist()
                )
            else:
                wanted = np.asarray(values[row])
                assert found.length is None or found.length[row] == len(wanted)
                assert root[at : at + wanted.nbytes].tobytes() == wanted.tobytes()
