"""Rewards that compare text with a reference, or look at its form."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import flowrl as fr
from flowrl.errors import ConfigError, DataError
from flowrl_operators._options import checked
from flowrl_operators.rewards._extract import BOXED, compiled, last_match


def _pattern_timeout(*, pattern: str | None = None, **_: object) -> float | None:
    return None if pattern is None else 30.0  # only a regular expression can take long


@fr.reward(timeout_s=_pattern_timeout)
def exact(
    response: str,
    answer: str,
    *,
    pattern: str | None = None,
    strip: bool = True,
    ignore_case: bool = False,
    wrong: float = 0.0,
) -> float:
    """1.0 when the response is the answer, character for character, else `wrong`.

    Args:
        pattern: compare only what the first group (or the whole) of this regular expression finds last in the response
            (`BOXED`, `ANSWER_TAG`, `NUMBER` are ready); nothing found is wrong.
        strip: leave white space around both out.
        ignore_case: compare case-folded.
        wrong: reward of a wrong answer.
    """
    found = response if pattern is None else last_match(pattern, response)
    if found is None:
        return float(wrong)
    wanted = str(answer)
    if strip:
        found, wanted = found.strip(), wanted.strip()
    if ignore_case:
        found, wanted = found.casefold(), wanted.casefold()
    return 1.0 if found == wanted else float(wrong)


@fr.reward
def regex(response: str, *, pattern: str, whole: bool = False, ignore_case: bool = False) -> float:
    """1.0 when a regular expression matches somewhere in the response (`whole`: matches all of it), else 0.0."""
    found = compiled(pattern, re.IGNORECASE if ignore_case else 0)
    return float((found.fullmatch(response) if whole else found.search(response)) is not None)


# ---------------------------------------------------------------------------------------------------- multiple choice

# possessive, and from a line's start not past its end: a response of nothing but line ends must not take minutes
_BEFORE = r"(?:answer|choice|option|choose|select|pick)(?:\s++(?:is|was|would\s++be|should\s++be|option|choice))*+"
_ASIDE = r"(?:[^\w\n]|_)*+"


def choice_letter(text: str, *, letters: str = "ABCDE") -> str | None:
    """The letter a text chooses, or None.

    Looked for in this order, the last of each kind wins: a letter in a box; a letter after "the answer is", "answer:",
    "option" and the like; a letter that stands alone (`(B)`, `B.`, `**B**` on its own line).

    Example:
        choice_letter("A is wrong. The answer is (B).") == "B"
    """
    one = f"[{re.escape(letters)}]"
    box = last_match(BOXED, text)
    if box is not None:
        inside = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*|[{}()\s.$]", "", box).upper()
        if len(inside) == 1 and inside in letters:
            return inside
    said = last_match(rf"(?i:\b{_BEFORE})\s*+:?[\s*(\[\"'$]*+({one})(?![\w'])", text)
    if said is not None:
        return said
    return last_match(rf"\(({one})\)|(?<![\w'])({one})[.):](?=\s|$)|(?m:^{_ASIDE}({one}){_ASIDE}$)", text)


@fr.reward
def choice(response: str, answer: str, *, letters: str = "ABCDE", format_score: float = 0.0) -> float:
    """Multiple choice: 1.0 when the response chooses the right letter, `format_score` for another letter, 0.0 for none.

    Args:
        letters: the letters there are, in capitals.
        format_score: reward of a clear but wrong choice.

    `answer` is a letter, with or without brackets and full stop. Errors: DataError when it is none of `letters`.
    """
    wanted = re.sub(r"[\W_]", "", str(answer)).upper()
    if len(wanted) != 1 or wanted not in letters:
        raise DataError(f"rewards.choice needs one of the letters {letters} as answer; found {answer!r}")
    found = choice_letter(response, letters=letters)
    return 0.0 if found is None else 1.0 if found == wanted else float(format_score)


# ----------------------------------------------------------------------------------------- answers of a few words

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
CLOSED = ("yes", "no", "noanswer")


def normalised(text: str) -> str:
    """SQuAD's form of an answer (arXiv 1606.05250): lower case, no punctuation, no articles, single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


class Overlap(NamedTuple):
    """How the words of two texts overlap."""

    f1: float
    precision: float
    recall: float


