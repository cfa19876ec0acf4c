"""A table over the network: the same answers and the same errors as in the process, deadlines, and claims that come back."""

import gc
import json
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from flowrl.errors import ConfigError, DataError, SchemaError, StoreError, WaitTimeout
from flowrl.schema import PROMPT, SAMPLE, TOKEN
from flowrl.store import flight, interop, wire
from flowrl.store.flight import RemoteTable, TableServer, serve_table
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable
from tests.null.store.strategies import TYPES, row_lists

KINDS = {"prompt_id": PROMPT.str, "reward": SAMPLE.f32, "response_ids": TOKEN.i32}


def rows(count: int, start: int = 0, tokens: int = 3) -> RowBatch:
    numbers = range(start, start + count)
    return RowBatch(
        {
            "prompt_id": [f"p{i}" for i in numbers],
            "reward": [float(i) for i in numbers],
            "response_ids": [np.full(tokens, i, np.int32) for i in numbers],
        },
        KINDS,
    )


@pytest.fixture
def table() -> Iterator[Any]:
    with ExperienceTable(memory="private") as made:
        yield made


@pytest.fixture
def server(table: Any) -> Iterator[TableServer]:
    with serve_table(table) as made:
        yield made


@pytest.fixture
def remote(server: TableServer) -> Iterator[RemoteTable]:
    with RemoteTable(server.uri, server.token, timeout_s=20) as made:
        yield made


def soon(holds: Callable[[], bool], timeout_s: float = 15.0) -> bool:
    until = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


# ------------------------------------------------------------------------------------------------------ the same rows


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(row_lists, min_size=1, max_size=3), how=st.sampled_from(["batch", "arrow", "dicts"]))
def test_rows_go_and_come_as_they_are(parts: list[Any], how: str) -> None:
    batches = [RowBatch.from_rows(part, TYPES) for part in parts]
    with (
        ExperienceTable(memory="private") as table,
        serve_table(table) as server,
        RemoteTable(server.uri, server.token) as remote,
    ):
        first = 0
        for part, batch in zip(parts, batches, strict=True):
            given_rows = {"batch": batch, "arrow": batch.to_arrow(), "dicts": part}[how]
            if how == "dicts" and not part:
                continue
            assert remote.append(given_rows, TYPES) == range(first, first + len(batch))
            first += len(batch)
        expected = RowBatch.concat(batches)
        if how == "dicts" and not first:
            return
        assert (len(remote), remote.appended, remote.evicted) == (first, first, 0)
        assert remote.schema == table.schema and remote.columns == table.columns
        assert remote.batch().equals(expected)
        assert remote.batch(["count", "prompt_id"]).equals(expected.select(["count", "prompt_id"]))
        order = np.arange(first)[::-1]
        assert remote.take(order).equals(expected.take(order))
        scanned = list(remote.scan())
        assert (RowBatch.concat(scanned).equals(expected)) if scanned else first == 0


def test_columns_come_later(remote: RemoteTable, table: Any) -> None:
    remote.append(rows(3))
    remote.add_column("advantage", [0.5, 1.5, 2.5], SAMPLE.f32)
    assert table["advantage"].tolist() == [0.5, 1.5, 2.5]
    assert remote.take([1], ["advantage"]).to_pylist() == [{"advantage": 1.5}]
    remote.add_column("judged", None, SAMPLE.bool)
    assert remote.append([{"prompt_id": "p3", "reward": 3.0, "response_ids": [1], "advantage": 9.0}]) == range(3, 4)
    assert remote.fill("judged", [2, 0], [True, False]) == 2
    assert remote.claim("trainer", 9, ["judged"]).numbers.tolist() == [0, 2]


def test_numbers_are_where_their_dtype_asks_for(remote: RemoteTable) -> None:
    remote.append(rows(3, tokens=1))
    for found in (remote.take([0, 1]), remote.batch(), *remote.scan()):
        arrays = [found["reward"], found["response_ids"].values, found["response_ids"].offsets]
        assert all(array.flags.aligned and not array.flags.writeable for array in arrays)


