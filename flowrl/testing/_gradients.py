"""Finite differences of a function some of whose parts are meant to be constants.

[Note: What has no gradient is held]
`weight = ratio.detach()` makes a loss whose gradient is not the derivative of its value, on purpose. What such a loss means is
the derivative with `weight` constant. So a first evaluation keeps the answer of every tensor operation that got something with
gradient and gave something without (detach, anything under no_grad, comparisons, indices), and the evaluations at
neighbouring points are given the kept answers instead of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Kept = list[tuple[str, Any]]
"""For each tensor operation its name, and the answer to be kept or None."""


def kept_constant(run: Callable[[], Any]) -> Kept:
    """For each tensor operation of `run`: its name, and what it gave where that had no gradient though its inputs had."""
    from torch.overrides import TorchFunctionMode

    kept: Kept = []

    class Keep(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = _tensors((args, kwargs or {}))
            had = any(tensor.requires_grad for tensor in given)
            answer = func(*args, **(kwargs or {}))
            tensors = _tensors(answer)
            is_new = bool(tensors) and not any(t is g for t in tensors for g in given)
            is_constant = had and is_new and not any(tensor.requires_grad for tensor in tensors)
            kept.append((_name(func), answer if is_constant else None))
            return answer

    with Keep():
        run()
    return kept


def held_constant(kept: Kept, run: Callable[[], Any]) -> Any:
    """`run()` with the kept answers in place of its own. Where it takes another course, its own count from there on."""
    from torch.overrides import TorchFunctionMode

    class Hold(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.at = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, answer = kept[self.at] if self.at < len(kept) else ("", None)
            self.at = self.at + 1 if name == _name(func) else len(kept)
            if name == _name(func) and answer is not None:
                return answer
            return func(*args, **(kwargs or {}))

    with Hold():
        return run()


def _name(func: Any) -> str:
    return str(getattr(func, "__qualname__", None) or getattr(func, "__name__", func))


def _tensors(value: Any) -> list[Any]:
    from torch import Tensor

    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in _tensors(part)] if isinstance(value, list | tuple) else []
