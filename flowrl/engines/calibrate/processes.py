"""Starts one process for each device and waits for them: with a deadline, and none is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flowrl.engines.calibrate.worker import Job
from flowrl.errors import EngineError

MODULE = "flowrl.engines.calibrate.worker"
POLL_S = 0.1
END_S = 5.0
"""A process that was asked to end gets this long."""


@dataclass(frozen=True, slots=True)
class Results:
    """What the processes measured."""

    values: dict[str, list[Any]] = field(default_factory=dict)
    """Measurement -> the value of each process that has one, by rank."""
    errors: dict[str, str] = field(default_factory=dict)
    """Measurement -> why it failed, on the first rank where it did."""
    ended: str = ""
    """Why processes ended early; "" when none did."""


def run_workers(world: int, *, is_gpu: bool, quick: bool, deadline_s: float) -> Results:
    """Measure with one process for each of `world` devices.

    Raises `EngineError` with the end of the first process's output when no process measured anything.
    """
    with tempfile.TemporaryDirectory(prefix="flowrl-calibrate-") as folder:
        jobs = [Job(rank, world, folder, is_gpu, quick, wait_s=deadline_s / 2) for rank in range(world)]
        ended = run_processes(MODULE, [json.dumps(asdict(job)) for job in jobs], Path(folder), deadline_s)
        results = read(Path(folder), world, ended)
        if "device" not in results.values:
            output = (Path(folder) / "0.err").read_text(encoding="utf-8", errors="replace").strip()
            raise EngineError(f"calibration measured nothing: {ended or 'no process got as far'}\n{output[-2000:]}")
    return results


def run_processes(module: str, arguments: Sequence[str], folder: Path, deadline_s: float) -> str:
    """Run `python -m module ARGUMENT` for each argument at the same time, until all have ended, one has failed or it is late.

    What the i-th prints is in `i.err` of the folder. Returns why they ended early; "" when they did not. When this returns, or
    raises, none of them runs any more.
    """
    running: list[subprocess.Popen[bytes]] = []
    try:
        for index, argument in enumerate(arguments):
            running.append(_start(module, argument, folder / f"{index}.err"))
        return _wait(running, time.monotonic() + deadline_s, deadline_s)
    finally:
        _end(running)


def read(folder: Path, world: int, ended: str = "") -> Results:
    """The lines that processes wrote into a folder."""
    results = Results(ended=ended)
    for rank in range(world):
        path = folder / f"{rank}.jsonl"
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            line = json.loads(text)
            if "error" in line:
                results.errors.setdefault(line["name"], f"{line['error']} (process {rank})")
            else:
                results.values.setdefault(line["name"], []).append(line["value"])
    return results


def _start(module: str, argument: str, printed: Path) -> subprocess.Popen[bytes]:
    paths = [path for path in sys.path if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.getcwd()])}
    with printed.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, argument],
            stdin=subprocess.PIPE,  # never written to: it closes when this process ends, however it ends
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _wait(running: list[subprocess.Popen[bytes]], until: float, deadline_s: float) -> str:
    """Until all have ended, one has failed, or it is too late. Returns why it ended early."""
    while True:
        codes = [one.poll() for one in running]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            return f"process {failed} ended with code {codes[failed]}"
        if None not in codes:
            return ""
        if time.monotonic() > until:
            return f"{deadline_s:g} s were over"
        pause()


def pause() -> None:
    """Between two looks at the processes."""
    time.sleep(POLL_S)


def _end(running: list[subprocess.Popen[bytes]]) -> None:
    for one in running:
        if one.stdin is not None:
            one.stdin.close()
        if one.poll() is None:
            one.terminate()
    for one in running:
        try:
            one.wait(END_S)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()
