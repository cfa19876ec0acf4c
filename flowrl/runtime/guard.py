"""Limits on how long a user's function may take."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from flowrl.errors import WaitTimeout


def call_with_timeout(function: Callable[[], Any], seconds: float | None, what: str) -> Any:
    """`function()`, or WaitTimeout naming `what` after `seconds`.

    In the main thread the call is interrupted where it is (a Unix alarm); elsewhere it is left behind in a daemon thread.
    Under a debugger there is no limit, so that a breakpoint may be looked at for as long as it takes.
    """
    if seconds is None or sys.gettrace() is not None:
        return function()
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        return _with_alarm(function, seconds, what)
    return _with_thread(function, seconds, what)


class _Expired(BaseException):
    """Passes through a user's `except Exception`."""


def _with_alarm(function: Callable[[], Any], seconds: float, what: str) -> Any:
    def expire(number: int, frame: FrameType | None) -> None:
        raise _Expired

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return function()
    except _Expired:
        raise WaitTimeout(f"{what} took longer than {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _with_thread(function: Callable[[], Any], seconds: float, what: str) -> Any:
    result: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(function())
        except BaseException as error:  # carried to the caller, whatever it is
            failure.append(error)

    thread = threading.Thread(target=work, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise WaitTimeout(f"{what} took longer than {seconds:g} s; its thread is left behind")
    if failure:
        raise failure[0]
    return result[0]
