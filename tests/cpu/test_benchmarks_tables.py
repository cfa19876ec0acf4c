"""The comparison of tables moves equal rows and notices when they are not: no time is judged here."""

import numpy as np
import pytest
import torch

from benchmarks.tables import comparison, handoff, kills, padding, reads, stored, workload as made
from benchmarks.tables.anchors import arrow_files, memory, pipes
from benchmarks.tables.ours import TableStore
from benchmarks.tables.targets import TARGETS, Target

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

TINY = made.Size(prompts=8, logit_rows=16, vocabulary=512, corpus_bytes=200_000)


@pytest.fixture(scope="module")
def tiny():
    return made.make(TINY)


def test_rows_are_what_the_workload_says(tiny):
    lengths = tiny.lengths("response_ids")
    assert len(lengths) == TINY.rows == 64
    assert lengths.min() >= 32
    assert lengths.max() <= made.MAX_RESPONSE
    for name in made.W1:
        assert len(tiny.values[name]) == tiny.offsets(name)[-1]
    assert tiny.values["response_ids"].min() >= 1  # 0 stands for padding
    assert np.array_equal(tiny.one("prompt_ids", 0), tiny.one("prompt_ids", made.GROUP - 1))
    assert not np.array_equal(tiny.one("prompt_ids", 0), tiny.one("prompt_ids", made.GROUP))
    assert (tiny.values["rollout_logprobs"] <= 0).all()
    assert tiny.values[made.LOGITS].shape == (lengths[: TINY.logit_rows].sum(), made.TOP)
    assert (np.diff(tiny.values[made.LOGITS].astype(np.float32), axis=1) <= 0).all()


def test_rows_repeat(tiny):
    again = made.make(TINY)
    assert tiny.texts == again.texts
    for name, values in tiny.values.items():
        assert np.array_equal(values, again.values[name])


def test_rows_are_read_back_from_the_cache(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(made.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(made, "make", lambda size: tiny)
    made.load(TINY)
    monkeypatch.setattr(made, "make", lambda size: pytest.fail("made a second time"))
    again = made.load(TINY)
    assert again.texts == tiny.texts
    assert again.about == tiny.about
    for name, values in tiny.values.items():
        assert np.array_equal(values, again.values[name])


def test_a_digest_sees_one_changed_value_and_padding_that_is_not_zero(tiny):
    rows = tiny.rows(made.W2, 0, 8)
    one = padding.pad_list(rows, made.W2)
    flat = padding.pad_flat(padding.flat_columns(rows, made.W2), made.W2, 0, 8, padding.Staging())
    assert padding.digest(one, made.W2) == padding.digest(flat, made.W2) == handoff.expected([rows], made.W2)
    one["values"][3, 5] += 1
    assert padding.digest(one, made.W2) != padding.digest(flat, made.W2)
    short = int(np.argmin([len(row["values"]) for row in rows]))
    flat["values"][short, -1] = 1
    with pytest.raises(SystemExit, match="not zero behind its rows"):
        padding.digest(flat, made.W2)


def test_rows_reach_the_consumer(tiny):
    chunks = handoff.chunks_of(tiny, made.W2, TINY.logit_rows)
    way = handoff.Handoff([pipes.PickledRows(), pipes.PickledColumns(), arrow_files.ArrowFilesLz4()])
    try:
        for name in way.channels:
            speed, done = way.round(name, chunks, made.W2, check=True)
            assert speed > 0
            assert done.digest == handoff.expected(chunks, made.W2)
    finally:
        way.close()


class Wrong(pipes.PickledRows):
    name = "wrong"

    def unpacked(self, chunk, names):
        raise OSError("nothing can be read")


def test_a_consumer_that_fails_says_why(tiny):
    way = handoff.Handoff([Wrong()])
    try:
        with pytest.raises(SystemExit, match="nothing can be read"):
            way.round("wrong", handoff.chunks_of(tiny, made.W1, 16), made.W1)
    finally:
        way.close()


@pytest.mark.parametrize("make", [memory.ListOfRows, arrow_files.ArrowReader, arrow_files.ArrowLz4ByChunk, TableStore])
def test_stores_give_back_the_rows(tiny, make):
    rows = reads.Rows(tiny.rows(made.W1, 0, TINY.rows), made.W1)
    order = np.random.default_rng(0).permutation(TINY.rows)
    store = make(rows.rows, made.W1)
    try:
        reads.check(store, rows, order)
        store.add_column("later", np.ones(TINY.rows, np.float32))
        assert reads.speed(store.sequential(), TINY.rows) > 0
    finally:
        store.close()


def test_a_store_that_gives_other_rows_is_refused(tiny):
    rows = reads.Rows(tiny.rows(made.W1, 0, TINY.rows), made.W1)
    store = memory.ListOfRows(rows.rows, made.W1)
    store.rows[7]["rollout_logprobs"][0] -= 1
    with pytest.raises(SystemExit, match="in order: other values came out"):
        reads.check(store, rows, np.arange(TINY.rows))


def test_without_kernels_half_the_speed_is_enough_and_bytes_are_the_same():
    faster = Target("1", "speed", "a", ">=", 10, 20, "")
    assert faster.row({"a": 6.0}, compiled=True)[-1] == "MISSED"
    assert faster.row({"a": 6.0}, compiled=False)[-1] == "ok"
    assert faster.row({"a": 20.0}, compiled=True)[-1] == "ok, stretch"
    assert faster.row({}, compiled=True)[-1] == "not measured"
    sooner = Target("10", "latency", "a", "<=", 0.5, None, "", unit=" ms")
    assert sooner.row({"a": 0.9}, compiled=False)[-1] == "ok"
    fewer = Target("8", "bytes", "a", "<=", 0.5, None, "", False)
    assert fewer.row({"a": 0.9}, compiled=False)[-1] == "MISSED"
    assert {target.number for target in TARGETS} == {str(number) for number in range(1, 14)}


def test_every_part_runs_and_fills_its_targets(tiny):
    plan = comparison.Plan(rounds=1, groups=10, kills=1, anchors=False)
    measured = comparison.measure(tiny, plan, comparison.PARTS)
    with_others = {
        t.figure for t in TARGETS if any(w in t.figure for w in ("Ray", "Queue", "Proto", "fixed", "HF", "cpprb"))
    }
    for figures in measured.figures.values():
        assert {target.figure for target in TARGETS} - with_others <= set(figures)


def test_a_killed_writer_that_left_half_a_row_is_noticed(monkeypatch):
    monkeypatch.setattr(kills, "_checksum", lambda ids, logprobs: -1)  # only here: the writer computes the real one
    killed = kills.Killed()
    kills.once(killed, 0)
    assert killed.corrupt == killed.rows > 0


def test_torch_batches_are_tensors(tiny):
    batch = padding.pad_list(tiny.rows(made.W1, 0, 4), made.W1)
    assert all(isinstance(values, torch.Tensor) for values in batch.values())


def test_what_is_stored_is_told_for_every_column(tiny, monkeypatch):
    monkeypatch.setattr(stored, "load", lambda size: tiny)
    told = stored.main()
    assert all(f"`{name}`" in told for name in (*made.W2, stored.TEXT))
