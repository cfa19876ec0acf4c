"""Starts the ranks of a job on this host, and ends them together: with the first error, and without leaving any behind.

launcher            waits for its processes by their descriptors; makes the job's folder, and removes it
  rank 0 .. n-1     python -m flowrl.engines.launch.worker; ends when the launcher does, however that ends
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowrl.engines.launch.across import LOOPBACK, Across
from flowrl.engines.launch.board import INTERRUPT, Failure
from flowrl.engines.launch.folder import FolderWord, make_folder, remove_folder
from flowrl.engines.launch.hub import Hub
from flowrl.engines.launch.place import Place
from flowrl.errors import ConfigError, RunError
from flowrl.store import folders

MODULE = "flowrl.engines.launch.worker"
GRACE_S = 5.0
"""From the first failure to the end of ranks that do not end by themselves; then they are killed after as long again."""


def run_job(
    entry: str,
    argument: Any,
    nproc: int,
    *,
    environment: Mapping[str, str] | None = None,
    grace_s: float = GRACE_S,
    hosts: int = 1,
) -> None:
    """Call the function `entry` with `argument` in `nproc` processes, each a rank of one job, and wait for them.

    Args:
        entry: `module:function` or `FILE.py:function`.
        argument: of JSON's types.
        environment: added to that of this process.
        hosts: more than 1 treats neighbouring ranks, in as many equal parts, as if they were on hosts of their own: no memory in
            common, rows by Arrow Flight, messages by the network. To try on one machine what a run on several does.

    Errors: RunError with the first error of any rank; KeyboardInterrupt when one was interrupted. No process, and nothing of the
    job in shared memory, is left.
    """
    if nproc < 1:
        raise ConfigError(f"a job has at least 1 process; found {nproc}")
    if hosts < 1 or nproc % hosts:
        raise ConfigError(f"{nproc} processes on hosts in equal parts: 1, or a divisor of {nproc}; found {hosts} hosts")
    with _ended_in_order():
        _run(entry, argument, nproc, environment or {}, grace_s, hosts)


def _run(entry: str, argument: Any, nproc: int, environment: Mapping[str, str], grace_s: float, hosts: int) -> None:
    folders_of = [make_folder() for _ in range(hosts)]
    running: list[subprocess.Popen[bytes]] = []
    word: FolderWord | Hub | None = None
    try:
        word = FolderWord(folders_of[0]) if hosts == 1 else Hub(nproc)
        for place in _places(nproc, folders_of, word):
            running.append(_start(entry, argument, place, environment))
        failure = _wait(running, word, grace_s)
    except KeyboardInterrupt:
        if word is not None:
            _let_end(running, word, grace_s)
        raise
    finally:
        _end(running, grace_s)
        if word is not None:
            word.close()
        for folder in folders_of:
            remove_folder(folder)
        folders.reclaim_orphans()
    if failure is not None and failure.is_interrupt:
        raise KeyboardInterrupt(f"rank {failure.rank} was interrupted")
    if failure is not None:
        raise RunError(failure.told())


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM ends the ranks, and gives back their memory, before it ends this process; where nobody else handles it."""
    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if is_ours:
        signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminated(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)
    print("error: ended by SIGTERM, and all ranks with it", file=sys.stderr, flush=True)
    raise SystemExit(128 + number)


def _places(nproc: int, folders_of: Sequence[Path], word: FolderWord | Hub) -> list[Place]:
    if isinstance(word, FolderWord):
        return [Place(rank, nproc, str(folders_of[0])) for rank in range(nproc)]
    host_of = tuple(rank * len(folders_of) // nproc for rank in range(nproc))
    across = Across(word.address, word.token, LOOPBACK, host_of)
    return [Place(rank, nproc, str(folders_of[host]), across) for rank, host in enumerate(host_of)]


def _start(entry: str, argument: Any, place: Place, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    added = place.environment()
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // place.world))}  # else each takes all processors
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, json.dumps({"entry": entry, "argument": argument})],
        stdin=subprocess.PIPE,  # never written to: it closes when this process ends, however it ends
        env={**threads, **os.environ, **environment, **added},
    )


def _wait(running: Sequence[subprocess.Popen[bytes]], word: FolderWord | Hub, grace_s: float) -> Failure | None:
    """Until all have ended, or some time after the first that failed."""
    until: float | None = None
    first: Failure | None = None
    codes: dict[int, int] = {}
    while len(codes) < len(running):
        left = [rank for rank in range(len(running)) if rank not in codes]
        for rank, code in _ended(
            [running[rank] for rank in left], left, None if until is None else until - time.monotonic()
        ):
            codes[rank] = code
            if code and until is None:
                until = time.monotonic() + grace_s
                first = word.fail(Failure(rank, word.place_of(rank), _how(code)))
        if until is not None and time.monotonic() >= until:
            break
    return word.failure() or first  # the folder of the job may have gone, and with it the word of why


def _let_end(running: Sequence[subprocess.Popen[bytes]], word: FolderWord | Hub, grace_s: float) -> None:
    """After Ctrl-C, which ranks hear as well: let them write what they have. Who did not hear it learns it from the board."""
    for until in (time.monotonic() + grace_s / 2, time.monotonic() + grace_s):
        while (left := [one for one in running if one.poll() is None]) and time.monotonic() < until:
            _ended(left, range(len(left)), until - time.monotonic())
        if left:
            word.fail(Failure(0, word.place_of(0), f"{INTERRUPT}: the launcher was interrupted"))


def _ended(
    running: Sequence[subprocess.Popen[bytes]], ranks: Sequence[int], timeout_s: float | None
) -> list[tuple[int, int]]:
    """(rank, exit code) of those that have ended, as soon as one has, or the time is over."""
    poll = select.poll()
    descriptors = [os.pidfd_open(one.pid) for one in running]
    try:
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)
        codes = [(rank, one.poll()) for rank, one in zip(ranks, running, strict=True)]
        return [(rank, code) for rank, code in codes if code is not None]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _how(code: int) -> str:
    if code >= 0:
        return f"its process ended with code {code}"
    known = {int(one): one.name for one in signal.Signals}
    name = known.get(-code, f"signal {-code}")
    memory = "; the kernel does this when memory runs out" if -code == signal.SIGKILL else ""
    return f"its process was ended by {name}{memory}"


def _end(running: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """End all that still run: asked first, then killed."""
    for one in running:
        if one.stdin is not None:
            one.stdin.close()
        if one.poll() is None:
            one.terminate()
    until = time.monotonic() + grace_s
    while (left := [one for one in running if one.poll() is None]) and time.monotonic() < until:
        _ended(left, range(len(left)), until - time.monotonic())
    for one in left:
        one.kill()
    for one in left:
        one.wait()
