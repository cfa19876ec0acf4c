"""A table that another process serves, as seen from here; `flowrl.store.flight` has the other side.

    with RemoteTable(uri, token, timeout_s=30) as rows:
        numbers = rows.append([{"prompt_id": "a", "response": "4"}])
        rows.take([-1])["response"]

Methods mean what those of `ExperienceTable` mean. Each is a call over the network: hold on to what it gave.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from flowrl.errors import ConfigError, FlowError, StoreError, WaitTimeout
from flowrl.schema.columns import Column, TableSchema
from flowrl.schema.types import ColumnType
from flowrl.store import wire
from flowrl.store.columns import to_stored
from flowrl.store.interop import to_arrow
from flowrl.store.laying import Layer, carrier_for, check_carried, check_layout, packed, padded
from flowrl.store.rows import RowBatch
from flowrl.store.settings import check_claim_wait, check_count
from flowrl.store.source import BatchRows

if TYPE_CHECKING:
    from flowrl.store.loader import Batch
    from flowrl.store.stats import TableStats

TIMEOUT_S = 60.0
"""For one call, unless the table says otherwise."""

BYTES_PER_S = 16 << 20
"""A call that brings rows is given a second more for each of these."""

BEATS = 4
"""Heartbeats in a lease."""


class RemoteTable:
    """A table of another process, on this host or another.

    Example:
        with RemoteTable(server.uri, server.token) as rows:
            len(rows), rows.columns, rows.take([0])
    """

    def __init__(
        self, uri: str, token: str, *, timeout_s: float = TIMEOUT_S, tls_certificate: str | Path | None = None
    ) -> None:
        """Args:
            uri: the server's `uri`, such as "grpc://10.0.0.1:4711".
            token: the server's `token`.
            timeout_s: of a call, in seconds; one that brings rows has a second more for each 16 MiB.
            tls_certificate: PEM file to trust, for a server with TLS; None trusts what the system trusts.

        Errors: StoreError when no server is there or the token is another one; ConfigError for arguments that make no sense.
        """
        if not re.fullmatch(r"grpc(\+tls|\+tcp)?://(\[[^\]]+\]|[^:/]+):\d+", uri):
            raise ConfigError(f"the uri of a table server looks like grpc://10.0.0.1:4711; found '{uri}'")
        if not token.isascii() or not token.isprintable():
            raise ConfigError("a token is printable ASCII; give RemoteTable the server's own: server.token")
        if not timeout_s > 0:
            raise ConfigError(f"RemoteTable needs a timeout_s above 0; found {timeout_s!r}")
        self.uri, self.timeout_s = uri, timeout_s
        self._token, self._certificate = token, tls_certificate
        self._flight = wire.flight()
        try:
            trusted = None if tls_certificate is None else Path(tls_certificate).read_bytes()
        except OSError as error:
            raise ConfigError(f"the TLS file '{tls_certificate}' cannot be read: {error}") from error
        self._client = self._flight.FlightClient(uri, tls_root_certs=trusted)
        self._name = secrets.token_hex(8)
        self._process = os.getpid()
        self._types: dict[str, ColumnType] | None = None
        self._later: frozenset[str] = frozenset()
        self._open = 0
        """Claims and unread answers of ours that the server holds."""
        self._unwanted: deque[str] = deque()
        self._unread: deque[str] = deque()
        self._beat: threading.Thread | None = None
        self._stop = threading.Event()
        self._mutex = threading.RLock()  # a claim may be collected while this thread holds it
        weakref.finalize(self, self._stop.set)
        self._lease_s = float(self._describe()["lease_s"])

    # ------------------------------------------------------------------------------------------------- looking at it

    def __len__(self) -> int:
        return int(self._describe()["rows"])

    def __bool__(self) -> bool:
        return True  # a table without rows is still a table; ask len()

    @property
    def schema(self) -> TableSchema:
        found = self._describe()["columns"]
        return TableSchema(tuple(Column(name, ColumnType.parse(kind), doc) for name, kind, doc in found))

    @property
    def columns(self) -> tuple[str, ...]:
        return self.schema.names

    @property
    def appended(self) -> int:
        """Rows ever appended."""
        return int(self._describe()["appended"])

    @property
    def evicted(self) -> int:
        """Rows gone."""
        return int(self._describe()["evicted"])

    @property
    def version(self) -> int:
        """Grows with every change."""
        return int(self._describe()["version"])

    def __contains__(self, name: object) -> bool:
        return name in self.schema

    def __getitem__(self, name: str) -> Any:
        """All values of a column: an array [N, *inner] or a `Ragged`."""
        return self.batch([name])[name]

    def stats(self) -> TableStats:
        """Rows, bytes, codecs and tiers of the served table."""
        from flowrl.store.stats import ColumnStats, TableStats

        told = self._ask("stats")
        columns = {name: ColumnStats(**column) for name, column in told.pop("columns").items()}
        return TableStats(**told, columns=columns)

    def __repr__(self) -> str:
        return f"RemoteTable('{self.uri}')"

    def _describe(self, **more: Any) -> dict[str, Any]:
        return self._ask("describe", **more)

    # ------------------------------------------------------------------------------------------------------- growing

    def append(
        self, rows: RowBatch | pa.Table | Sequence[Mapping[str, Any]], types: Mapping[str, ColumnType] | None = None
    ) -> range:
        """Add rows at the end, all or none; see `ExperienceTable.append`.

        Errors: those of the table; WaitTimeout, after which the rows may have come or not: `appended` says.
        """
        from flowrl.store.incoming import as_batch

        if not isinstance(rows, RowBatch):
            known = self._known_types(rows)
            columns = tuple(Column(name, kind) for name, kind in known.items() if name not in self._later)
            rows = as_batch(rows, dict(types or {}), TableSchema(columns) if known else None)
        answer = self._send("append", rows)
        return range(answer["first"], answer["stop"])

    def add_column(self, name: str, values: Any, kind: ColumnType) -> None:
        """Add a column to all rows held, or with None one that `fill` fills; see `ExperienceTable.add_column`."""
        if values is None:
            Column(name, kind)  # refuses names that are no identifiers
            self._ask("declare", name=name, kind=str(kind))
        else:
            self._send("add_column", self._column(name, values, kind))
        self._types = None

    def fill(self, name: str, numbers: Any, values: Any, *, keep_existing: bool = False) -> int:
        """Give rows their value of a column that was declared; see `ExperienceTable.fill`."""
        rows = self._column(name, values, self._type_of(name))
        told = np.asarray(numbers).tolist()
        return int(self._send("fill", rows, numbers=told, keep_existing=bool(keep_existing))["filled"])

    def _type_of(self, name: str) -> ColumnType:
        known = self._known_types([{name: None}])
        if name not in known:
            self.take([], [name])  # the table's error, with the nearest name
        return known[name] if name in known else self.schema[name].type

    def _column(self, name: str, values: Any, kind: ColumnType) -> RowBatch:
        count = len(values) if hasattr(values, "__len__") else 0
        stored, kind = to_stored(name, values, kind, count)
        return RowBatch({name: stored}, {name: kind}, count)

    def _known_types(self, rows: Any) -> dict[str, ColumnType]:
        """Types of the table's columns; asked for again when a row names one that is not known here."""
        first = rows[0] if isinstance(rows, Sequence) and rows and isinstance(rows[0], Mapping) else {}
        if not self._types or any(name not in self._types for name in first):
            told = self._describe(later=True)
            self._types = {name: ColumnType.parse(kind) for name, kind, _ in told["columns"]}
            self._later = frozenset(told.get("later", ()))
        return self._types

    def finish(self) -> None:
        """No more rows will come."""
        self._ask("finish")

    # ------------------------------------------------------------------------------------------------------- reading

    def batch(self, columns: Sequence[str] | None = None) -> RowBatch:
        """All rows as one batch."""
        return wire.together(self._scanned(columns))

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[RowBatch]:
        """The rows in pieces, oldest first, as the table was when this was called."""
        return (wire.aligned(rows) for rows in self._scanned(columns) if len(rows))

    def _scanned(self, columns: Sequence[str] | None) -> Iterator[RowBatch]:
        _, parts = self._get("scan", columns=_names(columns))
        return parts

    def take(self, indices: Any, columns: Sequence[str] | None = None) -> RowBatch:
        """The given rows in the given order."""
        numbers = np.asarray(indices)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            RowBatch({}, {}, 0).take(numbers)  # the error that says what is needed
        _, parts = self._get("take", indices=numbers.tolist(), columns=_names(columns))
        return wire.together(parts)

    def claim(
        self, node: str, rows: int, columns: Sequence[str] | None = None, *, at_least: int = 1, whole_groups: bool = False,
        wait_s: float = 0.0,
    ) -> RemoteClaim | None:  # fmt: skip
        """Rows that no other consumer of `node` gets; see `ExperienceTable.claim`, whose options these are."""
        check_claim_wait(wait_s)
        options = {"at_least": at_least, "whole_groups": whole_groups}
        token = secrets.token_hex(8)
        self._hold()
        try:
            reply, parts = self._get(
                "claim", extra_s=wait_s, claim=token, node=node, rows=rows, columns=_names(columns), wait_s=wait_s,
                options=options,
            )  # fmt: skip
        except BaseException:
            self._forget_claim(token)
            raise
        if reply["numbers"] is None:
            self._let_go()
            return None
        return RemoteClaim(self, node, token, np.asarray(reply["numbers"], np.int64), parts)

    def stream(
        self,
        node: str,
        batch_rows: int = 32,
        *,
        columns: Sequence[str] | None = None,
        layout: str = "padded",
        pad_multiple: int = 1,
        at_least: int = 1,
        whole_groups: bool = False,
        timeout_s: float | None = None,
        ahead: int = 4,
        device: Any = None,
        pin: bool | None = None,
    ) -> Iterator[Batch]:
        """Batches of rows as they come, until the table is finished and used up; see `ExperienceTable.stream`.

        Args:
            timeout_s: longest wait for a row (that of a call when None).
            ahead: accepted as there; each batch is a claim of its own, so no rows wait here.
        """
        check_layout(layout)
        check_count("stream", "ahead", ahead)
        check_count("stream", "pad_multiple", pad_multiple)
        carrier = carrier_for(device, pin, 0)  # refuses a device that is not there
        wait_s = self.timeout_s if timeout_s is None else timeout_s

        def take() -> RemoteClaim | None:
            return self.claim(node, batch_rows, columns, at_least=at_least, whole_groups=whole_groups, wait_s=wait_s)

        def lay_out(rows: RowBatch) -> Batch:
            check_carried(rows.types, list(rows.types), layout, device, pin)
            if layout == "rows":
                return rows
            layer = Layer(BatchRows(rows), list(rows.types), layout, pad_multiple)
            return carrier.receive(layer.lay_out(np.arange(len(rows)), carrier))

        return _streamed(take, lay_out)

    # --------------------------------------------------------------------------------------------------------- calls

    def _options(self, timeout_s: float) -> Any:
        headers = [(b"authorization", f"Bearer {self._token}".encode()), (wire.CLIENT.encode(), self._name.encode())]
        return self._flight.FlightCallOptions(timeout=timeout_s, headers=headers)

    @contextmanager
    def _call(self, name: str, timeout_s: float) -> Iterator[Any]:
        """Options of a call; what goes wrong in it becomes an error that names the server and the call."""
        flight = self._flight
        if os.getpid() != self._process:
            raise StoreError(
                f"the connection to {self.uri} was opened by process {self._process} and does not survive a fork; open another "
                "RemoteTable in this process"
            )
        if self._stop.is_set():
            raise StoreError(f"the connection to {self.uri} is closed; open another RemoteTable")
        try:
            yield self._options(timeout_s)
        except flight.FlightTimedOutError as error:
            hint = (
                "; it may have been done or not"
                if name in ("append", "add_column", "fill", "fill_claim", "done")
                else ""
            )
            raise WaitTimeout(
                f"'{name}' of the table at {self.uri} was not answered within {timeout_s:g} s{hint}; raise timeout_s if the "
                "server is only slow"
            ) from error
        except flight.FlightUnauthenticatedError as error:
            raise StoreError(
                f"the table server at {self.uri} refuses the token; give RemoteTable the server's own: server.token"
            ) from error
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, FlowError):
                raise
            told = wire.from_failure(getattr(error, "extra_info", None))
            if told is not None:
                raise told from None
            raise StoreError(
                f"'{name}' of the table at {self.uri} failed: the server is gone or cannot be reached ({_first_line(error)})"
            ) from error

    def _ask(self, call: str, /, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        with self._call(call, self.timeout_s if timeout_s is None else timeout_s) as options:
            action = self._flight.Action("call", json.dumps({"call": call, **arguments}).encode())
            (answer,) = self._client.do_action(action, options)
            return dict(json.loads(answer.body.to_pybytes()))

    def _get(self, call: str, /, extra_s: float = 0.0, **arguments: Any) -> tuple[dict[str, Any], Iterator[RowBatch]]:
        """The answer, and its rows; the rest of them is asked for as they are taken."""
        answer = secrets.token_hex(8)
        try:
            page, reply = self._page(call, answer, extra_s, **arguments)
        except BaseException:
            self._hold()
            self._forget_answer(answer)  # the server may hold the rest of it for us
            raise
        if not reply.pop("more", False):
            return reply, iter(page)
        self._hold()
        return reply, _Parts(self, answer, page)

    def _page(
        self, call: str, answer: str, extra_s: float = 0.0, /, **arguments: Any
    ) -> tuple[list[RowBatch], dict[str, Any]]:
        with self._call(call, self.timeout_s + extra_s) as options:
            ticket = self._flight.Ticket(json.dumps({"call": call, "answer": answer, **arguments}).encode())
            return wire.from_message(self._client.do_get(ticket, options).read_all())

    def _send(self, call: str, rows: RowBatch, /, **arguments: Any) -> dict[str, Any]:
        parts = [to_arrow(piece) for piece in wire.pieces(rows)]
        timeout_s = self.timeout_s + sum(part.nbytes for part in parts) / BYTES_PER_S
        with self._call(call, timeout_s) as options:
            asked = self._flight.FlightDescriptor.for_command(
                json.dumps({"call": call, "num_rows": len(rows), **arguments}).encode()
            )
            writer, answers = self._client.do_put(asked, parts[0].schema, options)
            try:
                for part in parts:
                    writer.write_table(part)
                writer.done_writing()
                answer = answers.read()
            finally:
                writer.close()  # raises what the server said, also when writing failed because it had stopped listening
        return dict(json.loads(answer.to_pybytes()))

    # --------------------------------------------------------------------------------------------------- staying known

    def _hold(self) -> None:
        """The server keeps something for us from now on: stay known to it."""
        with self._mutex:
            self._open += 1
            if self._beat is not None:
                return
            every_s = self._lease_s / BEATS
            self._beat = threading.Thread(
                target=_beat, args=(weakref.ref(self), self._stop, every_s), name="flowrl-heartbeat", daemon=True
            )
        # not under the mutex: a claim that is collected in the new thread asks for it, and start() waits for that thread
        self._beat.start()

    def _let_go(self) -> None:
        with self._mutex:
            self._open -= 1

    def _forget_claim(self, token: str) -> None:
        """Nobody will end this claim: the next heartbeat gives it back."""
        self._unwanted.append(token)
        self._let_go()

    def _forget_answer(self, answer: str) -> None:
        """Nobody will read the rest of this answer: with the next heartbeat the server lets go of it."""
        self._unread.append(answer)
        self._let_go()

    def _renew(self) -> None:
        if not self._open and not self._unwanted and not self._unread:
            return
        unwanted, unread = list(self._unwanted), list(self._unread)
        self._ask("renew", unwanted=unwanted, unread=unread)
        for _ in unwanted:
            self._unwanted.popleft()
        for _ in unread:
            self._unread.popleft()

    def close(self) -> None:
        """Give back what is claimed, and hang up."""
        if self._stop.is_set():
            return
        if os.getpid() == self._process:
            with suppress(FlowError):  # the server may be gone, which ends the claims as well
                self._ask("leave", min(self.timeout_s, 5.0))
            self._client.close()
        self._stop.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, (self.uri, self._token, self.timeout_s, self._certificate))


