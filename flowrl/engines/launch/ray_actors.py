"""What runs on each node of a Ray job: a process for each rank, and one that stays beside them.

    host            makes the job's folder in shared memory, passes on what ranks print, sees their processes end, tidies up;
                    on the first of several nodes it holds the hub
      rank 0 .. n-1  the same rank function as with any other launcher, in the actor's own process and main thread

Plain classes, which `flowrl.engines.launch.ray_job` makes actors of.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.engines.launch.board import Failure
from flowrl.engines.launch.folder import FolderWord, make_folder, remove_folder
from flowrl.engines.launch.hub import Hub
from flowrl.engines.launch.worker import attempt
from flowrl.errors import ConfigError
from flowrl.store import folders

VISIBLE = "CUDA_VISIBLE_DEVICES"
READ_BYTES = 1 << 20
"""Most that is passed on of one stream at once."""


@dataclass(frozen=True, slots=True)
class Where:
    """What ranks of a job have in common on their node."""

    folder: str
    """Of the job, in shared memory."""
    logs: str
    """Where each rank's output goes."""
    port: int
    """Free at that moment, for MASTER_PORT."""
    hub: str = ""
    """Address of the job's hub, where this process holds it."""
    token: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """Some of what a rank has printed, in whole lines."""

    rank: int
    is_error: bool
    text: str


class RankActor:
    """One rank. Its process is the rank's, and ends with it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:
        return f"rank {self._rank}"

    def devices(self) -> str:
        """What Ray has given this rank of the node's GPUs: their ids, with commas; "" for none."""
        return os.environ.get(VISIBLE, "")

    def begin(self, environment: Mapping[str, str], paths: Sequence[str], cwd: str, logs: str) -> int:
        """Take on the environment of a rank; the id of its process.

        Errors: ConfigError when this node lacks the folder that the run was started in.
        """
        os.environ.update(environment)
        sys.path[:] = list(dict.fromkeys([*sys.path, *paths]))
        try:
            os.chdir(cwd)
        except OSError as error:
            raise ConfigError(
                f"rank {self._rank} on {socket.gethostname()} cannot work in {cwd}, where the run was started: {error.strerror}; "
                "start it in a folder that all nodes share"
            ) from error
        for number, name in ((1, "out"), (2, "err")):
            opened = os.open(_log(logs, self._rank, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(opened, number)  # for children and for what is written in C, too
            os.close(opened)
        sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        return os.getpid()

    def run(self, entry: str, argument: Any) -> int:
        """Call the rank function; 0 when it ended well. What went wrong is in the job's folder."""
        code = attempt(entry, argument)
        sys.stdout.flush()
        sys.stderr.flush()
        return code


class HostActor:
    """Beside the ranks of a node. Does none of their work."""

    def __init__(self, ranks: Sequence[int], address: str, hub_of: int = 0) -> None:
        """Args:
        ranks: that are on this node.
        address: of this node, for the others.
        hub_of: size of the job whose hub this one is to hold; 0: none.
        """
        self._folder = make_folder()
        self._address = address
        self._word: FolderWord | Hub = Hub(hub_of, host=address) if hub_of else FolderWord(self._folder)
        self._logs = tempfile.mkdtemp(prefix="flowrl-ranks-")
        self._processes: dict[int, int] = {}
        """Rank -> descriptor of its process: never that of another which got its id later."""
        self._streams: dict[tuple[int, bool], int] = {}
        for rank in ranks:
            for name in ("out", "err"):
                opened = os.open(_log(self._logs, rank, name), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._streams[rank, name == "err"] = opened
        self._rest: dict[tuple[int, bool], bytes] = {}

    def where(self) -> Where:
        hub = (self._word.address, self._word.token) if isinstance(self._word, Hub) else ("", "")
        with socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET) as one:
            one.bind((self._address, 0))
            return Where(str(self._folder), self._logs, one.getsockname()[1], *hub)

    def watch(self, pids: Mapping[int, int]) -> list[int]:
        """All ranks have begun: hold on to their processes, and to nothing by name. Ranks whose process is gone already."""
        shutil.rmtree(
            self._logs, ignore_errors=True
        )  # they are read and written by descriptor: nothing can stay behind
        gone = []
        for rank, pid in pids.items():
            try:
                self._processes[rank] = os.pidfd_open(pid)
            except ProcessLookupError:
                gone.append(rank)
        return gone

    def said(self, *, is_all: bool = False) -> list[Said]:
        """What ranks have printed since the last call, in whole lines.

        Args:
            is_all: the rest, as nobody prints any more; a last line gets an end.
        """
        found = []
        for (rank, is_error), stream in self._streams.items():
            data = self._rest.pop((rank, is_error), b"") + os.read(stream, READ_BYTES)
            while is_all and (more := os.read(stream, READ_BYTES)):
                data += more
            if is_all and data and not data.endswith(b"\n"):
                data += b"\n"
            end = data.rfind(b"\n") + 1
            if end < len(data):
                self._rest[rank, is_error] = data[end:]
            if end:
                found.append(Said(rank, is_error, data[:end].decode("utf-8", "replace")))
        return found

    def fail(self, rank: int, error: str, text: str) -> None:
        """Tell the ranks that one of them is gone. Asked of the first host."""
        self._word.fail(Failure(rank, self._word.place_of(rank), error, text))

    def failure(self) -> Failure | None:
        """The first of the job. Asked of the first host."""
        return self._word.failure()

    def ended(self, timeout_s: float) -> list[int]:
        """Wait for the processes of all ranks, and kill those that are there after `timeout_s`: these ranks."""
        until = time.monotonic() + timeout_s
        left = self._alive(until)
        for rank in left:
            signal.pidfd_send_signal(self._processes[rank], signal.SIGKILL)
        self._alive(time.monotonic() + timeout_s)
        return left

    def close(self) -> None:
        """Give back what the job had on this node."""
        for opened in (*self._processes.values(), *self._streams.values()):
            os.close(opened)
        self._processes.clear()
        self._streams.clear()
        shutil.rmtree(self._logs, ignore_errors=True)
        self._word.close()
        remove_folder(self._folder)
        folders.reclaim_orphans()

    def _alive(self, until: float) -> list[int]:
        """Ranks whose process is there at a time (`time.monotonic`), or none as soon as all have ended."""
        poll = select.poll()
        left = {descriptor: rank for rank, descriptor in self._processes.items()}
        for descriptor in left:
            poll.register(descriptor, select.POLLIN)
        while left:
            ended = poll.poll(max(0.0, until - time.monotonic()) * 1000)
            for descriptor, _ in ended:
                poll.unregister(descriptor)
                del left[descriptor]
            if not ended:
                break
        return sorted(left.values())


def _log(folder: str, rank: int, name: str) -> Path:
    return Path(folder, f"{rank}.{name}")
