"""What a section of the page is made of, and how it is checked and written.

A section shows one input. Each row has the conventions that give the same answer to it, that answer, and the text of the call
of ours that gives it too. The text is evaluated when the page is made: a row in which anything differs, by what the page
shows, is an error and not a page.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.golden.runner import find
from tests.golden.vectors import DATA, Case, read

Cells = tuple[Any, ...]
"""One number, text, truth value or array of numbers for each column of answers."""

RECORDED = "Recorded"
MAPPED = "Through the mapping"


@dataclass(frozen=True, slots=True)
class Row:
    """Conventions that agree."""

    systems: str
    """Names of golden files without the piece, with blanks between."""
    option: str = ""
    """Our call that answers the same; empty where none does."""
    instead: str = ""
    """Where there is none: why."""
    beyond: bool = False
    """This input lies outside what the vectors of these systems reach; the page marks it."""
    stated: Cells | None = None
    """The answer, where it is neither recorded nor to be had from the mapping; needs `beyond`."""


@dataclass(frozen=True, slots=True)
class Section:
    """One disagreement."""

    title: str
    text: str
    """What is at stake."""
    given: str
    """The input, written out."""
    system: Callable[[str], Cells]
    """What a convention answers."""
    ours: Callable[[str], Cells]
    """What the text of a call answers."""
    rows: tuple[Row, ...]
    default: str
    """Our default as a call."""
    why: str
    answers: tuple[str, ...] = ("answer",)
    """Heads of the columns of answers."""
    source: str = MAPPED
    label: str = "FlowRL, by default"
    digits: int = 4
    note: str = ""


# ------------------------------------------------------------------------------------------------ answers of other systems


def recorded(piece: str, convention: str, name: str) -> Case:
    """A case of a golden file. Errors: KeyError when there is none of that name."""
    found = {case.name: case for case in cases_of(piece, convention)}
    return found[name]


@functools.cache
def cases_of(piece: str, convention: str) -> tuple[Case, ...]:
    """The cases of a golden file."""
    return tuple(read(f"{piece}__{convention}"))


def mapped(
    piece: str, convention: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any] | None = None, **params: Any
) -> Any:
    """Our mapping of a convention on another input: its first case with these inputs, parameters changed as given.

    Errors: LookupError for a convention without a golden file, or one that nothing is mapped to.
    """
    answer = find(piece, convention)
    if answer is None or not (DATA / f"{piece}__{convention}.json").exists():
        raise LookupError(f"{piece} / {convention} has no golden file or no mapping")
    case = replace(cases_of(piece, convention)[0], inputs=dict(inputs), outputs=dict(outputs or {}))
    return answer(replace(case, params={**case.params, **params}))


def at(answer: Any) -> np.ndarray:
    """A value of an answer as numbers: what a `Where` holds, tensors and lists."""
    value = getattr(answer, "value", answer)
    return np.asarray(value.detach() if hasattr(value, "detach") else value, np.float64)


# ----------------------------------------------------------------------------------------------------------------- writing


def shown(value: Any, digits: int = 4) -> str:
    """A number with so many significant digits; arrays with commas between."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if np.ndim(value):
        return ", ".join(shown(one, digits) for one in np.asarray(value).reshape(-1))
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "∞" if number > 0 else "−∞"
    if number == 0:
        return "0"
    text = f"{number:.{digits}g}"
    if "e" in text:
        digit, power = text.split("e")
        text = f"{digit}e{int(power)}"
    return text.replace("-", "−")


def cells(values: Cells, section: Section) -> tuple[str, ...]:
    """An answer as the page shows it."""
    if len(values) != len(section.answers):
        raise AssertionError(f"{section.title}: {len(values)} answers for columns {section.answers}")
    return tuple(shown(value, section.digits) for value in values)


def checked(section: Section) -> list[tuple[str, tuple[str, ...], str]]:
    """(systems, answers, option) of each line of a section's table, the default last. Errors: AssertionError where a
    convention answers otherwise than its neighbours in the row, or our call otherwise than they."""
    default = cells(section.ours(section.default), section)
    lines = []
    for row in section.rows:
        systems = row.systems.split()
        if row.stated is not None and not row.beyond:
            raise AssertionError(f"{section.title}: a stated answer of {row.systems} needs beyond=True")
        answers = {name: cells(section.system(name) if row.stated is None else row.stated, section) for name in systems}
        answer = answers[systems[0]]
        if len(set(answers.values())) > 1:
            raise AssertionError(f"{section.title}: these do not agree: {answers}")
        if bool(row.option) == bool(row.instead):
            raise AssertionError(f"{section.title}: {row.systems} needs an option, or what there is instead")
        if row.option and (ours := cells(section.ours(row.option), section)) != answer:
            raise AssertionError(f"{section.title}: {row.option} gives {ours}, {row.systems} {answer}")
        if row.instead and default == answer:
            raise AssertionError(f"{section.title}: {row.systems} is what we do by default")
        names = ", ".join(f"`{name}`" for name in systems) + (" †" if row.beyond else "")
        lines.append((names, answer, f"`{row.option}`" if row.option else row.instead))
    lines.append((f"**{section.label}**", tuple(f"**{text}**" for text in default), f"`{section.default}`"))
    return lines


def written(section: Section) -> str:
    """A section of the page."""
    head = ("system", *section.answers, "ours")
    lines = [(names, *answer, option) for names, answer, option in checked(section)]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in (head, ["---"] * len(head), *lines)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in escaped)
    given, why = f"*{section.source}.* {section.given}", f"Why ours: {section.why}"
    parts = [f"### {section.title}", filled(section.text), filled(given), table, filled(section.note), filled(why)]
    return "\n\n".join(part for part in parts if part) + "\n"


def filled(text: str) -> str:
    """Prose in lines of the width of the other pages."""
    return textwrap.fill(text, 130, break_long_words=False, break_on_hyphens=False)


def evaluated(text: str, **names: Any) -> Any:
    """The value of the text of a call."""
    return eval(text, {"__builtins__": {}}, {**names, "dict": dict})
