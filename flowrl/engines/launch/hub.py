"""A board for ranks on several hosts: one process keeps what was said, and each rank has a connection to it.

    hub              in the process of rank 0 (torchrun), of a launcher, or beside the ranks of the first node (Ray)
      rank 0 .. n-1  `HubBoard`: messages pass the hub; rows and weights stay in shared memory, and between hosts go by
                     Arrow Flight from the rank that wrote them

[Note: A rank that is gone] Its connection ends when its process does, however that ends, and the hub tells all. A host that is
lost is noticed by the silence of its connections.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.engines.launch import frames
from flowrl.engines.launch.across import LOOPBACK, Across
from flowrl.engines.launch.board import GONE, POLL_S, Failure, Missing, Range, RankFailed, places_of
from flowrl.engines.launch.folder import hold, leave
from flowrl.errors import EngineError, RunError, StoreError, WaitTimeout
from flowrl.store.pages import FileServer, bracketed, fetch

ANSWER_S = 10.0
"""Longest wait for what the hub knows already."""
LEAVE_S = 60.0
"""How long the process with the hub stays for ranks that are still at work; less when one has failed."""
FAILED_S = 5.0
"""The same, when one has failed."""
LOST_S = 3.0
"""When rows do not come, how long to wait for word that their rank is gone."""
MOST_READERS = 4
"""Ranks that rows are brought from at the same time."""


# ----------------------------------------------------------------------------------------------------------------- hub


@dataclass(eq=False, slots=True)
class _Link:
    """A rank's connection."""

    sock: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        """To one that is gone: nothing. Its own thread finds out."""
        with self.lock, suppress(frames.Closed):
            frames.send(self.sock, head, body)


@dataclass(eq=False, slots=True)
class _Wait:
    link: _Link
    number: int
    keys: list[str]
    missing: set[str]


