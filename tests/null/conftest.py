"""Tests in this folder run without torch, without the network and without waiting.

The rule is held by making each of the three an error, while a file of this folder is imported and while its tests run:

- importing torch, transformers, vllm or ray, even where another folder's tests have loaded them in the same process;
- opening a socket (a socket pair inside the process, which asyncio needs, stays legal);
- `time.sleep`.
"""

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NoReturn

import pytest

HEAVY = frozenset({"torch", "transformers", "vllm", "ray"})
HERE = Path(__file__).parent


class HeavyImportError(ImportError):
    """A test of tests/null reached one of the heavy libraries."""


class RefuseHeavy:
    """A finder that comes before all others and refuses the heavy libraries by name."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in HEAVY:
            raise HeavyImportError(
                f"tests/null imported {name}; only engine adapters may, so either the import is in the wrong module "
                "or the test belongs in tests/cpu"
            )
        return None


class NoSocket(socket.socket):
    """A socket that can wrap what is open already and open nothing new."""

    def __init__(self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> None:
        if fileno is None:
            raise RuntimeError("tests/null opened a socket; a test that needs one belongs in tests/distributed")
        super().__init__(family, type, proto, fileno)


def no_sleep(seconds: float) -> NoReturn:
    raise RuntimeError(f"tests/null slept for {seconds} s; wait for an event, or move the test to tests/cpu")


@contextmanager
def only_light() -> Iterator[None]:
    """Hold the three rules of this folder, then put everything back."""
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in HEAVY}
    for name in hidden:
        del sys.modules[name]
    sys.meta_path.insert(0, RefuseHeavy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", NoSocket)
        patch.setattr(time, "sleep", no_sleep)
        try:
            yield
        finally:
            sys.meta_path.remove(RefuseHeavy)
            sys.modules.update(hidden)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    if HERE in collector.path.parents:  # a file of this folder is being imported
        with only_light():
            return (yield)
    return (yield)


@pytest.fixture(autouse=True)
def light() -> Iterator[None]:
    with only_light():
        yield