def test_large_answers_come_in_pages(remote: RemoteTable, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PAGE_BYTES", 2000)
    table.append(rows(700))
    asked: list[str] = []
    client = remote._client

    class Counting:
        def do_get(self, ticket: Any, options: Any) -> Any:
            asked.append(json.loads(ticket.ticket)["call"])
            return client.do_get(ticket, options)

        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

    remote._client = Counting()
    order = np.random.default_rng(0).permutation(700)
    assert remote.take(order).equals(table.take(order))
    assert asked[0] == "take" and asked.count("more") > 5
    assert remote.batch().equals(table.batch())
    with remote.claim("trainer", 700) as claim:
        assert claim.batch().equals(table.batch())
    asked.clear()
    scan = remote.scan()
    next(scan)
    assert asked == ["scan"], "the rest is asked for when it is wanted"


def test_a_scan_is_of_the_table_as_it_was(remote: RemoteTable, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PAGE_BYTES", 2000)
    table.append(rows(400))
    scan = remote.scan(["reward"])
    first = next(scan)
    table.append(rows(400, 400))
    assert RowBatch.concat([first, *scan])["reward"].tolist() == [float(i) for i in range(400)]


def test_a_scan_left_early_is_forgotten_by_the_server(
    server: TableServer, remote: RemoteTable, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PAGE_BYTES", 2000)
    table.append(rows(400))
    scan = remote.scan()
    next(scan)
    (client,) = server._clients._known.values()
    assert len(client.pages) == 1
    scan.close()
    remote._renew()
    assert client.pages == {}


def test_an_answer_that_is_never_read_is_forgotten_by_the_server(
    server: TableServer, remote: RemoteTable, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PAGE_BYTES", 2000)
    table.append(rows(600))
    remote.claim("trainer", 200).done()
    remote.claim("trainer", 200).release()
    remote.claim("judge", 600)
    remote.scan()
    (client,) = server._clients._known.values()
    assert len(client.pages) == 4
    gc.collect()
    remote._renew()
    assert client.pages == {} and client.claims == {}
    assert remote._open == 0, "the heartbeat has nothing to keep"


def test_a_claim_may_be_read_after_it_is_done(
    server: TableServer, remote: RemoteTable, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PAGE_BYTES", 2000)
    table.append(rows(300))
    claim = remote.claim("trainer", 300)
    claim.done()
    remote._renew()
    assert claim.batch().equals(table.batch())
    assert remote._open == 0


def test_the_rest_of_an_answer_given_up_early_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PAGE_BYTES", 2000)
    with Slow() as table, serve_table(table) as server, RemoteTable(server.uri, server.token, timeout_s=0.3) as remote:
        table.append(rows(400))
        with pytest.raises(WaitTimeout):
            remote.take(range(400))
        remote._renew()
        (client,) = server._clients._known.values()
        table.go.set()
        assert soon(lambda: server._clients.calls == 0)
        assert client.pages == {}


def test_rows_after_a_page_that_did_not_come_are_no_end(
    server: TableServer, remote: RemoteTable, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PAGE_BYTES", 2000)
    table.append(rows(400))
    claim, scan = remote.claim("trainer", 400), remote._scanned(None)
    client = remote._client

    class Silent:
        def do_get(self, ticket: Any, options: Any) -> Any:
            raise remote._flight.FlightTimedOutError("no answer")

        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

    remote._client = Silent()
    for read in (lambda: list(scan), claim.batch):
        with pytest.raises(WaitTimeout, match="'more' of the table"):
            read()
    remote._client = client
    for read in (lambda: next(scan), claim.batch):
        with pytest.raises(StoreError, match="the rest of these rows was given up when a page of them did not come"):
            read()
    claim.release()
    remote._renew()
    assert next(iter(server._clients._known.values())).pages == {}
    assert remote.claim("trainer", 400).batch().equals(table.batch())


def test_a_slice_travels_as_its_rows(table: Any) -> None:
    large = rows(1000, tokens=1000)
    message = wire.to_message([large.slice(10, 11)], {})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, message.schema) as writer:
        writer.write_table(message)
    assert sink.getvalue().size < 10_000 < large.nbytes
    with serve_table(table, request_bytes=20_000) as server, RemoteTable(server.uri, server.token) as remote:
        remote.append(large.slice(10, 11))
        assert remote.take([0]).equals(large.slice(10, 11))


def test_sizes_are_bounded(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_table(table, request_bytes=1 << 20) as server, RemoteTable(server.uri, server.token) as remote:
        with pytest.raises(DataError, match="'append' brought more than 1 MiB; send fewer rows at a time"):
            remote.append(rows(1000, tokens=30_000))
        assert len(remote) == 0
        remote.append(rows(10))
        monkeypatch.setattr(wire, "PAGE_BYTES", 100)
        monkeypatch.setattr(wire, "ROW_BYTES", 1000)
        with pytest.raises(DataError, match="a row has 0 MiB and at most 0 MiB travel in one"):
            remote.append(rows(2, tokens=1000))
        table.append(rows(1, tokens=1000))
        with pytest.raises(DataError, match="a row has 0 MiB"):
            remote.take([-1])
        assert remote.take([-1], ["reward"])["reward"].tolist() == [0.0]


def test_half_an_upload_changes_nothing(remote: RemoteTable, table: Any) -> None:
    """A client that is killed while it sends looks to Flight as if it had sent everything."""
    remote.append(rows(5))
    part = wire.to_arrow(rows(3))
    asked = remote._flight.FlightDescriptor.for_command(json.dumps({"call": "append", "num_rows": 9}).encode())
    writer, answers = remote._client.do_put(asked, part.schema, remote._options(10))
    writer.write_table(part)
    writer.done_writing()
    with pytest.raises(remote._flight.FlightServerError) as found:
        answers.read()
        writer.close()
    told = wire.from_failure(found.value.extra_info)
    assert isinstance(told, StoreError) and "was to bring 9 rows and brought 3; nothing was changed" in str(told)
    assert len(table) == 5


def test_other_tools_take_a_remote_table(remote: RemoteTable, tmp_path: Path) -> None:
    remote.append(rows(5))
    interop.to_parquet(remote, tmp_path / "rows.parquet")
    assert RowBatch.concat(list(interop.from_parquet(tmp_path / "rows.parquet"))).equals(rows(5))
    assert remote["reward"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert "reward" in remote and "rewrad" not in remote


# ------------------------------------------------------------------------------------------------------ the same errors

WRONG: dict[str, Callable[[Any], Any]] = {
    "a column is lacking": lambda t: t.append(rows(1).drop(["reward"])),
    "a column is unknown": lambda t: t.append(rows(1).with_column("odd", [1.0], SAMPLE.f32)),
    "a column has another type": lambda t: t.append(rows(1).with_column("reward", ["x"], SAMPLE.str)),
    "a dict lacks a column": lambda t: t.append([{"prompt_id": "a", "reward": 1.0}]),
    "a dict has an unknown column": lambda t: t.append([{"prompt_id": "a", "odd": 1.0}]),
    "a dict has a wrong value": lambda t: t.append([{"prompt_id": "a", "reward": "x", "response_ids": [1]}]),
    "no rows at all": lambda t: t.append({"prompt_id": "a"}),
    "a row that is not there": lambda t: t.take([99]),
    "a mask": lambda t: t.take([[True]]),
    "halves": lambda t: t.take([0.5]),
    "a column to read": lambda t: t.take([0], ["rewrad"]),
    "a column to scan": lambda t: t.scan(["rewrad"]),
    "a column that exists": lambda t: t.add_column("reward", [1.0, 2.0], SAMPLE.f32),
    "a column of another length": lambda t: t.add_column("odd", [1.0], SAMPLE.f32),
    "token columns of another length": lambda t: t.add_column("odd", [[1.0], [2.0]], TOKEN.f32),
    "a column to fill": lambda t: t.fill("odd", [0], [1.0]),
    "a row to fill that is not there": lambda t: t.fill("later", [99], [1.0]),
    "too few to fill": lambda t: t.fill("later", [0, 1], [1.0]),
    "a column that is filled": lambda t: t.fill("reward", [0], [1.0]),
    "a claim of no rows": lambda t: t.claim("trainer", 0),
    "a claim of an unknown column": lambda t: t.claim("trainer", 1, ["rewrad"]),
    "a claim of groups": lambda t: t.claim("trainer", 1, whole_groups=True),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_those_of_the_table(wrong: str, remote: RemoteTable, table: Any) -> None:
    table.append(rows(2))
    table.add_column("later", None, SAMPLE.f32)
    with pytest.raises(Exception) as here:
        WRONG[wrong](table)
    with pytest.raises(Exception) as there:
        WRONG[wrong](remote)
    assert (type(there.value), str(there.value)) == (type(here.value), str(here.value))
    assert len(remote) == 2


def test_errors_that_are_none_of_ours_and_long_ones(
    remote: RemoteTable, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    def talks(*_: object) -> None:
        raise DataError("row ä\n" * 5000)

    monkeypatch.setattr(table, "take", fails)
    with pytest.raises(StoreError, match="the server failed at 'take': ZeroDivisionError: by zero"):
        remote.take([0])
    monkeypatch.setattr(table, "take", talks)
    with pytest.raises(DataError, match="(?s)^row ä\nrow ä.*more characters\\)$"):
        remote.take([0])
    with pytest.raises(StoreError, match="the server knows no call '__init__'"):
        remote._ask("__init__")
    with pytest.raises(StoreError, match="the server failed at 'stats'"):
        remote._ask("stats", odd=1)


# ------------------------------------------------------------------------------------------------------ who may call


@pytest.mark.parametrize("token", ["", "another one"])
def test_a_wrong_token_is_refused(server: TableServer, token: str) -> None:
    with pytest.raises(StoreError, match=f"{server.uri} refuses the token"):
        RemoteTable(server.uri, token)


def test_tokens_are_fresh_and_needed_for_other_hosts(table: Any) -> None:
    with serve_table(table) as one, serve_table(table) as two:
        assert one.token != two.token and len(one.token) == 64
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.org"):
        with pytest.raises(ConfigError, match="with a token of yours only"):
            serve_table(table, host=host)
    with pytest.raises(ConfigError, match="at least 8 printable"):
        serve_table(table, token="short")
    with serve_table(table, host="0.0.0.0", token="a token of mine") as server:
        port = server.uri.rpartition(":")[2]
        assert len(RemoteTable(f"grpc://127.0.0.1:{port}", "a token of mine")) == 0


def test_what_serve_and_remote_table_refuse(table: Any, server: TableServer, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be served at 127.0.0.1"):
        serve_table(table, port=int(server.uri.rpartition(":")[2]))
    with pytest.raises(ConfigError, match="both tls_certificate and tls_key"):
        serve_table(table, tls_key=tmp_path / "key.pem")
    with pytest.raises(ConfigError, match="key.pem' cannot be read"):
        serve_table(table, tls_key=tmp_path / "key.pem", tls_certificate=tmp_path / "key.pem")
    with pytest.raises(ConfigError, match="lease_s above 0"):
        serve_table(table, lease_s=0)
    with pytest.raises(ConfigError, match="looks like grpc://10.0.0.1:4711; found 'localhost:12'"):
        RemoteTable("localhost:12", "token")
    with pytest.raises(ConfigError, match="printable ASCII"):
        RemoteTable(server.uri, "ä")
    with pytest.raises(ConfigError, match="timeout_s above 0"):
        RemoteTable(server.uri, server.token, timeout_s=0)


def test_with_tls(table: Any, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    with serve_table(table, host="localhost", tls_certificate=certificate, tls_key=key) as server:
        assert server.uri.startswith("grpc+tls://localhost:")
        with RemoteTable(server.uri, server.token, tls_certificate=certificate) as remote:
            remote.append(rows(2))
            assert remote.batch().equals(rows(2))
        with pytest.raises(StoreError, match="cannot be reached"):
            RemoteTable(server.uri, server.token, timeout_s=5)


def test_a_remote_table_can_be_sent_on(remote: RemoteTable) -> None:
    remote.append(rows(2))
    with pickle.loads(pickle.dumps(remote)) as other:
        assert len(other) == 2
        assert other._name != remote._name


def test_a_connection_does_not_survive_a_fork(remote: RemoteTable) -> None:
    remote._process += 1
    with pytest.raises(StoreError, match="does not survive a fork; open another RemoteTable"):
        len(remote)
    remote._process -= 1


# ----------------------------------------------------------------------------------------------------------- deadlines


class Slow(ExperienceTable):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(memory="private")
        self.go = threading.Event()

    def take(self, indices: Any, columns: Sequence[str] | None = None) -> RowBatch:
        assert self.go.wait(30)
        return super().take(indices, columns)


def test_a_call_without_an_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with Slow() as table, serve_table(table) as server, RemoteTable(server.uri, server.token, timeout_s=0.3) as remote:
        remote.append(rows(1))
        began = time.monotonic()
        with pytest.raises(WaitTimeout, match=f"'take' of the table at {server.uri} was not answered within 0.3 s"):
            remote.take([0])
        assert time.monotonic() - began < 5
        assert len(remote) == 1, "the connection is usable"
        with pytest.raises(WaitTimeout, match="still has 1 calls at work after 0.2 s"):
            server.close(timeout_s=0.2)
        table.go.set()


def test_a_server_that_is_gone_is_named(table: Any) -> None:
    server = serve_table(table)
    remote = RemoteTable(server.uri, server.token, timeout_s=5)
    server.close()
    server.close()
    for call in (lambda: len(remote), lambda: remote.append(rows(1)), lambda: remote.take([0]), remote.finish):
        with pytest.raises(
            StoreError, match=f"the table at {server.uri} failed: the server is gone or cannot be reached"
        ):
            call()
    with pytest.raises(StoreError, match=server.uri):
        RemoteTable(server.uri, server.token, timeout_s=5)
    remote.close()
    remote.close()
    with pytest.raises(StoreError, match="is closed; open another"):
        len(remote)


# -------------------------------------------------------------------------------------------------------------- claims


def test_a_claim_is_done_released_or_dropped(remote: RemoteTable, table: Any) -> None:
    table.append(rows(4))
    with remote.claim("trainer", 2, ["reward"]) as claim:
        assert claim.numbers.tolist() == [0, 1] and len(claim) == 2
        assert claim.batch()["reward"].tolist() == [0.0, 1.0]
    assert "ended" in repr(claim)
    with pytest.raises(StoreError, match="has ended already"):
        claim.done()
    with pytest.raises(ValueError, match="mine"), remote.claim("trainer", 2) as claim:
        raise ValueError("mine")
    claim = remote.claim("trainer", 1)
    assert claim.numbers.tolist() == [2]
    claim.release()
    claim = remote.claim("trainer", 1)
    assert claim.numbers.tolist() == [2]
    del claim
    remote._renew()
    claim = remote.claim("trainer", 9)
    assert claim.numbers.tolist() == [2, 3]
    claim.done()
    assert remote.claim("trainer", 1) is None
    assert table.claim("judge", 9).numbers.tolist() == [0, 1, 2, 3], "another node has its own"


def test_layouts_of_a_claim(remote: RemoteTable, table: Any) -> None:
    table.append(rows(2, tokens=2))
    claim = remote.claim("trainer", 2, ["response_ids"])
    assert claim.padded(multiple=4)["response_ids"].tolist() == [[0, 0, 0, 0], [1, 1, 0, 0]]
    assert claim.packed()["cu_seqlens"].tolist() == [0, 2, 4]


@pytest.mark.parametrize("layout", ["rows", "padded", "packed"])
def test_a_stream_is_that_of_the_table(remote: RemoteTable, table: Any, layout: str) -> None:
    table.append(rows(7))
    table.finish()
    here = list(table.stream("here", 3, columns=["response_ids"], layout=layout))
    there = list(remote.stream("there", 3, columns=["response_ids"], layout=layout))
    assert len(here) == len(there) == 3
    for a, b in zip(here, there, strict=True):
        assert list(a.keys() if isinstance(a, dict) else a.names) == list(b.keys() if isinstance(b, dict) else b.names)
        assert all(np.array_equal(a[name], b[name]) for name in b) if isinstance(b, dict) else a == b


def test_a_stream_takes_the_options_of_the_table(remote: RemoteTable, table: Any) -> None:
    torch = pytest.importorskip("torch")
    table.append(rows(5))
    options: dict[str, Any] = {
        "columns": ["response_ids"],
        "pad_multiple": 8,
        "ahead": 2,
        "device": "cpu",
        "timeout_s": 5,
    }
    table.finish()
    here, there = (list(t.stream(f"of {t!r}", 3, **options)) for t in (table, remote))
    assert [b["response_ids"].shape for b in there] == [(3, 8), (2, 8)]
    for a, b in zip(here, there, strict=True):
        assert list(a) == list(b)
        assert all(torch.equal(a[name], b[name]) for name in a)
    packed = next(remote.stream("packed", 5, columns=["response_ids"], layout="packed", device="cpu"))
    assert packed["cu_seqlens"].tolist() == [0, 3, 6, 9, 12, 15]


def test_a_stream_waits_for_enough_rows(remote: RemoteTable, table: Any) -> None:
    table.append(rows(3))
    with pytest.raises(WaitTimeout, match="waited 0.3 s for 4 rows"):
        next(remote.stream("trainer", 8, at_least=4, timeout_s=0.3))
    table.append(rows(1, 3))
    assert len(next(remote.stream("trainer", 8, at_least=4, layout="rows", timeout_s=5))) == 4


@pytest.mark.parametrize("options", [
    {"device": "nowhere"}, {"ahead": 0}, {"pad_multiple": 0}, {"pin": True}, {"device": "cpu", "layout": "rows"},
    {"device": "cpu"}, {"at_least": 9}, {"laout": "rows"},
], ids=str)  # fmt: skip
def test_options_that_a_stream_refuses_are_no_failure_of_the_server(
    options: dict[str, Any], remote: RemoteTable, table: Any
) -> None:
    table.append(rows(4))
    table.finish()
    with pytest.raises((ConfigError, TypeError)) as refused:
        next(remote.stream("trainer", 2, **options))
    assert "server" not in str(refused.value)
    assert table.claim("trainer", 9, wait_s=10).numbers.tolist() == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="unexpected keyword argument 'wait'"):
        remote.claim("trainer", 1, wait=3)
    with pytest.raises(ConfigError, match="claim needs wait_s in seconds"):
        remote.claim("trainer", 1, wait_s=float("inf"))


def test_a_claim_fills_and_is_done_in_one(remote: RemoteTable, table: Any) -> None:
    table.append(rows(3))
    table.add_column("score", None, SAMPLE.f32)
    table.add_column("marks", None, TOKEN.bool)
    table.fill("score", [1], [7.0])  # by a judge that died before it was done
    names = ["prompt_id", "response_ids"]
    with remote.claim("judge", 2, names) as claim:
        with pytest.raises(SchemaError, match="scroe"):
            claim.fill({"scroe": [1.0, 2.0]})
        with pytest.raises((SchemaError, DataError)):
            claim.fill({"score": [1.0]})
        assert claim.is_open
        claim.fill({"score": [1.0, 2.0], "marks": [[True] * 3, [False] * 3]})
        assert not claim.is_open
        with pytest.raises(StoreError, match="has ended already"):
            claim.fill({"score": [1.0, 2.0]})
    with remote.claim("judge", 9, names) as claim:
        assert claim.numbers.tolist() == [2]
        claim.fill({"score": [3.0], "marks": [[True] * 3]})
    assert table["score"].tolist() == [1.0, 7.0, 3.0], "what is there stays"
    assert table["marks"].values.tolist() == [True] * 3 + [False] * 3 + [True] * 3


def test_a_claim_that_is_gone_fills_nothing(remote: RemoteTable, server: TableServer, table: Any) -> None:
    table.append(rows(2))
    table.add_column("score", None, SAMPLE.f32)
    claim = remote.claim("judge", 2, ["prompt_id"])
    server._clients.leave(remote._name)  # what the end of a lease does
    with pytest.raises(StoreError, match="the claim is gone"):
        claim.fill({"score": [1.0, 2.0]})
    assert table.fill("score", [0, 1], [3.0, 4.0]) == 2


def test_a_fill_whose_answer_came_too_late_may_be_called_again(server: TableServer, table: Any) -> None:
    table.append(rows(2))
    table.add_column("score", None, SAMPLE.f32)
    go, calls, real = threading.Event(), [], table.claim

    class Late:
        def __init__(self, claim: Any) -> None:
            self.numbers, self.batch, self.release, self._claim = claim.numbers, claim.batch, claim.release, claim

        def fill(self, columns: Any) -> None:
            calls.append("fill")
            self._claim.fill(columns)
            assert go.wait(30)

    table.claim = lambda *args, **options: Late(real(*args, **options))
    with RemoteTable(server.uri, server.token, timeout_s=20) as remote:
        claim = remote.claim("judge", 2, ["prompt_id"])
        remote._type_of("score")  # asked for once
        remote.timeout_s = 0.3
        with pytest.raises(WaitTimeout, match="it may have been done or not"):
            claim.fill({"score": [1.0, 2.0]})
        assert claim.is_open
        go.set()
        remote.timeout_s = 20
        claim.fill({"score": [1.0, 2.0]})
    assert calls == ["fill"] and table["score"].tolist() == [1.0, 2.0]


def test_filling_again_keeps_what_is_there_when_told(remote: RemoteTable, table: Any) -> None:
    table.append(rows(2))
    remote.add_column("score", None, SAMPLE.f32)
    assert remote.fill("score", [0], [1.0]) == 1
    with pytest.raises(SchemaError, match="has a value of 'score' already"):
        remote.fill("score", [0, 1], [5.0, 6.0])
    assert remote.fill("score", [0, 1], [5.0, 6.0], keep_existing=True) == 1
    assert table["score"].tolist() == [1.0, 6.0]


def test_a_stream_left_early_gives_the_last_batch_back(remote: RemoteTable, table: Any) -> None:
    table.append(rows(7))
    for number, _ in enumerate(remote.stream("trainer", 2, timeout_s=10)):
        if number == 1:
            break
    held = table.claim("trainer", 9, wait_s=10)
    assert held.numbers.tolist() == [2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match="a layout is one of .*found 'paded'; did you mean 'padded'"):
        remote.stream("trainer", layout="paded")
    with pytest.raises(WaitTimeout, match="waited 0.3 s for 1 rows for node 'trainer'"):
        next(remote.stream("trainer", timeout_s=0.3))


def test_a_claim_waits_for_rows(remote: RemoteTable, table: Any) -> None:
    table.append(rows(1))
    remote.claim("trainer", 1).done()
    later = threading.Timer(0.7, table.append, [rows(1, 1)])
    later.start()
    began = time.monotonic()
    assert remote.claim("trainer", 1, wait_s=15).numbers.tolist() == [1]
    assert 0.4 < time.monotonic() - began < 10
    later.join(10)
    with pytest.raises(WaitTimeout, match="waited 0.7 s for 1 rows"):
        remote.claim("trainer", 1, wait_s=0.7)
    remote.claim("judge", 9).done()
    later = threading.Timer(0.2, remote.finish)
    later.start()
    assert remote.claim("judge", 1, wait_s=15) is None
    later.join(10)


def test_a_heartbeat_keeps_claims_and_silence_gives_them_back(table: Any) -> None:
    table.append(rows(4))
    with serve_table(table, lease_s=0.4) as server:
        awake = RemoteTable(server.uri, server.token)
        silent = RemoteTable(server.uri, server.token)
        kept, lost = awake.claim("trainer", 2), silent.claim("trainer", 2)
        silent._stop.set()
        back = table.claim("trainer", 2, wait_s=15)
        assert back.numbers.tolist() == lost.numbers.tolist() == [2, 3]
        time.sleep(1.0)
        assert table.claim("trainer", 2) is None
        kept.done()
        silent._stop.clear()
        with pytest.raises(StoreError, match="heard nothing of this client for 0.4 s and gave its rows back"):
            lost.done()
        back.done()


def test_a_client_that_is_killed_gives_its_claims_back(table: Any) -> None:
    table.append(rows(4))
    with serve_table(table, lease_s=1.0) as server:
        code = (
            "import sys, time\nfrom flowrl.store.flight import RemoteTable\n"
            "claim = RemoteTable(sys.argv[1], sys.argv[2]).claim('trainer', 3)\n"
            "print(len(claim), flush=True)\ntime.sleep(60)\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code, server.uri, server.token], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "3\n"
            time.sleep(2.0)
            held = table.claim("trainer", 4)
            assert held.numbers.tolist() == [3], "its heartbeat keeps them"
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait(20)
            child.stdout.close()
        assert table.claim("trainer", 4, wait_s=20).numbers.tolist() == [0, 1, 2]


def test_closing_either_side_gives_claims_back(table: Any) -> None:
    table.append(rows(4))
    server = serve_table(table)
    remote = RemoteTable(server.uri, server.token)
    other = RemoteTable(server.uri, server.token)
    first, second = remote.claim("trainer", 2), other.claim("trainer", 2)
    remote.close()
    held = table.claim("trainer", 9)
    assert held.numbers.tolist() == first.numbers.tolist()
    server.close()
    assert table.claim("trainer", 9).numbers.tolist() == second.numbers.tolist()
    other.close()


def test_a_claim_whose_answer_came_too_late_is_given_back(server: TableServer, table: Any) -> None:
    table.append(rows(2))
    go, real = threading.Event(), table.claim

    def slow(*args: Any, **options: Any) -> Any:
        assert go.wait(30)
        return real(*args, **options)

    with RemoteTable(server.uri, server.token, timeout_s=0.3) as remote:
        table.claim = slow
        with pytest.raises(WaitTimeout, match="'claim' of the table"):
            remote.claim("trainer", 2)
        remote._renew()
        go.set()
        del table.claim
        assert table.claim("trainer", 2, wait_s=15).numbers.tolist() == [0, 1]


def test_claims_that_fail_leave_nothing_behind(
    server: TableServer, remote: RemoteTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "_REMEMBERED", 3)
    for _ in range(10):
        with pytest.raises(WaitTimeout):
            remote.claim("trainer", 1, wait_s=0.001)
    remote._renew()
    (client,) = server._clients._known.values()
    kept = {name: len(getattr(client, name)) for name in client.__slots__ if hasattr(getattr(client, name), "__len__")}
    assert sum(kept.values()) <= 3, kept
    assert remote._open == 0


def test_done_may_be_called_again_while_the_first_call_is_at_work(server: TableServer, table: Any) -> None:
    table.append(rows(2))
    go, calls, real = threading.Event(), [], table.claim

    class Late:
        """A claim whose answer is late."""

        def __init__(self, claim: Any) -> None:
            self.numbers, self.batch, self.release, self._claim = claim.numbers, claim.batch, claim.release, claim

        def done(self) -> None:
            calls.append("done")
            self._claim.done()
            assert go.wait(30)

    table.claim = lambda *args, **options: Late(real(*args, **options))
    with RemoteTable(server.uri, server.token, timeout_s=0.3) as remote:
        claim = remote.claim("trainer", 2)
        with pytest.raises(WaitTimeout):
            claim.done()
        later = threading.Timer(0.4, go.set)
        later.start()
        remote.timeout_s = 20
        claim.done()
        later.join(10)
    assert calls == ["done"]


def test_done_that_failed_may_be_called_again(server: TableServer, table: Any) -> None:
    """The table's lock was not to be had, for one."""
    table.append(rows(2))
    real, failing = table.claim, [WaitTimeout("the lock is held")]

    class Failing:
        def __init__(self, claim: Any) -> None:
            self.numbers, self.batch, self.release, self._claim = claim.numbers, claim.batch, claim.release, claim

        def done(self) -> None:
            if failing:
                raise failing.pop()
            self._claim.done()

    table.claim = lambda *args, **options: Failing(real(*args, **options))
    with RemoteTable(server.uri, server.token, timeout_s=20) as remote:
        claim = remote.claim("trainer", 2)
        with pytest.raises(WaitTimeout, match="the lock is held"):
            claim.done()
        claim.done()
    assert real("trainer", 2) is None


def test_a_process_that_serves_may_end_without_closing(table: Any) -> None:
    code = (
        "import sys\nfrom flowrl.schema import PROMPT\nfrom flowrl.store.flight import serve_table\n"
        "from flowrl.store.table import ExperienceTable\ntable = ExperienceTable(memory='private')\n"
        "table.append([{'prompt_id': 'a'}])\nserver = serve_table(table)\nprint(server.uri, server.token, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdin is not None
    try:
        uri, token = child.stdout.readline().split()
        remote = RemoteTable(uri, token)
        remote.claim("trainer", 1).done()
        waiting = threading.Timer(0.5, child.stdin.write, ["\n"])
        waiting.start()
        closing = threading.Timer(0.6, child.stdin.close)
        closing.start()
        with pytest.raises(StoreError, match=uri):
            remote.claim("trainer", 1, wait_s=60)
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.wait(20)
        child.stdout.close()


def test_a_server_that_is_killed_leaves_its_claims_to_others() -> None:
    code = (
        "import sys, time\nfrom flowrl.store.flight import serve_table\nfrom flowrl.store.table import ExperienceTable\n"
        "server = serve_table(ExperienceTable.open(sys.argv[1]))\nprint(server.uri, server.token, flush=True)\ntime.sleep(60)\n"
    )
    with ExperienceTable() as table:
        table.append(rows(4))
        child = subprocess.Popen([sys.executable, "-c", code, table.name], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        try:
            uri, token = child.stdout.readline().split()
            remote = RemoteTable(uri, token, timeout_s=10)
            remote.append(rows(1, 4))
            claim = remote.claim("trainer", 3)
            assert claim.numbers.tolist() == [0, 1, 2]
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait(20)
            child.stdout.close()
        assert table.claim("trainer", 9, at_least=5, wait_s=20).numbers.tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(StoreError, match=f"'done' of the table at {uri} failed: the server is gone"):
            claim.done()


def test_a_server_that_closes_ends_the_waits_of_claims(table: Any) -> None:
    table.append(rows(1))
    server = serve_table(table)
    remote = RemoteTable(server.uri, server.token)
    remote.claim("trainer", 1).done()
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            remote.claim("trainer", 1, wait_s=60)
        except StoreError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert soon(lambda: server._clients.calls == 1)
    server.close(timeout_s=10)
    thread.join(10)
    assert not thread.is_alive() and len(failed) == 1


def test_many_consumers_have_each_row_once(server: TableServer, table: Any) -> None:
    seen: list[int] = []
    table.append(rows(1))

    def consume() -> None:
        with RemoteTable(server.uri, server.token) as remote:
            while (claim := remote.claim("trainer", 5, ["reward"], wait_s=20)) is not None:
                with claim:
                    seen.extend(claim.batch()["reward"].astype(int).tolist())

    consumers = [threading.Thread(target=consume) for _ in range(3)]
    for thread in consumers:
        thread.start()
    with RemoteTable(server.uri, server.token) as producer:
        for start in range(1, 100, 11):
            producer.append(rows(11, start))
        producer.finish()
    for thread in consumers:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(seen) == list(range(100))


def test_stats_are_those_of_the_table(remote: RemoteTable, table: Any) -> None:
    table.append(rows(5))
    there, here = remote.stats(), table.stats()
    assert there == here
    assert there.columns["reward"].type == "SAMPLE.f32"
