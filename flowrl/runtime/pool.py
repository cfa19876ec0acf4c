"""Worker processes for operators of one row: a row that hangs is killed, one that takes its process with it is flagged.

    parent                                         worker (one process, one row at a time)
    use(call)        ------- socket pair ------->  import the operator by name, check its hash
                     <------------------ ready     (from here on the clock of a row runs)
    row(i, values)   --------------------------->  function(*values, **config)
                     <-------- answer or error
    too late, gone, nonsense: kill the worker's process group, flag the row, start another

Workers stay warm between steps and runs; `close` (at exit at the latest) ends them. They are plain `python -c` processes and
not those of `multiprocessing` (nor of libraries on top of it), which run the user's script again in every worker: a
script without an `if __name__ == "__main__"` guard would start itself over and over. So a function has to be importable by
name; others raise `CannotRun`, and the caller runs them here.

A worker leads a session and a process group of its own: Ctrl-C reaches the parent alone, and killing a worker takes its
children along (unless they left its group). When the parent dies, even by SIGKILL, the kernel ends the workers: see `serve`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.errors import OperatorError, WaitTimeout
from flowrl.graph.code import resolve
from flowrl.graph.operators import Operator, OperatorCall
from flowrl.graph.values import thaw

START_S = 120.0
"""Seconds a new worker may take to import an operator."""
MAX_ANSWER_BYTES = 64 << 20
"""Largest pickled answer of one row."""
MAX_STARTS = 3
"""Workers of one call that may die before they are ready, after one of them was."""

_HEADER = struct.Struct("<Q")
_PLAIN = frozenset({float, int, bool, str, type(None)})
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from flowrl.runtime.pool import serve; "
    "serve(int(sys.argv[2]), int(sys.argv[3]))"
)


class CannotRun(Exception):
    """An operator cannot run in a worker: it is not importable by name there, or is another one."""


class WorkerDied(RuntimeError):
    """The process died while it worked on a row."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one row."""

    value: Any = None
    error: BaseException | None = None
    """What the function raised; WaitTimeout when it took too long, WorkerDied when its process died."""


def named_elsewhere(call: OperatorCall) -> bool:
    """Whether another process can import the operator by its name."""
    module, _, name = call.name.partition(":")
    return module not in ("__main__", "__mp_main__") and "<" not in name


class WorkerPool:
    """Runs operators of one row in worker processes."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._proven: set[bytes] = set()
        """Calls that some worker was ready for."""
        self._refused: dict[bytes, str] = {}
        """Calls that cannot run in a worker, and why."""
        self.pid = os.getpid()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are there."""
        return [worker.process.pid for worker in self._workers]

    def run(
        self, call: OperatorCall, rows: Sequence[Sequence[Any]], *, workers: int, timeout_s: float | None
    ) -> list[Outcome]:
        """The outcome of each row (the values of the columns read), in the order of the rows.

        Errors: CannotRun before any row ran; OperatorError when workers die again and again before they are ready.
        """
        if not rows:
            return []
        with self._lock:
            try:
                payload = pickle.dumps(call)
            except Exception as error:  # whatever its configuration or function says when it is pickled
                raise CannotRun(f"{type(error).__name__}: {error}") from error
            if payload in self._refused:
                raise CannotRun(self._refused[payload])
            job = _Job(payload, rows, timeout_s)
            try:
                self._work(job, min(workers, len(rows)))
            except BaseException:  # Ctrl-C, say: nothing of this job may answer into the next one
                self._discard([worker for worker in self._workers if worker.is_busy])
                raise
            return job.outcomes

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            if os.getpid() == self.pid:
                self._discard(list(self._workers))

    def _work(self, job: _Job, size: int) -> None:
        mine = [worker for worker in self._workers if not worker.is_dead()]
        self._discard([worker for worker in self._workers if worker not in mine])
        mine = mine[:size]
        while job.left:
            worker = next((w for w in mine if not w.is_busy), None) if job.todo else None
            if worker is None and job.todo and len(mine) < size:
                size, worker = self._another(job, mine, size)
            if worker is not None:
                if not worker.begin(job, job.todo.popleft()):
                    self._lost(worker, job, mine)
                continue
            for worker in _ready(mine):
                try:
                    message = worker.receive()
                except (OSError, EOFError, ValueError, pickle.UnpicklingError):
                    self._lost(worker, job, mine)
                    continue
                if message is not None and not self._told(worker, job, message):
                    self._lost(worker, job, mine)
            for worker in [w for w in mine if w.is_busy and time.monotonic() > w.deadline]:
                self._lost(worker, job, mine, is_late=True)

    def _another(self, job: _Job, mine: list[_Worker], size: int) -> tuple[int, _Worker | None]:
        """(how many workers there shall be, a new one); where the machine gives no more, those that there are do it."""
        try:
            worker = _Worker()
        except OSError as error:
            if mine:
                return len(mine), None
            kind = CannotRun if job.left == len(job.rows) else OperatorError
            raise kind(f"no worker process can be started: {error}") from error
        self._workers.append(worker)
        mine.append(worker)
        return size, worker

    def _told(self, worker: _Worker, job: _Job, message: Any) -> bool:
        """Take a worker's message; False when it makes no sense."""
        match message:
            case ("ready",) if worker.is_preparing:
                self._proven.add(job.payload)
                return worker.send_row(job)
            case ("refused", str(why)) if worker.is_preparing:
                worker.forget()
                self._refused[job.payload] = why
                raise CannotRun(why)
            case ("row", int(index), bytes(blob), error) if index == worker.row:
                job.settle(index, _unpacked(blob, error))
                worker.row = None
                return True
        return False

    def _lost(self, worker: _Worker, job: _Job, mine: list[_Worker], *, is_late: bool = False) -> None:
        """A worker died, sent nonsense or is too late: kill it; its row is flagged, or goes to another when it never began."""
        index, was_preparing = worker.row, worker.is_preparing
        how = _how_it_died(worker.end())
        mine.remove(worker)
        self._workers.remove(worker)
        if index is None:
            return
        if not was_preparing:
            job.settle(index, Outcome(error=WaitTimeout("") if is_late else WorkerDied(how)))
            return
        why = f"took longer than {START_S:g} s to import it" if is_late else how
        if job.payload not in self._proven:
            raise CannotRun(f"a worker process could not be made ready: {why}")
        job.failed_starts += 1
        if job.failed_starts > MAX_STARTS:
            raise OperatorError(
                f"{job.failed_starts} worker processes in a row could not be made ready; the last: {why}"
            )
        job.todo.appendleft(index)

    def _discard(self, workers: list[_Worker]) -> None:
        for worker in workers:
            worker.end()
            self._workers.remove(worker)


