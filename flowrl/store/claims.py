"""Rows handed to consumers, each row to exactly one consumer of a node.

with table.claim("update", 32, columns=["response_ids", "advantage"], wait_s=60) as claim:
    train(claim.padded())                 # done at the end of the block; given back when it raises

waiting -> claimed -> done                a consumer that dies gives its claims back
             |  ^
             v  |
           released
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.errors import ConfigError, DataError, FlowError, StoreError, WaitTimeout
from flowrl.store.backing import Backing
from flowrl.store.catalog import Catalog, Record
from flowrl.store.changes import fill
from flowrl.store.intervals import Pairs, RowSet, length
from flowrl.store.laying import Layer
from flowrl.store.reading import View, check_columns
from flowrl.store.rows import RowBatch
from flowrl.store.settings import check_claim_wait, check_count
from flowrl.store.staging import Carrier

if TYPE_CHECKING:
    from flowrl.store.loader import Batch

COMMIT_EVERY_S = 0.002
"""A stream tells at most this often that batches are done, unless it claims anyway."""

MOST_LOOKED = 256
LONGEST_NAP_S = 0.25
"""Between looks at whether a consumer has died, which no record tells."""


class Claim:
    """Some rows, and the right to be the only consumer of a node that has them."""

    is_open = False

    def __init__(self, backing: Backing, node: str, token: str, pairs: Pairs, view: View) -> None:
        self.backing, self.node = backing, node
        self._token, self._pairs = token, pairs
        self._view: View | None = view
        self._forks = backing.forks
        self.is_open = True

    @property
    def view(self) -> View:
        """The rows. Errors: StoreError when the claim has ended: its memory is given out again."""
        if self._view is None:
            raise StoreError(f"this claim of node '{self.node}' has ended; read its rows before done() or release()")
        return self._view

    def __len__(self) -> int:
        return length(self._pairs)

    @property
    def numbers(self) -> np.ndarray:
        """Row numbers, int64 [N], as `fill` takes them."""
        return RowSet(self._pairs).numbers()

    def batch(self) -> RowBatch:
        """The rows."""
        return self.view.batch()

    def padded(self, *, multiple: int = 1) -> dict[str, np.ndarray]:
        """As a loader's layout "padded"."""
        return self._laid_out("padded", multiple)

    def packed(self) -> dict[str, np.ndarray]:
        """As a loader's layout "packed"."""
        return self._laid_out("packed", 1)

    def _laid_out(self, layout: str, multiple: int) -> dict[str, Any]:
        layer = Layer(self.view, list(self.view.types), layout, multiple)
        return layer.lay_out(np.arange(self.view.num_rows), self.backing.carrier())

    def fill(self, columns: Mapping[str, Any]) -> None:
        """Give the rows their values of columns that came later, and be done with them: both or neither, whatever happens.

        Args:
            columns: by name, one value (or list) for each row, in the claim's order.

        Errors: as `ExperienceTable.fill`.
        """
        if not self.is_open:
            raise StoreError(f"this claim of node '{self.node}' has ended already; claim rows again")
        done = {"kind": "done", "node": self.node, "token": self._token}
        with self.backing.transaction() as catalog:
            if not still_claims(catalog, done):
                self.end()
                raise StoreError(_gone_text(self.node))
            # rows of a consumer that died after filling them keep what they have
            fill(self.backing, columns, self.numbers, self.backing.timeout_s, keep_existing=True, also=[done])
        self.end()

    def done(self) -> None:
        """The rows are used: no consumer of the node is given them again."""
        self._end("done")

    def release(self) -> None:
        """Give the rows back: another consumer of the node, or this one, may claim them."""
        self._end("release")

    def part_done(self, start: int, stop: int) -> Record:
        """The record that some of the rows are used, by their place in the claim."""
        return {
            "kind": "done", "node": self.node, "token": self._token, "rows": _part(self._pairs, start, stop)
        }  # fmt: skip

    def commit(self, record: Record) -> None:
        """Errors: StoreError when the claim is gone."""
        self._commit(record)

    def _end(self, kind: str) -> None:
        self._commit({"kind": kind, "node": self.node, "token": self._token})
        self.end()

    def end(self) -> None:
        """It is over, and everyone knows or will."""
        self.is_open, self._view = False, None

    def drop(self, *records: Record) -> None:
        """Give the rows back with the next thing this process does to the table. For collectors."""
        if self.is_open and self._forks == self.backing.forks:  # else a fork's child drops what is its parent's
            self.end()
            self.backing.drop(self.node, self._token, *records)

    def __del__(self) -> None:
        self.drop()

    def _commit(self, record: Record) -> None:
        if not self.is_open:
            raise StoreError(f"this claim of node '{self.node}' has ended already; claim rows again")
        with self.backing.transaction() as catalog:
            if not still_claims(catalog, record):
                self.end()
                raise StoreError(_gone_text(self.node))
            self.backing.commit(record, is_last=True)

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_open:
            return
        if kind is None:
            self.done()
            return
        with suppress(FlowError):
            self.release()  # the error of the block is the one to be seen

    def __repr__(self) -> str:
        state = "open" if self.is_open else "ended"
        return f"Claim({len(self)} rows of node '{self.node}', {state})"


