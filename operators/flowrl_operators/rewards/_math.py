"""Rewards for mathematics: math-verify's judgement, and the format of GSM8K."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import flowrl as fr
from flowrl.errors import DataError, MissingExtra
from flowrl_operators._options import checked
from flowrl_operators.rewards._extract import last_match

PERCENT = ("either", "number", "distinct")


@fr.reward(processes=True)
def math(
    response: str,
    answer: str,
    *,
    pattern: str | None = None,
    strict: bool = True,
    percent: str = "either",
    latex: bool = True,
    wrong: float = 0.0,
    unreadable: float | None = None,
) -> float:
    """1.0 when the response's final answer equals the reference mathematically, else `wrong`, as math-verify judges.

    The last `\\boxed{...}`, formula or number of the response is compared with `answer` (LaTeX with or without dollar
    signs, or a plain number). Needs the extra `math`. The comparison is not symmetric: an answer `5` is right where
    the reference is `x = 5`.

    A formula is evaluated: where the task is to compute `8 + 3`, a response that only repeats `8 + 3` counts as right, and a
    policy will find that out. `pattern=NUMBER` then judges the last number alone, `pattern=BOXED` the last box.

    Args:
        pattern: judge only what this regular expression (its first group, or the whole) finds last in the response; nothing
            found is wrong.
        strict: False compares variables by position and sets with tuples.
        percent: what 50% equals: `"either"` 50 and 0.5 (math-verify with a recent parser), `"number"` 50 alone, `"distinct"`
            another 50% alone.
        latex: an answer without dollar signs or a box is read as LaTeX; False gives it to math-verify as it is, which then
            sees plain numbers and little else.
        wrong: reward of a wrong answer; DAPO (arXiv 2503.14476) takes -1.
        unreadable: reward where `answer` holds no mathematics; None makes it an error.

    Errors: MissingExtra without math-verify; there is no second, weaker rule to fall back on. DataError when `answer` holds
    no mathematics. ConfigError for an unknown option value.
    """
    checked("percent", percent, PERCENT, "rewards.math")
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise MissingExtra(
            "rewards.math needs math-verify, which is not installed: pip install 'flowrl-operators[math]'; "
            "rewards.exact compares text without it"
        ) from error
    for part in ("parser", "grader"):
        logging.getLogger(f"math_verify.{part}").addFilter(_is_not_about_timeouts)
    given = _as_latex(str(answer)) if latex else str(answer)
    found = response if pattern is None else last_match(pattern, response)
    if percent == "number":
        given, found = _without_percent(given), None if found is None else _without_percent(found)
    # its own timeouts are signal alarms, which work in the main thread only; the operator's timeout covers both calls
    gold = parse(given, parsing_timeout=None)
    if not gold:
        if unreadable is not None:
            return float(unreadable)
        raise DataError(
            f"math-verify finds no mathematics in the reference answer {answer!r}; use rewards.exact for text"
        )
    if found is None:
        return float(wrong)
    said = parse(found, parsing_timeout=None)
    if percent == "distinct" and _is_percent(gold) != _is_percent(said):
        return float(wrong)
    if strict or not any(_has_several_variables(side) for side in (gold, said)):
        is_right = verify(gold, said, strict=strict, timeout_seconds=None)
    else:
        pairs = ((gold, said), (_by_position(gold), _by_position(said)))
        is_right = any(verify(*pair, strict=True, timeout_seconds=None) for pair in pairs)
    return 1.0 if is_right else float(wrong)


def _has_several_variables(parsed: Sequence[Any]) -> bool:
    return any(len(getattr(item, "free_symbols", ())) > 1 for item in parsed)


def _by_position(parsed: Sequence[Any]) -> list[Any]:
    """Variables renamed in the order of their names. math-verify pairs those of two expressions in the order of two sets, which
    is another one in each process."""
    found = []
    for item in parsed:
        names = sorted(getattr(item, "free_symbols", ()), key=str)
        found.append(item.xreplace({n: type(n)(f"v{i}") for i, n in enumerate(names)}) if names else item)
    return found


def _is_not_about_timeouts(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Timeout is disabled")


def _as_latex(answer: str) -> str:
    is_marked = re.search(r"(?<!\\)\$|\\boxed|\\\(|\\\[", answer)  # an escaped dollar is a currency
    return answer if is_marked else f"${answer}$"


def _without_percent(text: str) -> str:
    return re.sub(r"(?<=\d)\s*\\?%", "", text)


def _is_percent(parsed: Sequence[object]) -> bool:
    """Whether the text that math-verify took the answer from (it comes last) ends in a percent sign."""
    return bool(parsed) and isinstance(parsed[-1], str) and parsed[-1].rstrip().endswith("%")


# ---------------------------------------------------------------------------------------------------------- GSM8K

_FIGURES = r"-?[\d.,]+"
METHODS = ("strict", "flexible")


def gsm8k_answer(text: str, *, method: str = "strict", which: str = "last", tail: int | None = None) -> str | None:
    """The answer of a text in the format of GSM8K (arXiv 2110.14168), or None.

    Args:
        method: `"strict"`: the figures after `#### ` (that is: four signs and one blank), their commas left out;
            `"flexible"`: the last figures anywhere, as they are written.
        which: `"last"` or `"first"` of several `#### ` marks.
        tail: look only at so many characters at the end; some systems take 300.
    """
    checked("method", method, METHODS, "rewards.gsm8k")
    checked("which", which, ("last", "first"), "rewards.gsm8k")
    if tail is not None:
        text = text[-tail:] if tail > 0 else ""
    if method == "flexible":
        return next((figures for figures in reversed(re.findall(_FIGURES, text)) if figures != "."), None)
    marked = re.findall(f"#### ({_FIGURES})", text)
    return marked[-1 if which == "last" else 0].replace(",", "") if marked else None


@fr.reward(timeout_s=None)
def gsm8k(
    response: str,
    answer: str,
    *,
    method: str = "strict",
    which: str = "last",
    tail: int | None = None,
    compare: str = "number",
    format_score: float = 0.0,
) -> float:
    """1.0 for the right final number, `format_score` for another number in the right place, 0.0 for none.

    Args:
        method, which, tail: see `gsm8k_answer`.
        compare: `"number"`: 5, 5. and 5.0 are equal, and 1,234 and 1234; `"text"`: character for character, as most systems
            do (a flexible `1,234` is then wrong where the reference is 1234).
        format_score: reward of an answer in the right format that is wrong.

    `answer` may be the bare number or GSM8K's own text, which ends in `#### 72`.
    """
    checked("compare", compare, ("number", "text"), "rewards.gsm8k")
    found = gsm8k_answer(response, method=method, which=which, tail=tail)
    if found is None:
        return 0.0
    wanted = gsm8k_answer(str(answer)) or str(answer) if "####" in str(answer) else str(answer)
    is_right = found == wanted if compare == "text" else _is_same_number(found, wanted)
    return 1.0 if is_right else float(format_score)


def _is_same_number(found: str, wanted: str) -> bool:
    try:
        return Decimal(found.replace(",", "")) == Decimal(wanted.strip().replace(",", "").lstrip("$"))
    except InvalidOperation:
        return found.strip() == wanted.strip()
