"""Batches from a table: every row once, groups whole, bounds kept, layouts that hold the same values."""

import gc
import pickle
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flowrl.errors import ConfigError, DataError, SchemaError, StoreError, WaitTimeout
from flowrl.schema import PROMPT, SAMPLE, TOKEN
from flowrl.store.loader import Loader, packed, padded
from flowrl.store.rows import RowBatch
from flowrl.store.source import BatchRows
from flowrl.store.staging import Ahead, Staged, StagingPool
from flowrl.store.table import ExperienceTable
from tests.null.store.strategies import batch_of, row_lists


def tokens(lengths: list[int], groups: str = "") -> RowBatch:
    count = len(lengths)
    return RowBatch(
        {
            "prompt_id": list(groups) or [str(i) for i in range(count)],
            "prompt_ids": [[7]] * count,
            "response_ids": [[10 + i] * n for i, n in enumerate(lengths)],
            "reward": np.arange(count),
        },
        {"prompt_id": PROMPT.str, "prompt_ids": PROMPT.i32["*"], "response_ids": TOKEN.i32, "reward": SAMPLE.f32},
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abcd")), max_size=20),
    st.sampled_from([{"batch_rows": 20}, {"max_tokens": 400}, {"batch_rows": 25, "max_tokens": 400}, {}]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["rows", "packed", "padded"]),
)
def test_every_row_comes_once_and_no_bound_is_crossed(
    rows: list[tuple[int, str]], bounds: dict[str, int], is_shuffled: bool, is_grouped: bool, layout: str
) -> None:
    batch = tokens([n for n, _ in rows], "".join(g for _, g in rows))
    loader = Loader(
        batch, **bounds, shuffle=is_shuffled, seed=3, group_by="prompt_id" if is_grouped else None, layout=layout
    )
    seen: list[float] = []
    homes: dict[str, set[int]] = {}
    for number, part in enumerate(loader):
        found = part["reward"].tolist()
        assert 0 < len(found) <= bounds.get("batch_rows", 32 if not bounds else 10**9)
        if layout == "packed" and "max_tokens" in bounds:
            assert len(part["response_ids"]) + len(part["prompt_ids"]) <= bounds["max_tokens"]
        if layout == "padded" and "max_tokens" in bounds:
            assert part["response_ids"].size + part["prompt_ids"].size <= bounds["max_tokens"]
        seen += found
        for prompt in part["prompt_id"]:
            homes.setdefault(prompt, set()).add(number)
    assert sorted(seen) == list(range(len(rows)))
    if not is_shuffled and not is_grouped:
        assert seen == sorted(seen)
    if is_grouped:
        assert all(len(numbers) == 1 for numbers in homes.values())


def test_batches_are_as_full_as_their_bounds_let_them() -> None:
    assert [len(part) for part in Loader(tokens([1] * 70))] == [32, 32, 6]
    assert [len(part) for part in Loader(tokens([1] * 7), batch_rows=3)] == [3, 3, 1]
    assert [len(part) for part in Loader(tokens([1] * 7), max_tokens=6)] == [3, 3, 1]  # a prompt has one token too
    full = Loader(tokens([1] * 7), max_tokens=6, layout="padded")
    assert [len(part["reward"]) for part in full] == [3, 3, 1]
    assert [len(part) for part in Loader(tokens([1] * 7, "aabbccc"), batch_rows=4, group_by="prompt_id")] == [4, 3]


def test_shuffling_depends_on_seed_and_epoch_alone() -> None:
    batch = tokens([1] * 50)

    def order(loader: Loader) -> list[float]:
        return [value for part in loader for value in part["reward"].tolist()]

    loader = Loader(batch, batch_rows=7, shuffle=True, seed=1)
    first, second = order(loader), order(loader)
    assert first != second
    again = Loader(batch, batch_rows=50, shuffle=True, seed=1)  # the batch size does not change the order
    assert order(again) == first
    again.epoch = 1
    assert order(again) == second
    assert order(Loader(batch, shuffle=True, seed=2)) != first


