"""Ranks on several hosts, which are parts of this one that share no memory: the numbers of one process, rows by Arrow Flight,
the first error of any rank, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.engines.launch import across, frames, hub as hubs
from flowrl.engines.launch.across import LOOPBACK, Across, address_towards, host_id, interface_of
from flowrl.engines.launch.board import GONE, Failure, RankFailed
from flowrl.engines.launch.folder import make_folder, remove_folder
from flowrl.engines.launch.hub import Hub, HubBoard
from flowrl.engines.launch.place import Place
from flowrl.engines.launch.spawn import run_job
from flowrl.errors import ConfigError, RunError, StoreError, WaitTimeout
from flowrl.runtime.ranks import segment
from flowrl.runtime.ranks.exchange import Exchange
from flowrl.runtime.rundir import RunDir
from flowrl.store.pages import FileServer, fetch

JOBS = Path(__file__).with_name("host_jobs.py")
NULL = JOBS.parents[1] / "null" / "runtime"
SLOW = pytest.mark.slow


# ------------------------------------------------------------------------------------------------------ a job of two hosts


class Hosts:
    """Four ranks in this process, on two hosts."""

    def __init__(self, host_of: tuple[int, ...] = (0, 0, 1, 1)) -> None:
        self.hub = Hub(len(host_of))
        self.folders = [make_folder() for _ in set(host_of)]
        self.across = Across(self.hub.address, self.hub.token, LOOPBACK, host_of)
        self.boards = [
            HubBoard(self.across, self.folders[host], rank, len(host_of)) for rank, host in enumerate(host_of)
        ]

    def close(self) -> None:
        for board in self.boards:
            board.close()
        self.hub.close()
        for folder in self.folders:
            remove_folder(folder)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.close()


def wait(board: Any, *keys: str, timeout_s: float = 0.05) -> list[bytes]:
    return board.get(list(keys), timeout_s=timeout_s, what=lambda missing: f"for {', '.join(missing)}")


def in_threads(*calls: Any) -> list[Any]:
    """What calls give that wait for each other."""
    found: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            found[index] = calls[index]()
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    return found


def test_a_message_is_there_for_all_hosts_until_it_is_dropped(hosts: Hosts) -> None:
    first, _, third, last = hosts.boards
    first.post("0/a/b", b"one")
    last.post("c", b"")
    assert wait(third, "0/a/b", "c", "0/a/b", timeout_s=60.0) == [b"one", b"", b"one"]
    first.drop(["0/a/b", "never"])
    first.post("later", b"")
    assert wait(third, "later", timeout_s=60.0) == [b""]
    last.at("step 3, at 'reward'")
    last.post("at", b"")
    wait(first, "at", timeout_s=60.0)
    with pytest.raises(WaitTimeout) as raised:
        wait(third, "0/a/b", "c")
    assert str(raised.value).startswith("rank 2 waited 0.05 s for 0/a/b; rank 0 has not begun, rank 1 has not begun, ")
    assert str(raised.value).endswith("rank 3 was last in step 3, at 'reward'")


def test_a_wait_ends_when_the_message_comes(hosts: Hosts) -> None:
    first, _, third, _ = hosts.boards
    found = in_threads(
        lambda: wait(third, "x", "y", timeout_s=60.0), lambda: (first.post("y", b"2"), first.post("x", b"1"))
    )
    assert found[0] == [b"1", b"2"]


def test_the_first_failure_ends_every_wait(hosts: Hosts) -> None:
    first = Failure.of(3, "step 0, at 'x'", ValueError("first\nand more"))
    found = in_threads(lambda: wait(hosts.boards[0], "x", timeout_s=60.0), lambda: hosts.boards[3].fail(first))
    assert isinstance(found[0], RankFailed) and found[1] == first == hosts.hub.failure()
    assert str(found[0]).startswith("rank 3 failed first, in step 0, at 'x': ValueError: first")
    assert "and more" in found[0].failure.text
    assert hosts.boards[1].fail(Failure.of(1, "", ValueError("second"))) == first
    assert hubs.tell(hosts.across, Failure.of(2, "", ValueError("third"))) == first


def test_an_interrupt_is_one_everywhere(hosts: Hosts) -> None:
    hosts.hub.fail(Failure(0, "", "KeyboardInterrupt: the launcher was interrupted"))
    with pytest.raises(KeyboardInterrupt):
        wait(hosts.boards[2], "x", timeout_s=60.0)


def test_a_rank_that_is_gone_without_a_word_ends_a_wait(hosts: Hosts) -> None:
    hosts.boards[3].at("step 1, at 'rollout'")
    hosts.boards[3].post("at", b"")
    wait(hosts.boards[0], "at", timeout_s=60.0)
    hosts.boards[3]._sock.shutdown(socket.SHUT_RDWR)  # as the end of its process does
    with pytest.raises(RankFailed, match="rank 3 failed first, in step 1, at 'rollout': its process is gone"):
        wait(hosts.boards[0], "x", timeout_s=60.0)


def test_a_rank_that_has_ended_is_not_missed(hosts: Hosts) -> None:
    hosts.boards[3].close()
    with pytest.raises(WaitTimeout):
        wait(hosts.boards[0], "x", timeout_s=0.3)
    assert hosts.hub.failure() is None


def test_the_end_of_the_hub_ends_every_wait(hosts: Hosts) -> None:
    hosts.hub.close()
    with pytest.raises(
        RunError, match="the job's board at 127.0.0.1:[0-9]+ has gone: whoever started the ranks has ended"
    ):
        wait(hosts.boards[0], "x", timeout_s=60.0)


def test_the_end_of_the_rank_that_holds_the_hub_is_its_failure() -> None:
    hub, folder = Hub(2), make_folder()
    across = Across(hub.address, hub.token, LOOPBACK, (0, 1), keeper=0)
    board = HubBoard(across, folder, 1, 2)
    hub.close()
    with pytest.raises(RankFailed) as raised:
        wait(board, "x", timeout_s=60.0)
    assert raised.value.failure == Failure(0, "", GONE)
    board.close()
    remove_folder(folder)


def test_who_does_not_know_the_token_is_let_in_nowhere(hosts: Hosts, tmp_path: Path) -> None:
    wrong = Across(hosts.across.hub, "guessed", LOOPBACK, hosts.across.host_of)
    with pytest.raises(RunError, match="cannot be reached"):
        HubBoard(wrong, hosts.folders[0], 0, 4)
    host, port = hosts.hub.address.split(":")
    with socket.create_connection((host, int(port))) as stranger:
        frames._exactly(stranger, 32)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
        with contextlib.suppress(ConnectionResetError):
            assert not stranger.recv(1)  # no word of the hub: the connection ends
    assert wait_all(hosts)  # the others go on


def wait_all(hosts: Hosts) -> bool:
    hosts.boards[0].post("still", b"here")
    return wait(hosts.boards[3], "still", timeout_s=60.0) == [b"here"]


def test_the_token_is_shown_nowhere() -> None:
    made = Across("10.0.0.1:1", "secret", "10.0.0.2", (0, 1))
    assert "secret" not in repr(made) and Across.from_text(made.to_text()) == made


# --------------------------------------------------------------------------------------------------------------------- rows


def test_parts_of_other_hosts_are_brought_once_to_each_host(hosts: Hosts) -> None:
    arrays = [{"x": np.arange(5) + 10 * rank, "y": np.full((rank, 3), rank, np.float32)} for rank in range(4)]

    def share(rank: int) -> Any:
        exchange = Exchange(hosts.boards[rank], 60.0)
        whole = exchange.share("k", (0, 1, 2, 3), (arrays[rank], rank), "rows")
        return whole, exchange.num_bytes

    found = in_threads(*(lambda rank=rank: share(rank) for rank in range(4)))
    expected = {name: np.concatenate([one[name] for one in arrays]) for name in ("x", "y")}
    own = [sum(array.nbytes for array in one.values()) for one in arrays]
    for whole, _ in found:
        assert whole.said == (0, 1, 2, 3)
        for name, value in expected.items():
            np.testing.assert_array_equal(whole.arrays[name], value)
    more = [num_bytes - mine for (_, num_bytes), mine in zip(found, own, strict=True)]
    assert sorted(more[:2]) == [0, own[2] + own[3]] and sorted(more[2:]) == [0, own[0] + own[1]]


def test_a_rank_that_only_reads_gets_rows_of_another_host(hosts: Hosts) -> None:
    made = {"x": np.arange(1000)}
    calls = [lambda: Exchange(hosts.boards[0], 60.0).share("k", (0,), (made, "note"), "rows")]
    calls += [lambda rank=rank: Exchange(hosts.boards[rank], 60.0).share("k", (0,), None, "rows") for rank in (2, 3)]
    for whole in in_threads(*calls):
        assert whole.said == ("note",) and np.array_equal(whole.arrays["x"], made["x"])
    assert not whole.arrays["x"].flags.writeable


def test_nothing_is_brought_where_there_is_nothing(hosts: Hosts) -> None:
    empty = {"x": np.zeros(0, np.int64)}
    calls = [lambda: Exchange(hosts.boards[0], 60.0).share("k", (0,), (empty, None), "rows")]
    calls += [lambda: Exchange(hosts.boards[2], 60.0).share("k", (0,), None, "rows")]
    assert [len(whole.arrays["x"]) for whole in in_threads(*calls)] == [0, 0]


def test_a_host_that_does_not_give_its_rows_is_named(hosts: Hosts) -> None:
    hosts.boards[0]._server.close()
    made = {"x": np.arange(10)}
    in_threads(lambda: Exchange(hosts.boards[0], 60.0).share("k", (0,), (made, None), "the rows"))
    with pytest.raises(StoreError, match="k.rows' did not come from grpc://127.0.0.1"):
        Exchange(hosts.boards[2], 60.0).share("k", (0,), None, "the rows")


def test_pieces_of_a_part_are_where_it_was_written() -> None:
    parts = [{"x": np.arange(3, dtype=np.int16)}, {"x": np.zeros(0, np.int16)}, {"x": np.arange(2, dtype=np.int16)}]
    placing = segment.placing_of([segment.sizes_of(one) for one in parts])
    assert [segment.pieces(placing, part) for part in range(3)] == [[(0, 6)], [], [(6, 10)]]


def test_files_are_served_to_who_has_the_token_and_no_others_are(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 255, 40 << 20).astype(np.uint8)  # more than one message
    (tmp_path / "a.rows").write_bytes(data.tobytes())
    (tmp_path / "secret").write_bytes(b"x")
    memory = bytearray(len(data))
    ranges = [(3, 7), (100, len(data))]
    with FileServer(tmp_path, LOOPBACK, "the-token") as server:
        assert fetch(server.uri, "the-token", "a.rows", ranges, memory, timeout_s=60.0) == sum(b - a for a, b in ranges)
        expected = np.zeros_like(data)
        for first, stop in ranges:
            expected[first:stop] = data[first:stop]
        assert np.array_equal(np.frombuffer(memory, np.uint8), expected)
        for token, name, first, why in (
            ("another-one", "a.rows", 0, "the token is another one"),
            ("the-token", "secret", 0, "no file 'secret' is served"),
            ("the-token", "../a.rows", 0, "no file '../a.rows' is served"),
            ("the-token", "b.rows", 0, "'b.rows' has gone"),
            ("the-token", "a.rows", 1 << 30, "bytes"),
        ):
            with pytest.raises(StoreError, match=why):
                fetch(server.uri, token, name, [(first, first + 1)], memory, timeout_s=60.0)
    with pytest.raises(StoreError, match="did not come"):
        fetch(server.uri, "the-token", "a.rows", [(0, 1)], memory, timeout_s=60.0)
    with pytest.raises(StoreError, match="is that an address of this host"):
        FileServer(tmp_path, "192.0.2.77", "the-token")


# ------------------------------------------------------------------------------------------------------------------- places


def test_a_host_is_what_shares_memory_and_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert host_id({}) == host_id({})
    assert host_id({"FLOWRL_HOST": "left"}) == "left"
    mine = host_id({})
    monkeypatch.setattr(across, "_MEMORY", tmp_path)
    assert host_id({}) != mine


def test_an_address_is_the_one_on_the_way() -> None:
    assert address_towards(LOOPBACK, {}) == LOOPBACK and interface_of(LOOPBACK) == "lo"
    assert address_towards("nowhere.invalid", {"FLOWRL_ADDRESS": "10.9.8.7"}) == "10.9.8.7"
    with pytest.raises(ConfigError, match="no way from .* to nowhere.invalid.*FLOWRL_ADDRESS"):
        address_towards("nowhere.invalid", {})


def test_a_rank_is_told_where_it_is() -> None:
    whole = Across("10.0.0.1:1", "t", "10.0.0.2", (0, 0, 1))
    told = Place(2, 3, "/dev/shm/x", whole).environment()
    assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("0", "1") and Place.of(told) == Place(
        2, 3, "/dev/shm/x", whole
    )
    alone = Place(1, 3, "/dev/shm/x").environment()
    assert (alone["LOCAL_RANK"], alone["LOCAL_WORLD_SIZE"]) == ("1", "3") and Place.of(alone).across is None


def test_ranks_are_on_hosts_in_equal_parts() -> None:
    with pytest.raises(ConfigError, match="found 3 hosts"):
        run_job("x:y", {}, 4, hosts=3)


# --------------------------------------------------------------------------------------------------------------- whole runs


def test_two_hosts_give_what_one_process_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(NULL))
    import rank_jobs

    flows, shapes = ["ppo", "dapo"], ["together", "scattered"]
    run_job(f"{JOBS}:every_flow", {"folder": str(tmp_path), "flows": flows, "shapes": shapes}, 4, hosts=2)
    monkeypatch.setattr(
        "flowrl_operators.rewards.math.function", lambda response, answer, **_: float(answer in response)
    )
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for name in flows:
        with rank_jobs.local(name) as run:
            expected = json.loads(json.dumps({"numbers": rank_jobs.numbers(run), "weights": rank_jobs.weights(run)}))
        for shape in shapes:
            assert ranks[0][f"{shape} {name}"]["numbers"] == expected["numbers"], (shape, name)
            for rank in ranks:
                for model, value in rank[f"{shape} {name}"]["weights"].items():
                    assert value == expected["weights"][model], (shape, name, model)


def test_rows_cross_once_and_are_freed(tmp_path: Path) -> None:
    run_job(f"{JOBS}:counts", {"folder": str(tmp_path)}, 4, hosts=2)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert found[0]["folder"] == found[1]["folder"] != found[2]["folder"] == found[3]["folder"]
    for mates, others in (((0, 1), {2, 3}), ((2, 3), {0, 1})):
        brought = [one for rank in mates for one in found[rank]["brought"]]
        assert brought and all(set(ranks) <= others and num_bytes > 0 for ranks, num_bytes in brought)
    for one in found:
        assert one["left"] == [] and not Path(one["folder"]).exists()


def test_a_folder_that_the_other_host_does_not_see(tmp_path: Path) -> None:
    run_job(f"{JOBS}:apart", {"folder": str(tmp_path)}, 2, hosts=2)
    path = Path(json.loads((tmp_path / "where.json").read_text()))
    events = [json.loads(line) for line in (path / "trace.jsonl").read_text().splitlines()]
    assert {event["attributes"]["rank"] for event in events} == {0, 1}
    assert not (path / "ranks").exists()


def failure(folder: Path, entry: str, **said: Any) -> str:
    with pytest.raises(RunError) as raised:
        run_job(f"{JOBS}:{entry}", {"folder": str(folder), "timeout_s": 60.0, **said}, 4, hosts=2)
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("pid.*"))]
    assert len(found) == 4
    for pid, job in found:
        assert not Path(job).exists()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return str(raised.value)


@pytest.mark.parametrize(("how", "rank"), [("raise", 3), ("kill", 2), pytest.param("kill", 0, marks=SLOW)])
def test_a_rank_of_another_host_that_fails_ends_the_run(tmp_path: Path, how: str, rank: int) -> None:
    text = failure(tmp_path, "fails", how=how, rank=rank)
    first = "OperatorError: operator 'troubled'" if how == "raise" else "its process "
    assert text.startswith(f"rank {rank} failed first, in step 1, at 'troubled': {first}")
    run = RunDir.open(tmp_path / "runs" / "rewarded-1")
    if rank != 0:  # else nobody was left to write it
        assert run.status == "failed" and f"rank {rank} failed first" in run.info["error"]
    assert [row["step"] for row in run.metrics()] == [0]


@SLOW
def test_a_rank_of_another_host_that_stands_still(tmp_path: Path) -> None:
    text = failure(tmp_path, "fails", how="stall", rank=3, timeout_s=2.0)
    assert "waited 2 s in step 1 for what 'troubled' writes from rank 3" in text
    assert "rank 3 was last in step 1, at 'troubled'" in text
