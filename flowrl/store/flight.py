"""A table for other hosts, over Arrow Flight.

    with serve_table(table) as server:                           # the host that has the rows
        print(server.uri, server.token)

    with RemoteTable(uri, token) as rows:                        # any other process
        rows.append([{"prompt_id": "a", "response": "4"}])
        with rows.claim("judge", 32, columns=["response"], wait_s=60) as claim:
            claim.fill({"reward": judge(claim.batch())})

What travels is Arrow IPC and JSON, never a pickle. A call says its name and its arguments in JSON:

    do_action   describe, stats, declare, done, release, finish, renew, leave     JSON to JSON
    do_get      take, scan, claim: the first page of rows; `more`: the next one   JSON to rows
    do_put      append, add_column, fill, fill_claim                              JSON and rows to JSON

A call gives one page at most, so each has a deadline of its own, and a slow client holds nobody up. Errors of the table arrive as
what they were.

[Note: Claims of a client that dies] The server keeps the claims of a client under a lease. Every call of the client renews it,
and a heartbeat in between. When it runs out, the rows are given back. When the server dies, the table finds its process dead
and takes the rows back itself.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import pyarrow as pa

from flowrl.errors import ConfigError, DataError, FlowError, StoreError, WaitTimeout
from flowrl.schema.columns import TableSchema
from flowrl.schema.types import ColumnType
from flowrl.store import wire
from flowrl.store.remote import RemoteClaim, RemoteTable
from flowrl.store.rows import RowBatch

if TYPE_CHECKING:
    from flowrl.store.stats import TableStats

__all__ = ["RemoteClaim", "RemoteTable", "TableServer", "serve_table"]

LEASE_S = 30.0
"""How long a client may be silent before its claims are given back."""

REQUEST_BYTES = 1 << 30
"""The most one `append`, `add_column` or `fill` may bring."""

_LOOK_S = 0.5
"""Of a wait inside the server, between looks at whether the client and the server are still there."""

_REMEMBERED = 1000
"""Claims and answers of a client that are over, the last ones: ending one twice is no error, since the first answer may have been
lost; and one that was given up while it was made is not kept."""


_SERVING: set[TableServer] = set()
"""Servers that are not closed: one nobody holds goes on, and the end of the process closes it."""


class ServedClaim(Protocol):
    """What a server asks of a claim."""

    @property
    def numbers(self) -> np.ndarray: ...
    def batch(self) -> RowBatch: ...
    def fill(self, columns: Mapping[str, Any]) -> None: ...
    def done(self) -> None: ...
    def release(self) -> None: ...


class Served(Protocol):
    """What a server asks of its table."""

    def __len__(self) -> int: ...
    @property
    def schema(self) -> TableSchema: ...
    @property
    def appended(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def version(self) -> int: ...
    def stats(self) -> TableStats: ...
    def append(self, rows: RowBatch) -> range: ...
    def add_column(self, name: str, values: Any, kind: ColumnType) -> None: ...
    def fill(self, name: str, numbers: Any, values: Any, *, keep_existing: bool = False) -> int: ...
    def finish(self) -> None: ...
    def take(self, indices: Any, columns: Sequence[str] | None = None) -> RowBatch: ...
    def scan(self, columns: Sequence[str] | None = None) -> Iterator[RowBatch]: ...
    def claim(
        self, node: str, rows: int, columns: Sequence[str] | None = None, *, at_least: int = 1, whole_groups: bool = False,
        wait_s: float = 0.0,
    ) -> ServedClaim | None: ...  # fmt: skip


@dataclass(eq=False, slots=True)
class _Client:
    """What the server holds for one client."""

    until: float
    """When its lease ends, on the monotonic clock."""
    calls: int = 0
    """At work now; the lease does not end meanwhile."""
    claims: dict[str, ServedClaim] = field(default_factory=dict)
    ending: set[str] = field(default_factory=set)
    """Of the claims those that a call is ending now."""
    over: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Claims that were ended, and claims and answers that were given up, perhaps before they were made."""
    pages: dict[str, Iterator[list[RowBatch]]] = field(default_factory=dict)
    """Answers of which some pages were not asked for yet."""
    left: bool = False


