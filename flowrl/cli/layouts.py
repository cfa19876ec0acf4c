"""Layouts that people name on the command line."""

from __future__ import annotations

from flowrl.errors import ConfigError, TextError
from flowrl.mesh import Layout


def layout_of(text: str, *, most_devices: int, work: str) -> Layout:
    """The layout of an option, for work that looks at every device. Errors: ConfigError for no layout, and one too large.

    Args:
        work: what layouts are for, in errors: "an audit is of".
    """
    try:
        found = Layout.parse(text)
    except TextError as error:
        raise ConfigError(str(error)) from error
    if found.size > most_devices:
        raise ConfigError(f"{work} layouts of {most_devices:,} devices at most; found {found.size:,}")
    return found
