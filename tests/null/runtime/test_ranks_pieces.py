"""Shares of rows, rows in shared memory, and what ranks tell each other, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from flowrl.engines.launch.board import Alone, Failure, RankFailed
from flowrl.engines.launch.folder import FolderBoard, make_folder, remove_folder
from flowrl.engines.launch.place import Place
from flowrl.engines.launch.protocol import Site
from flowrl.errors import ConfigError, RunError, WaitTimeout
from flowrl.mesh import Layout
from flowrl.runtime.ranks import packed, segment
from flowrl.runtime.ranks.shares import cut, neighbours
from flowrl.schema.types import PROMPT, SAMPLE, TOKEN, TURN
from flowrl.store.rows import RowBatch

# ------------------------------------------------------------------------------------------------------------- shares


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 8))
def test_parts_are_the_rows_in_order(weights: list[int], parts: int) -> None:
    bounds = cut(np.asarray(weights, np.int64), parts)
    assert len(bounds) == parts
    assert [row for first, stop in bounds for row in range(first, stop)] == list(range(len(weights)))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 8))
def test_no_part_is_heavier_than_its_share_by_more_than_a_row(weights: list[int], parts: int) -> None:
    loads = [sum(weights[first:stop]) for first, stop in cut(np.asarray(weights), parts)]
    assert max(loads) <= sum(weights) / parts + max(weights) + 1e-6


def test_long_rows_are_dealt_by_their_tokens() -> None:
    assert cut(np.array([4, 1, 1, 1, 1]), 2) == ((0, 1), (1, 5))


def test_groups_are_not_torn() -> None:
    firsts = np.array([0, 3, 6])
    assert cut(np.ones(9), 2, firsts=firsts) in (((0, 3), (3, 9)), ((0, 6), (6, 9)))
    assert cut(np.ones(9), 4, firsts=firsts)[-1][1] == 9


def test_groups_that_do_not_stand_together_have_no_firsts() -> None:
    assert neighbours([np.array([0, 2]), np.array([1, 3])]) is None
    assert neighbours([np.array([0, 1]), np.array([2])]).tolist() == [0, 2]  # type: ignore[union-attr]


def test_ranks_that_see_the_same_rows_are_one_share() -> None:
    assert Site("m", (4, 5, 6, 7), Layout.parse("f2t2"), frozenset()).data_ranks == (4, 6)
    assert Site("m", (4, 5, 6, 7), Layout.parse("t2f2@div"), frozenset()).data_ranks == (4, 5)
    assert Site("m", (0, 1), Layout.parse("t2"), frozenset()).data_ranks == (0,)


# --------------------------------------------------------------------------------------------------------------- rows


def rows(count: int) -> RowBatch:
    lengths = [i % 3 for i in range(count)]
    return RowBatch(
        {
            "prompt_id": [f"p{i}é\ud800" for i in range(count)],
            "prompt_ids": [list(range(i % 4)) for i in range(count)],
            "response_ids": [list(range(n)) for n in lengths],
            "loss_mask": [[True] * n for n in lengths],
            "teacher": [[[1, 2]] * n for n in lengths],
            "reward": np.arange(count, dtype=np.float32),
            "notes": [["a", ""][: i % 3] for i in range(count)],
            "image": [bytes([i, 255]) for i in range(count)],
        },
        {
            "prompt_id": PROMPT.str, "prompt_ids": PROMPT.i32["*"], "response_ids": TOKEN.i32, "loss_mask": TOKEN.bool,
            "teacher": TOKEN.i32[2], "reward": SAMPLE.f32, "notes": TURN.str, "image": SAMPLE.bytes,
        },
    )  # fmt: skip


@pytest.mark.parametrize("bounds", [[(0, 7)], [(0, 3), (3, 7)], [(0, 0), (0, 5), (5, 5), (5, 7)]])
def test_rows_of_parts_are_the_rows(tmp_path: Path, bounds: list[tuple[int, int]]) -> None:
    whole = rows(7)
    parts = [whole.slice(first, stop) for first, stop in bounds]
    arrays = [packed.pack(part) for part in parts]
    placing = segment.placing_of([segment.sizes_of(one) for one in arrays])
    path = tmp_path / "rows"
    for number in reversed(range(len(parts))):  # whoever comes first
        segment.write(path, placing, number, arrays[number])
    found = packed.unpack(segment.read(path, placing), [packed.shape_of(part) for part in parts])
    assert found.equals(whole)
    path.unlink()
    assert found.equals(whole)  # the memory stays while it is read


def test_numbers_are_read_where_they_lie(tmp_path: Path) -> None:
    arrays = {"x": np.arange(8.0)}
    placing = segment.placing_of([segment.sizes_of(arrays)])
    segment.write(tmp_path / "x", placing, 0, arrays)
    first, second = (segment.read(tmp_path / "x", placing)["x"] for _ in range(2))
    assert not first.flags.writeable
    with open(tmp_path / "x", "r+b") as file:
        file.write(np.array([9.0]).tobytes())
    assert first[0] == second[0] == 9.0


def test_parts_with_other_columns_are_refused() -> None:
    with pytest.raises(RunError, match="parts of one table need the same columns"):
        segment.placing_of([segment.sizes_of({"x": np.zeros(1)}), segment.sizes_of({"y": np.zeros(1)})])


# -------------------------------------------------------------------------------------------------------------- board


@pytest.fixture
def folder() -> Iterator[Path]:
    made = make_folder()
    yield made
    remove_folder(made)


@pytest.fixture
def boards(folder: Path) -> Iterator[list[FolderBoard]]:
    found = [FolderBoard(folder, rank, 2) for rank in range(2)]
    yield found
    for board in found:
        board.close()


def wait(board: Any, *keys: str, timeout_s: float = 0.01) -> list[bytes]:
    return board.get(list(keys), timeout_s=timeout_s, what=lambda missing: f"for {', '.join(missing)}")


def test_a_message_is_there_for_all_until_it_is_dropped(boards: list[FolderBoard]) -> None:
    boards[0].post("0/a/b", b"one")
    boards[1].post("c", b"")
    assert wait(boards[1], "0/a/b", "c") == [b"one", b""] == wait(boards[0], "0/a/b", "c")
    boards[0].drop(["0/a/b", "never"])
    with pytest.raises(WaitTimeout, match=r"rank 1 waited 0.01 s for 0/a/b; rank 0 has not begun"):
        wait(boards[1], "0/a/b")


def test_a_wait_that_is_over_says_where_the_others_are(boards: list[FolderBoard]) -> None:
    boards[1].at("step 3, at 'reward'")
    with pytest.raises(WaitTimeout, match="rank 1 was last in step 3, at 'reward'"):
        wait(boards[0], "x")


def test_the_first_failure_ends_every_wait(boards: list[FolderBoard]) -> None:
    first = Failure.of(1, "step 0, at 'x'", ValueError("first\nand more"))
    assert boards[1].fail(first) == first
    assert boards[0].fail(Failure.of(0, "", ValueError("second"))) == first
    with pytest.raises(RankFailed, match=r"rank 1 failed first, in step 0, at 'x': ValueError: first$") as raised:
        wait(boards[0], "x", timeout_s=60.0)
    assert "and more" in raised.value.failure.text


def test_a_rank_that_is_gone_without_a_word_ends_a_wait(boards: list[FolderBoard]) -> None:
    import os

    boards[1].at("step 1, at 'rollout'")
    os.close(boards[1]._lock)  # as the end of its process does
    boards[1]._lock = -1
    with pytest.raises(RankFailed, match="rank 1 failed first, in step 1, at 'rollout': its process is gone"):
        wait(boards[0], "x", timeout_s=60.0)


def test_a_rank_that_has_ended_is_not_missed(boards: list[FolderBoard]) -> None:
    boards[1].close()
    with pytest.raises(WaitTimeout):
        wait(boards[0], "x", timeout_s=0.3)


def test_the_folder_of_a_job_goes_with_its_last_rank() -> None:
    from flowrl.store import folders

    made = make_folder()
    folders.settled(made)  # no launcher holds it
    ranks = [FolderBoard(made, rank, 2) for rank in range(2)]
    folders.reclaim_orphans()
    assert made.exists()
    ranks[0].close()
    assert made.exists()
    ranks[1].close()
    assert not made.exists()


def test_one_rank_needs_nobody() -> None:
    board = Alone()
    board.post("a", b"1")
    assert wait(board, "a") == [b"1"]
    with pytest.raises(RunError, match="there is no other rank that could post it"):
        wait(board, "b")


# -------------------------------------------------------------------------------------------------------------- place


def test_a_process_knows_its_place_by_its_environment() -> None:
    assert Place.of({}) == Place(0, 1, "")
    assert Place.of({"RANK": "2", "WORLD_SIZE": "4", "FLOWRL_JOB": "/x"}) == Place(2, 4, "/x")
    for environment in ({"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "x"}):
        with pytest.raises(ConfigError, match="RANK"):
            Place.of(environment)