class _Clients:
    """All clients, and the thread that ends their leases."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._known: dict[str, _Client] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._end_leases, name="flowrl-leases", daemon=True)
        self._thread.start()

    @contextmanager
    def calling(self, name: str) -> Iterator[_Client]:
        with self._changed:
            client = self._known.get(name)
            if client is None:
                client = self._known[name] = _Client(time.monotonic() + self.lease_s)
                self._changed.notify_all()
            client.calls += 1
        try:
            yield client
        finally:
            with self._changed:
                client.calls -= 1
                client.until = time.monotonic() + self.lease_s

    def keep(self, client: _Client, token: str, claim: ServedClaim) -> bool:
        """Whether the client still wants this claim."""
        with self._changed:
            if client.left or self._closed or token in client.over:
                return False
            client.claims[token] = claim
            return True

    def keep_pages(self, client: _Client, answer: str, pages: Iterator[list[RowBatch]]) -> None:
        """Hold the rest of an answer, if the client still wants it."""
        with self._changed:
            if not client.left and not self._closed and answer not in client.over:
                client.pages[answer] = pages

    def forget_pages(self, client: _Client, answer: str) -> None:
        with self._changed:
            client.pages.pop(answer, None)
            self._is_over(client, answer)  # a call that makes the next page may be at work

    def give_up(self, client: _Client, token: str) -> None:
        """The claim will not be made."""
        with self._changed:
            self._is_over(client, token)

    def _is_over(self, client: _Client, token: str) -> None:
        client.over[token] = None
        while len(client.over) > _REMEMBERED:
            client.over.popitem(last=False)

    def end(self, client: _Client, token: str, how: str, columns: Mapping[str, Any] | None = None) -> None:
        """`done`, `release`, or `fill` with columns. Errors: StoreError when the lease has run out meanwhile."""
        with self._changed:
            while token in client.ending:  # a client that gave up waiting for the answer calls again
                self._changed.wait(_LOOK_S)
            claim = client.claims.get(token)
            if claim is None:
                if token in client.over:
                    return
                if how == "release":
                    self._is_over(client, token)
                    return
                raise StoreError(
                    f"the claim is gone: the server heard nothing of this client for {self.lease_s:g} s and gave its rows back; "
                    "claim rows again, or serve the table with a longer lease_s"
                )
            client.ending.add(token)
        try:
            if columns is not None:
                claim.fill(columns)
            elif how == "done":
                claim.done()
            else:
                claim.release()
            with self._changed:
                client.claims.pop(token, None)
                self._is_over(client, token)
        finally:
            with self._changed:
                client.ending.discard(token)
                self._changed.notify_all()

    def leave(self, name: str) -> None:
        with self._changed:
            client = self._known.pop(name, None)
        if client is not None:
            self._drop(client)

    @property
    def calls(self) -> int:
        with self._changed:
            return sum(client.calls for client in self._known.values())

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._closed = True
            clients, self._known = list(self._known.values()), {}
            self._changed.notify_all()
        for client in clients:
            self._drop(client)
        self._thread.join(timeout_s)

    def _drop(self, client: _Client) -> None:
        with self._changed:
            client.left = True
            claims, client.claims = client.claims, {}
            client.pages.clear()
        for claim in claims.values():
            with suppress(FlowError):  # the table may be closed, or have taken the rows back itself
                claim.release()

    def _end_leases(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                over = [name for name, c in self._known.items() if not c.calls and c.until <= now]
                gone = [self._known.pop(name) for name in over]
                if not gone:
                    ends = [c.until - now for c in self._known.values()]
                    # a lease is never shorter than a tenth of a second after a call ends
                    self._changed.wait(max(min(ends, default=self.lease_s), self.lease_s / 10))
            for client in gone:
                self._drop(client)


class TableServer:
    """A table that other processes read and write while this one lives; `serve_table` makes it."""

    def __init__(self, service: Any, clients: _Clients, uri: str, token: str) -> None:
        self._service, self._clients = service, clients
        self.uri, self.token = uri, token
        self._closed = False
        _SERVING.add(self)
        # made after Flight's own, and so run before it: Flight would wait for calls that wait for rows
        self._at_exit = weakref.finalize(self, _end_calls, service, clients, 5.0)

    def close(self, timeout_s: float = 10.0) -> None:
        """End all calls and give back what clients have claimed. The table itself stays as it is.

        Errors: WaitTimeout when a call has not ended by then; it goes on in the background.
        """
        if self._closed:
            return
        self._closed = True
        self._at_exit.detach()
        _SERVING.discard(self)
        at_work = _end_calls(self._service, self._clients, timeout_s)
        if at_work is not None:
            raise WaitTimeout(
                f"the table server at {self.uri} still has {at_work} calls at work after {timeout_s:g} s; "
                "they end in the background"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TableServer({self.uri}{', closed' if self._closed else ''})"


def _end_calls(service: Any, clients: _Clients, timeout_s: float) -> int | None:
    """How many calls have not ended within the time; None when all have."""
    service.closing.set()
    ending = threading.Thread(target=service.shutdown, name="flowrl-shutdown", daemon=True)
    ending.start()
    ending.join(timeout_s)
    at_work = clients.calls
    clients.close(timeout_s)
    return at_work if ending.is_alive() else None


def serve_table(
    table: Served,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    *,
    lease_s: float = LEASE_S,
    request_bytes: int = REQUEST_BYTES,
    tls_certificate: str | Path | None = None,
    tls_key: str | Path | None = None,
) -> TableServer:
    """Let other processes read and write a table, until the server is closed. It works in threads of its own.

    Args:
        host: address to listen at. Whoever reaches it and has the token may read and change the table.
        port: 0 takes a free one.
        token: what clients must show; None makes a fresh one, which is allowed on this host only.
        lease_s: how long a client may be silent before its claims are given back.
        request_bytes: the most one append may bring.
        tls_certificate, tls_key: PEM files. Without them everything, the token too, travels in the clear.

    Errors: ConfigError for a host that others reach without a token; StoreError when the address is taken.
    """
    if token is None and not _is_loopback(host):
        raise ConfigError(
            f"a table is served to other hosts (host={host!r}) with a token of yours only: serve_table(table, host={host!r}, "
            "token=secrets.token_hex(32)), and the same for each RemoteTable"
        )
    if token is not None and (
        not isinstance(token, str) or len(token) < 8 or not token.isascii() or not token.isprintable()
    ):
        raise ConfigError("a token is at least 8 printable ASCII characters; make one with secrets.token_hex(32)")
    if not lease_s > 0:
        raise ConfigError(f"serve_table needs a lease_s above 0; found {lease_s!r}")
    if (tls_certificate is None) != (tls_key is None):
        raise ConfigError("serve_table needs both tls_certificate and tls_key, or neither")
    token = secrets.token_hex(32) if token is None else token
    certificates = []
    if tls_certificate is not None and tls_key is not None:
        certificates = [(_pem(tls_certificate), _pem(tls_key))]
    scheme = "grpc+tls" if certificates else "grpc"
    clients = _Clients(lease_s)
    try:
        service = _service()(
            f"{scheme}://{_bracketed(host)}:{port}", certificates, table, token, clients, request_bytes
        )
    except (OSError, pa.ArrowException) as error:
        clients.close(1.0)
        raise StoreError(
            f"the table cannot be served at {host}:{port}: {error}; choose another host or port"
        ) from error
    named = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return TableServer(service, clients, f"{scheme}://{_bracketed(named)}:{service.port}", token)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _pem(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the TLS file '{path}' cannot be read: {error}") from error


# ------------------------------------------------------------------------------------------------------------- service


class _ClosingError(Exception):
    """The server is being closed; the client is told like one that comes later."""


class _Calls:
    """What each call does, free of Flight."""

    def __init__(self, table: Served, clients: _Clients, closing: threading.Event) -> None:
        self.table, self.clients, self.closing = table, clients, closing

    # JSON to JSON

    def describe(self, client: _Client, *, later: bool = False) -> dict[str, Any]:
        table = self.table
        told = {
            "columns": [[c.name, str(c.type), c.doc] for c in table.schema],
            "rows": len(table),
            "lease_s": self.clients.lease_s,
            "appended": table.appended,
            "evicted": table.evicted,
            "version": table.version,
        }
        if later:
            told["later"] = [name for name, column in table.stats().columns.items() if not column.required]
        return told

    def stats(self, client: _Client) -> dict[str, Any]:
        return dict(self.table.stats().to_dict())

    def declare(self, client: _Client, *, name: str, kind: str) -> dict[str, Any]:
        self.table.add_column(name, None, ColumnType.parse(kind))
        return {}

    def done(self, client: _Client, *, claim: str) -> dict[str, Any]:
        self.clients.end(client, claim, "done")
        return {}

    def release(self, client: _Client, *, claim: str) -> dict[str, Any]:
        self.clients.end(client, claim, "release")
        return {}

    def finish(self, client: _Client) -> dict[str, Any]:
        self.table.finish()
        return {}

    def renew(self, client: _Client, *, unwanted: Sequence[str] = (), unread: Sequence[str] = ()) -> dict[str, Any]:
        """The heartbeat; it also says which claims and answers nobody waits for any more."""
        for token in unwanted:
            with suppress(FlowError):
                self.clients.end(client, token, "release")
        for answer in unread:
            self.clients.forget_pages(client, answer)
        return {}

    # JSON to rows

    def take(self, client: _Client, asked: _Asked, *, indices: Any, columns: Any) -> _Answer:
        rows = self.table.take(np.asarray(indices, np.int64), columns)
        return _Answer({}, iter([rows]), rows.types)

    def scan(self, client: _Client, asked: _Asked, *, columns: Any) -> _Answer:
        schema = self.table.schema
        batches = self.table.scan(columns)
        return _Answer({}, batches, {c.name: c.type for c in (schema if columns is None else schema.select(columns))})

    def claim(
        self, client: _Client, asked: _Asked, *, claim: str, node: str, rows: int, columns: Any, wait_s: float,
        options: Mapping[str, Any],
    ) -> _Answer:  # fmt: skip
        try:
            made = self._waited_for(asked, wait_s, node, rows, columns, options)
        except Exception:
            self.clients.give_up(client, claim)
            raise
        if made is None:
            return _Answer({"numbers": None}, iter(()), {})
        if not asked.is_wanted() or not self.clients.keep(client, claim, made):
            made.release()
            raise StoreError("the claim was given up while it was made")
        try:
            batch = made.batch()
            return _Answer({"numbers": np.asarray(made.numbers).tolist()}, iter([batch]), batch.types)
        except Exception:
            self.clients.end(client, claim, "release")
            raise

    def _waited_for(
        self, asked: _Asked, wait_s: float, node: str, rows: int, columns: Any, options: Mapping[str, Any]
    ) -> ServedClaim | None:
        """A claim, waited for in short turns, so that nothing is claimed for a client that is gone."""
        until = time.monotonic() + wait_s
        while True:
            turn_s = min(max(until - time.monotonic(), 0.001), _LOOK_S)  # never 0: that would not say that time is up
            is_last = turn_s < _LOOK_S
            try:
                return self.table.claim(node, rows, columns, wait_s=turn_s if wait_s > 0 else 0, **options)
            except WaitTimeout as error:
                if is_last:
                    raise WaitTimeout(str(error).replace(f"waited {turn_s:g} s", f"waited {wait_s:g} s")) from error
            if self.closing.is_set():
                raise _ClosingError
            if not asked.is_wanted():
                raise StoreError("the client is gone")

    def more(self, client: _Client, asked: _Asked) -> _Answer:
        found = client.pages.pop(asked.answer, None)
        if found is None:
            raise StoreError(
                f"the rest of an answer is gone: the server heard nothing of this client for {self.clients.lease_s:g} s; "
                "read again"
            )
        return _Answer({}, iter(()), {}, found)

    # JSON and rows to JSON

    def append(self, client: _Client, rows: RowBatch) -> dict[str, Any]:
        numbers = self.table.append(rows)
        return {"first": numbers.start, "stop": numbers.stop}

    def add_column(self, client: _Client, rows: RowBatch) -> dict[str, Any]:
        (name,) = rows.names
        self.table.add_column(name, rows[name], rows.types[name])
        return {}

    def fill(self, client: _Client, rows: RowBatch, *, numbers: Any, keep_existing: bool = False) -> dict[str, Any]:
        (name,) = rows.names
        told = np.asarray(numbers if numbers else np.zeros(0, np.int64))
        return {"filled": self.table.fill(name, told, rows[name], keep_existing=keep_existing)}

    def fill_claim(self, client: _Client, rows: RowBatch, *, claim: str) -> dict[str, Any]:
        self.clients.end(client, claim, "fill", {name: rows[name] for name in rows.names})
        return {}


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call for rows."""

    answer: str
    """The client's name for the answer: it asks for the next page, and gives up the rest, by this."""
    is_wanted: Callable[[], bool]
    """Whether the client is still there."""


