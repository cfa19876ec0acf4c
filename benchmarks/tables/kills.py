"""A writer is killed in the middle of its work, again and again: what it had committed must be whole.

Each row carries a checksum of its other columns. The writer says after every append how many rows it has appended; after
the kill the table must have at least those, and every row it has must match its checksum.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

import flowrl as fr
from benchmarks.tables.handoff import WAIT_S
from benchmarks.tables.workload import GROUP

TYPES = {"checksum": fr.SAMPLE.i64}


@dataclass(slots=True)
class Killed:
    """What many kills did."""

    kills: int = 0
    rows: int = 0
    """Committed rows that were looked at."""
    corrupt: int = 0
    lost: int = 0
    """The most, in one kill, of rows that the writer was told are appended and that are not there."""


def _checksum(ids: np.ndarray, logprobs: np.ndarray) -> int:
    return zlib.crc32(logprobs.tobytes(), zlib.crc32(ids.tobytes()))


def _num_corrupt(rows: Any) -> int:
    """Rows of a batch that do not match their checksum."""
    found = zip(rows["response_ids"], rows["rollout_logprobs"], rows["checksum"].tolist(), strict=True)
    return sum(_checksum(ids, logprobs) != told for ids, logprobs, told in found)


def group(number: int, random: np.random.Generator) -> list[dict[str, Any]]:
    rows = []
    for sample in range(GROUP):
        length = int(random.integers(32, 2048))
        row: dict[str, Any] = {
            "prompt_ids": np.full(64, number + 1, np.int32),
            "response_ids": random.integers(1, 32_768, length).astype(np.int32),
            "rollout_logprobs": random.standard_normal(length).astype(np.float32),
            "sample_index": sample,
        }
        rows.append({**row, "checksum": _checksum(row["response_ids"], row["rollout_logprobs"])})
    return rows


def _write(table: Any, seed: int, told: Any) -> None:
    random = np.random.default_rng(seed)
    groups = [group(number, random) for number in range(64)]
    appended = 0
    while True:
        table.append(groups[appended // GROUP % len(groups)], TYPES)
        appended += GROUP
        told.send(appended)


def _last(heard: Any) -> int:
    """What the writer said last; it is dead, so the pipe ends."""
    last = 0
    while heard.poll(WAIT_S):
        try:
            last = heard.recv()
        except (EOFError, OSError):  # OSError: the kill cut a message in two
            return last
    raise SystemExit("the pipe of a killed writer did not end")


def once(killed: Killed, seed: int) -> None:
    """One writer, killed after 5 to 60 ms of appending."""
    context = multiprocessing.get_context("forkserver")
    random = np.random.default_rng(seed)
    heard, told = context.Pipe(duplex=False)
    with fr.ExperienceTable() as table:
        process = context.Process(target=_write, args=(table, seed, told))
        process.start()
        told.close()
        if not heard.poll(WAIT_S):
            raise SystemExit(f"the writer that was to be killed appended nothing within {WAIT_S:.0f} s")
        time.sleep(float(random.uniform(0.005, 0.06)))
        os.kill(process.pid, signal.SIGKILL)
        process.join(WAIT_S)
        acknowledged, have = _last(heard), len(table)
        killed.kills += 1
        killed.rows += have
        killed.lost = max(killed.lost, acknowledged - have)
        killed.corrupt += sum(_num_corrupt(batch) for batch in table.scan())
        table.append(group(0, random), TYPES)  # and it can be written on
        if len(table) != have + GROUP:
            raise SystemExit(f"after a kill the table has {len(table)} rows where {have + GROUP} were appended")


def many(count: int) -> Killed:
    multiprocessing.set_forkserver_preload(["benchmarks.tables.kills"])
    killed = Killed()
    for seed in range(count):
        once(killed, seed)
    return killed
