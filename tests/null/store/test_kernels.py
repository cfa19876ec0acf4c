"""Batches gathered by address: what the loader's own layouts give, from either kernel."""

import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from flowrl.errors import ConfigError, DataError, MissingExtra, SchemaError
from flowrl.schema import PROMPT, SAMPLE, TOKEN, ColumnType
from flowrl.schema.ragged import Ragged
from flowrl.store import kernels
from flowrl.store.kernels import Gather, GatherColumn, aligned, choose, forced, gather_packed, gather_padded
from flowrl.store.layout import places, prepare
from flowrl.store.loader import packed, padded
from flowrl.store.rows import RowBatch
from tests.null.store.strategies import TYPES, batch_of, row

needs_numba = pytest.mark.skipif(choose() != "numba", reason="numba is not installed, or compiles nothing")
KERNELS = ["numpy", pytest.param("numba", marks=needs_numba)]
NUMBERS = {name: kind for name, kind in TYPES.items() if kind.is_numeric}


def columns_of(batch: RowBatch, root: np.ndarray | None = None) -> list[GatherColumn]:
    """The batch's numbers, as they lie in a block."""
    prepared = prepare({name: batch[name] for name in batch.names}, batch.types, len(batch))
    root = aligned(prepared.nbytes) if root is None else root
    prepared.write(root)
    made = []
    for layout in prepared.layouts:
        found = places(layout, root, len(batch))
        assert found is not None
        made.append(GatherColumn(layout.name, layout.type, found.address, found.length, found.bits, found.inner, root))
    return made


def rubbish(nbytes: int) -> np.ndarray:
    block = aligned(nbytes)
    block[:] = 0xAB
    return block


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


batches = st.lists(row(), min_size=1, max_size=6).map(lambda rows: batch_of(rows).select(NUMBERS))


@pytest.mark.parametrize("kernel", KERNELS)
@given(batches, st.data())
def test_small_rows(kernel: str, batch: RowBatch, data: st.DataObject) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=8)), np.int64)
    multiple = data.draw(st.sampled_from([1, 3, 8, 64]))
    columns = columns_of(batch)
    taken = batch.take(rows)
    found = gather_padded(columns, rows, multiple=multiple, take=rubbish, kernel=kernel)
    assert_same(found, padded(taken, multiple=multiple))
    assert_same(gather_packed(columns, rows, take=rubbish, kernel=kernel), packed(taken))


