"""The table against a plain Python model: any sequence of changes. `tests/cpu/store` has the same in shared memory and files."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowrl.errors import SchemaError, StoreError
from flowrl.schema import SAMPLE, TOKEN
from flowrl.store.claims import Claim
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable
from tests.null.store.strategies import TYPES, row

MAX_ROWS, CHUNK_ROWS = 9, 4
NODES = st.sampled_from(["update", "critic"])


class Model:
    """What a table should hold: rows by number, and who has them."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.appended = 0
        self.types = dict(TYPES)
        self.later: list[str] = []
        self.taken: dict[str, dict[int, str]] = {}

    def claimed(self) -> set[int]:
        return {n for taken in self.taken.values() for n, how in taken.items() if how == "claimed"}

    def append(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        over = len(self.rows) + min(len(rows), MAX_ROWS) - MAX_ROWS
        for number in [n for n in self.rows if n not in self.claimed()][: max(over, 0)]:
            del self.rows[number]
        for place, values in enumerate(rows):
            if place >= len(rows) - MAX_ROWS:
                self.rows[self.appended + place] = dict(values)
        self.appended += len(rows)

    def complete(self, columns: list[str]) -> list[int]:
        return [n for n, values in self.rows.items() if all(name in values for name in columns)]

    def claimable(self, node: str, columns: list[str], count: int) -> list[int]:
        return [n for n in self.complete(columns) if n not in self.taken.get(node, {})][:count]


class TableMachine(RuleBasedStateMachine):
    """Any order of changes leaves the table equal to the model, in every process that has it open."""

    options: ClassVar[dict[str, Any]] = {"memory": "private"}
    has_path = False
    shared = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        path = {"path": self.folder / "table"} if self.has_path else {}
        self.table = ExperienceTable(max_rows=MAX_ROWS, chunk_rows=CHUNK_ROWS, **self.options, **path)
        self.second = ExperienceTable.open(self.table.name) if self.shared else self.table
        self.model = Model()
        self.claims: list[tuple[str, list[int], Claim]] = []
        self.kept: list[tuple[RowBatch, list[dict[str, Any]]]] = []

    def teardown(self) -> None:
        for _, _, claim in self.claims:
            claim.release()
        self.claims.clear()
        self.second.close()
        self.table.close()
        shutil.rmtree(self.folder)

    @property
    def started(self) -> bool:
        return bool(self.table.columns) and set(TYPES) <= set(self.table.columns)

    # ----------------------------------------------------------------------------------------------------- changes

    @rule(rows=st.lists(row(), max_size=14), how=st.sampled_from(["batch", "arrow", "dicts"]), second=st.booleans())
    def append(self, rows: list[dict[str, Any]], how: str, second: bool) -> None:
        more = [n for n in self.model.types if n not in TYPES and n not in self.model.later]
        rows = [{**r, **{name: float(place) for place, name in enumerate(more)}} for r in rows]
        types = {n: t for n, t in self.model.types.items() if n not in self.model.later}
        batch = RowBatch.from_rows(rows, types)
        given = {"batch": batch, "arrow": batch.to_arrow(), "dicts": rows}[how]
        table = self.second if second else self.table
        numbers = table.append(given, types) if how == "dicts" and rows else table.append(batch)
        assert numbers == range(self.model.appended, self.model.appended + len(rows))
        self.model.append(rows)

    @precondition(lambda self: self.started)
    @rule(value=st.floats(-8, 8, width=16))
    def add_column(self, value: float) -> None:
        name = f"extra_{len(self.model.types)}"
        self.table.add_column(name, [value + i for i in range(len(self.model.rows))], SAMPLE.f64)
        self.model.types[name] = SAMPLE.f64
        for place, values in enumerate(self.model.rows.values()):
            values[name] = value + place

    @precondition(lambda self: self.started and len(self.model.later) < 2)
    @rule(tokens=st.booleans())
    def declare(self, tokens: bool) -> None:
        name = f"later_{len(self.model.types)}"
        kind = TOKEN.f32 if tokens else SAMPLE.f64
        self.second.add_column(name, None, kind)
        self.model.types[name] = kind
        self.model.later.append(name)

    @precondition(lambda self: self.model.later)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.model.later))
        open_ = [n for n, values in self.model.rows.items() if name not in values]
        gone = [n for n in range(self.model.appended) if n not in self.model.rows]
        numbers = data.draw(st.lists(st.sampled_from([*open_, *gone]), unique=True)) if open_ or gone else []
        made = {}
        for number in numbers:
            tokens = self.model.rows[number]["response_ids"] if number in self.model.rows else []
            made[number] = float(number) if self.model.types[name] == SAMPLE.f64 else [number + 0.5] * len(tokens)
        filled = self.table.fill(name, numbers, list(made.values()))
        assert filled == sum(n in self.model.rows for n in numbers)
        for number, value in made.items():
            if number in self.model.rows:
                self.model.rows[number][name] = value
        if numbers and filled:
            there = next(n for n in numbers if n in self.model.rows)
            with pytest.raises(SchemaError, match="already"):
                self.table.fill(name, [there], [made[there]])

    @precondition(lambda self: self.started)
    @rule(node=NODES, count=st.integers(1, 6), data=st.data())
    def claim(self, node: str, count: int, data: st.DataObject) -> None:
        columns = data.draw(st.lists(st.sampled_from(sorted(self.model.types)), min_size=1, max_size=3, unique=True))
        wanted = self.model.claimable(node, columns, count)
        claim = self.second.claim(node, count, columns)
        if not wanted:
            assert claim is None
            return
        assert claim is not None
        assert claim.numbers.tolist() == wanted
        expected = [{name: self.model.rows[n][name] for name in columns} for n in wanted]
        assert claim.batch().to_pylist() == expected
        self.model.taken.setdefault(node, {}).update(dict.fromkeys(wanted, "claimed"))
        self.claims.append((node, wanted, claim))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), done=st.booleans())
    def end_claim(self, data: st.DataObject, done: bool) -> None:
        node, numbers, claim = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        assert len(claim.batch()) == len(numbers), "claimed rows can be read however full the table is"
        claim.done() if done else claim.release()
        for number in numbers:
            if done:
                self.model.taken[node][number] = "done"
            else:
                del self.model.taken[node][number]
        with pytest.raises(StoreError, match="ended already"):
            claim.done()

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.integers(0, max(self.model.appended, 1)), max_size=5))
        gone = {n for n in numbers if n in self.model.rows and n not in self.model.claimed()}
        assert self.table.evict(numbers) == len(gone)
        for number in gone:
            del self.model.rows[number]

    @rule()
    def compress(self) -> None:
        self.table.compress()

    @rule()
    def spill(self) -> None:
        if self.has_path:
            self.second.spill()

    @precondition(lambda self: not self.claims and not self.model.taken)
    @rule()
    def save_and_restore(self) -> None:
        before = self.table.state()
        self.table.restore(before)
        assert self.table.version == before["version"]

    # ----------------------------------------------------------------------------------------------------- reading

    @precondition(lambda self: self.model.rows and not self.model.later)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        rows = list(self.model.rows.values())
        places = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=12))
        assert self.second.take(places).to_pylist() == [rows[p] for p in places]
        mask = np.array([r["is_right"] for r in rows])
        assert self.table.filter(mask).to_pylist() == [r for r in rows if r["is_right"]]
        assert self.table.filter(lambda chunk: chunk["is_right"], ["reward"]).to_pylist() == [
            {"reward": r["reward"]} for r in rows if r["is_right"]
        ]
        self.kept = [*self.kept[-2:], (self.second.batch(), [dict(r) for r in rows])]

    @invariant()
    def rows_that_were_read_stay_as_they_are(self) -> None:
        for batch, rows in self.kept:
            assert batch.to_pylist() == rows

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        for table in (self.table, self.second):
            rows = list(self.model.rows.values())
            assert len(table) == len(rows)
            assert table.numbers.tolist() == list(self.model.rows)
            assert table.appended == self.model.appended
            assert table.evicted == self.model.appended - len(rows)
            names = [n for n in table.columns if n not in self.model.later]
            wanted = [{name: r[name] for name in names} for r in rows]
            assert table.batch(names).to_pylist() == wanted
            assert [r for chunk in table.scan(names) for r in chunk.rows()] == wanted
            assert all(len(chunk) <= CHUNK_ROWS for chunk in table.scan(names))
            stats = table.stats()
            assert (stats.rows, stats.claimed) == (len(rows), len(self.model.claimed()))
            assert stats.stored_bytes == sum(stats.tiers.values())


TableMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=14, deadline=None)
TestPrivate = TableMachine.TestCase
