"""One rank of a job: `python -m flowrl.engines.launch.worker '{"entry": "module:function", "argument": ...}'`.

It ends when its launcher does: the launcher holds the other end of its input.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.engines.launch.board import Failure, RankFailed
from flowrl.engines.launch.folder import remove_folder
from flowrl.engines.launch.place import JOB, Place, tell_failure
from flowrl.errors import ConfigError

FAILED = 1
INTERRUPTED = 130


def main(text: str) -> int:
    lifeline = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what asks for input gets none
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    said = json.loads(text)
    return attempt(said["entry"], said["argument"])


def attempt(entry: str, argument: Any) -> int:
    """Call a rank function, whichever launcher started this rank; 0 when it ended well. The job is told of what went wrong."""
    try:
        found(entry)(argument)
    except RankFailed:
        return FAILED  # whoever failed has said so
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:  # told to the launcher, which prints the first error of the job once
        tell_failure(Failure.of(Place.of(os.environ).rank, "the beginning", error))
        return FAILED
    return 0


def found(entry: str) -> Callable[[Any], Any]:
    """The function that `module:function` or `FILE.py:function` names. Errors: ConfigError."""
    where, _, name = entry.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{where} is no file of Python")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    function: Callable[[Any], Any] = getattr(module, name)
    return function


def _end_with(lifeline: int) -> None:
    """End this process when the other end of its lifeline is closed."""
    while os.read(lifeline, 1):
        pass
    if job := os.environ.get(JOB):
        remove_folder(Path(job))  # whoever would have done so may have been killed
    os._exit(FAILED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