@dataclass(slots=True)
class _Job:
    payload: bytes
    """The pickled call."""
    rows: Sequence[Sequence[Any]]
    timeout_s: float | None
    todo: deque[int] = field(init=False)
    outcomes: list[Outcome] = field(init=False)
    left: int = field(init=False)
    """Rows without an outcome."""
    failed_starts: int = 0

    def __post_init__(self) -> None:
        self.left = len(self.rows)
        self.todo = deque(range(self.left))
        self.outcomes = [Outcome()] * self.left

    def settle(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self.left -= 1


class _Worker:
    """One process, from the parent's side."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(0.0)
        lifeline, self.lifeline = os.pipe()  # ours and the worker's end are closed on exec unless passed on
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno()), str(lifeline)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ},  # they work side by side
            )
        except OSError:
            self.socket.close()
            os.close(self.lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self.buffer = bytearray()
        self.payload = b""
        self.row: int | None = None
        """The row it works on."""
        self.is_preparing = False
        """Whether it imports the operator first."""
        self.deadline = float("inf")

    @property
    def is_busy(self) -> bool:
        return self.row is not None

    def is_dead(self) -> bool:
        return self.process.poll() is not None

    def begin(self, job: _Job, index: int) -> bool:
        """Give it a row, after the operator when it has another one; False when it cannot be reached."""
        self.row = index
        if self.payload == job.payload:
            return self.send_row(job)
        self.payload = job.payload
        self.is_preparing = True
        self.deadline = time.monotonic() + START_S
        return self._send(("use", job.payload))

    def forget(self) -> None:
        """It could not import the operator; it is free again."""
        self.row, self.payload, self.is_preparing = None, b"", False

    def send_row(self, job: _Job) -> bool:
        assert self.row is not None
        self.is_preparing = False
        sent = self._send(("row", self.row, tuple(job.rows[self.row])))
        self.deadline = float("inf") if job.timeout_s is None else time.monotonic() + job.timeout_s
        return sent

    def _send(self, message: Any) -> bool:
        body = pickle.dumps(message)
        try:
            self.socket.settimeout(START_S)
            self.socket.sendall(_HEADER.pack(len(body)) + body)
            self.socket.settimeout(0.0)
        except OSError:
            return False
        return True

    def receive(self) -> Any:
        """Read what is there; the message when it is whole, else None. Errors: EOFError at its end, ValueError for nonsense."""
        part = self.socket.recv(1 << 20)
        if not part:
            raise EOFError
        self.buffer += part
        if len(self.buffer) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self.buffer)
        if size > MAX_ANSWER_BYTES + (1 << 20):
            raise ValueError(f"a message of {size} bytes")
        if len(self.buffer) < _HEADER.size + size:
            return None
        body = bytes(self.buffer[_HEADER.size : _HEADER.size + size])
        del self.buffer[: _HEADER.size + size]
        return pickle.loads(body)

    def end(self) -> int | None:
        """Kill it and what it started, and wait for it; how it had ended by itself (negative: the signal), None if it had not."""
        status = self.process.poll()
        if status is None and self._is_closed():  # on its way out
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(0.5)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.socket.close()
        with contextlib.suppress(OSError):
            os.close(self.lifeline)
        return status

    def _is_closed(self) -> bool:
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


def _ready(workers: Sequence[_Worker]) -> list[_Worker]:
    """Those that have something to say; waits until one has, or until one is late."""
    left = min((worker.deadline for worker in workers), default=float("inf")) - time.monotonic()
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.socket, selectors.EVENT_READ, worker)
        events = selector.select(None if left == float("inf") else max(left, 0.0) + 1e-3)
        return [key.data for key, _ in events]


def _unpacked(blob: bytes, error: Any) -> Outcome:
    if error is None:
        try:
            return Outcome(pickle.loads(blob))
        except Exception as broken:  # an answer's class may do anything when it is put together again
            return Outcome(error=broken)
    try:
        found = pickle.loads(blob) if blob else None
    except Exception:
        found = None
    name, text = error
    return Outcome(error=found if isinstance(found, Exception) else type(name, (Exception,), {})(text))


def _how_it_died(status: int | None) -> str:
    if status is None:
        return "its worker process sent nonsense, and was ended"
    if status >= 0:
        return f"its worker process ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"its worker process was ended by {name}{hint}"


# ------------------------------------------------------------------------------------------------- the pool of a process

_shared: WorkerPool | None = None
_shared_lock = threading.Lock()


def shared() -> WorkerPool:
    """The pool of this process; a forked child gets one of its own."""
    global _shared
    with _shared_lock:
        if _shared is None or _shared.pid != os.getpid():
            _shared = WorkerPool()
            atexit.register(_shared.close)
        return _shared


def default_workers() -> int:
    """Workers where nobody says how many: the processors this process may use, at most 8."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


# ------------------------------------------------------------------------------------------------------ the worker's side


def serve(channel: int, lifeline: int) -> None:
    """The life of a worker: take operators and rows, answer, until the parent closes its end."""
    _die_with_the_other_end_of(lifeline)
    with contextlib.suppress(OSError), socket.socket(fileno=channel) as link:  # an operator may have closed it
        link.set_inheritable(False)
        function: Any = None
        config: dict[str, Any] = {}
        while (body := _read_message(link)) is not None:
            match pickle.loads(body):
                case ("use", payload):
                    try:
                        function, config = _found(payload)
                        reply: tuple[Any, ...] = ("ready",)
                    except BaseException as error:  # importing a user's module may raise anything
                        reply = ("refused", f"{type(error).__name__}: {error}")
                case ("row", index, values):
                    reply = ("row", index, *_answered(function, values, config))
                case other:
                    raise RuntimeError(f"a worker was sent {other!r:.40}")
            text = pickle.dumps(reply)
            link.sendall(_HEADER.pack(len(text)) + text)


def _die_with_the_other_end_of(lifeline: int) -> None:
    """Ask the kernel to end this process group when the parent's end of a pipe closes: whatever Python is busy with."""
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO, which ends a process that has no handler for it


def _read_message(link: socket.socket) -> bytes | None:
    header = _read_exactly(link, _HEADER.size)
    return None if header is None else _read_exactly(link, _HEADER.unpack(header)[0])


def _read_exactly(link: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = link.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _found(payload: bytes) -> tuple[Any, dict[str, Any]]:
    call: OperatorCall = pickle.loads(payload)
    operator = resolve(call.name)
    if not isinstance(operator, Operator):
        raise TypeError(f"'{call.name}' is a {type(operator).__name__} in a worker, and no operator")
    if operator.hash != call.hash:
        raise ValueError(
            f"'{call.name}' is another one in a worker (hash {operator.hash}, {call.hash} here): its source has changed since it "
            "was imported"
        )
    return operator.function, {name: thaw(value) for name, value in call.config}


def _answered(function: Any, values: Any, config: dict[str, Any]) -> tuple[bytes, tuple[str, str] | None]:
    """(pickled answer, None), or (pickled error if that works, (its type, its text))."""
    try:
        value = function(*values, **config)
        blob = pickle.dumps(value)
        if (
            type(value) not in _PLAIN
        ):  # what goes wrong when it is put together again goes wrong here, under the row's limit
            pickle.loads(blob)
        if len(blob) > MAX_ANSWER_BYTES:
            raise ValueError(
                f"it returned {len(blob)} bytes; at most {MAX_ANSWER_BYTES} come back from a worker process"
            )
        return blob, None
    except BaseException as error:  # whatever a user's function raises goes to the parent
        try:
            text = str(error)
        except Exception:
            text = "(its text cannot be had)"
        return _pickled_error(error), (type(error).__name__, text[:10_000])
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()


def _pickled_error(error: BaseException) -> bytes:
    """The error for the parent, when it survives the way there and is small."""
    try:
        blob = pickle.dumps(error)
        is_same = type(pickle.loads(blob)) is type(error) and str(pickle.loads(blob)) == str(error)
    except Exception:
        return b""
    return blob if is_same and len(blob) < MAX_ANSWER_BYTES else b""