class Hub:
    """Keeps the messages of a job; see `flowrl.engines.launch.board.Board` for what they are."""

    def __init__(self, world: int, *, host: str = LOOPBACK, token: str | None = None) -> None:
        """`host`: the address to listen at, on a free port. Errors: EngineError when that cannot be."""
        self.world = world
        self.token = token or secrets.token_hex(32)
        self._said: dict[str, bytes] = {}
        self._places: dict[int, str] = {}
        self._links: dict[int, _Link] = {}
        self._waits: dict[str, list[_Wait]] = {}
        """By each key that is missing."""
        self._gone: set[int] = set()
        """Ranks that said that they end, or whose connection has ended."""
        self._failure: Failure | None = None
        self._closed = False
        self._changed = threading.Condition()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, 0), family=family, backlog=max(8, world))
        except OSError as error:
            raise EngineError(
                f"the job's board cannot listen at {host}: {error}; is that an address of this host? (FLOWRL_ADDRESS)"
            ) from error
        self.address = f"{bracketed(host)}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, name="flowrl-hub", daemon=True).start()

    # what a launcher hears and says

    def fail(self, failure: Failure) -> Failure:
        """Tell the job of a failure; the first one that it was told of."""
        with self._changed:
            is_first = self._failure is None
            if self._failure is None:
                self._failure = failure
            first, links = self._failure, list(self._links.values())
            self._changed.notify_all()
        if is_first:
            for link in links:
                link.send({"failure": failure.to_bytes().decode()})
        return first

    def failure(self) -> Failure | None:
        with self._changed:
            return self._failure

    def place_of(self, rank: int) -> str:
        """Where a rank was last, in its own words; "" when it has said nothing."""
        with self._changed:
            return self._places.get(rank, "")

    def close(self, *, wait_s: float = 0.0) -> None:
        """Wait for the ranks that came to leave, then let go of all. A failure shortens the wait."""
        until = time.monotonic() + wait_s
        with self._changed:
            while set(self._links) - self._gone:
                if self._failure is not None:
                    until = min(until, time.monotonic() + FAILED_S)
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._closed = True
            links = list(self._links.values())
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for link in links:
            with suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)

    # one thread for each connection

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(sock,), name="flowrl-hub-rank", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                frames.greet(sock, self.token, is_server=True)
                hello, _ = frames.receive(sock)
            except (frames.Closed, EngineError, OSError):  # a stranger
                return
            link, rank = _Link(sock), hello["rank"]
            if rank is not None:
                with self._changed:
                    self._links[rank] = link
                    known = self._failure
                if known is not None:
                    link.send({"failure": known.to_bytes().decode()})
            try:
                while True:
                    head, body = frames.receive(sock)
                    self._heard(rank, link, head, body)
            except frames.Closed:
                pass
            if rank is not None:
                self._ended(rank)

    def _ended(self, rank: int) -> None:
        with self._changed:
            is_known = rank in self._gone or self._closed
            self._gone.add(rank)
            self._changed.notify_all()
        if not is_known:
            self.fail(Failure(rank, self.place_of(rank), GONE))

    def _heard(self, rank: int, link: _Link, head: dict[str, Any], body: bytes) -> None:
        match head["do"]:
            case "post":
                self._posted(head["key"], body)
            case "get":
                self._asked(link, head["id"], head["keys"])
            case "forget":
                self._late(link, head["id"], head["keys"])
            case "drop":
                with self._changed:
                    for key in head["keys"]:
                        self._said.pop(key, None)
            case "at":
                with self._changed:
                    self._places[rank] = head["text"]
            case "fail":
                first = self.fail(Failure.from_bytes(body))
                link.send({"id": head["id"], "first": first.to_bytes().decode()})
            case "end":
                with self._changed:
                    self._gone.add(rank)
                    self._changed.notify_all()

    def _posted(self, key: str, value: bytes) -> None:
        ready = []
        with self._changed:
            self._said[key] = value
            for one in self._waits.pop(key, ()):
                one.missing.discard(key)
                if not one.missing:
                    ready.append((one, [self._said[name] for name in one.keys]))
        for one, found in ready:
            one.link.send({"id": one.number, "sizes": [len(data) for data in found]}, b"".join(found))

    def _asked(self, link: _Link, number: int, keys: list[str]) -> None:
        with self._changed:
            missing = {key for key in keys if key not in self._said}
            for key in missing:
                self._waits.setdefault(key, []).append(_Wait(link, number, keys, missing))
            found = [] if missing else [self._said[key] for key in keys]
        if not missing:
            link.send({"id": number, "sizes": [len(data) for data in found]}, b"".join(found))

    def _late(self, link: _Link, number: int, keys: list[str]) -> None:
        with self._changed:
            missing = [key for key in keys if key not in self._said]
            for key in missing:
                left = [one for one in self._waits.get(key, ()) if (one.link, one.number) != (link, number)]
                self._waits[key] = left
            places = {str(rank): at for rank, at in self._places.items()}
        if missing:  # else the answer is on its way
            link.send({"id": number, "missing": missing, "places": places})


# ---------------------------------------------------------------------------------------------------------------- rank


def tell(across: Across, failure: Failure) -> Failure:
    """Tell a job of a failure from a process that has not joined it; the first one that it was told of, or this one."""
    try:
        with _connected(across, None) as sock:
            sock.settimeout(ANSWER_S)
            frames.send(sock, {"do": "fail", "id": 0}, failure.to_bytes())
            while "first" not in (head := frames.receive(sock)[0]):
                pass
            return Failure.from_bytes(head["first"].encode())
    except (frames.Closed, RunError, OSError):  # the hub went with whoever held it
        return failure


def _connected(across: Across, rank: int | None) -> socket.socket:
    """Errors: RunError when the hub is not there or does not know the token."""
    host, _, port = across.hub.rpartition(":")
    sock: socket.socket | None = None
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=frames.GREET_S)
        frames.greet(sock, across.token, is_server=False)
        frames.send(sock, {"rank": rank})
        return sock
    except (frames.Closed, EngineError, OSError) as error:
        if sock is not None:
            sock.close()
        raise RunError(
            f"the job's board at {across.hub} cannot be reached: {error}; whoever started the job has ended, or a firewall is "
            "between the hosts"
        ) from error


