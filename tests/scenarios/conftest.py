"""One thread is quickest for models this small."""

from collections.abc import Iterator

import pytest
import torch

from flowrl.engines import ENGINES


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> type:
    """The engine `script`, with nothing asked yet."""
    from tests.scenarios.pieces import ScriptEngine

    monkeypatch.setitem(ENGINES, "script", "tests.scenarios.pieces:ScriptEngine")
    monkeypatch.setattr(ScriptEngine, "asked", [])
    return ScriptEngine
