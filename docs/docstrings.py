"""How docstrings are read for the reference: what follows `Example:` is code (an extension of griffe, named in mkdocs.yml)."""

import re
import textwrap
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:\n+((?:(?: {4}.*|[ \t]*)(?:\n|\Z))+)", re.MULTILINE)


def fenced(text: str) -> str:
    """A docstring with its examples as code blocks."""
    return EXAMPLE.sub(lambda match: f"```python\n{textwrap.dedent(match[1]).strip()}\n```\n\n", text)


class Examples(griffe.Extension):
    """Shows examples as code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
