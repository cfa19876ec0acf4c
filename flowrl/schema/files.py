"""Files that people name: read and written, with errors that say which file and why.

A name may be that of a folder, be too long, hold a null character or point into a folder that is not there. The system says so as
`OSError` or `ValueError`; here all of it is a `ConfigError`.
"""

from __future__ import annotations

import errno
import json
import tomllib
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.schema.fields import shown


def read_file(path: str | Path, what: str) -> str:
    """The text of a UTF-8 file. `what` it is, for errors: `the plan`."""
    where = _path(path, what)
    try:
        return where.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {plain(path)} is no text in UTF-8: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} {plain(path)} cannot be read: {_why(error)}") from error


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """The tables of a TOML file. Errors: as of `read_file`, and for what is no TOML."""
    text = read_file(path, what)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{plain(path)} is not a TOML file: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{plain(path)} is nested too deep") from error
    except ValueError as error:
        raise ConfigError(f"{plain(path)} has a whole number of thousands of digits") from error


def write_file(path: str | Path, text: str, option: str = "") -> None:
    """Write a UTF-8 file. `option` that named it, for errors: `--out`."""
    where = _path(path, "a file")
    try:
        where.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option + ' ' if option else ''}{plain(path)} cannot be written: {_why(error)}") from error


def check_writable(path: str | Path, option: str) -> None:
    """Raise `ConfigError` now if a file could not be written later, as far as that can be told: before long work is done."""
    where = _path(path, "a file")
    said = f"{option} {plain(path)}"
    if "\0" in str(where):
        raise ConfigError(f"{said} cannot be written: a name has no null character")
    if len(where.name.encode(errors="replace")) > MOST_NAME:
        raise ConfigError(f"{said} cannot be written: a file's name has {MOST_NAME} bytes at most")
    if not str(path):
        raise ConfigError(f"{option} needs the name of a file; found ''")
    if is_folder(where):
        raise ConfigError(f"{said} is a folder; name a file in it")
    for one in (where.parent, where):
        if _is_loop(one):
            raise ConfigError(f"{said} cannot be written: {quoted(one)} is a symbolic link that leads back to itself")
    if not is_folder(where.parent):
        raise ConfigError(f"{said}: there is no folder {quoted(where.parent)}")


def _is_loop(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


MOST_NAME = 255
"""Bytes of a file's name on the usual file systems."""


def is_file(path: str | Path) -> bool:
    """Whether there is a file of a name that may not be one at all: too long, with a null character."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def is_there(path: str | Path) -> bool:
    """Whether there is anything of such a name."""
    return is_file(path) or is_folder(path)


def is_folder(path: str | Path) -> bool:
    """Whether there is a folder of such a name."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def read_json(text: object, what: str) -> Any:
    """A JSON value. Raises `ConfigError` for what is none, is nested too deep, has a key twice or a number that is too long."""
    if not isinstance(text, str):
        raise ConfigError(f"{what} is read from the text of a JSON file; found {shown(text)} ({type(text).__name__})")
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ConfigError, json.JSONDecodeError) as error:
        raise ConfigError(f"{what} is a JSON file; {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{what} is a JSON file; this one is nested too deep") from error
    except ValueError as error:
        raise ConfigError(f"{what} is a JSON file; this one has a whole number of thousands of digits") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f"an object has the key {shown(twice)} twice; keep one of them")
    return found


def _path(path: object, what: str) -> Path:
    if not isinstance(path, str | Path):
        raise ConfigError(f"{what} needs a path; found {shown(path)} ({type(path).__name__})")
    return Path(path)


def plain(path: str | Path) -> str:
    """A name as errors have it, without quotes."""
    return quoted(path)[1:-1]


def quoted(path: str | Path) -> str:
    """A name as errors have it: in quotes, control characters escaped, and cut where it is very long."""
    text = str(path)
    return repr(text if len(text) <= 200 else f"{text[:100]}...")


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
