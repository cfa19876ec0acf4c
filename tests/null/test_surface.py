"""The public surface is pinned: a change shows as a change of `surface.txt`.

To accept one: `python tests/null/test_surface.py` rewrites the file; say why in CHANGELOG.md.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import flowrl as fr

PINNED = Path(__file__).with_name("surface.txt")


def surface() -> str:
    lines = []
    for name in fr.__all__:
        value = getattr(fr, name)
        if inspect.isclass(value):
            fields = getattr(value, "__dataclass_fields__", None)
            if fields is not None:
                lines.append(f"class {name}({', '.join(f for f in fields if not f.startswith('_'))})")
            else:
                lines.append(f"class {name}")
            methods = [m for m, v in vars(value).items() if not m.startswith("_") and callable(getattr(value, m, None))]
            lines.extend(f"    {name}.{m}" for m in sorted(methods))
        elif callable(value):
            parameters = inspect.signature(value).parameters.values()
            shown = ", ".join(("*" if p.kind is p.KEYWORD_ONLY else "") + p.name for p in parameters)
            lines.append(f"def {name}({shown})")
        else:
            lines.append(f"{name}: {type(value).__name__}")
    return "\n".join(lines) + "\n"


def test_public_surface_is_as_pinned():
    assert surface() == PINNED.read_text()


def test_every_public_name_can_be_had_and_is_documented():
    for name in fr.__all__:
        value = getattr(fr, name)
        if callable(value):
            assert value.__doc__, f"flowrl.{name} has no docstring"


if __name__ == "__main__":
    PINNED.write_text(surface())
