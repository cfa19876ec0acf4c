"""What every page is made of: the document with its policy, sections, tables, legends.

Example:
    parts = (section("curves", "Curves", drawing),)
    document("run grpo-1", join(navigation(parts), *(part.markup for part in parts)), scripts=("page.js",))

A page is one file. The policy in its head forbids it to fetch anything, and all texts are escaped (`flowrl.viz.svg`).
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from flowrl.viz.palette import css, hatches
from flowrl.viz.svg import Markup, join, tag

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Content-Security-Policy of a page: nothing is loaded, from the network or from files beside it."""
LIVE_POLICY = f"{POLICY}; connect-src 'self'"
"""Of a page that is served while its run goes on: it may ask who served it for what is new."""
_CELL = re.compile(r'<t[hd]\b(?:[^>]*? class="([^"]*)")?[^>]*>')
"""A cell of a table, with its class."""


class Part(NamedTuple):
    """A section of a page."""

    name: str
    """Its id."""
    title: str
    markup: Markup


def document(
    title: str,
    body: Markup,
    *,
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    data: Iterable[Markup] = (),
    facts: Mapping[str, str] | None = None,
    policy: str = POLICY,
    more_head: Markup | None = None,
) -> str:
    """The whole page.

    Args:
        styles, scripts: assets beside `page.css`, by name.
        data: script elements that hold data (`data_script`).
        facts: attributes of the root element.
    """
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width,initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        more_head,
        Markup(f"<style>{css()}{''.join(asset(name) for name in ('page.css', *styles))}</style>"),
    )
    root = "".join(f' {name}="{html.escape(value, quote=True)}"' for name, value in (facts or {}).items())
    code = "\n".join(f"<script>{asset(name)}</script>" for name in scripts)
    held = "\n".join(data)
    inside = f"{hatches()}{body}\n{held}\n{code}"
    return f'<!doctype html>\n<html lang="en"{root}><head>{head}</head><body>\n{inside}\n</body></html>\n'


def asset(name: str) -> str:
    """A file of the package's own, as text."""
    return files("flowrl.viz").joinpath("assets", name).read_text(encoding="utf-8")


def data_script(name: str, values: Any) -> Markup:
    """Values as JSON in a script element that runs nothing."""
    return Markup(f'<script type="application/json" id="{name}">{json_markup(values)}</script>')


def json_markup(values: Any) -> Markup:
    """JSON in which nothing can end a script element or begin another."""
    compact = json.dumps(values, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        compact = compact.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(compact)  # other letters than ASCII are escaped by json.dumps


def in_frame(page: str, title: str, *, height: int = 760) -> str:
    """A page in a frame of its own, for notebooks: neither's style reaches the other."""
    return (
        f'<iframe srcdoc="{html.escape(page, quote=True)}" sandbox="allow-scripts" title="{html.escape(title)}" '
        f'style="width:100%;height:{height}px;border:0"></iframe>'
    )


def section(name: str, title: str, inside: Markup) -> Part:
    head = tag("h2", title, id=f"{name}-head")
    return Part(name, title, tag("section", head, inside, id=name, aria_labelledby=f"{name}-head"))


def navigation(parts: Iterable[Part]) -> Markup:
    links = (tag("a", part.title, href=f"#{part.name}") for part in parts)
    return tag("nav", tag("div", *links), aria_label="Parts of the page")


def legend(mark: Markup, name: str, kind: str = "", value: str = "") -> Markup:
    """An item of a legend; with a `kind` (an attribute of marks) it becomes a button that dims those with this value."""
    return tag("li", mark, tag("span", name), data_filter=kind or None, data_value=value if kind else None)


def table(head: Sequence[str], rows: Iterable[Markup]) -> Markup:
    """Rows are `tr`s; the head of a column of numbers stands over them, to the right."""
    rows = tuple(rows)
    cells = _CELL.findall(rows[0]) if rows else []
    kinds = ["num" if one == "num" else None for one in cells] + [None] * len(head)
    heads = (tag("th", word, scope="col", class_=kind) for word, kind in zip(head, kinds, strict=False))
    return tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows))


def folded(words: str, inside: Markup) -> Markup:
    return tag("details", tag("summary", words), tag("div", inside, class_="scroll"))
