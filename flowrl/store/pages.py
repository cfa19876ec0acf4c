"""Files of shared memory for other hosts, over Arrow Flight: bytes of a file here are written to the same places of a file there.

    with FileServer(folder, "10.0.0.1", token) as server:              # the host that has the file
        ...
    fetch(server.uri, token, "a.rows", [(0, 4096)], memory)            # any other: memory[0:4096] is as there

Both sides know what lies where; only numbers travel. Bytes go out of the mapped file and, on the other side, from the message
into the memory given, without another copy in between.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from flowrl.errors import StoreError, WaitTimeout
from flowrl.store import wire
from flowrl.store.flight import access

SUFFIX = ".rows"
"""Of the files that are served; no other file of the folder is."""
CLOSE_S = 5.0
"""Longest wait for calls at work when a server is closed; they then end in the background."""

Range = tuple[int, int]
"""First byte and end."""

_SERVING: set[FileServer] = set()
"""Servers that are not closed: the end of the process closes them."""


class FileServer:
    """Serves the files `*.rows` of one folder to whoever shows the token, until it is closed."""

    def __init__(self, folder: Path, host: str, token: str) -> None:
        """`host`: the address to listen at, on a free port. Errors: StoreError when that cannot be."""
        try:
            self._service = _service()(f"grpc://{bracketed(host)}:0", Path(folder), token)
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"rows cannot be served at {host}: {error}; is that an address of this host?") from error
        self.uri = f"grpc://{bracketed(host)}:{self._service.port}"
        _SERVING.add(self)
        self._at_exit = weakref.finalize(self, _shut, self._service)  # before Flight's own, which would wait for calls

    def close(self) -> None:
        _SERVING.discard(self)
        self._at_exit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shut(service: Any) -> None:
    ending = threading.Thread(target=service.shutdown, name="flowrl-shutdown", daemon=True)
    ending.start()
    ending.join(CLOSE_S)


def fetch(
    uri: str, token: str, name: str, ranges: Sequence[Range], memory: memoryview | mmap.mmap, *, timeout_s: float
) -> int:
    """Bring ranges of a served file to the same places of `memory`; how many bytes.

    Errors: WaitTimeout after `timeout_s`; StoreError when server, file or a part of it is not there, or the token is wrong.
    """
    flight = wire.flight()
    headers = [(b"authorization", f"Bearer {token}".encode())]
    options = flight.FlightCallOptions(timeout=timeout_s, headers=headers)
    ticket = flight.Ticket(json.dumps({"file": name, "ranges": [list(one) for one in ranges]}).encode())
    target = np.frombuffer(memory, np.uint8)
    places = _places(ranges)
    num_bytes = 0
    client = flight.FlightClient(uri)
    try:
        for chunk in client.do_get(ticket, options):
            values = chunk.data.column(0)
            first, stop = next(places, (0, -1))
            if stop - first != len(values):
                raise StoreError(f"{uri} was to bring {stop - first} bytes of '{name}' and brought {len(values)}")
            target[first:stop] = np.frombuffer(values.buffers()[1], np.uint8, len(values), values.offset)
            num_bytes += len(values)
    except flight.FlightTimedOutError as error:
        raise WaitTimeout(f"waited {timeout_s:g} s for '{name}' from {uri}") from error
    except flight.FlightServerError as error:
        raise wire.from_failure(error.extra_info) or StoreError(f"{uri} failed at '{name}': {error}") from error
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        raise StoreError(f"'{name}' did not come from {uri}: {error}") from error
    finally:
        with suppress(flight.FlightError, pa.ArrowException):
            client.close()
    if next(places, None) is not None:
        raise StoreError(f"{uri} brought only {num_bytes} bytes of '{name}'")
    return num_bytes


def bracketed(host: str) -> str:
    """A host as a part of an address with a port."""
    return f"[{host}]" if ":" in host else host


def _places(ranges: Sequence[Range]) -> Iterator[Range]:
    """The ranges in pages that fit into a message."""
    for first, stop in ranges:
        for start in range(first, stop, wire.PAGE_BYTES):
            yield start, min(start + wire.PAGE_BYTES, stop)


def _service() -> Any:
    """The class of the Flight service; made here, so that importing this module does not load Flight."""
    flight = wire.flight()

    class Service(flight.FlightServerBase):  # type: ignore[name-defined]
        def __init__(self, location: str, folder: Path, token: str) -> None:
            self._folder = folder
            super().__init__(location, middleware={"access": access(token)})

        def do_get(self, context: Any, ticket: Any) -> Any:
            try:
                asked = json.loads(ticket.ticket)
                batches = _batches(self._folder, asked["file"], asked["ranges"])
            except Exception as error:  # whatever it is travels to who asked
                raise flight.FlightServerError(*wire.to_failure("get", error)) from error
            return flight.RecordBatchStream(pa.Table.from_batches(batches, _SCHEMA))

    return Service


_SCHEMA = pa.schema([pa.field("bytes", pa.uint8())])


def _batches(folder: Path, name: str, ranges: Sequence[Range]) -> list[pa.RecordBatch]:
    """Views of a mapped file. Errors: StoreError for a file that is not served, and for bytes that it lacks."""
    if "/" in name or not name.endswith(SUFFIX):
        raise StoreError(f"no file '{name}' is served")
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"'{name}' has gone: {error.strerror}") from error
    try:
        size = os.fstat(descriptor).st_size
        if any(not 0 <= first <= stop <= size for first, stop in ranges):
            raise StoreError(f"'{name}' has {size} bytes, and {ranges} were asked for")
        memory = pa.py_buffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ)) if size else pa.py_buffer(b"")
    finally:
        os.close(descriptor)
    found = []
    for first, stop in _places([(int(first), int(stop)) for first, stop in ranges]):
        values = pa.Array.from_buffers(pa.uint8(), stop - first, [None, memory.slice(first, stop - first)])
        found.append(pa.RecordBatch.from_arrays([values], schema=_SCHEMA))
    return found
