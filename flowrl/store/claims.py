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
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from flowrl.errors import ConfigError, DataError, StoreError, WaitTimeout
from flowrl.schema.columns import nearest
from flowrl.store.backing import Backing
from flowrl.store.intervals import Pairs, RowSet, length
from flowrl.store.kernels import Take, gather_packed, gather_padded
from flowrl.store.loader import LAYOUTS, packed, padded
from flowrl.store.reading import View, check_columns
from flowrl.store.rows import RowBatch

if TYPE_CHECKING:
    from flowrl.store.loader import Batch

LONGEST_NAP_S = 0.25
"""Between looks at whether a consumer has died, which no record tells."""


class Claim:
    """Some rows, and the right to be the only consumer of a node that has them."""

    def __init__(self, backing: Backing, node: str, token: str, pairs: Pairs, view: View) -> None:
        self._backing, self.node, self._token, self._pairs, self._view = backing, node, token, pairs, view
        self.is_open = True

    def __len__(self) -> int:
        return length(self._pairs)

    @property
    def numbers(self) -> np.ndarray:
        """Row numbers, int64 [N], as `fill` takes them."""
        return RowSet(self._pairs).numbers()

    def batch(self) -> RowBatch:
        """The rows."""
        return self._view.batch()

    def padded(self, *, multiple: int = 1) -> dict[str, np.ndarray]:
        """As a loader's layout "padded"."""
        return laid_out(self._view, "padded", multiple=multiple)  # type: ignore[return-value]

    def packed(self) -> dict[str, np.ndarray]:
        """As a loader's layout "packed"."""
        return laid_out(self._view, "packed")  # type: ignore[return-value]

    def done(self) -> None:
        """The rows are used: no consumer of the node is given them again."""
        self._end("done")

    def release(self) -> None:
        """Give the rows back: another consumer of the node, or this one, may claim them."""
        self._end("release")

    def _end(self, kind: str) -> None:
        if not self.is_open:
            raise StoreError(f"this claim of node '{self.node}' has ended already; claim rows again")
        with self._backing.transaction() as catalog:
            node = catalog.nodes.get(self.node)
            if node is None or self._token not in node.open:
                self.is_open = False
                raise StoreError(
                    f"the claim of node '{self.node}' is gone: the table took the rows back because the process that "
                    "claimed them was found dead, or the table was restored"
                )
            self._backing.commit({"kind": kind, "node": self.node, "token": self._token})
        self.is_open = False

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_open:
            self.done() if kind is None else self.release()

    def __repr__(self) -> str:
        state = "open" if self.is_open else "ended"
        return f"Claim({len(self)} rows of node '{self.node}', {state})"


def claim(
    backing: Backing,
    node: str,
    rows: int,
    columns: Sequence[str] | str | None,
    *,
    whole_groups: bool,
    at_least: int,
    wait_s: float,
) -> Claim | None:
    """See `ExperienceTable.claim`."""
    for name, value in (("rows", rows), ("at_least", at_least)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"claim needs {name} of at least 1; found {value!r}")
    if at_least > rows:
        raise ConfigError(f"claim was asked for at least {at_least} and at most {rows} rows; lower at_least")
    until = time.monotonic() + wait_s
    while True:
        found = _try(backing, node, rows, columns, whole_groups, at_least)
        if isinstance(found, Claim):
            return found
        seen, is_over = found
        left = until - time.monotonic()
        if is_over or wait_s <= 0:
            return None
        if left <= 0:
            raise WaitTimeout(_waited_text(backing, node, rows, columns, at_least, wait_s))
        backing.log.wait(seen, min(left, LONGEST_NAP_S))


def _try(
    backing: Backing, node: str, rows: int, columns: Sequence[str] | str | None, whole_groups: bool, at_least: int
    ,) -> Claim | tuple[int, bool]:  # fmt: skip
    """A claim; or the sequence the table was looked at, and whether nothing can come any more."""
    with backing.transaction() as catalog:
        if not catalog.columns:  # no row has come yet, so nobody knows the columns
            return backing.log.sequence, catalog.finished
        names = check_columns(catalog, columns)
        if whole_groups and catalog.appended and not catalog.groups:
            raise ConfigError(
                "claim(whole_groups=True) needs a table that knows its groups: ExperienceTable(keep_together='prompt_id')"
            )
        pairs = catalog.claimable(node, names, rows, whole_groups=whole_groups)
        have = length(pairs)
        if whole_groups and not have and catalog.alive:
            _check_group_fits(backing, node, names, rows)
        if have < (1 if catalog.finished else at_least):
            if backing.release_the_dead():
                return -1, False
            if node not in catalog.nodes:  # from now on its rows are kept until it is done with them
                backing.commit({"kind": "node", "node": node})
            others = node in catalog.nodes and bool(catalog.nodes[node].open)
            return backing.log.sequence, catalog.finished and not others and not _is_awaited(backing, node)
        view = View.of(backing, pairs, names)
        token = f"{backing.new_uid():x}"
        slot = 0 if backing.presence is None else backing.presence.slot
        backing.commit({"kind": "claim", "node": node, "token": token, "slot": slot, "rows": pairs})
        return Claim(backing, node, token, pairs, view)


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
    lacking = [
        f"'{name}' is there for {length([p for a, b in catalog.alive for p in catalog.columns[name].ready.clip(a, b)])}"
        for name in names
        if name in catalog.columns
    ]
    claimed = 0 if state is None else sum(length(pairs) for _, pairs in state.open.values())
    return (
        f"waited {wait_s:g} s for {at_least} rows for node '{node}'. The table has {len(catalog.alive)} rows: {untaken} not "
        f"taken by the node, {claimed} claimed by its consumers; {', '.join(lacking) or 'no columns yet'}. "
        "Is the producer still running? finish() says that no more rows will come"
    )


def laid_out(view: View, layout: str, *, multiple: int = 1, take: Take | None = None) -> Batch:
    """All rows of a view in a loader's layout. Errors: ConfigError for an unknown one."""
    if layout not in LAYOUTS:
        raise ConfigError(f"a layout is one of {', '.join(LAYOUTS)}; found {layout!r}; {nearest(str(layout), LAYOUTS)}")
    if layout == "rows":
        return view.batch()
    plain = all(kind.is_numeric for kind in view.types.values())
    found = view.places(list(view.types)) if plain else None
    if found is None:  # text, compressed, on disk
        return packed(view.batch()) if layout == "packed" else padded(view.batch(), multiple=multiple)
    rows = np.arange(view.num_rows)
    if layout == "packed":
        return gather_packed(found, rows, take=take)
    return gather_padded(found, rows, multiple=multiple, take=take)


def stream(take: Callable[[], Claim | None], lay_out: Callable[[View], Batch]) -> Iterator[Batch]:
    """Batches of claims, one after another, until the table is finished and used up.

    A batch counts as used when the next one is asked for. Leaving the loop in between, by `break` or by an error, gives
    the last batch back.
    """
    held: list[Claim] = []

    try:
        while True:
            claimed = take()
            if claimed is None:
                return
            held.append(claimed)
            yield lay_out(claimed._view)
            held.pop().done()
    finally:
        for claimed in held:
            if claimed.is_open and not claimed._backing.closed:
                claimed.release()


__all__ = ["Claim", "claim", "stream"]
