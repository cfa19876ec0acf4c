"""Rows from one process to another: a list of dicts goes in, padded batches of 32 come out.

    this process                         the consumer (one process for all channels; an actor for Ray and TransferQueue)
    channel.put(256 rows)  -- x 16 -->   channel.batches(...)  counts rows; in the first round also checks their bytes
    at most 4 chunks are under way

A round is from the first `put` until the consumer has made its last batch. Rounds of all channels take turns.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.tables.padding import Batch, add, digest
from benchmarks.tables.workload import Workload

CHUNK, BATCH, AHEAD = 256, 32, 4
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Done:
    """What the consumer says at the end of a round."""

    at: float
    """`time.perf_counter()`: the same clock in every process of a machine."""
    rows: int
    digest: dict[str, int]


class Channel:
    """One way to hand rows over. The object is pickled to the consumer's process before anything is sent."""

    name = ""
    context = multiprocessing.get_context("spawn")

    def __init__(self) -> None:
        self.room = self.context.Semaphore(AHEAD)
        self.queue: Any = self.context.Queue()

    # ------------------------------------------------------------------------------------- in the process that makes rows

    def begin(self, names: Sequence[str], num_rows: int, *, check: bool) -> None:
        """Before the clock starts."""

    def put(self, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
        self.wait_for_room()
        self.queue.put(self.packed(rows, names))

    def packed(self, rows: list[dict[str, Any]], names: Sequence[str]) -> Any:
        """What is put into the queue."""
        return rows

    def finish(self) -> Done | None:
        """After the last put; None: the consumer's process answers."""
        return None

    def close(self) -> None:
        self.queue.close()

    def wait_for_room(self) -> None:
        if not self.room.acquire(timeout=WAIT_S):
            raise SystemExit(f"{self.name}: the consumer took no chunk for {WAIT_S:.0f} s")

    # -------------------------------------------------------------------------------------------- in the consumer's process

    def batches(self, names: Sequence[str], num_rows: int) -> Iterator[Batch]:
        got = 0
        while got < num_rows:
            for batch in self.unpacked(self.queue.get(timeout=WAIT_S), names):
                got += len(batch["response_ids"])
                yield batch
            self.room.release()

    def unpacked(self, chunk: Any, names: Sequence[str]) -> Iterator[Batch]:
        """Padded batches of one thing that was put."""
        raise NotImplementedError


def consume(batches: Iterator[Batch], names: Sequence[str], *, check: bool) -> Done:
    rows, found = 0, dict.fromkeys(names, 0)
    for batch in batches:
        rows += len(batch["response_ids"])
        if check:
            found = add(found, digest(batch, names))
    return Done(time.perf_counter(), rows, found)


def serve(channels: dict[str, Channel], commands: Any) -> None:
    """The consumer's process: a round for each command, until None."""
    torch.set_num_threads(1)
    while (command := commands.recv()) is not None:
        name, names, num_rows, check = command
        try:
            commands.send(("ready", None))
            commands.send(("done", consume(channels[name].batches(names, num_rows), names, check=check)))
        except Exception:  # what went wrong there is said here
            commands.send(("failed", traceback.format_exc()))


class Consumer:
    """The consumer's process, seen from here."""

    def __init__(self, channels: dict[str, Channel]) -> None:
        context = Channel.context
        self.commands, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(channels, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, name: str, names: Sequence[str], num_rows: int, *, check: bool) -> None:
        self.commands.send((name, tuple(names), num_rows, check))
        self.answer("ready")

    def answer(self, wanted: str) -> Any:
        if not self.commands.poll(WAIT_S):
            raise SystemExit(f"the consumer did not say '{wanted}' within {WAIT_S:.0f} s")
        said, what = self.commands.recv()
        if said != wanted:
            raise SystemExit(f"the consumer failed:\n{what}")
        return what

    def close(self) -> None:
        if self.process.is_alive():
            self.commands.send(None)
            self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


class Handoff:
    """All channels, and their consumers, over one workload."""

    def __init__(self, channels: Sequence[Channel], apart: Sequence[Channel] = ()) -> None:
        """Args: apart: channels that bring a consumer of their own."""
        self.channels = {channel.name: channel for channel in (*channels, *apart)}
        self.apart = {channel.name for channel in apart}
        self.consumer = Consumer({channel.name: channel for channel in channels})

    def round(
        self, name: str, chunks: list[list[dict[str, Any]]], names: Sequence[str], *, check: bool = False
    ) -> tuple[float, Done]:
        """(rows a second, what the consumer said)"""
        channel, num_rows = self.channels[name], sum(len(chunk) for chunk in chunks)
        channel.begin(names, num_rows, check=check)
        if name not in self.apart:
            self.consumer.begin(name, names, num_rows, check=check)
        start = time.perf_counter()
        for chunk in chunks:
            channel.put(chunk, names)
        done = channel.finish() or self.consumer.answer("done")
        if done.rows != num_rows:
            raise SystemExit(f"{name}: {done.rows} of {num_rows} rows came out")
        return num_rows / (done.at - start), done

    def close(self) -> None:
        self.consumer.close()
        for channel in self.channels.values():
            channel.close()


def chunks_of(workload: Workload, names: tuple[str, ...], num_rows: int) -> list[list[dict[str, Any]]]:
    return [workload.rows(names, first, min(first + CHUNK, num_rows)) for first in range(0, num_rows, CHUNK)]


def expected(chunks: list[list[dict[str, Any]]], names: Sequence[str]) -> dict[str, int]:
    """The digest of what went in."""
    found = dict.fromkeys(names, 0)
    for chunk in chunks:
        for row in chunk:
            found = add(found, digest({name: row[name][None] for name in names}, names))
    return found
