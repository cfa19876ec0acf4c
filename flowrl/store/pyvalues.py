"""Values of a column as the rows of Python bring them: whether they can be written as they are, all at once.

What is said here of a column holds for all of its values; what cannot be said so is left to `flowrl.store.columns.to_stored`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from flowrl.store.columns import NUMPY_DTYPES

KNOWN = {np.ndarray, list, str, bytes, int, float, bool}
ARRAY, FLOAT, INT = {np.ndarray}, {float}, {int}


def are_flat(values: Sequence[np.ndarray], dtype: np.dtype[Any]) -> bool:
    """Whether arrays can stand end to end as they are, [T]."""
    count = len(values)
    return list(map(_DTYPE, values)).count(dtype) == count and list(map(_NDIM, values)).count(1) == count


def are_parts(values: Sequence[np.ndarray], dtype: np.dtype[Any]) -> bool:
    """The same for [T, *inner]."""
    if list(map(_DTYPE, values)).count(dtype) != len(values):
        return False
    return values[0].ndim > 0 and len({value.shape[1:] for value in values}) == 1


def numbers_of(values: Sequence[Any], kinds: set[type], dtype: np.dtype[Any]) -> np.ndarray | None:
    """Numbers of Python as the column has them; None when that is not for here to say."""
    if kinds == FLOAT and dtype.kind == "f":
        total = sum(values)
        if total - total != 0:  # NaN or infinite, or some value is
            return None
    elif kinds != INT or dtype.kind not in "iu":
        return None
    least, most = _RANGE[dtype]
    return np.array(values, dtype) if least <= min(values) and max(values) <= most else None


_RANGE: dict[np.dtype[Any], tuple[float, float]] = {
    dtype: (float(found.min), float(found.max)) if dtype.kind == "f" else (int(found.min), int(found.max))
    for dtype in NUMPY_DTYPES.values()
    if dtype.kind in "fiu"
    for found in ((np.finfo if dtype.kind == "f" else np.iinfo)(dtype),)
}
"""By dtype: the least and the largest number."""
_DTYPE, _NDIM = attrgetter("dtype"), attrgetter("ndim")


def as_arrays(values: Sequence[Any]) -> Sequence[Any]:
    """With torch tensors that share their memory with NumPy as arrays; torch is not imported for it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return values
    return [_array_of(value) if isinstance(value, torch.Tensor) else value for value in values]


def _array_of(tensor: Any) -> Any:
    try:
        return np.asarray(tensor)
    except (TypeError, RuntimeError):  # on a device, bfloat16, or part of a graph: refused as what it is
        return tensor
