"""Operators and losses by name, short or whole, and by what is said of them."""

from __future__ import annotations

import difflib
import inspect
import itertools
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.cli import description
from flowrl.errors import ConfigError, PackError
from flowrl.graph import packs
from flowrl.graph.losses import LossFunction
from flowrl.graph.operators import REQUIRED, Operator
from flowrl.recipe import targets

SHOWN = 3
"""Names in a hint."""


def named(name: str) -> Operator | LossFunction:
    """What `PACK.OPERATOR`, `FILE.py:NAME` or `module:NAME` names, or a short name that only one operator or loss has.

    Errors: ConfigError naming what is near, or where the name is mentioned.
    """
    installed = packs.packs()  # a name claimed by two distributions is no mistake of whoever asks
    if ":" in name or name.endswith(".py"):
        return _in_file(name)
    if name.partition(".")[0] not in {pack.name for pack in installed}:
        return _by_short_name(name)
    try:
        return packs.find(name)
    except PackError as error:
        first, _, wanted = name.partition(".")
        mentions = "" if _whole_names(f".{wanted}") else _mentions(wanted)
        raise ConfigError(f"pack '{first}' has no '{wanted}'{mentions}" if mentions else str(error)) from error


def is_pack(name: str) -> bool:
    """Whether a name without a dot is an installed pack."""
    return name in {pack.name for pack in packs.packs()}


def pack(name: str) -> packs.Pack:
    """Errors: ConfigError naming the installed packs."""
    found: packs.Pack = _asked(lambda: packs.pack_named(name))
    return found


@dataclass(frozen=True)
class Match:
    """An operator or a loss of which every word is true."""

    name: str
    """With the pack: what `ops show` takes."""
    sentence: str
    places: tuple[str, ...]
    """Where the words stand that neither the name nor the sentence has."""


def search(words: Sequence[str], among: Sequence[packs.Pack]) -> list[Match]:
    """Operators and losses with all of the words in their names, docstrings, options or columns, in any spelling of case,
    hyphens, dots and blanks. Where nothing has them as whole words, a word may go on (`normal` finds `normalised`)."""
    return _search(words, among, whole=True) or _search(words, among, whole=False)


def nearest_word(word: str, among: Sequence[packs.Pack]) -> str:
    """A hint with words that are said of something, or nothing; an abbreviation is near to too much."""
    known: dict[str, str] = {}
    for one in among:
        for key, operator in packs.contents(one).everything.items():
            for text in (key, *_texts(operator)):
                known.update({found.lower(): found for found in re.findall(r"[\w+-]{3,}", text)})
    near = difflib.get_close_matches(word.lower(), known, n=SHOWN, cutoff=0.75) if len(word) > 3 else []
    return f"; did you mean {' or '.join(repr(known[key]) for key in near)}?" if near else ""


def first_sentence(found: Operator | LossFunction) -> str:
    """What an operator says of itself, in a line."""
    paragraph = " ".join((inspect.getdoc(found.function) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[^.][.])\s+(?=[A-Z`])", paragraph)[0]


def cut(text: str, width: int) -> str:
    """A text in a line of so many characters, ended by dots where there is more."""
    if len(text) <= width:
        return text
    whole = text[: width - 3].rpartition(" ")[0]
    return (whole if len(whole) > width / 2 else text[: width - 3]).rstrip(" ,;:=(-") + "..."


def _search(words: Sequence[str], among: Sequence[packs.Pack], *, whole: bool) -> list[Match]:
    found = []
    for one in among:
        for key, operator in packs.contents(one).everything.items():
            name, sentence, texts = f"{one.name}.{key}", first_sentence(operator), _texts(operator)
            places = [_place(word, (name, sentence), texts, whole) for word in words]
            if None not in places:
                found.append(Match(name, sentence, tuple(dict.fromkeys(place for place in places if place))))
    return found


def _in_file(target: str) -> Operator | LossFunction:
    """The operator or loss that `FILE.py:NAME` or `module:NAME` names."""
    where, name = targets.split_target(target)
    if not name:
        raise ConfigError(f"name the operator or loss of the file: {where}:NAME")
    found = targets.find(target)
    if not isinstance(found, Operator | LossFunction):
        raise ConfigError(f"'{target}' is a {type(found).__name__}; it should be an operator or a loss")
    return found


def _by_short_name(name: str) -> Operator | LossFunction:
    """What only one pack has under a name without the pack: `rloo`, `advantages.rloo`."""
    chosen = _whole_names(f".{name}")
    if len(chosen) == 1:
        return next(iter(chosen.values()))
    if chosen:
        raise ConfigError(f"'{name}' may be {' or '.join(sorted(chosen))}; write the one you mean")
    first, dot, _ = name.partition(".")
    if dot:
        own = f"; what a file defines is named {first}.py:NAME" if Path(f"{first}.py").is_file() else ""
        _asked(lambda: packs.pack_named(first), own)
    short = {key.rpartition(".")[2] for key in _whole_names("")}
    near = difflib.get_close_matches(name, short, n=SHOWN, cutoff=0.6)
    hint = _mentions(name) or (f"; did you mean {' or '.join(repr(key) for key in near)}?" if near else "")
    raise ConfigError(f"no pack '{name}' is installed, and no pack has an operator or a loss '{name}'{hint}")


def _whole_names(ending: str) -> dict[str, Operator | LossFunction]:
    """By name with the pack, what ends so."""
    return {
        whole: found
        for pack in packs.packs()
        for key, found in packs.contents(pack).everything.items()
        if (whole := f"{pack.name}.{key}").endswith(ending)
    }


def _mentions(word: str) -> str:
    """Who mentions a word that is no name."""
    found = _search([word], packs.packs(), whole=True)
    if not found:
        return ""
    listed = ", ".join(match.name for match in found[:SHOWN]) + (" and others" if len(found) > SHOWN else "")
    return f"; it is mentioned by {listed}: flowrl ops list --search {shlex.quote(word)}"


def _asked(look_up: Callable[[], Any], more: str = "") -> Any:
    """A look-up of what was typed: a name that does not exist is wrong usage."""
    try:
        return look_up()
    except PackError as error:
        raise ConfigError(f"{error}{more}") from error


def _texts(found: Operator | LossFunction) -> list[str]:
    """Everything that is said of an operator, in pieces fit for a line: its docstring, options, columns."""
    doc = [line.strip() for line in (inspect.getdoc(found.function) or "").splitlines()]
    options = [
        f"{key} (required)" if value is REQUIRED else f"{key} = {value!r}" for key, value in found.defaults.items()
    ]
    columns = [f"reads {read.column.removeprefix('$')}" for read in found.reads]
    if isinstance(found, Operator):
        columns += [f"writes {name}" for name in description.written(found) or ()]
    # a name of two words may stand across the end of a line
    pairs = [f"{one} {other}" for one, other in itertools.pairwise(doc) if one and other]
    return [*doc, *pairs, *options, *columns]


def _place(word: str, shown: Sequence[str], texts: Sequence[str], whole: bool) -> str | None:
    """Empty where what is shown has the word, else the first text that has it; None where nothing has."""
    wanted = re.compile(rf"(?<![a-z0-9]){re.escape(_plain(word))}{'(?![a-z0-9])' if whole else ''}")
    if any(wanted.search(_plain(text)) for text in shown):
        return ""
    return next((text for text in texts if wanted.search(_plain(text))), None)


def _plain(text: str) -> str:
    return re.sub(r"[-_.\s]+", " ", text.lower()).strip()