@dataclass(slots=True)
class _Answer:
    """Rows and what is said with them."""

    reply: dict[str, Any]
    batches: Iterator[RowBatch]
    types: Mapping[str, ColumnType]
    pages: Iterator[list[RowBatch]] | None = None
    """The rest of an earlier answer, instead of batches."""


def access(token: str) -> Any:
    """What lets in who shows the token, and keeps who that is."""
    from pyarrow import flight

    expected = f"Bearer {token}".encode()

    class Caller(flight.ServerMiddleware):
        def __init__(self, client: str) -> None:
            self.client = client

    class Access(flight.ServerMiddlewareFactory):
        def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> Caller:
            given = (headers.get("authorization") or [""])[0]
            if not hmac.compare_digest(given.encode(), expected):
                raise flight.FlightUnauthenticatedError("the token is another one")
            return Caller((headers.get(wire.CLIENT) or [""])[0])

    return Access()


def _service() -> Any:
    """The class of the Flight service; made here, so that importing this module does not load Flight."""
    wire.flight()  # the error that says what is missing
    from pyarrow import flight

    class Service(flight.FlightServerBase):
        def __init__(
            self,
            location: str,
            certificates: list[Any],
            table: Served,
            token: str,
            clients: _Clients,
            request_bytes: int,
        ) -> None:
            self.closing = threading.Event()
            self._clients, self._request_bytes = clients, request_bytes
            self._calls = _Calls(table, clients, self.closing)
            super().__init__(location, tls_certificates=certificates, middleware={"access": access(token)})

        @contextmanager
        def _call(self, context: Any, asked: bytes) -> Iterator[tuple[str, dict[str, Any], _Client]]:
            """Name, arguments, client; errors inside become what travels."""
            name = "call"
            try:
                arguments = json.loads(asked)
                name = arguments.pop("call")
                caller = context.get_middleware("access").client
                if self.closing.is_set():
                    raise _ClosingError
                with self._clients.calling(caller) as client:
                    yield name, arguments, client
            except flight.FlightError:
                raise
            except _ClosingError:
                raise flight.FlightUnavailableError("it is closing") from None
            except Exception as error:
                raise flight.FlightServerError(*wire.to_failure(name, error)) from error

        def do_action(self, context: Any, action: Any) -> Any:
            with self._call(context, action.body.to_pybytes()) as (name, arguments, client):
                if name == "leave":
                    self._clients.leave(context.get_middleware("access").client)
                    return [b"{}"]
                answer = _known(self._calls, name, _ACTIONS)(client, **arguments)
                return [json.dumps(answer).encode()]

        def do_get(self, context: Any, ticket: Any) -> Any:
            with self._call(context, ticket.ticket) as (name, arguments, client):
                asked = _Asked(arguments.pop("answer"), lambda: not context.is_cancelled())
                answer = _known(self._calls, name, _READS)(client, asked, **arguments)
                rest = answer.pages or wire.pages(answer.batches, answer.types)
                page = next(rest)
                reply = dict(answer.reply)
                following = next(rest, None)
                if following is not None:
                    reply["more"] = True
                    self._clients.keep_pages(client, asked.answer, _again(following, rest))
                empty = RowBatch({name: [] for name in answer.types}, answer.types, 0)
                return flight.RecordBatchStream(wire.to_message(page or [empty], reply))

        def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            with self._call(context, descriptor.command) as (name, arguments, client):
                rows = _received(reader, name, arguments.pop("num_rows"), self._request_bytes)
                writer.write(json.dumps(_known(self._calls, name, _WRITES)(client, rows, **arguments)).encode())

    return Service


