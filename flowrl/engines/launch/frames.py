"""Messages over a socket, after both ends have shown that they know the job's token.

    frame    length of the head, length of the body, head (JSON), body (bytes)

The token itself never travels: each end answers a random number with a keyed hash of it. What follows is neither encrypted nor
signed, so the network is one that you trust.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
from typing import Any

from flowrl.errors import EngineError

GREET_S = 10.0
"""Longest wait for each word of the greeting."""
SEND_S = 60.0
"""Longest wait for an end that takes nothing any more."""
MOST_BYTES = 1 << 30
_SIZES = struct.Struct("!IQ")
_NONCE = 32


class Closed(Exception):
    """The other end is gone."""


def greet(sock: socket.socket, token: str, *, is_server: bool) -> None:
    """Both ends show that they know the token. Errors: EngineError when the other one does not; Closed; OSError."""
    sock.settimeout(GREET_S)
    mine, theirs = secrets.token_bytes(_NONCE), b""
    if is_server:
        sock.sendall(mine)
        answer = _exactly(sock, 2 * _NONCE)
        theirs, shown = answer[:_NONCE], answer[_NONCE:]
        _check(shown, token, b"rank", mine, theirs)
        sock.sendall(_hash(token, b"hub", theirs, mine))
    else:
        theirs = _exactly(sock, _NONCE)
        sock.sendall(mine + _hash(token, b"rank", theirs, mine))
        _check(_exactly(sock, _NONCE), token, b"hub", mine, theirs)
    sock.settimeout(None)
    keep_alive(sock)


def keep_alive(sock: socket.socket) -> None:
    """A host that is lost, and can end no connection, is noticed within half a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_S), 0))


def send(sock: socket.socket, head: dict[str, Any], body: bytes = b"") -> None:
    """Errors: Closed."""
    text = json.dumps(head).encode()
    try:
        sock.sendall(_SIZES.pack(len(text), len(body)) + text)
        if body:
            sock.sendall(body)
    except OSError as error:
        raise Closed(str(error)) from error


def receive(sock: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Errors: Closed."""
    try:
        of_head, of_body = _SIZES.unpack(_exactly(sock, _SIZES.size))
        if max(of_head, of_body) > MOST_BYTES:
            raise Closed(f"a message of {max(of_head, of_body):,} bytes")
        return json.loads(_exactly(sock, of_head)), _exactly(sock, of_body)
    except OSError as error:
        raise Closed(str(error)) from error


def _exactly(sock: socket.socket, count: int) -> bytes:
    found = bytearray(count)
    view = memoryview(found)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise Closed("it has ended")
        view = view[got:]
    return bytes(found)


def _hash(token: str, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token.encode(), who + first + second, "sha256")


def _check(shown: bytes, token: str, who: bytes, first: bytes, second: bytes) -> None:
    if not hmac.compare_digest(shown, _hash(token, who, first, second)):
        raise EngineError("the other end of a connection does not know the job's token")
