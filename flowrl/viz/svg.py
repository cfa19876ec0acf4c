"""Markup in which every text is escaped: the only way in which views write SVG and HTML.

Example:
    tag("rect", tag("title", "a < b"), x=4, y=2.5, width=10, height=8, class_="bar")
    # <rect x="4" y="2.5" width="10" height="8" class="bar"><title>a &lt; b</title></rect>

Names of models, operators and columns come from users, and a page is opened in a browser. So a plain `str` is text and is
escaped; only what `tag`, `style` and `join` give is markup.
"""

from __future__ import annotations

import html
import re

_UNSAFE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")
"""No characters of XML, or marks that turn the direction of the text around them."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9:-]*")
VOID = frozenset({"meta", "br", "input"})
"""HTML elements that have no end."""

_CASED = {"viewbox": "viewBox", "patternunits": "patternUnits", "markerwidth": "markerWidth", "markerheight": "markerHeight",
          "markerunits": "markerUnits", "refx": "refX", "refy": "refY", "preserveaspectratio": "preserveAspectRatio",
          "textlength": "textLength"}  # fmt: skip
"""Attributes of SVG that are not all small letters."""

Scalar = str | int | float


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Piece = Scalar | None
"""A child: markup as it is, text and numbers escaped, None left out."""
Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge."""


def escape(text: object) -> Markup:
    """Text for an element or an attribute; characters that a page may not have become U+FFFD."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(clean(str(text)), quote=True))


def clean(text: str) -> str:
    """The text without characters that a page may not have."""
    return _UNSAFE.sub("\ufffd", text)


def number(value: float) -> str:
    """A coordinate with at most two decimals, as short as it can be."""
    text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return "0" if text == "-0" else text


def tag(element: str, *inside: Piece, **attributes: Scalar | bool | None) -> Markup:
    """An element.

    Args:
        inside: what it contains, in this order.
        attributes: `class_` and `for_` lose the underscore, others have it turned into a hyphen (`data_step`); None and False
            are left out, True is an attribute without a value.
    """
    shown = "".join(_attribute(name, value) for name, value in attributes.items())
    body = join(*inside)
    end = "" if element in VOID else f"</{element}>"
    return Markup(f"<{element}{shown}>{body}{end}")


def _attribute(name: str, value: Scalar | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = _CASED.get(name, name.rstrip("_").replace("_", "-"))
    assert _NAME.fullmatch(name), f"{name!r} is no name of an attribute"  # they are written in this package only
    if value is True:
        return f" {name}"
    text = number(value) if isinstance(value, float) else value
    return f' {name}="{html.escape(clean(str(text)), quote=True)}"'


def join(*pieces: Piece) -> Markup:
    """Pieces one after another."""
    return Markup("".join(escape(piece) for piece in pieces if piece is not None))


def text(x: float, y: float, words: object, **attributes: Scalar | bool | None) -> Markup:
    """Text whose baseline begins at a point (`text_anchor` says otherwise)."""
    return tag("text", str(words), x=float(x), y=float(y), **attributes)


def rect(x: float, y: float, width: float, height: float, *inside: Piece, **attributes: Scalar | bool | None) -> Markup:
    """A rectangle; negative sizes, which a rounding error may give, become 0."""
    return tag(
        "rect",
        *inside,
        x=float(x),
        y=float(y),
        width=float(max(0.0, width)),
        height=float(max(0.0, height)),
        **attributes,
    )


def line(x1: float, y1: float, x2: float, y2: float, **attributes: Scalar | bool | None) -> Markup:
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), **attributes)


def picture(
    name: str,
    width: float,
    height: float,
    title: str,
    description: str,
    *inside: Piece,
    **attributes: Scalar | bool | None,
) -> Markup:
    """An SVG with a title and a description for those who do not see it. `name` makes their ids and is unlike any other."""
    return tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", description, id=f"{name}-desc"),
        *inside,
        id=name,
        xmlns="http://www.w3.org/2000/svg",
        viewbox=f"0 0 {number(float(width))} {number(float(height))}",
        width="100%",
        style=f"max-width:{number(float(width))}px",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        **attributes,
    )


def fitted(words: str, width: float, *, size: float = 12.0) -> str:
    """As much of a text as fits a width in pixels, with an ellipsis; empty where not even three letters fit.

    Reckoned with the width of an average letter, as the fonts of the reader are not known.
    """
    letters = int(width / (size * LETTER))
    if len(words) <= letters:
        return words
    return words[: letters - 1].rstrip() + "…" if letters >= 4 else ""


def width_of(words: str, *, size: float = 12.0) -> float:
    """About how wide a text is, in pixels."""
    return len(words) * size * LETTER


def are_over(one: Box, other: Box) -> bool:
    """Whether two boxes have a place in common, so that texts in them would lie on each other."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


LETTER = 0.54
"""Width of an average letter, in heights of the font."""
