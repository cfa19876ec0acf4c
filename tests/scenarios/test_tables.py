"""Experience tables: what travels, chunks, single rows, shards, shared memory, ids, and consumers that come early."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flowrl as fr
from flowrl.errors import DataError, OperatorError
from flowrl.store import opening, wire
from flowrl.store.folders import shm_folder
from flowrl.store.interop import from_parquet, reader, to_parquet
from flowrl.store.rows import RowBatch
from tests.scenarios.pieces import run

TIERS = ["plain", "compressed", "files"]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., fr.ExperienceTable]]:
    """Tables by where their rows lie; `settle` moves the full chunks there."""
    made: list[fr.ExperienceTable] = []

    def table(tier: str = "plain", **options: Any) -> fr.ExperienceTable:
        if tier != "plain":
            options |= {"compression": "auto", "hot_bytes": 0}
        if tier == "files":
            options |= {"path": tmp_path / f"table{len(made)}", "memory_bytes": 1}
        made.append(fr.ExperienceTable(**options))
        return made[-1]

    yield table
    for each in made:
        each.close()


def settle(table: fr.ExperienceTable, tier: str) -> None:
    table.flush()
    moved = {"plain": "hot", "compressed": "packed", "files": "disk"}[tier]
    assert table.stats().tiers[moved] > 0


def digest(table: fr.ExperienceTable) -> str:
    return hashlib.sha256(table.batch().to_ipc()).hexdigest()


# --- what travels -----------------------------------------------------------------------------------------------------


def test_a_row_of_a_large_table_travels_alone(make: Callable[..., fr.ExperienceTable]) -> None:
    table = make(chunk_rows=20_000)
    ids = fr.Ragged(np.arange(20_000 * 512, dtype=np.int32), np.arange(20_001) * 512)
    table.append(RowBatch({"response_ids": ids}, {"response_ids": fr.TOKEN.i32}))
    assert table.nbytes > 40_000_000
    claim = table.claim("train", 8)
    assert claim is not None
    parts = [table.take([7]), table.batch().slice(7, 8), next(table.scan()).slice(7, 8), claim.batch().slice(7, 8)]
    for part in parts:
        sent = pickle.dumps(part)
        assert len(sent) < 64_000
        assert pickle.loads(sent)["response_ids"][0].tolist() == list(range(7 * 512, 8 * 512))
        (page,) = wire.pages([part], part.types)
        sink = pa.BufferOutputStream()
        message = wire.to_message(page, {})
        with pa.ipc.new_stream(sink, message.schema) as writer:
            writer.write_table(message)
        assert sink.getvalue().size < 64_000
    with fr.serve_table(table) as server, fr.RemoteTable(server.uri, server.token) as remote:
        assert remote.take([7]).equals(parts[0])


def test_a_table_travels_as_its_name(make: Callable[..., fr.ExperienceTable]) -> None:
    table = make()
    table.append([{"prompt_id": str(i), "response": "x" * 1000} for i in range(1000)])
    sent = pickle.dumps(table)
    assert len(sent) < 1000
    code = (
        "import pickle, sys; table = pickle.load(sys.stdin.buffer); print(len(table), table.take([-1])['prompt_id'][0])"
    )
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, timeout=60, check=True)
    assert done.stdout.split() == [b"1000", b"999"]


# --- chunks and single rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_no_chunk_and_no_page_is_empty(
    tier: str, make: Callable[..., fr.ExperienceTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PAGE_BYTES", 64)  # a limit that any two rows exceed
    table = make(tier, chunk_rows=4)
    rows = [{"prompt_id": str(i), "response_ids": [i] * (i % 3), "reward": i} for i in range(13)]
    for start, stop in ((0, 3), (3, 3), (3, 8), (8, 8), (8, 13)):
        table.append(rows[start:stop] if stop > start else table.take([]))
    settle(table, tier)
    table.evict([0, 1, 2, 3, 5])
    chunks = [len(chunk) for chunk in table.scan()]
    assert all(chunks) and sum(chunks) == 8
    for arrow in (table.to_arrow(), reader(table).read_all()):
        assert {name: [len(c) for c in arrow[name].chunks] for name in table.columns} == dict.fromkeys(
            table.columns, chunks
        )
    pages = list(wire.pages(table.scan(), table.batch().types))
    assert all(len(piece) for page in pages for piece in page)
    assert [r for page in pages for piece in page for r in piece["reward"].tolist()] == table["reward"].tolist()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("tier", TIERS)
def test_one_row_is_read_as_two_are(tier: str, count: int, make: Callable[..., fr.ExperienceTable]) -> None:
    # every value equal, which collapsing code takes for a constant
    row = {"prompt_id": "p", "prompt": "same", "tags": ["t", "u"], "response_ids": [5, 5, 5], "reward": 1.0}
    kinds = {"tags": fr.PROMPT.str["*"]}
    table = make(tier, chunk_rows=1)
    table.append([row] * count, kinds)
    table.add_column("good", [True] * count, fr.SAMPLE.bool)
    settle(table, tier)
    with table.claim("node", 8) as claim:
        claimed = claim.batch()
    with fr.serve_table(table) as server, fr.RemoteTable(server.uri, server.token) as remote:
        ways = [table.batch(), table.take(range(count)), table.filter([True] * count), claimed, remote.batch()]
    for found in ways:
        assert {name: str(found.types[name]) for name in found.names} == {
            "prompt_id": "PROMPT.str", "prompt": "PROMPT.str", "tags": "PROMPT.str['*']", "response_ids": "TOKEN.i32",
            "reward": "SAMPLE.f32", "good": "SAMPLE.bool",
        }  # fmt: skip
        assert list(found.rows()) == [{**row, "good": True}] * count
    (padded,) = table.loader(layout="padded", columns=["response_ids", "reward"])
    assert padded["response_ids"].shape == padded["mask"].shape == (count, 3) and padded["reward"].shape == (count,)
    (packed,) = table.loader(layout="packed", columns=["response_ids"])
    assert packed["cu_seqlens"].tolist() == [3 * i for i in range(count + 1)]


# --- shards -----------------------------------------------------------------------------------------------------------


def test_rows_of_several_writers_are_all_there_with_their_columns(make: Callable[..., fr.ExperienceTable]) -> None:
    kinds = {"loss": fr.SAMPLE.f64, "count": fr.SAMPLE.i64, "rank": fr.SAMPLE.i32, "note": fr.SAMPLE.str}
    pooled, shards = make(), []
    for rank, (loss, count) in enumerate(((1.0, 1), (3.0, 3))):
        rows = [{"loss": loss, "count": count, "rank": rank, "note": f"of rank {rank}"}]
        shards.append(make())
        shards[-1].append(rows, kinds)
        with fr.ExperienceTable.open(pooled.name) as attached:  # a writer of its own
            attached.append(rows, kinds)
    for found in (pooled.batch(), RowBatch.concat([shard.batch() for shard in shards])):
        assert np.average(found["loss"], weights=found["count"]) == 2.5
        assert found["note"].tolist() == ["of rank 0", "of rank 1"]
        assert dict(found.types) == kinds


# --- shared memory ----------------------------------------------------------------------------------------------------


@fr.operator(writes={"centred": fr.SAMPLE.f32})
def centred_in_place(reward: fr.SAMPLE.f32):
    reward -= reward.mean()
    return reward


@fr.flow
def in_place(rows):
    return centred_in_place(rows)


@pytest.mark.parametrize("tier", TIERS)
def test_writing_into_rows_of_a_table_is_an_error_and_changes_nothing(
    tier: str, make: Callable[..., fr.ExperienceTable]
) -> None:
    table = make(tier, chunk_rows=2)
    table.append(
        [{"prompt_id": str(i), "prompt": "p", "response": "r", "response_ids": [1, i], "reward": i} for i in range(4)]
    )
    settle(table, tier)
    before = digest(table)
    with table.claim("node", 4) as claim:
        claimed = claim.batch()
    ways = [table.batch(), table.take([1, 0]), table.filter(table["reward"] > 0), *table.scan(), claimed]
    for found in ways:
        for values in (found["reward"], found["response_ids"].values):
            with pytest.raises(ValueError, match="read-only"):
                values += 1
    arrow = table.to_arrow()
    for chunk in (arrow["reward"].chunk(0), arrow["response_ids"].chunk(0).values):
        with pytest.raises(ValueError, match="read-only"):
            chunk.to_numpy()[0] = 3
    with pytest.raises(OperatorError, match="centred_in_place.*read-only.*work on a copy"):
        run(in_place, engine="null", rows=fr.Data(table.batch(), batch="all"))
    for layout in ("padded", "packed"):  # copies, which are the caller's
        for batch in table.loader(batch_rows=2, layout=layout, columns=["response_ids", "reward"]):
            batch["reward"] += 1
            batch["response_ids"][...] = 0
    assert digest(table) == before


def test_memory_is_given_back_when_the_table_is_closed() -> None:
    table = fr.ExperienceTable()
    table.append([{"prompt_id": "a"}])
    rows = table.batch()
    assert (shm_folder() / table.name).is_dir()
    table.close()
    assert not (shm_folder() / table.name).exists()
    assert rows["prompt_id"].tolist() == ["a"]  # what was read stays


@fr.flow
def replayed(prompts, policy):
    return fr.buffer(fr.rollout(policy, prompts), capacity=4, draw=2)


def test_a_run_keeps_its_buffers_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "new_folder", lambda: pytest.fail("a run made shared memory"))
    done = run(
        replayed, engine="null", steps=3, batch=2, prompts=[{"prompt": "1="}, {"prompt": "2="}], policy=fr.Model(None)
    )
    assert [step["buffer/rows"] for step in done.metrics] == [2, 4, 4]


# --- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_large_integer_ids_stay_apart_in_a_table_and_missing_ones_are_refused(
    tier: str, tmp_path: Path, make: Callable[..., fr.ExperienceTable]
) -> None:
    # as float64 all of them would be one
    ids = [2**53, 2**53, 2**53 + 1, 2**53 + 1]
    kinds = {"uid": fr.PROMPT.i64}
    table = make(tier, chunk_rows=2, keep_together="uid")
    table.append(pa.table({"uid": ids, "reward": pa.array([1.0, 2.0, 3.0, 4.0], pa.float32())}), kinds)
    settle(table, tier)
    with pytest.raises(DataError, match="'uid' has no value in row 1"):
        table.append(pa.table({"uid": pa.array([5, None]), "reward": pa.array([5.0, 6.0], pa.float32())}), kinds)
    assert len(table) == 4
    to_parquet(table, tmp_path / "rows.parquet")
    (again,) = from_parquet(tmp_path / "rows.parquet")
    for rows in (table.batch(), table.take([0, 1, 2, 3]), RowBatch.from_arrow(table.to_arrow()), again):
        assert rows["uid"].dtype == np.int64 and rows["uid"].tolist() == ids
        assert [g.tolist() for g in rows.group_indices("uid")] == [[0, 1], [2, 3]]
    assert table.find("uid", [2**53, 2**53 + 1, 2**53 + 2]).tolist() == [1, 3, -1]
    with table.claim("node", 3, whole_groups=True) as claim:
        assert claim.numbers.tolist() == [0, 1]


# --- consumers --------------------------------------------------------------------------------------------------------


def test_a_consumer_that_comes_before_the_first_row_waits_and_counts(make: Callable[..., fr.ExperienceTable]) -> None:
    table = make(max_rows=2, on_full="wait", timeout_s=0.1)
    table.add_column("reward", None, fr.SAMPLE.f32)
    assert table.claim("train", 1, ["response", "reward"]) is None  # nobody knows these columns yet
    numbers = table.append([{"response": "a"}, {"response": "b"}])
    with table.claim("judge", 2, ["response"]) as claim:
        table.fill("reward", claim.numbers, [1.0, 0.0])
    with pytest.raises(TimeoutError, match="'train' is done with 0"):  # its rows are not dropped unseen
        table.append([{"response": "c"}])
    with table.claim("train", 2, ["response", "reward"]) as claim:
        assert claim.numbers.tolist() == list(numbers)
    table.append([{"response": "c"}])
