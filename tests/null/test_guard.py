"""The rules of this folder bite, and let through what they should."""

import asyncio
import importlib
import socket
import time

import pytest


@pytest.mark.parametrize("name", ["torch", "torch.nn", "transformers", "vllm", "ray"])
def test_heavy_import_is_refused(name: str) -> None:
    with pytest.raises(ImportError, match="tests/null imported"):
        importlib.import_module(name)


def test_socket_is_refused() -> None:
    with pytest.raises(RuntimeError, match="opened a socket"):
        socket.create_connection(("127.0.0.1", 9))


def test_sleep_is_refused() -> None:
    with pytest.raises(RuntimeError, match="slept for 0.1 s"):
        time.sleep(0.1)


def test_asyncio_still_runs() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    assert asyncio.run(answer()) == 42
