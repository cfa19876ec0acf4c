"""The page of a run while it goes on, for this machine alone.

    with LiveView(folder, pieces) as view:
        print(view.url)             # http://127.0.0.1:40123/3kq.../
        view.serve()                # until it is interrupted

What it gives is read from the run and nothing else: no part of a request ever becomes part of a path of a file. It listens on
loopback, answers who knows the token in the address, and reads; there is no other method, and no listing.

The attacker to think of is a page of somewhere else, open in the same browser. It does not know the token; a name of its own that
it points at this machine is refused by the Host header; and what a browser says of where a request comes from is heeded.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from flowrl.viz.frame import LIVE_POLICY
from flowrl.viz.run.page import run_html
from flowrl.viz.run.responses import Chunk, Pieces, Responses, packed_json
from flowrl.viz.run.source import RunFolder, stamp

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost")
TIMEOUT_S = 10.0
"""A connection that says nothing for so long is closed."""
MOST_CONNECTIONS = 16
"""At once; more are closed unheard."""
TOKEN_BYTES = 24
KEPT_CHUNKS = 8
"""Steps whose blocks stay in memory: a page asks for the texts and then for the tokens of the same rows."""
HEADERS = {
    "Content-Security-Policy": f"{LIVE_POLICY}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_ROUTE = re.compile(r"/([A-Za-z0-9_-]+)/(?:(state)|(index|text|tokens)/([0-9]{1,9}))?", re.ASCII)
"""`/TOKEN/`, `/TOKEN/state`, `/TOKEN/text/12`: there is nothing else."""

HTML, JSON, BYTES = "text/html; charset=utf-8", "application/json", "application/octet-stream"


class Gone(LookupError):
    """There is no such chunk."""


class Pages:
    """What is given: the page, its state, the index from a chunk on, and the blocks of a chunk. Safe to call from threads."""

    def __init__(self, folder: RunFolder, pieces: Pieces | None = None) -> None:
        self.folder = folder
        self._pieces = pieces
        self._lock = threading.Lock()
        self._index: list[dict[str, Any]] = []
        self._places: list[tuple[int, int]] = []
        """(step, chunk of the step) of each chunk in the index."""
        self._known: set[int] = set()
        self._recent: dict[int, list[Chunk]] = {}

    def page(self) -> bytes:
        return run_html(self.folder, pieces=self._pieces, is_live=True).encode("utf-8", "backslashreplace")

    def state(self) -> bytes:
        return json.dumps({"stamp": stamp(self.folder), "status": self.folder.status}).encode("ascii")

    def index(self, first: int) -> bytes:
        """The chunks from `first` on, deflated JSON."""
        with self._lock:
            self._learn()
            return packed_json(self._index[first:])

    def block(self, kind: str, number: int) -> bytes:
        """`text` or `tokens` of a chunk. Raises Gone."""
        with self._lock:
            self._learn()
            if number >= len(self._places):
                raise Gone
            step, place = self._places[number]
            if step not in self._recent:
                self._remember(step, list(Responses(self.folder, self._pieces).chunks(step)))
            chunks = self._recent[step]
            if place >= len(chunks):
                raise Gone
            found = chunks[place].text if kind == "text" else chunks[place].tokens
        if found is None:
            raise Gone
        return found

    def _learn(self) -> None:
        """Take in the steps that were completed since: those that have metrics, as their rows are whole then."""
        found = Responses(self.folder, self._pieces)
        is_running = self.folder.status == "running"
        complete = {int(row["step"]) for row in self.folder.metrics()} if is_running else set(found.steps)
        for step in found.steps:
            if step in self._known or step not in complete:
                continue
            self._known.add(step)
            for place, index in enumerate(found.indices(step)):
                self._index.append(index)
                self._places.append((step, place))

    def _remember(self, step: int, chunks: list[Chunk]) -> None:
        self._recent[step] = chunks
        while len(self._recent) > KEPT_CHUNKS:
            del self._recent[next(iter(self._recent))]


class LiveView:
    """The server. `with` closes it; `serve` answers until `stop`, or an interrupt.

    Args:
        port: 0 takes one that is free.
    """

    def __init__(self, folder: RunFolder, pieces: Pieces | None = None, *, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        self.pages = Pages(folder, pieces)

        class Handler(_Handler):
            answers = self.pages
            secret = self.token

        self._server = _Server((LOOPBACK, port), Handler)
        self.port = int(self._server.socket.getsockname()[1])
        Handler.port = self.port

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/{self.token}/"

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.2)

    def stop(self) -> None:
        """End `serve`; from another thread."""
        self._server.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left in the middle is no news."""


class _Handler(BaseHTTPRequestHandler):
    """One connection, one answer."""

    answers: Pages
    secret: str
    port: int
    protocol_version = "HTTP/1.0"
    timeout = TIMEOUT_S
    server_version = "flowrl"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        status, kind, body = self._found()
        self._write(status, kind, body if with_body else b"", len(body))

    def _found(self) -> tuple[HTTPStatus, str, bytes]:
        # whatever is wrong, the answer is the same: it tells nothing of what would have been right
        nothing = (HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"nothing here\n")
        route = _ROUTE.fullmatch(self.path)
        given = route[1] if route else ""
        knows = hmac.compare_digest(given.encode("ascii"), self.secret.encode("ascii"))
        if route is None or not knows or not self._is_for_us() or not self._is_from_here():
            return nothing
        answer = self._reader(route)
        try:
            kind, body = answer()
        except Gone:
            return nothing
        except Exception:  # a run that is written at this moment, or was removed: the page asks again
            return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", b"the run cannot be read just now\n"
        return HTTPStatus.OK, kind, body

    def _reader(self, route: re.Match[str]) -> Callable[[], tuple[str, bytes]]:
        pages = self.answers
        if route[2]:
            return lambda: (JSON, pages.state())
        if route[3] is None:
            return lambda: (HTML, pages.page())
        number = int(route[4])
        if route[3] == "index":
            return lambda: (BYTES, pages.index(number))
        return lambda: (BYTES, pages.block(route[3], number))

    def _is_for_us(self) -> bool:
        """Whether the browser was told to come to this machine: not by a name that somebody points here."""
        hosts = self.headers.get_all("Host") or []
        return len(hosts) == 1 and hosts[0].lower() in {f"{name}:{self.port}" for name in NAMES}

    def _is_from_here(self) -> bool:
        """Whether the page itself asks, or a person who opened the address; browsers say so."""
        return self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")

    def _write(self, status: HTTPStatus, kind: str, body: bytes, length: int) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Also for methods that are not there and requests that are none; nothing that was sent is repeated."""
        self.close_connection = True
        try:
            status = HTTPStatus(code)
        except ValueError:
            status = HTTPStatus.BAD_REQUEST
        if status is HTTPStatus.NOT_IMPLEMENTED:
            status = HTTPStatus.METHOD_NOT_ALLOWED
        self._write(status, "text/plain; charset=utf-8", b"", 0)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the address holds the token."""

    def handle(self) -> None:
        try:
            super().handle()
        except (TimeoutError, ConnectionError):  # who asked has left
            self.close_connection = True
