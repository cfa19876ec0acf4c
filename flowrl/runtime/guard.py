"""Limits on how long a user's function may take."""

from __future__ import annotations

import bdb
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from flowrl.errors import WaitTimeout

What = str | Callable[[], str]
Call = Callable[[Callable[[], Any], What], Any]
"""Runs a function under a limit; the text (or a function that makes it) names it in errors."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[Call]:
    """A way to call functions that may each take `seconds`; for many short calls, it is set up once.

        with time_limit(30.0) as call:
            answers = [call(lambda: function(row), f"row {i}") for i, row in enumerate(rows)]

    A call that takes longer is a WaitTimeout. In the main thread it is interrupted where it is (a Unix alarm); elsewhere it
    is left behind in a daemon thread. Under a debugger there is no limit, so that a breakpoint may be looked at for as long
    as it takes; leaving it (`q`) is a KeyboardInterrupt.
    """
    if seconds is None:
        yield _without_limit
    elif threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        before = signal.signal(signal.SIGALRM, _expire)
        # inside a limited function that runs a flow of its own, both limits hold; an alarm of somebody else waits
        is_inner = before is _expire
        theirs, _ = (0.0, 0.0) if is_inner else signal.setitimer(signal.ITIMER_REAL, 0)
        began = time.monotonic()
        with_alarm = _with_inner_alarm if is_inner else _with_alarm
        try:
            yield lambda function, what: with_alarm(function, seconds, what)
        finally:
            signal.signal(signal.SIGALRM, before)
            if theirs:
                signal.setitimer(signal.ITIMER_REAL, max(theirs - (time.monotonic() - began), 1e-3))
    else:
        yield lambda function, what: _with_thread(function, seconds, what)


def call_with_timeout(function: Callable[[], Any], seconds: float | None, what: What) -> Any:
    """`function()`, or WaitTimeout naming `what` after `seconds`; see `time_limit`."""
    with time_limit(seconds) as call:
        return call(function, what)


def _text(what: What) -> str:
    return what if isinstance(what, str) else what()


class _Expired(BaseException):
    """Passes through a user's `except Exception`."""


def _expire(number: int, frame: FrameType | None) -> None:
    if sys.gettrace() is None:  # a breakpoint inside the function has no limit either
        raise _Expired


def _called(function: Callable[[], Any]) -> Any:
    """`function()`; leaving a debugger inside it is an interrupt of the run, and no failure of the function."""
    try:
        return function()
    except Exception as error:
        if not _is_quit(error):
            raise
        raise KeyboardInterrupt("the debugger was left") from error


def _is_quit(error: Exception) -> bool:
    """Whether `q` was typed in pdb, or in pytest's."""
    kind = type(error)
    return isinstance(error, bdb.BdbQuit) or (kind.__module__, kind.__name__) == ("_pytest.outcomes", "Exit")


def _without_limit(function: Callable[[], Any], what: What) -> Any:
    return _called(function)


def _with_alarm(function: Callable[[], Any], seconds: float, what: What) -> Any:
    if sys.gettrace() is not None:
        return _called(function)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return _called(function)
    except _Expired:
        raise WaitTimeout(f"{_text(what)} took longer than {seconds:g} s") from None
    finally:
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        if not left:  # it rang, or the function used the alarm for itself and may have left its own handler behind
            signal.signal(signal.SIGALRM, _expire)


def _with_inner_alarm(function: Callable[[], Any], seconds: float, what: What) -> Any:
    """Like `_with_alarm`, with a limit around it that goes on: the nearer one is set, and the outer one comes back."""
    outer, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    if not outer or seconds < outer:
        began = time.monotonic()
        try:
            return _with_alarm(function, seconds, what)
        finally:
            if outer:
                signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - began), 1e-3))
    signal.setitimer(signal.ITIMER_REAL, outer)
    return _called(function)


def _with_thread(function: Callable[[], Any], seconds: float, what: What) -> Any:
    if sys.gettrace() is not None:
        return _called(function)
    result: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(_called(function))
        except BaseException as error:  # carried to the caller, whatever it is
            failure.append(error)

    name = _text(what)
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise WaitTimeout(f"{name} took longer than {seconds:g} s; its thread is left behind")
    if failure:
        raise failure[0]
    return result[0]