def word_overlap(prediction: str, truth: str, *, closed: Sequence[str] = CLOSED) -> Overlap:
    """F1, precision and recall of the words of two normalised texts, as SQuAD and HotpotQA (arXiv 1809.09600) count them.

    Args:
        closed: answers that are right or wrong as a whole: `yes` shares nothing with `yes indeed`.
    """
    said, wanted = normalised(prediction), normalised(truth)
    if said != wanted and (said in closed or wanted in closed):
        return Overlap(0.0, 0.0, 0.0)
    words, truths = said.split(), wanted.split()
    common = (Counter(words) & Counter(truths)).total()
    if not common:
        return Overlap(0.0, 0.0, 0.0)
    precision, recall = common / len(words), common / len(truths)
    return Overlap(2 * precision * recall / (precision + recall), precision, recall)


def _accepted(answer: str | Sequence[str], separator: str | None) -> list[str]:
    if not isinstance(answer, str):
        return [str(one) for one in answer]
    return answer.split(separator) if separator else [answer]


@fr.reward(timeout_s=_pattern_timeout)
def f1(
    response: str,
    answer: str,
    *,
    pattern: str | None = None,
    separator: str | None = None,
    closed: tuple[str, ...] = CLOSED,
) -> float:
    """F1 of the words of response and answer, between 0 and 1; the best of several accepted answers counts.

    Args:
        pattern: judge only what this regular expression finds last in the response; nothing found is 0.0.
        separator: text between several accepted answers in `answer`.
        closed: answers that are right or wrong as a whole (see `word_overlap`).
    """
    found = response if pattern is None else last_match(pattern, response)
    if found is None:
        return 0.0
    return max((word_overlap(found, one, closed=closed).f1 for one in _accepted(answer, separator)), default=0.0)


@fr.reward(timeout_s=_pattern_timeout)
def short_answer(
    response: str,
    answer: str,
    *,
    pattern: str | None = None,
    contains: bool = False,
    separator: str | None = None,
    format_score: float = 0.0,
) -> float:
    """Exact match in SQuAD's normalised form: 1.0 for the answer, `format_score` for another one, 0.0 for no answer.

    Args:
        pattern: judge only what this regular expression finds last (`ANSWER_TAG`); nothing found is 0.0.
        contains: an accepted answer anywhere in the response is enough.
        separator: text between several accepted answers in `answer`.
        format_score: reward of an answer that was found and is wrong.
    """
    found = response if pattern is None else last_match(pattern, response)
    if found is None:
        return 0.0
    said = normalised(found)
    wanted = [normalised(one) for one in _accepted(answer, separator)]
    is_right = any(one in said for one in wanted) if contains else said in wanted
    return 1.0 if is_right else float(format_score)


# ----------------------------------------------------------------------------------------------------------- form

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
    return float(compiled(pattern).fullmatch(prefilled + response) is not None)


@fr.reward(timeout_s=None)
def tags(
    response: str, *, names: tuple[str, ...] = ("think", "answer"), count: str = "all", prefilled: str = ""
) -> float:
    """Whether the response consists of `<think>...</think><answer>...</answer>`: every tag once, in this order.

    Args:
        names: the tags, in order.
        count: `"all"`: 1.0 when it is exactly so, nothing but white space outside, else 0.0; `"share"`: the share of the
            opening and closing tags that occur exactly once, wherever they stand, which pays for the first steps too.
        prefilled: what the chat template has already written of the response.
    """
    checked("count", count, ("all", "share"), "rewards.tags")
    if not names:
        raise ConfigError("rewards.tags needs at least one tag; found none")
    text = prefilled + response
    marks = [mark for name in names for mark in (f"<{name}>", f"</{name}>")]
    once = [text.count(mark) == 1 for mark in marks]
    if count == "share":
        return sum(once) / len(marks)
    at = [text.find(mark) for mark in marks]
    if not all(once) or at != sorted(at):
        return 0.0
    ends = [-1, *(at[i] + len(marks[i]) for i in range(1, len(marks), 2))]  # what stands before each opening tag
    outside = [text[max(end, 0) : start] for end, start in zip(ends, [*at[::2], len(text)], strict=True)]
    return float(not "".join(outside).strip())
