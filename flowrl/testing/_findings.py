"""What a broken property says: which one, on which input, what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flowrl.errors import FlowError
from flowrl.schema.ragged import Ragged

MOST = 100
"""Characters of one column in a message."""


class ConformanceError(FlowError, AssertionError):
    """An operator or a loss breaks properties it must have; the message has each with the smallest input that shows it."""


class Broken(Exception):
    """A property does not hold."""

    def __init__(self, text: str, *, given: Any = None, expected: Any = None, found: Any = None) -> None:
        lines = [text]
        lines += [f"  input     {line}" if i == 0 else f"            {line}" for i, line in enumerate(_lines(given))]
        lines += [f"  expected  {shown(expected)}"] if expected is not None else []
        lines += [f"  found     {shown(found)}"] if found is not None else []
        super().__init__("\n".join(lines))


def _lines(given: Any) -> Iterable[str]:
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return [f"{name} = {shown(value)}" for name, value in given.items()] or ["no columns"]
    return [str(given)]


def shown(value: Any) -> str:
    """A value in one line of bearable length."""
    if hasattr(value, "detach"):
        value = value.detach().double().cpu().numpy() if value.is_floating_point() else value.cpu().numpy()
    if isinstance(value, Ragged):
        value = value.to_list()
    text = value if isinstance(value, str) else _text(value)
    return text if len(text) <= MOST else f"{text[: MOST - 4]} ..."


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value[:60]))}{', ...' if len(value) > 60 else ''}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value)
