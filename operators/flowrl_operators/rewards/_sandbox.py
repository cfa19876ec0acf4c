"""Run programs that nobody has read: the parent's side. `_sandbox_main.py` does the work, in processes of its own."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, WaitTimeout

MAIN = Path(__file__).with_name("_sandbox_main.py")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    time_s: float = 5.0
    """Seconds of wall time of one run, and about as many of processor time."""
    total_s: float = 60.0
    """Seconds of all runs of one response; those that are left over then do not pass."""
    memory_bytes: int = 1 << 30
    """Address space of each process."""
    output_bytes: int = 1 << 20
    """Size of its output, and of any file it writes."""
    files_bytes: int = 16 << 20
    """Size of all its files together, where the kernel gives it a file system of its own."""
    processes: int = 32
    """Processes and threads it may start."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigError(f"limit '{name}' of a program is a positive number; found {value!r}")


@dataclass(frozen=True, slots=True)
class Ran:
    """How one run went."""

    status: str
    """`exit`, `signal`, `timeout`, `output` (too much of it), `processes` (too many of them), `not run` (no time was left),
    `broken` (it could not be started)."""
    code: int | None = None
    """Exit status, or minus the signal."""
    stdout: str = ""
    stderr: str = ""
    """The last 4000 bytes."""
    report: str = ""
    """What was written to file descriptor 3."""
    cage: dict[str, bool] | None = None
    """Which protections there were; see `sandbox_protects`."""

    @property
    def is_clean(self) -> bool:
        return self.status == "exit" and self.code == 0


def run_programs(runs: Sequence[dict[str, str]], limits: Limits, *, namespaces: bool = True) -> list[Ran]:
    """Run programs one after the other: each {"program": source, "stdin": text} or {"command": source of `python -c`, ...}.

    `namespaces=False` does without them, as on a machine that does not give them.

    Errors: WaitTimeout when the sandbox itself does not come back.
    """
    if not runs:
        return []
    task = {"python": sys.executable, "limits": {**asdict(limits), "namespaces": namespaces}, "runs": list(runs)}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(MAIN)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"},  # no keys, no proxies
        cwd="/",
    )
    patience = min(limits.total_s, limits.time_s * len(runs)) + 15.0
    try:
        text, _ = process.communicate(json.dumps(task).encode(), timeout=patience)
    except subprocess.TimeoutExpired:
        raise WaitTimeout(f"the sandbox of a program did not come back within {patience:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not text:
        return [Ran("broken", stderr=f"the sandbox ended with exit status {process.returncode}")] * len(runs)
    return [_ran(result) for result in json.loads(text)]


def _ran(result: dict[str, Any]) -> Ran:
    if result["status"] == "broken":
        return Ran("broken", stderr=str(result.get("why", "")))
    names = ("status", "code", "stdout", "stderr", "report", "cage")
    return Ran(**{name: result[name] for name in names if name in result})


@functools.cache
def sandbox_protects() -> dict[str, bool]:
    """What the sandbox of `rewards.code` holds back on this machine, found out by running a program.

    `files`: it can write in its own folder only. `network`: it reaches none; `tcp`: it makes no TCP connections. `processes`: it
    neither sees nor reaches processes outside, and none of its own survive, whatever they do. Limits of time, memory and output
    hold everywhere. Reading files is held back nowhere.
    """
    (ran,) = run_programs([{"program": "", "stdin": ""}], Limits(time_s=20.0))
    return dict(ran.cage or {})