def still_claims(catalog: Catalog, record: Record) -> bool:
    """Whether the claim that a record is about has not ended."""
    node = catalog.nodes.get(record["node"])
    return node is not None and record["token"] in node.open


def _gone_text(node: str) -> str:
    return (
        f"the claim of node '{node}' is gone: the table took the rows back because the process that claimed them was found "
        "dead, or the table was restored"
    )


def _part(pairs: Pairs, start: int, stop: int) -> Pairs:
    """Rows `start` to `stop`, counted within the intervals."""
    found: Pairs = []
    at = 0
    for first, end in pairs:
        low, high = max(start, at), min(stop, at + end - first)
        if low < high:
            found.append((first + low - at, first + high - at))
        at += end - first
    return found


def claim(
    backing: Backing,
    node: str,
    rows: int,
    columns: Sequence[str] | str | None,
    *,
    whole_groups: bool,
    at_least: int,
    wait_s: float,
    unit: int = 1,
    also: Record | None = None,
) -> Claim | None:
    """See `ExperienceTable.claim`.

    Args:
        also: a record to commit with the claim, or before waiting for it.
        unit: rows of a batch; no batch of fewer than `at_least` rows is left over at the end of a claim.
    """
    if not isinstance(node, str) or not node:
        raise ConfigError(f"a node is named by a text, such as 'update'; found {node!r}")
    check_claim_wait(wait_s)
    check_count("claim", "rows", rows)
    check_count("claim", "at_least", at_least)
    if at_least > rows:
        raise ConfigError(f"claim was asked for at least {at_least} and at most {rows} rows; lower at_least")
    until = time.monotonic() + wait_s
    asked = (node, rows, columns if isinstance(columns, str | None) else tuple(columns), whole_groups, at_least)
    if wait_s <= 0 and also is None and _saw_nothing(backing, asked):
        return None
    while True:
        found = _try(backing, node, rows, columns, whole_groups, at_least, unit, also)
        also = None
        if isinstance(found, Claim):
            return found
        seen, is_over = found
        if seen < 0:  # rows of a process that died are free now
            continue
        left = until - time.monotonic()
        if is_over or wait_s <= 0:
            if len(backing.looked) > MOST_LOOKED:
                backing.looked.clear()
            backing.looked[asked] = (seen, time.monotonic())
            return None
        if left <= 0:
            with backing.mutex:
                raise WaitTimeout(_waited_text(backing, node, rows, columns, at_least, wait_s))
        backing.log.wait(seen, min(left, LONGEST_NAP_S))


def _saw_nothing(backing: Backing, asked: tuple[Any, ...]) -> bool:
    """Whether the same was asked for in vain, nothing was committed since, and it is not time to look for the dead again.

    Who asks in a loop would otherwise hold the lock most of the time, and keep away those it waits for.
    """
    sequence, when = backing.looked.get(asked, (-1, 0.0))
    if backing.closed or backing.has_dropped:
        return False
    return sequence == backing.log.sequence and time.monotonic() - when < LONGEST_NAP_S


def _try(
    backing: Backing,
    node: str,
    rows: int,
    columns: Sequence[str] | str | None,
    whole_groups: bool,
    at_least: int,
    unit: int,
    also: Record | None,
) -> Claim | tuple[int, bool]:
    """A claim; or the sequence the table was looked at, and whether nothing can come any more."""
    with backing.transaction() as catalog:
        if not (catalog.appended or any(column.required for column in catalog.columns.values())):
            _announce(backing, node)  # no row has come yet, so nobody knows the columns
            return backing.log.sequence, catalog.finished
        names = check_columns(catalog, columns)
        if whole_groups and catalog.appended and not catalog.groups:
            raise ConfigError(
                "claim(whole_groups=True) needs a table that knows its groups: ExperienceTable(keep_together='prompt_id')"
            )
        pairs = catalog.claimable(node, names, rows, whole_groups=whole_groups)
        have = length(pairs)
        if at_least > 1 and have > unit and 0 < have % unit < at_least and not (whole_groups or catalog.finished):
            pairs = _part(pairs, 0, have - have % unit)
            have = length(pairs)
        if whole_groups and not have and catalog.alive:
            _check_group_fits(backing, node, names, rows)
        before = [] if also is None else [also]
        if before and not still_claims(catalog, before[0]):
            raise StoreError(_gone_text(node))
        if have < (1 if catalog.finished else at_least):
            if before:
                backing.commit(*before)
            if backing.release_the_dead():
                return -1, False
            _announce(backing, node)
            others = node in catalog.nodes and bool(catalog.nodes[node].open)
            return backing.log.sequence, catalog.finished and not others and not _is_awaited(backing, node)
        view = View.of(backing, pairs, names)
        token = f"{backing.new_uid():x}"
        slot = 0 if backing.presence is None else backing.presence.slot
        record = {"kind": "claim", "node": node, "token": token, "slot": slot, "rows": pairs}
        backing.commit(*before, record, is_last=True)
        return Claim(backing, node, token, pairs, view)


