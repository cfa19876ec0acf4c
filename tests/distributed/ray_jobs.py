"""What ranks on Ray do in tests, beside the flows that they share with other launchers."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "FLOWRL_JOB",
    "EXTRA",
    "CUDA_VISIBLE_DEVICES",
)


def tells(said: dict[str, Any]) -> None:
    """Write down where this rank is, and print on all ways."""
    rank = os.environ["RANK"]
    found = {name: os.environ.get(name) for name in NAMES}
    found["cwd"], found["pid"] = os.getcwd(), os.getpid()
    found["is_main_thread"] = threading.current_thread() is threading.main_thread()
    Path(said["folder"], f"{rank}.json").write_text(json.dumps(found))
    print(f"printed by {rank}")
    print(f"complained by {rank}", file=sys.stderr)
    os.write(1, f"written by {rank}\nwithout an end by {rank}".encode())


def leaves(said: dict[str, Any]) -> None:
    """One rank ends its process; the other waits for something that never comes."""
    rank = os.environ["RANK"]
    Path(said["folder"], f"pid.{rank}").write_text(json.dumps([os.getpid(), os.environ["FLOWRL_JOB"]]))
    if rank == "1":
        sys.stdout.flush()
        os._exit(7)
    threading.Event().wait()
