"""Plain values in a file: numbers, text, lists, tuples, dicts, bytes and NumPy arrays, read back as they were.

    one line of JSON     the value; arrays and bytes are named by where they lie: {"$array": [0, 4096, "<f4", [1024]]}
    the bytes of all arrays, joined

Reading runs no code, as unpickling would.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.errors import RunError


def write(path: Path, value: Any, what: str) -> None:
    """Write a value; `what` names it in errors. Errors: RunError for one of another type; OSError."""
    parts: list[bytes] = []
    head = json.dumps(_Packer(parts, what).pack(value)).encode() + b"\n"
    with path.open("wb") as file:
        file.write(head)
        file.writelines(parts)


def read(path: Path) -> Any:
    """What `write` has written. Errors: OSError; ValueError, KeyError for a file that is damaged."""
    data = path.read_bytes()
    head, found, rest = data.partition(b"\n")
    if not found:
        raise ValueError("its first line does not end")
    return _unpack(json.loads(head), memoryview(rest))


class _Packer:
    def __init__(self, parts: list[bytes], what: str) -> None:
        self._parts, self._what, self._at = parts, what, 0

    def pack(self, value: Any, path: str = "") -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case bytes() | bytearray() | memoryview():
                return {"$bytes": self._put(bytes(value))}
            case np.generic():
                return {"$scalar": self._array(np.asarray(value), path)}
            case np.ndarray() if value.dtype == object:
                return {
                    "$objects": [self.pack(one, path) for one in value.ravel().tolist()],
                    "shape": list(value.shape),
                }
            case np.ndarray():
                return {"$array": self._array(value, path)}
            case tuple():
                return {"$tuple": [self.pack(one, f"{path}[{i}]") for i, one in enumerate(value)]}
            case list():
                return [self.pack(one, f"{path}[{i}]") for i, one in enumerate(value)]
            case Mapping():
                return {"$dict": [[self.pack(k, path), self.pack(v, f"{path}[{k!r}]")] for k, v in value.items()]}
        raise RunError(
            f"{self._what} holds a {type(value).__name__}{f' at {path}' if path else ''}, which a checkpoint cannot keep; use "
            "numbers, text, lists, dicts and NumPy arrays"
        )

    def _array(self, array: np.ndarray, path: str) -> list[Any]:
        if array.dtype.hasobject or array.dtype.names is not None:
            raise RunError(
                f"{self._what} holds an array of {array.dtype}{f' at {path}' if path else ''}; use plain types"
            )
        return [*self._put(np.ascontiguousarray(array).tobytes()), array.dtype.str, list(array.shape)]

    def _put(self, data: bytes) -> list[int]:
        self._parts.append(data)
        self._at += len(data)
        return [self._at - len(data), len(data)]


def _unpack(value: Any, rest: memoryview) -> Any:
    if isinstance(value, list):
        return [_unpack(one, rest) for one in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    inner: Any = value.get(kind)
    match kind:
        case "$bytes":
            return bytes(_cut(rest, inner))
        case "$array" | "$scalar":
            found = np.frombuffer(_cut(rest, inner[:2]), np.dtype(inner[2])).reshape(inner[3]).copy()
            return found if kind == "$array" else found[()]
        case "$objects":
            array = np.empty(len(inner), object)
            array[:] = [_unpack(one, rest) for one in inner]
            return array.reshape(value["shape"])
        case "$tuple":
            return tuple(_unpack(one, rest) for one in inner)
        case "$dict":
            return {_unpack(k, rest): _unpack(v, rest) for k, v in inner}
    raise ValueError(f"it has a value of the unknown kind {kind!r}")


def _cut(rest: memoryview, place: list[int]) -> memoryview:
    start, size = place
    if start + size > len(rest):
        raise ValueError("it ends too early")
    return rest[start : start + size]