def _announce(backing: Backing, node: str) -> None:
    """From now on rows are kept until the node is done with them, where the table waits for consumers."""
    if node not in backing.catalog.nodes:
        backing.commit({"kind": "node", "node": node})


def _is_awaited(backing: Backing, node: str) -> bool:
    """Whether rows are there that only lack a column, which someone may fill yet."""
    catalog = backing.catalog
    untaken = catalog.claimable(node, (), 1)
    return bool(untaken)


def _check_group_fits(backing: Backing, node: str, names: Sequence[str], rows: int) -> None:
    catalog = backing.catalog
    waiting = catalog.claimable(node, names, 1)
    if not waiting:
        return
    first, end = catalog.group_of(waiting[0][0])
    if end - first > rows and catalog.claimable(node, names, end - first, whole_groups=True):
        raise DataError(f"a group has {end - first} rows and the claim takes {rows}; claim more rows at a time")


def _waited_text(
    backing: Backing, node: str, rows: int, columns: Sequence[str] | str | None, at_least: int, wait_s: float
) -> str:
    catalog = backing.catalog
    names = list(catalog.columns) if columns is None else [columns] if isinstance(columns, str) else list(columns)
    state = catalog.nodes.get(node)
    untaken = len(catalog.alive) - (0 if state is None else length(
        [pair for a, b in catalog.alive for pair in state.taken.clip(a, b)]
    ))  # fmt: skip
    lacking = []
    for name in names:
        if name in catalog.columns:
            ready = catalog.columns[name].ready
            there = length(pair for a, b in catalog.alive for pair in ready.clip(a, b))
            lacking.append(f"'{name}' is there for {there}")
    claimed = 0 if state is None else sum(length(pairs) for _, pairs in state.open.values())
    return (
        f"waited {wait_s:g} s for {at_least} rows for node '{node}'. The table has {len(catalog.alive)} rows: {untaken} not "
        f"taken by the node, {claimed} claimed by its consumers; {', '.join(lacking) or 'no columns yet'}. "
        "Is the producer still running? finish() says that no more rows will come"
    )


class Stream(Iterator["Batch"]):
    """Batches of rows as they come; made by `ExperienceTable.stream`.

    Rows are claimed for several batches at once when they are there. A batch is done when the next one is asked for; others
    see it at once, or, of batches that take less than COMMIT_EVERY_S, with the next claim.

        waits for      rows that have the columns            unblocked by  append, fill, release, finish
    """

    def __init__(
        self,
        take: Callable[[int, Record | None], Claim | None],
        layout: str,
        multiple: int,
        batch_rows: int,
        ahead: int,
        carrier: Carrier,
    ) -> None:
        self._take, self._layout, self._multiple = take, layout, multiple
        self._batch_rows, self._ahead, self._carrier = batch_rows, ahead, carrier
        self._claim: Claim | None = None
        self._layer: Layer | None = None
        self._told = self._used = self._next = 0
        """Rows of the claim: done, and everyone knows; done; given out."""
        self._told_at = 0.0
        self._is_over = False

    def __next__(self) -> Batch:
        if self._is_over:
            raise StopIteration
        try:
            self._used = self._next
            claim = self._claim
            if claim is not None and self._used < len(claim):
                if time.monotonic() - self._told_at > COMMIT_EVERY_S:
                    self._tell(claim)
            elif not self._claim_more():
                self._is_over = True
                raise StopIteration
            return self._lay_out()
        except StopIteration:
            raise
        except BaseException:
            with suppress(FlowError):  # the error that is on its way is the one to be seen
                self.close()
            raise

    def _tell(self, claim: Claim) -> None:
        if self._used > self._told:
            claim.commit(claim.part_done(self._told, self._used))
            self._told, self._told_at = self._used, time.monotonic()

    def _claim_more(self) -> bool:
        before = self._claim
        also = None if before is None else before.part_done(self._told, self._used)
        taken = self._take(self._batch_rows * self._ahead, also)  # tells of the last one, too
        if before is not None:
            before.end()
        self._claim = taken
        self._told = self._used = self._next = 0
        self._told_at = time.monotonic()
        if self._claim is None:
            return False
        view = self._claim.view
        self._layer = None if self._layout == "rows" else Layer(view, list(view.types), self._layout, self._multiple)
        return True

    def _lay_out(self) -> Batch:
        assert self._claim is not None
        self._next = min(self._used + self._batch_rows, len(self._claim))
        rows = np.arange(self._used, self._next)
        if self._layer is None:
            return self._claim.view.rows(rows)
        return self._carrier.receive(self._layer.lay_out(rows, self._carrier))

    def close(self) -> None:
        """Give back what is not used: the batch that was given last, and rows that were claimed for later ones."""
        self._is_over = True
        claim, self._claim, self._layer = self._claim, None, None
        if claim is not None and claim.is_open and not claim.backing.closed:
            self._tell(claim)
            claim.release()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        claim: Claim | None = getattr(self, "_claim", None)
        if claim is not None and claim.is_open:
            claim.drop(*([claim.part_done(self._told, self._used)] if self._used > self._told else []))


__all__ = ["Claim", "Stream", "claim"]
