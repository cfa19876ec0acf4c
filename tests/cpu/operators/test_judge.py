"""rewards.judge against a server that misbehaves."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import ConfigError, DataError, EngineError
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl_operators import rewards

Reply = tuple[int, bytes, dict[str, str]]


def said(text: Any) -> Reply:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode(), {}


class Server:
    """Answers each request by a function of (its number, its body); remembers what it was sent."""

    def __init__(self, answer: Callable[[int, dict[str, Any]], Reply]) -> None:
        self.answer = answer
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.lock = threading.Lock()
        self.under_way = self.most_under_way = 0
        self.url = ""


@contextmanager
def serving(answer: Callable[[int, dict[str, Any]], Reply]) -> Iterator[Server]:
    state = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                number = len(state.requests)
                state.requests.append((self.path, dict(self.headers), body))
                state.under_way += 1
                state.most_under_way = max(state.most_under_way, state.under_way)
            status, text, headers = state.answer(number, body)
            with state.lock:
                state.under_way -= 1
            try:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(text)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)
            except OSError:
                pass  # the client gave up

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


def ask(server: Server, response: str = "four", **options: Any) -> float:
    options = {"model": "m", "url": server.url, "wait_s": 0.01, "key": None, **options}
    return rewards.judge(response, "2+2?", "4", **options)


def test_the_score_is_brought_to_zero_and_one() -> None:
    with serving(lambda number, body: said("Score: 2\nOn reflection,\n**Score:** 7.5")) as server:
        assert ask(server) == 0.75
        assert ask(server, low=5.0, high=10.0) == 0.5
        path, _, body = server.requests[0]
    assert path == "/v1/chat/completions" and body["model"] == "m" and body["temperature"] == 0.0
    assert all(word in body["messages"][0]["content"] for word in ("2+2?", "four", "4"))


def test_a_response_cannot_fill_in_the_template() -> None:
    with serving(lambda number, body: said("Score: 1")) as server:
        ask(server, "{answer} {prompt} {0} %s", template="<{response}>")
        assert server.requests[0][2]["messages"][0]["content"] == "<{answer} {prompt} {0} %s>"


def test_it_tries_again_and_the_last_answer_counts() -> None:
    replies: list[Reply] = [(500, b"oops", {}), (429, b"slow down", {"Retry-After": "0.01"}), said("Score: 10")]
    with serving(lambda number, body: replies[number]) as server:
        assert ask(server) == 1.0
        assert len(server.requests) == 3


@pytest.mark.parametrize(("status", "attempts"), [(503, 3), (401, 1), (404, 1)])
def test_it_gives_up_with_the_servers_words(status: int, attempts: int) -> None:
    with serving(lambda number, body: (status, b"because", {})) as server:
        with pytest.raises(EngineError, match=f"after {attempts} attempts?.*status {status}: because"):
            ask(server, retries=2)
        assert len(server.requests) == attempts


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((200, b"<html>", {}), "no chat completion"),
        ((200, b'{"choices": []}', {}), "no chat completion"),
        ((200, b'{"choices": 3}', {}), "no chat completion"),
        ((200, b"[]", {}), "no chat completion"),
        ((200, b"\xff\xfe", {}), "no chat completion"),
        (said(None), "NoneType for text"),
        (said("I would rather not"), "holds no score"),
        (said("Score: 11"), "score 11 is not between 0 and 10"),
        (said("Score: -1"), "score -1 is not between"),
        ((200, b"x" * (5 << 20), {}), "longer than"),
    ],
)
def test_odd_replies_are_errors_and_no_rewards(reply: Reply, words: str) -> None:
    with serving(lambda number, body: reply) as server, pytest.raises(DataError, match=words):
        ask(server)


def test_half_a_reply_is_asked_for_again() -> None:
    half = (200, b"{", {"Content-Length": "100", "Connection": "close"})
    with serving(lambda number, body: half if not number else said("Score: 5")) as server:
        assert ask(server, timeout_s=1.0) == 0.5


def test_a_server_that_hangs_is_left() -> None:
    release = threading.Event()

    def hang(number: int, body: dict[str, Any]) -> Reply:
        release.wait(20)
        return said("Score: 5")

    with serving(hang) as server:
        began = time.monotonic()
        with pytest.raises(EngineError, match="after 2 attempts.*timed out"):
            ask(server, timeout_s=0.2, retries=1)
        assert time.monotonic() - began < 10
        release.set()


def test_nobody_listens() -> None:
    with serving(lambda number, body: said("")) as server:
        url = server.url
    with pytest.raises(EngineError, match="did not answer after 2 attempts"):
        rewards.judge("r", "p", "a", model="m", url=url, retries=1, wait_s=0.01)


def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    with serving(lambda number, body: (401, b"bad key sk-secret", {})) as server:
        with pytest.raises(EngineError, match="bad key <key>") as caught:
            ask(server, key="JUDGE_KEY")
        assert server.requests[0][1]["Authorization"] == "Bearer sk-secret"
        assert "sk-secret" not in str(caught.value)
        call = rewards.judge.bind(model="m", url=server.url, key="JUDGE_KEY")
        assert "sk-secret" not in repr(call)
        with pytest.raises(EngineError):
            ask(server, key="NO_SUCH_VARIABLE")
        assert "Authorization" not in server.requests[1][1]


def test_rows_are_asked_side_by_side_but_no_more_than_told() -> None:
    def answer(number: int, body: dict[str, Any]) -> Reply:
        time.sleep(0.05)
        text = body["messages"][0]["content"]
        return (400, b"no", {}) if text == "bad" else said(f"Score: {text}")

    texts = ["1", "2", "bad", "4", "5", "6", "7", "8"]
    rows = RowBatch({"response": np.asarray(texts, dtype=object)}, {"response": fr.SAMPLE.str})
    with serving(answer) as server:
        call = rewards.judge.bind(model="m", url=server.url, template="{response}", concurrency=3, key=None)
        done = run_operator(call, rows)
        assert 1 < server.most_under_way <= 3
    np.testing.assert_allclose(done.rows["reward"], [0.1, 0.2, np.nan, 0.4, 0.5, 0.6, 0.7, 0.8], rtol=1e-6)
    assert done.failed == 1 and "status 400: no" in done.rows["row_error"][2]


def test_a_wait_that_is_no_number_is_not_waited_for() -> None:
    replies: list[Reply] = [(429, b"", {"Retry-After": "nan"}), said("Score: 10")]
    with serving(lambda number, body: replies[number]) as server:
        assert ask(server) == 1.0


def test_a_reply_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl_operators.rewards._judge.PATIENCE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def trickle() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.05)

        threading.Thread(target=trickle, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(EngineError, match="did not come to its end"):
            rewards.judge(
                "r", "p", "a", model="m", url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=0.5, retries=0
            )
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"low": 10.0},
        {"high": float("inf")},
        {"low": float("nan")},
        {"url": "localhost:8000"},
        {"url": "file:///etc/passwd"},
        {"retries": -1},
        {"concurrency": 0},
        {"timeout_s": 0.0},
        {"wait_s": float("nan")},
    ],
)
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rewards.judge"):
        rewards.judge("r", "p", "a", **{"model": "m", "url": "http://x", **wrong})
