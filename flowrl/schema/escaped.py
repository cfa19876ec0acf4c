"""Text from files as it can be printed: what a terminal would obey, hide or turn round is shown as an escape.

Names in a plan or a cluster come from files that somebody else may have written; a step called "update\\x1b[2J" would clear the
screen.
"""

from __future__ import annotations

import unicodedata

HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of characters that print nothing of their own: control, format (marks of direction, joiners), halves of pairs,
separators of lines."""


def escaped(text: str, *, keep: str = "") -> str:
    """The text with each such character as in `repr`: `\\x1b`, `\\u202e`, `\\n`.

    Args: keep: characters that stay, such as the ends of lines in a table.
    """
    if text.isascii() and text.replace("\n", "").isprintable() and ("\n" in keep or "\n" not in text):
        return text
    return "".join(_one(one, keep) for one in text)


def _one(character: str, keep: str) -> str:
    if character in keep or unicodedata.category(character) not in HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")
