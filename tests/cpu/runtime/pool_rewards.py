"""Rewards that misbehave, in a module that worker processes can import."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time

import flowrl as fr


class Unsendable(Exception):
    """Cannot be put together again from its text alone."""

    def __init__(self, text: str, more: object) -> None:
        super().__init__(text)
        self.more = more


class TakesItsReader:
    """Ends the process that puts it together again."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (7,)


@fr.reward(timeout_s=2.0, processes=True)
def obey(response: str) -> float:
    """Do what the response says."""
    word, _, rest = response.partition(" ")
    match word:
        case "value":
            return float(rest)
        case "pid":
            return float(os.getpid())
        case "raise":
            raise ValueError(rest)
        case "unsendable":
            raise Unsendable("odd", lambda: None)
        case "exit":
            sys.exit(3)
        case "vanish":
            os._exit(7)
        case "abort":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            ctypes.string_at(0)
        case "sleep":
            time.sleep(float(rest))
        case "spin":
            while True:
                pass
        case "lambda":
            return lambda: 1  # type: ignore[return-value]
        case "huge":
            return b"x" * (80 << 20)  # type: ignore[return-value]
        case "text":
            return "no number"  # type: ignore[return-value]
        case "none":
            return None  # type: ignore[return-value]
        case "child":
            child = subprocess.Popen(["sleep", "100"])
            with open(rest, "w") as file:
                file.write(str(child.pid))
            time.sleep(100)
        case "closefds":
            os.closerange(3, 100)
        case "stdin":
            return float(len(sys.stdin.read()))
        case "interrupt":
            raise KeyboardInterrupt
        case "takes":
            return TakesItsReader()  # type: ignore[return-value]
        case "fd":
            for fd in range(3, 1024):
                try:
                    os.write(fd, b"\xff" * 100)
                except OSError:
                    pass
    return 0.0


@fr.reward(timeout_s=None)
def plain(response: str) -> float:
    """A reward that asks for nothing."""
    return float(os.getpid())


@fr.reward(timeout_s=None)
def endless(response: str) -> float:
    """Holds the interpreter's lock for ever, so that no Python code of its process can run."""
    re.match(r"(a|aa)+$", "a" * 100 + "b")
    return 0.0
