"""Finding the answer in a text: patterns for the option `pattern` of the rewards, and the functions behind them."""

from __future__ import annotations

import re

from flowrl.errors import ConfigError

NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?"
"""Pattern of a plain number: `math(pattern=NUMBER)` judges the last number alone."""

BOXED = r"\\(?:boxed|fbox)\s*(?:\{((?:[^{}]++|\{(?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+\})*+)\}|(\w))"
"""Pattern of what stands in `\\boxed{...}`, braces in it up to three deep."""

ANSWER_TAG = r"<answer>(.*?)</answer>"
"""Pattern of what stands between `<answer>` and `</answer>`."""


def compiled(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """A regular expression in which `.` is any character. Errors: ConfigError for one that is none."""
    try:
        return re.compile(pattern, re.DOTALL | flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{pattern!r:.200} is no regular expression: {error}") from error


def last_match(pattern: str, text: str) -> str | None:
    """What a regular expression finds last in a text: its first group that took part, or the whole; None for nothing."""
    found = None
    for found in compiled(pattern).finditer(text):  # noqa: B007 the last one is used after the loop
        pass
    if found is None:
        return None
    groups = [group for group in found.groups() if group is not None]
    return groups[0] if groups else "" if found.re.groups else found[0]


def boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` of a text, or None.

    Example:
        boxed("so \\\\boxed{\\\\frac{1}{2}}.") == "\\\\frac{1}{2}"
    """
    return last_match(BOXED, text)