@settings(max_examples=40, deadline=None)
@given(row_lists)
def test_layouts_hold_the_values_of_the_rows(rows: list[dict[str, Any]]) -> None:
    batch = batch_of(rows)
    flat, full = packed(batch), padded(batch)
    for name in ("response_ids", "teacher_ids", "prompt_ids", "step_text"):
        bounds = flat["cu_seqlens" if name in ("response_ids", "teacher_ids") else f"{name}.cu_seqlens"]
        mask = full["mask" if name in ("response_ids", "teacher_ids") else f"{name}.mask"]
        assert bounds.dtype == np.int32 and mask.dtype == np.bool_
        for i, r in enumerate(rows):
            assert flat[name][bounds[i] : bounds[i + 1]].tolist() == r[name]
            assert full[name][i][mask[i]].tolist() == r[name]
            assert mask[i].tolist() == sorted(mask[i].tolist(), reverse=True)  # padding is on the right
    assert flat["reward"] is batch["reward"]


def test_padding_is_zero_and_rounded_up() -> None:
    made = padded(tokens([1, 3, 0]), multiple=4)
    assert made["response_ids"].tolist() == [[10, 0, 0, 0], [11, 11, 11, 0], [0, 0, 0, 0]]
    assert made["mask"].sum(1).tolist() == [1, 3, 0]
    assert made["prompt_ids"].shape == (3, 4)
    assert padded(tokens([]))["response_ids"].shape == (0, 0)


def test_bounds_of_packed_rows_are_those_of_the_rows() -> None:
    made = packed(tokens([2, 0, 3]))
    assert made["cu_seqlens"].tolist() == [0, 2, 2, 5]
    assert made["prompt_ids.cu_seqlens"].tolist() == [0, 1, 2, 3]


def test_what_fits_in_no_batch_is_refused_before_the_first() -> None:
    with pytest.raises(DataError, match="row 1 has 10 tokens and a batch takes 8; raise max_tokens"):
        Loader(tokens([2, 9, 1]), max_tokens=8)
    with pytest.raises(DataError, match="group of 3 rows has 9 tokens"):
        Loader(tokens([2, 2, 2], "aaa"), max_tokens=8, group_by="prompt_id")
    with pytest.raises(DataError, match="group of equal 'prompt_id' has 3 rows and a batch takes 2"):
        Loader(tokens([2, 2, 2], "aaa"), batch_rows=2, group_by="prompt_id")


def test_tokens_count_even_when_their_columns_are_not_asked_for() -> None:
    loader = Loader(tokens([3, 3, 3]), max_tokens=8, columns=["reward"])
    assert [part["reward"].tolist() for part in loader] == [[0.0, 1.0], [2.0]]
    assert all(part.names == ("reward",) for part in Loader(tokens([1]), columns=["reward"]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_rows": 0}, "batch_rows of at least 1"),
        ({"max_tokens": -1}, "max_tokens of at least 1"),
        ({"layout": "packd"}, "did you mean 'packed'"),
        ({"max_tokens": 5, "columns": None}, "use batch_rows"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], says: str) -> None:
    rows = tokens([1, 2]).select(["reward"])
    with pytest.raises(ConfigError, match=says):
        Loader(rows, **options)
    with pytest.raises(ConfigError, match=says):
        ExperienceTable.loader(_filled(rows), **options)


def _filled(rows: RowBatch) -> ExperienceTable:
    table = ExperienceTable()
    table.append(rows)
    return table


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prefetch": -1}, "prefetch of 0 or more"),
        ({"num_workers": True}, "num_workers of 0 or more"),
        ({"pin": True}, "pin=True is for tensors"),
        ({"device": "cpu"}, "layout 'rows' gives a RowBatch, which has no device"),
        ({"reuse": True}, "reuse=True.*needs layout 'padded' or 'packed'"),
        ({"reuse": True, "layout": "packed", "prefetch": 2}, "reuse=True.*no prefetch"),
        ({"reuse": True, "layout": "packed", "num_workers": 1}, "reuse=True.*no prefetch"),
        (
            {"device": "cpu", "layout": "padded"},
            r"'prompt_id' is PROMPT.str and cannot be a tensor.*columns=\['prompt_ids'",
        ),
    ],
)
def test_senseless_places_for_batches_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Loader(tokens([1, 2]), **options)


