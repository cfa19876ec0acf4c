"""Rules that look at one response."""

from __future__ import annotations

import logging
import re

import flowrl as fr
from flowrl.errors import DataError, MissingExtra

NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?"
"""Pattern of a plain number, for `math(pattern=NUMBER)` and `exact(pattern=NUMBER)`."""


@fr.reward
def math(response: str, answer: str, *, pattern: str | None = None) -> float:
    """1.0 when the response's final answer equals the reference mathematically, else 0.0, as math-verify judges.

    The last `\\boxed{...}`, formula or number of the response is compared with `answer` (LaTeX with or without dollar
    signs, or a plain number). Needs the extra `math`.

    A formula is evaluated: where the task is to compute `8 + 3`, a response that only repeats `8 + 3` counts as right, and a
    policy will find that out. `pattern=NUMBER` then judges the last number alone.

    Args:
        pattern: judge only what this regular expression (its first group, or the whole) finds last in the response; nothing
            found is 0.0.

    Errors: MissingExtra without math-verify; there is no second, weaker rule to fall back on. DataError when `answer` holds
    no mathematics.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise MissingExtra(
            "rewards.math needs math-verify, which is not installed: pip install 'flowrl-operators[math]'; "
            "rewards.exact compares text without it"
        ) from error
    for part in ("parser", "grader"):
        logging.getLogger(f"math_verify.{part}").addFilter(_is_not_about_timeouts)
    # its own timeouts are signal alarms, which work in the main thread only; the operator's timeout covers both calls
    gold = parse(_as_latex(str(answer)), parsing_timeout=None)
    if not gold:
        raise DataError(
            f"math-verify finds no mathematics in the reference answer {answer!r}; use rewards.exact for text"
        )
    found = response if pattern is None else _last_match(pattern, response)
    return 0.0 if found is None else float(verify(gold, parse(found, parsing_timeout=None), timeout_seconds=None))


def _last_match(pattern: str, text: str) -> str | None:
    """What the first group (or the whole) of a regular expression finds last in a text."""
    matches = list(re.finditer(pattern, text, re.DOTALL))
    if not matches:
        return None
    return matches[-1][1 if matches[-1].re.groups else 0] or ""


def _is_not_about_timeouts(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Timeout is disabled")


def _as_latex(answer: str) -> str:
    is_marked = re.search(r"(?<!\\)\$|\\boxed|\\\(|\\\[", answer)  # an escaped dollar is a currency
    return answer if is_marked else f"${answer}$"


def _exact_timeout(*, pattern: str | None, **_: object) -> float | None:
    return None if pattern is None else 30.0  # only a regular expression can take long


@fr.reward(timeout_s=_exact_timeout)
def exact(
    response: str, answer: str, *, pattern: str | None = None, strip: bool = True, ignore_case: bool = False
) -> float:
    """1.0 when the response is the answer, character for character, else 0.0.

    Args:
        pattern: compare only what the first group (or the whole) of this regular expression finds last in the response;
            nothing found is 0.0.
        strip: leave white space around both out.
        ignore_case: compare case-folded.
    """
    found = response if pattern is None else _last_match(pattern, response)
    if found is None:
        return 0.0
    wanted = str(answer)
    if strip:
        found, wanted = found.strip(), wanted.strip()
    if ignore_case:
        found, wanted = found.casefold(), wanted.casefold()
    return float(found == wanted)


THINK = r"(?!.*<think>.*<think>)\s*<think>.*?</think>.*"


@fr.reward
def format(response: str, *, pattern: str = THINK, prefilled: str = "") -> float:
    """1.0 when the whole response matches a regular expression, else 0.0.

    Args:
        pattern: matched against all of the text, `.` including line ends. The default asks for one thinking part,
            `<think>...</think>`, at the start.
        prefilled: text with which the chat template has already begun the response, e.g. `"<think>\\n"`; the sampled part
            alone would never match.
    """
    return float(re.fullmatch(pattern, prefilled + response, re.DOTALL) is not None)