def long_batch(seed: int, num_rows: int, longest: int) -> RowBatch:
    """Rows as a run has them: some empty, some long, bits that end anywhere in a byte, equal prompts."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest, num_rows) * (random.random(num_rows) > 0.1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    floats = random.integers(0, 2**32, total, dtype=np.uint32).view(np.float32)  # any bits, also those of NaN
    prompts = [random.integers(0, 9, 1 + 7 * (i // 4)).astype(np.int32) for i in range(num_rows)]
    prompts = [prompts[4 * (i // 4)] for i in range(num_rows)]
    columns: dict[str, Any] = {
        "prompt_ids": prompts,
        "response_ids": Ragged(random.integers(0, 2**31, total).astype(np.int32), offsets),
        "logprobs": Ragged(floats, offsets),
        "loss_mask": Ragged(random.random(total) < 0.5, offsets),
        "teacher": Ragged(random.normal(size=(total, 5)).astype(np.float16), offsets),
        "flags": Ragged(random.random((total, 3)) < 0.5, offsets),
        "bytes": Ragged(random.integers(0, 256, total).astype(np.uint8), offsets),
        "reward": random.normal(size=num_rows),
        "vector": random.normal(size=(num_rows, 129)).astype(np.float32),
    }
    types = {
        "prompt_ids": PROMPT.i32["*"], "response_ids": TOKEN.i32, "logprobs": TOKEN.f32, "loss_mask": TOKEN.bool,
        "teacher": TOKEN.f16[5], "flags": TOKEN.bool[3], "bytes": TOKEN.u8, "reward": SAMPLE.f64, "vector": SAMPLE.f32[129],
    }  # fmt: skip
    return RowBatch(columns, types, num_rows)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("longest", [70, 1200])
def test_long_rows(kernel: str, multiple: int, longest: int) -> None:
    batch = long_batch(longest, 40, longest)
    gather = Gather(columns_of(batch), kernel)
    assert len(gather) == 40
    random = np.random.default_rng(multiple)
    for rows in (np.arange(40), random.permutation(40)[:32], random.integers(0, 40, 50), np.array([7])):
        assert_same(gather.padded(rows, multiple=multiple, take=rubbish), padded(batch.take(rows), multiple=multiple))
        assert_same(gather.packed(rows, take=rubbish), packed(batch.take(rows)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_written_outside_the_batch(kernel: str) -> None:
    gather = Gather(columns_of(long_batch(3, 20, 300)), kernel)
    for how in (gather.padded, gather.packed):
        blocks = []

        def take(nbytes: int, blocks: list[tuple[np.ndarray, int]] = blocks) -> np.ndarray:
            blocks.append((rubbish(nbytes + 256), nbytes))
            return blocks[-1][0]

        made = how(np.arange(20), take=take)  # type: ignore[operator]
        block, nbytes = blocks[0]
        assert (block[nbytes:] == 0xAB).all()
        assert all(np.shares_memory(array, block) for array in made.values() if array.size)
        assert all((array.__array_interface__["data"][0] % 64) == 0 for array in made.values())


@pytest.mark.parametrize("kernel", KERNELS)
def test_threads_share_a_gather(kernel: str) -> None:
    batch = long_batch(5, 40, 200)
    gather = Gather(columns_of(batch), kernel)
    orders = [np.random.default_rng(seed).permutation(40) for seed in range(4)]
    wanted = [padded(batch.take(rows)) for rows in orders]
    found: dict[int, list[dict[str, np.ndarray]]] = {}

    def work(place: int) -> None:
        found[place] = [gather.padded(orders[place]) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for place in range(4):
        for made in found[place]:
            assert_same(made, wanted[place])


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_are_not_there_are_refused(kernel: str) -> None:
    gather = Gather(columns_of(long_batch(1, 4, 9)), kernel)
    for wrong in (4, -1, 2**40):
        with pytest.raises(DataError, match=f"row {wrong} of 4 rows"):
            gather.padded(np.array([0, wrong]))
        with pytest.raises(DataError, match=f"row {wrong} of 4 rows"):
            gather.packed(np.array([wrong]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_values_than_bounds_can_say_are_refused(kernel: str) -> None:
    column = GatherColumn("response_ids", TOKEN.u8, np.zeros(1, np.int64), np.array([2**31]))

    def never(nbytes: int) -> np.ndarray:
        block = np.lib.stride_tricks.as_strided(aligned(64), (nbytes,), (0,))  # claims memory that is not there
        return block

    with pytest.raises(DataError, match=r"response_ids' has 2147483648 values"):
        gather_packed([column], np.array([0]), take=never, kernel=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_memory_that_does_not_do_is_refused(kernel: str) -> None:
    gather = Gather(columns_of(long_batch(1, 4, 9)), kernel)
    for take in (lambda nbytes: aligned(nbytes - 64), lambda nbytes: aligned(nbytes + 8)[8:]):
        with pytest.raises(ConfigError, match="multiple of 64"):
            gather.padded(np.arange(4), take=take)


def test_columns_that_cannot_be_gathered_are_refused() -> None:
    def column(name: str, kind: ColumnType, lengths: list[int] | None, rows: int = 2) -> GatherColumn:
        return GatherColumn(name, kind, np.zeros(rows, np.int64), None if lengths is None else np.array(lengths))

    with pytest.raises(SchemaError, match="text has no fixed width"):
        Gather([column("x", SAMPLE.str, None)])
    with pytest.raises(SchemaError, match="'b' has others"):
        Gather([column("a", TOKEN.i32, [1, 2]), column("b", TOKEN.i32, [2, 1])])
    with pytest.raises(SchemaError, match=r"found \[2, 3\]"):
        Gather([column("a", SAMPLE.f32, None), column("b", SAMPLE.f32, None, 3)])


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_columns_and_no_rows(kernel: str) -> None:
    assert Gather([], kernel).padded(np.zeros(0, np.int64)) == {}
    gather = Gather(columns_of(long_batch(1, 4, 9)), kernel)
    none = np.zeros(0, np.int64)
    assert_same(gather.padded(none), padded(long_batch(1, 4, 9).take(none)))
    assert_same(gather.packed(none), packed(long_batch(1, 4, 9).take(none)))


# ------------------------------------------------------------------------------------------------------ choosing


def test_a_kernel_is_chosen_by_name() -> None:
    assert choose("numpy") == "numpy"
    with pytest.raises(ConfigError, match=r"auto, numba, numpy; found 'cuda'"):
        choose("cuda")
    with forced("numpy"):
        assert choose("auto") == Gather([]).kernel == "numpy"


def test_without_numba_numpy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "flowrl.store.kernels.numba_path", raising=False)
    monkeypatch.delattr(kernels, "numba_path", raising=False)
    kernels._numba.cache_clear()
    try:
        assert choose("auto") == "numpy"
        with pytest.raises(MissingExtra, match=r"flowrl\[kernels\]"):
            choose("numba")
    finally:
        kernels._numba.cache_clear()


@needs_numba
@pytest.mark.parametrize("error", [RuntimeError("no locator"), OSError(28, "No space left on device")])
def test_code_is_compiled_where_no_cache_can_be_written(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core import caching

    from flowrl.store.kernels import numba_path

    tried = []

    def refuse(*arguments: object) -> None:
        tried.append(arguments)
        raise error

    method = "__init__" if isinstance(error, RuntimeError) else "save_overload"  # when it is made, when it is used
    monkeypatch.setattr(caching.FunctionCache, method, refuse)

    def twice(number: int) -> int:
        return 2 * number

    assert numba_path._compiled("int64(int64)")(twice)(21) == 42
    assert tried