def test_an_unknown_column_is_refused_at_once() -> None:
    with pytest.raises(SchemaError, match="no column 'rewad'; did you mean 'reward'"):
        Loader(tokens([1]), columns=["rewad"])


# --------------------------------------------------------------------------------------- which rows make a batch


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.sampled_from("abcdefgh")), max_size=40),
    st.sampled_from([None, 12, 20]),
    st.sampled_from([None, 250, 300]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 4]),
)
def test_batches_are_cut_as_one_row_after_another_would_be(
    rows: list[tuple[int, int, str]],
    most: int | None,
    most_tokens: int | None,
    is_shuffled: bool,
    is_grouped: bool,
    is_padded: bool,
    multiple: int,
) -> None:
    batch = RowBatch(
        {
            "prompt_id": [key for *_, key in rows],
            "prompt_ids": [[7] * p for _, p, _ in rows],
            "response_ids": [[1] * n for n, _, _ in rows],
        },
        {"prompt_id": PROMPT.str, "prompt_ids": PROMPT.i32["*"], "response_ids": TOKEN.i32},
    )
    options: dict[str, Any] = {
        "batch_rows": most, "max_tokens": most_tokens, "shuffle": is_shuffled, "seed": 5,
        "group_by": "prompt_id" if is_grouped else None, "layout": "padded" if is_padded else "packed",
        "pad_multiple": multiple,
    }  # fmt: skip
    try:
        loader = Loader(batch, **options)
    except DataError:
        return
    units = batch.group_indices("prompt_id") if is_grouped else [np.array([i]) for i in range(len(rows))]
    order = np.random.default_rng([5, 3]).permutation(len(units)) if is_shuffled else range(len(units))
    expected: list[list[int]] = []
    held: list[int] = []

    def size(numbers: list[int]) -> int:
        if not is_padded:
            return sum(rows[i][0] + rows[i][1] for i in numbers)
        return len(numbers) * sum(-(-max(rows[i][axis] for i in numbers) // multiple) * multiple for axis in (0, 1))

    for number in order:
        grown = held + units[number].tolist()
        limit = most if most is not None or most_tokens is not None else 32
        if held and (
            (limit is not None and len(grown) > limit) or (most_tokens is not None and size(grown) > most_tokens)
        ):
            expected.append(held)
            grown = units[number].tolist()
        held = grown
    expected += [held] if held else []
    assert [part.tolist() for part in loader.batches(3)] == expected


# ------------------------------------------------------------------------------------------------- laid out, ahead


class Cold(BatchRows):
    """Rows that do not lie in memory as plain values."""

    def places(self, columns: Any) -> Any:
        return None


def same(one: Any, other: Any) -> None:
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype and one[name].shape == other[name].shape, name
        assert one[name].tolist() == other[name].tolist(), name


@settings(max_examples=30, deadline=None)
@given(row_lists.filter(len), st.sampled_from(["packed", "padded"]), st.integers(0, 2), st.booleans())
def test_batches_are_the_layouts_of_their_rows(
    rows: list[dict[str, Any]], layout: str, prefetch: int, is_cold: bool
) -> None:
    batch = batch_of(rows)
    lay_out = {"packed": packed, "padded": padded}[layout]
    loader = Loader(Cold(batch) if is_cold else batch, batch_rows=2, layout=layout, prefetch=prefetch)
    for _ in range(2):  # staging is used again
        made = list(loader)
        assert len(made) == len(list(loader.batches(0)))
        for numbers, part in zip(loader.batches(0), made, strict=True):
            same(part, lay_out(batch.take(numbers)))


@pytest.mark.parametrize("layout", ["rows", "packed", "padded"])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_thread_ahead_changes_nothing(layout: str, prefetch: int) -> None:
    batch = tokens([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], "aabbbccdeef")
    options: dict[str, Any] = {"shuffle": True, "seed": 4, "layout": layout, "group_by": "prompt_id", "batch_rows": 4}
    plain, ahead = Loader(batch, **options), Loader(batch, prefetch=prefetch, **options)
    for _ in range(3):
        one, other = list(plain), list(ahead)
        assert len(one) == len(other) > 2
        for a, b in zip(one, other, strict=True):
            if layout == "rows":
                assert a == b
            else:
                same(a, b)


def test_a_batch_that_is_kept_is_never_overwritten() -> None:
    batch = tokens(list(range(1, 41)))
    for prefetch in (0, 1, 4):
        loader = Loader(batch, batch_rows=2, layout="padded", prefetch=prefetch)
        kept = [part["response_ids"][:, :1] for part in loader]  # a slice is enough to hold the memory
        assert [part.reshape(-1).tolist() for part in kept] == [[10 + 2 * i, 11 + 2 * i] for i in range(20)]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_reuse_gives_the_same_batches(layout: str) -> None:
    batch = tokens([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], "aabbbccdeef")
    options: dict[str, Any] = {"shuffle": True, "seed": 4, "layout": layout, "batch_rows": 4}
    plain, reusing = Loader(batch, **options), Loader(batch, reuse=True, **options)
    for _ in range(2):
        made = [{name: np.copy(array) for name, array in part.items()} for part in reusing]  # type: ignore[union-attr]
        for one, other in zip(plain, made, strict=True):
            same(one, other)


def test_a_reused_batch_lies_where_the_one_before_lay() -> None:
    loader = Loader(tokens([5] * 40), batch_rows=2, layout="padded", reuse=True)
    places = {part["response_ids"].ctypes.data for part in loader}
    assert len(places) == 1
    (carrier,) = loader._idle
    assert carrier.pool.made == 1


def test_a_batch_that_ended_says_so() -> None:
    batches = iter(Loader(tokens([2, 1, 3, 4]), batch_rows=2, layout="padded", reuse=True))
    first: Any = next(batches)
    copied = dict(first)
    assert first["mask"].tolist() == [[True, True], [True, False]]
    last: Any = next(batches)
    reads: list[Callable[[], Any]] = [
        lambda: first["mask"], lambda: list(first), lambda: len(first), lambda: first.get("mask"), lambda: "mask" in first,
        lambda: first.items(), lambda: first.keys(), lambda: first.values(), lambda: dict(first), lambda: {**first},
        lambda: first | {}, lambda: {} | first, lambda: first.copy(), lambda: pickle.dumps(first), lambda: first == copied,
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(StoreError, match="reuse=True"):
            read()
    assert next(batches, None) is None
    assert last["mask"].tolist() == [[True] * 3 + [False], [True] * 4]  # no other batch came


def test_arrays_taken_out_of_a_batch_outlive_it() -> None:
    loader = Loader(tokens(list(range(1, 41))), batch_rows=2, layout="padded", reuse=True)
    kept = [part["response_ids"][:, :1] for part in loader]
    assert [part.reshape(-1).tolist() for part in kept] == [[10 + 2 * i, 11 + 2 * i] for i in range(20)]


def test_memory_of_a_dropped_batch_is_used_again() -> None:
    batch = tokens([5] * 400)
    for prefetch, most in ((0, 2), (1, 3), (3, 5)):
        loader = Loader(batch, batch_rows=2, layout="packed", prefetch=prefetch)
        for _ in loader:
            pass
        for _ in loader:
            pass
        (carrier,) = loader._idle
        assert 1 <= carrier.pool.made <= most


def test_no_more_batches_are_alive_than_were_promised() -> None:
    alive: weakref.WeakValueDictionary[int, Staged] = weakref.WeakValueDictionary()
    most = []

    def items() -> Iterator[Staged]:
        for number in range(50):
            item = Staged(number=number)
            alive[number] = item
            most.append(len(alive))
            yield item
            del item

    for ahead in (1, 2, 4):
        alive.clear()
        most.clear()
        numbers = []
        for item in Ahead(items(), ahead):
            numbers.append(item["number"])
        del item
        assert numbers == list(range(50))
        assert max(most) <= ahead + 1
        assert len(list(Ahead(items(), ahead))) == 50  # whoever keeps them all gets them all


class Broken(BatchRows):
    def rows(self, indices: Any, columns: Any) -> Any:
        if 5 in indices:
            raise OSError("the disk is on fire")
        return super().rows(indices, columns)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "flowrl-loader"]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_comes_where_the_batch_would_have_come(prefetch: int) -> None:
    loader = Loader(Broken(tokens([1] * 9)), batch_rows=2, prefetch=prefetch)
    found = []
    with pytest.raises(OSError, match="on fire") as caught:
        for part in loader:
            found.append(len(part))
    assert found == [2, 2]
    frames = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert 'raise OSError("the disk is on fire")' in frames  # where it happened, not only where it was found
    assert not threads()


def test_leaving_early_ends_the_thread() -> None:
    loader = Loader(tokens([1] * 90), batch_rows=2, prefetch=3, layout="packed")
    for _ in loader:
        assert threads()
        break
    gc.collect()
    assert not threads()
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            raise ZeroDivisionError
    gc.collect()
    assert not threads()
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert not threads()
    with pytest.raises(StoreError, match="closed, in the middle of an epoch"):
        list(iterator)
    with loader:
        assert len(list(loader)) == 45  # anew
    assert not threads()


def test_a_consumer_does_not_wait_for_ever() -> None:
    gate = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        gate.wait(60)
        yield 2

    ahead = Ahead(items(), 1, timeout_s=60.0)
    assert next(ahead) == 1
    ahead._timeout_s = 0.01
    with pytest.raises(WaitTimeout, match="no batch was made in"):
        next(ahead)
    gate.set()
    ahead._timeout_s = 60.0
    assert list(ahead) == [2]  # nothing was lost by it


def test_workers_mean_a_thread() -> None:
    assert Loader(tokens([1]), num_workers=2).prefetch == 4
    assert Loader(tokens([1]), num_workers=1, prefetch=5).prefetch == 5
    loader = Loader(tokens([1] * 21), num_workers=2, batch_rows=2)
    iterator = iter(loader)
    assert len(threads()) == 1  # more batches than it may make ahead, so it is there
    assert [len(part) for part in iterator] == [2] * 10 + [1]


def test_a_pickled_batch_is_a_plain_dict() -> None:
    (part,) = Loader(tokens([2, 1]), layout="packed")
    there = pickle.loads(pickle.dumps(part))
    assert type(there) is dict
    same(there, part)


def test_a_block_is_taken_again_when_nothing_refers_to_it() -> None:
    pool = StagingPool(most=2)
    block = pool.take(100)
    start = block.ctypes.data
    assert start % 64 == 0 and block.flags.writeable
    view = np.ndarray((5, 5), np.int32, block)[1:, ::2]
    del block
    other = pool.take(100)
    assert other.ctypes.data != start
    view[:] = 7
    del view
    assert pool.take(100).ctypes.data == start
    assert pool.made == 2
    kept = [pool.take(100), pool.take(100)]  # more than it knows at a time: they are left to whoever holds them
    assert len({block.ctypes.data for block in (other, *kept)}) == 3
    assert len(pool._blocks) == 2
    large = pool.take(10 << 20)
    assert len(large) >= 10 << 20
    assert pool.nbytes < 13 << 20
