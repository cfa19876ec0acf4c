"""The page of a run that goes on: what it gives, and that it gives nothing else to anybody else."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrl.runtime.rundir import RunDir
from flowrl.viz.run import serve
from flowrl.viz.run.serve import LiveView
from tests.null.viz.run_cases import as_bytes, plain_run, rows_of

WAIT_S = 30.0


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    return plain_run(tmp_path, steps=3)


@pytest.fixture
def live(folder: RunDir) -> Iterator[LiveView]:
    with running(folder) as view:
        yield view


class running:
    """A view that answers in a thread."""

    def __init__(self, folder: RunDir) -> None:
        self.view = LiveView(RunDir.open(folder.path), as_bytes)
        self.thread = threading.Thread(target=self.view.serve, daemon=True)

    def __enter__(self) -> LiveView:
        self.thread.start()
        return self.view

    def __exit__(self, *_: object) -> None:
        self.view.stop()
        self.thread.join(WAIT_S)
        self.view.__exit__(None, None, None)
        assert not self.thread.is_alive()


def ask(live: LiveView, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=WAIT_S)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=given)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def raw(live: LiveView, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", live.port), timeout=WAIT_S) as sock:
        sock.sendall(request)
        found = b""
        while part := sock.recv(65536):
            found += part
        return found


# ------------------------------------------------------------------------------------------------------- what it gives


def test_the_page_its_state_and_the_blocks(live: LiveView) -> None:
    root = f"/{live.token}/"
    status, headers, page = ask(live, root)
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8" and b"Run plain-1" in page
    status, _, state = ask(live, root + "state")
    assert status == 200 and json.loads(state)["status"] == "finished"
    index = json.loads(zlib.decompress(ask(live, root + "index/0")[2]))
    assert [chunk["step"] for chunk in index] == [0, 1, 2]
    assert json.loads(zlib.decompress(ask(live, root + "index/2")[2])) == index[2:]
    text = json.loads(zlib.decompress(ask(live, root + "text/1")[2]))
    assert "needle 1" in text["words"]["response"]
    assert ask(live, root + "tokens/1")[0] == 200


def test_every_answer_is_guarded(live: LiveView) -> None:
    for path in (f"/{live.token}/", f"/{live.token}/state", "/", "/nothing"):
        _, headers, _ = ask(live, path)
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers and "python" not in str(headers).lower()


def test_head_is_get_without_a_body(live: LiveView) -> None:
    status, headers, body = ask(live, f"/{live.token}/", "HEAD")
    assert status == 200 and body == b"" and int(headers["content-length"]) > 1000


# ------------------------------------------------------------------------------------------------------------- attacks


def test_it_listens_on_loopback_alone(live: LiveView) -> None:
    assert live._server.socket.getsockname()[0] == "127.0.0.1"
    assert live.url.startswith(f"http://127.0.0.1:{live.port}/") and len(live.token) >= 32


def test_tokens_differ(folder: RunDir) -> None:
    views = [LiveView(folder) for _ in range(3)]
    for view in views:
        view.__exit__(None, None, None)
    assert len({view.token for view in views}) == 3


def test_without_the_token_there_is_nothing(live: LiveView) -> None:
    wrong = ("", live.token[:-1], live.token + "a", live.token.swapcase(), "a" * len(live.token), "../" + live.token)
    answers = set()
    for token in wrong:
        for rest in ("", "/", "/state", "/index/0", "/text/0"):
            status, _, body = ask(live, f"/{token}{rest}")
            answers.add((status, body))
    answers.add(ask(live, f"/{live.token}/nothing")[::2])
    assert answers == {(404, b"nothing here\n")}, "a wrong token and a path that is not there look alike"


@pytest.mark.parametrize(
    "rest",
    ["../run.json", "..%2frun.json", "%2e%2e/run.json", "run.json", "edges/", "edges/step_000000/group_norm.arrow",
     "text/../state", "text/", "text/-1", "text/1.0", "text/1e9",
     "text/99999999999999999999", "text/0/", "text/0?x=1", "state?x", "state/",
     "state#x", "text/%30", "text/٣", "tokens/0x0", "//state", "/etc/passwd", "text/0%00", "index/", ".", "..", "./state"],
)  # fmt: skip
def test_other_paths_are_nothing(live: LiveView, rest: str) -> None:
    answer = raw(live, f"GET /{live.token}/{rest} HTTP/1.1\r\nHost: 127.0.0.1:{live.port}\r\n\r\n".encode())
    assert answer.split(b" ")[1] in (b"404", b"400"), rest
    assert b"prompt" not in answer and b"pid" not in answer


def test_chunks_that_are_not_there(live: LiveView) -> None:
    assert ask(live, f"/{live.token}/text/3")[0] == 404
    assert ask(live, f"/{live.token}/tokens/999999999")[0] == 404
    assert json.loads(zlib.decompress(ask(live, f"/{live.token}/index/999999999")[2])) == []


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get", "X" * 500])
def test_it_can_only_be_read(live: LiveView, method: str) -> None:
    request = f"{method} /{live.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{live.port}\r\nContent-Length: 2\r\n\r\nhi".encode()
    answer = raw(live, request)
    assert answer.split(b" ")[1] == b"405" and b"curves" not in answer and method.encode() not in answer


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil.example:{port}", "[::1]:{port}",
             "localhost:{port}.evil.example", "", "0.0.0.0:{port}", "127.0.0.1:{port}@evil.example"],
)  # fmt: skip
def test_a_name_that_somebody_points_here_is_refused(live: LiveView, host: str) -> None:
    assert ask(live, f"/{live.token}/state", Host=host.format(port=live.port))[0] == 404


def test_no_host_and_two_hosts_are_refused(live: LiveView) -> None:
    line = f"GET /{live.token}/state HTTP/1.1\r\n"
    ours = f"Host: 127.0.0.1:{live.port}\r\n"
    for hosts in ("", f"{ours}Host: evil.example\r\n", f"{ours}{ours}"):
        assert raw(live, f"{line}{hosts}\r\n".encode()).split(b" ")[1] == b"404"
    assert raw(live, f"{line}{ours}\r\n".encode()).split(b" ")[1] == b"200"
    assert raw(live, f"{line}Host: LocalHost:{live.port}\r\n\r\n".encode()).split(b" ")[1] == b"200"


def test_requests_of_other_pages_are_refused(live: LiveView) -> None:
    for site in ("cross-site", "same-site", "anything"):
        assert ask(live, f"/{live.token}/state", Sec_Fetch_Site=site)[0] == 404
    for site in ("none", "same-origin"):
        assert ask(live, f"/{live.token}/state", Sec_Fetch_Site=site)[0] == 200


@pytest.mark.parametrize(
    "request_",
    [b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
     b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 300 + b"\r\n",
     b"GET / HTTP/1.1\r\n" + b"A" * 70_000 + b"\r\n\r\n", b"GET /<script>alert(1)</script> HTTP/1.1\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_request_is_survived_and_not_repeated(live: LiveView, request_: bytes) -> None:
    try:
        answer = raw(live, request_)
    except ConnectionError:  # it hung up before it had read all of it
        answer = b""
    assert b"200" not in answer[:20] and b"<script>" not in answer and b"aaaa" not in answer
    assert ask(live, f"/{live.token}/state")[0] == 200, "and it goes on"


def test_one_that_says_nothing_is_hung_up_on(live: LiveView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve._Handler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", live.port), timeout=WAIT_S) as sock:
        sock.sendall(b"GET /")
        assert sock.recv(100) == b"", "closed, without an answer"


def test_too_many_at_once_are_not_heard(live: LiveView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve._Handler, "timeout", None)  # so that nothing else closes a connection
    held = [socket.create_connection(("127.0.0.1", live.port), timeout=WAIT_S) for _ in range(serve.MOST_CONNECTIONS)]
    try:
        for sock in held:
            sock.sendall(b"GET /")
        with socket.create_connection(("127.0.0.1", live.port), timeout=WAIT_S) as more:
            try:
                assert more.recv(100) == b""
            except ConnectionResetError:  # the same, said harder
                pass
    finally:
        for sock in held:
            sock.close()


def test_a_run_that_was_removed_is_no_trace_of_code(live: LiveView, folder: RunDir) -> None:
    (folder.path / "run.json").unlink()
    status, _, body = ask(live, f"/{live.token}/")
    assert status == 503 and body == b"the run cannot be read just now\n"


# ------------------------------------------------------------------------------------------------------------ it lives


def test_rows_of_a_step_are_given_when_it_is_whole(tmp_path: Path) -> None:
    folder = RunDir.create(tmp_path, "going")
    folder.write_edge(0, "rollout", rows_of(["p"], [["a", "b"]]))
    folder.write_metrics(0, {"reward/mean": 0.5})
    folder.write_edge(1, "rollout", rows_of(["p"], [["c", "d"]]))
    with running(folder) as live:
        index = f"/{live.token}/index/0"
        before = json.loads(ask(live, f"/{live.token}/state")[2])["stamp"]
        assert len(json.loads(zlib.decompress(ask(live, index)[2]))) == 1, "the second step is not written to its end"
        folder.write_metrics(1, {"reward/mean": 0.75})
        assert json.loads(ask(live, f"/{live.token}/state")[2])["stamp"] != before
        assert len(json.loads(zlib.decompress(ask(live, index)[2]))) == 2
    folder.finish()


def test_a_page_follows_its_run(browser: Any, tmp_path: Path) -> None:
    folder = RunDir.create(tmp_path, "going")
    folder.write_info({"flow": "grpo", "steps": 3})
    folder.write_edge(0, "rollout", rows_of(["first prompt"], [["a", "b"]]))
    folder.write_metrics(0, {"reward/mean": 0.5})
    browser.go_offline(is_offline=False)
    with running(folder) as live:
        browser.open(live.url)
        browser.wait("document.querySelectorAll('#viewer .row').length === 2")
        assert "1 of 3" in browser.run("document.querySelector('header').innerText")
        folder.write_edge(1, "rollout", rows_of(["second prompt"], [["c", "d"]]))
        folder.write_metrics(1, {"reward/mean": 0.75})
        browser.wait("document.querySelectorAll('#viewer .row').length === 4")
        browser.wait("document.querySelector('header').innerText.includes('2 of 3')")
        browser.wait("document.getElementById('curves').innerText.includes('0.75')")
        origin = f"http://127.0.0.1:{live.port}/{live.token}/"
        assert browser.said == [] and all(url.startswith(origin) for url in browser.requests)
        browser.open("about:blank")
    folder.finish()