_ACTIONS = ("describe", "stats", "declare", "done", "release", "finish", "renew")
_READS = ("take", "scan", "claim", "more")
_WRITES = ("append", "add_column", "fill", "fill_claim")


def _known(calls: _Calls, name: str, names: Sequence[str]) -> Callable[..., Any]:
    if name not in names:
        raise StoreError(f"the server knows no call '{name}'; client and server need the same version of flowrl")
    found: Callable[..., Any] = getattr(calls, name)
    return found


def _again(page: list[RowBatch], rest: Iterator[list[RowBatch]]) -> Iterator[list[RowBatch]]:
    yield page
    yield from rest


def _received(reader: Any, call: str, num_rows: int, limit: int) -> RowBatch:
    """All rows of a request. Errors: DataError for too many bytes; StoreError when some are lacking."""
    batches: list[pa.RecordBatch] = []
    size = 0
    for chunk in reader:
        if chunk.data is None:
            continue
        batches.append(chunk.data)
        size += chunk.data.nbytes
        if size > limit:
            raise DataError(
                f"'{call}' brought more than {limit >> 20} MiB; send fewer rows at a time, or serve the table with a larger "
                "request_bytes"
            )
    rows = wire.aligned(RowBatch.from_arrow(pa.Table.from_batches(batches, reader.schema)))
    if len(rows) != num_rows:  # a client that died on the way looks like one that has sent all
        raise StoreError(f"'{call}' was to bring {num_rows} rows and brought {len(rows)}; nothing was changed")
    return rows