class _Parts(Iterator[RowBatch]):
    """The rows of an answer of several pages; a page is asked for when the rows before it were taken.

    One that is dropped, begun or not, is forgotten by the server too.
    """

    def __init__(self, table: RemoteTable, answer: str, page: list[RowBatch]) -> None:
        self._table, self._answer = table, answer
        self._page = iter(page)
        self._is_cut = False
        """The rest was given up after an error."""
        self._dropped = weakref.finalize(self, table._forget_answer, answer)

    def __next__(self) -> RowBatch:
        while True:
            for rows in self._page:
                return rows
            if self._is_cut:
                raise StoreError(
                    "the rest of these rows was given up when a page of them did not come; read again, or release the claim and "
                    "claim again"
                )
            if not self._dropped.alive:
                raise StopIteration
            self._turn()

    def _turn(self) -> None:
        try:
            page, reply = self._table._page("more", self._answer)
        except BaseException:
            self._is_cut = True
            self._dropped()
            raise
        self._page = iter(page)
        if not reply.get("more"):
            self._dropped.detach()
            self._table._let_go()


class RemoteClaim:
    """Some rows of a `RemoteTable`, and the right to be the only consumer of a node that has them.

    As a context manager it is done at the end of the block, and given back when the block raises. One that is dropped is given
    back.
    """

    def __init__(
        self, table: RemoteTable, node: str, token: str, numbers: np.ndarray, parts: Iterator[RowBatch]
    ) -> None:
        self.node, self.numbers = node, numbers
        self.is_open = True
        self._table, self._token, self._parts = table, token, parts
        self._rows: RowBatch | None = None
        self._dropped = weakref.finalize(self, table._forget_claim, token)

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self) -> RowBatch:
        """The rows."""
        if self._rows is None:
            self._rows = wire.together(self._parts)
        return self._rows

    def padded(self, *, multiple: int = 1) -> dict[str, np.ndarray]:
        """As a loader's layout "padded"."""
        return padded(self.batch(), multiple=multiple)

    def packed(self) -> dict[str, np.ndarray]:
        """As a loader's layout "packed"."""
        return packed(self.batch())

    def fill(self, columns: Mapping[str, Any]) -> None:
        """Give the rows their values of columns that came later, and be done with them: both or neither.

        Args:
            columns: by name, one value (or list) for each row, in the claim's order.

        Errors: as `Claim.fill`; the claim stays open. After a WaitTimeout it may be called again.
        """
        self._check_open()
        if not columns:
            return self.done()
        stored, kinds = {}, {}
        for name, values in columns.items():
            stored[name], kinds[name] = to_stored(name, values, self._table._type_of(name), len(self))
        self._table._send("fill_claim", RowBatch(stored, kinds, len(self)), claim=self._token)
        self._ended()

    def done(self) -> None:
        """The rows are used: no consumer of the node is given them again. After a WaitTimeout it may be called again."""
        self._end("done")

    def release(self) -> None:
        """Give the rows back: another consumer of the node, or this one, may claim them."""
        self._end("release")

    def _end(self, how: str) -> None:
        self._check_open()
        try:
            self._table._ask(how, claim=self._token)
        except WaitTimeout:
            raise
        except FlowError:
            self._ended()
            raise
        self._ended()

    def _check_open(self) -> None:
        if not self.is_open:
            raise StoreError(f"this claim of node '{self.node}' has ended already; claim rows again")

    def _ended(self) -> None:
        self.is_open = False
        self._dropped.detach()
        self._table._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_open:
            return
        if kind is None:
            self.done()
        else:
            with suppress(FlowError):  # what the block raised says more
                self.release()

    def __repr__(self) -> str:
        return f"RemoteClaim({len(self)} rows of node '{self.node}', {'open' if self.is_open else 'ended'})"


def _streamed(take: Callable[[], RemoteClaim | None], lay_out: Callable[[RowBatch], Batch]) -> Iterator[Batch]:
    claim: RemoteClaim | None = None
    try:
        while (claim := take()) is not None:
            yield lay_out(claim.batch())
            claim.done()  # the next batch was asked for
    finally:
        if claim is not None and claim.is_open:
            with suppress(FlowError):  # what ended the loop says more
                claim.release()


def _beat(table: weakref.ref[RemoteTable], stop: threading.Event, every_s: float) -> None:
    while not stop.wait(every_s):
        found = table()
        if found is None:
            return
        with suppress(FlowError):  # the next call of whoever uses the table says what is wrong
            found._renew()
        del found


def _reopened(uri: str, token: str, timeout_s: float, certificate: str | Path | None) -> RemoteTable:
    return RemoteTable(uri, token, timeout_s=timeout_s, tls_certificate=certificate)


def _names(columns: Sequence[str] | None) -> list[str] | None:
    if columns is None:
        return None
    return [columns] if isinstance(columns, str) else list(columns)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].partition(". Detail:")[0][:300]
