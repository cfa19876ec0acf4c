"""What adapters of other systems' functions share."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowrl.errors import DataError


def finished(answer: Any) -> Any:
    """The answer, waited for when the function was a coroutine; also where an event loop runs already."""
    if not inspect.isawaitable(answer):
        return answer

    async def waited() -> Any:
        return await answer

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(waited())
    found: list[Any] = []

    def elsewhere() -> None:
        try:
            found.append((True, asyncio.run(waited())))
        except BaseException as error:  # raised again where it was asked for
            found.append((False, error))

    thread = threading.Thread(target=elsewhere, daemon=True)
    thread.start()
    thread.join()
    is_good, value = found[0]
    if not is_good:
        raise value
    return value


def takes_any(function: Callable[..., Any]) -> bool:
    """Whether a function takes keyword arguments of any name."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def named(function: Callable[..., Any]) -> list[str]:
    """Parameters that may be given by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind in kinds]


def accepted(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that a function takes by name."""
    if takes_any(function):
        return dict(values)
    return {name: values[name] for name in named(function) if name in values}


def numpy_of(values: Any) -> Any:
    """A tensor as a NumPy array, floats as float64; anything else as it is."""
    if not hasattr(values, "detach"):
        return values
    values = values.detach().cpu()
    return (values.double() if values.is_floating_point() else values).numpy()  # NumPy has no bfloat16


def text_of(content: Any, what: str = "a message") -> str:
    """Text of plain text, of a chat message's content, or of a list of messages (one below the other).

    Errors: DataError for content that is no text, such as an image.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping) and "content" in content:
        return text_of(content["content"], what)
    if isinstance(content, Mapping) and content.get("type") == "text":
        return str(content.get("text", ""))
    if hasattr(content, "content"):
        return text_of(content.content, what)
    if isinstance(content, Sequence):
        return "\n".join(text_of(part, what) for part in content)
    raise DataError(f"{what} holds {content!r:.80} ({type(content).__name__}); only text is taken")