class HubBoard:
    """See `flowrl.engines.launch.board.Board`."""

    def __init__(self, across: Across, folder: Path, rank: int, world: int, *, hub: Hub | None = None) -> None:
        """Args:
            folder: of the job in this host's shared memory.
            hub: the job's, where this process holds it: it then leaves last.

        Errors: RunError when the folder or the hub has gone.
        """
        self.rank, self.world = rank, world
        self.host_of = across.host_of
        self.place = ""
        self.num_runs = 0
        self.timeout_s = 0.0
        self.folder: Path | None = folder
        self.address = across.address
        self._here, self._across, self._hub = folder, across, hub
        self._sock = _connected(across, rank)
        self._lock = hold(folder, rank)
        self._count = 0
        self._answers: dict[int, tuple[dict[str, Any], bytes]] = {}
        self._failure: Failure | None = None
        self._is_lost = self._is_closed = False
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._uris: dict[int, str] = {}
        self._server = FileServer(folder, across.address, across.token)
        threading.Thread(target=self._listen, name="flowrl-board", daemon=True).start()
        self.post(f"rows-at/{rank}", self._server.uri.encode())

    # ------------------------------------------------------------------------------------------------------- messages

    def post(self, key: str, value: bytes) -> None:
        self._send({"do": "post", "key": key}, value)

    def get(self, keys: Sequence[str], *, timeout_s: float, what: Missing) -> list[bytes]:
        unique = list(dict.fromkeys(keys))
        number = self._ask({"do": "get", "keys": unique})
        answer = self._answer(number, timeout_s)
        if answer is None:
            self._send({"do": "forget", "id": number, "keys": unique})
            answer = self._answer(number, ANSWER_S)
        if answer is None:
            raise WaitTimeout(
                f"rank {self.rank} waited {timeout_s:g} s {what(unique)}; the board at {self._across.hub} says nothing either: "
                "the process that holds it has been stopped, or its host is lost"
            )
        head, body = answer
        if "missing" in head:
            places = {int(rank): at for rank, at in head["places"].items()}
            raise WaitTimeout(
                f"rank {self.rank} waited {timeout_s:g} s {what(head['missing'])}; {places_of(places, self.rank, self.world)}"
            )
        found, start = {}, 0
        for key, size in zip(unique, head["sizes"], strict=True):
            found[key] = body[start : start + size]
            start += size
        return [found[key] for key in keys]

    def drop(self, keys: Iterable[str]) -> None:
        if names := list(keys):
            self._send({"do": "drop", "keys": names})

    def at(self, text: str) -> None:
        self.place = text
        self._send({"do": "at", "text": text})

    def fail(self, failure: Failure) -> Failure:
        if self._failure is not None:
            return self._failure
        try:
            answer = self._answer(self._ask({"do": "fail"}, failure.to_bytes()), ANSWER_S)
        except (RankFailed, RunError, KeyboardInterrupt):
            return self._failure or failure
        return failure if answer is None else Failure.from_bytes(answer[0]["first"].encode())

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(RankFailed, RunError, KeyboardInterrupt):
            self._send({"do": "end"})
        if self._hub is not None:
            self._hub.close(wait_s=LEAVE_S)
        self._server.close()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        leave(self._here, self.rank, self._lock)

    # ----------------------------------------------------------------------------------------------------------- rows

    def bring(self, name: str, parts: Mapping[int, Sequence[Range]], size: int, *, timeout_s: float, what: str) -> int:
        """Bring parts of a file of the job from ranks of other hosts to the same places of the file here; bytes brought.

        Args:
            parts: rank that wrote -> what it wrote.
            size: of the whole file, in bytes.
            what: in errors: what is waited for.

        Errors: as of `get`; StoreError when shared memory is full.
        """
        keys = {rank: f"rows-at/{rank}" for rank in parts if rank not in self._uris}
        found = self.get(list(keys.values()), timeout_s=timeout_s, what=lambda _: what) if keys else []
        self._uris.update({rank: uri.decode() for rank, uri in zip(keys, found, strict=True)})
        descriptor = os.open(self._here / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
        except OSError as error:
            raise StoreError(
                f"{size:,} bytes of shared memory cannot be written to {self._here / name}: {error}"
            ) from error
        finally:
            os.close(descriptor)
        token = self._across.token

        def reading(rank: int) -> Callable[[], int]:
            return lambda: fetch(self._uris[rank], token, name, parts[rank], memory, timeout_s=timeout_s)

        reads = _Reads([reading(rank) for rank in parts])
        try:
            return reads.result(self._raise_failure)
        except WaitTimeout as error:
            raise WaitTimeout(f"rank {self.rank}, {what}: {error}") from error
        except StoreError:
            until = time.monotonic() + LOST_S
            with self._changed:
                while self._failure is None and not self._is_lost and time.monotonic() < until:
                    self._changed.wait(until - time.monotonic())
            self._raise_failure()
            raise

    # --------------------------------------------------------------------------------------------------------- inside

    def _ask(self, head: dict[str, Any], body: bytes = b"") -> int:
        with self._changed:
            self._count += 1
            number = self._count
        self._send({**head, "id": number}, body)
        return number

    def _send(self, head: dict[str, Any], body: bytes = b"") -> None:
        try:
            with self._sending:
                frames.send(self._sock, head, body)
        except frames.Closed:
            with self._changed:
                self._changed.wait_for(lambda: self._is_lost, LOST_S)  # it may have said why
            self._raise_failure()
            raise self._lost() from None

    def _answer(self, number: int, timeout_s: float) -> tuple[dict[str, Any], bytes] | None:
        """What the hub answers; None when it has not by then. Errors: RankFailed, KeyboardInterrupt, RunError."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while number not in self._answers:
                self._raise_failure()
                if self._is_lost:
                    raise self._lost()
                left = until - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(left, 60.0))
            return self._answers.pop(number)

    def _listen(self) -> None:
        try:
            while True:
                head, body = frames.receive(self._sock)
                with self._changed:
                    if "failure" in head:
                        self._failure = self._failure or Failure.from_bytes(head["failure"].encode())
                    else:
                        self._answers[head["id"]] = head, body
                    self._changed.notify_all()
        except frames.Closed:
            with self._changed:
                keeper = self._across.keeper
                if keeper is not None and not self._is_closed:
                    self._failure = self._failure or Failure(keeper, "", GONE)
                self._is_lost = True
                self._changed.notify_all()

    def _raise_failure(self) -> None:
        failure = self._failure
        if failure is not None and failure.is_interrupt:
            raise KeyboardInterrupt(str(failure))
        if failure is not None:
            raise RankFailed(failure, self.place)

    def _lost(self) -> RunError:
        return RunError(f"the job's board at {self._across.hub} has gone: whoever started the ranks has ended")


class _Reads:
    """Calls in a few threads, which end with their calls or with the process."""

    def __init__(self, calls: Sequence[Callable[[], int]]) -> None:
        self._left = list(calls)
        self._running = len(calls)
        self._found = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        for _ in range(min(MOST_READERS, len(calls))):
            threading.Thread(target=self._work, name="flowrl-rows", daemon=True).start()

    def result(self, look: Callable[[], None]) -> int:
        """The sum of what they give; looks now and then. Errors: that of the first call that fails, and of `look`."""
        with self._changed:
            while self._running and self._error is None:
                self._changed.wait(POLL_S)
                look()
            if self._error is not None:
                raise self._error
            return self._found

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._left or self._error is not None:
                    return
                call = self._left.pop()
            found, failed = 0, None
            try:
                found = call()
            except BaseException as error:  # raised again where the result is asked for
                failed = error
            with self._changed:
                self._found += found
                self._error = self._error or failed
                self._running -= 1
                self._changed.notify_all()
