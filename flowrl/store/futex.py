"""Sleeping on a word of shared memory, until a process that changed it wakes whoever sleeps there.

A system call of Linux without a function in Python; elsewhere a sleep of 50 us stands for it.
"""

from __future__ import annotations

import ctypes
import math
import platform
import time
from typing import Any

_NUMBER = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if platform.system() == "Linux" else None
_WAIT, _WAKE = 0, 1
_EVERYONE = 0x7FFFFFFF


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _system_call(*arguments: Any) -> Any:
    call = ctypes.CDLL(None).syscall
    call.restype, call.argtypes = (
        ctypes.c_long,
        (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, *arguments),
    )
    return call


_call = None if _NUMBER is None else _system_call(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
_call_to_wake = None if _NUMBER is None else _system_call()


def sleep(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the 4-byte word at `address` is `value`, until woken or the time is over; no sleep when it differs.

    It may also end earlier, so whoever sleeps looks again what there is.
    """
    if _call is None:
        time.sleep(50e-6)
        return
    fraction, whole = math.modf(timeout_s)
    _call(_NUMBER, address, _WAIT, value, ctypes.byref(_TimeSpec(int(whole), int(fraction * 1e9))), None, 0)


def wake(address: int) -> None:
    """Wake everybody who sleeps on the word at `address`, in any process."""
    if _call_to_wake is not None:
        _call_to_wake(_NUMBER, address, _WAKE, _EVERYONE)
