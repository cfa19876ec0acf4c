"""The page's contents, and for each system the calls of ours that do what it does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tests.golden.disagreements.tables import Section

SYSTEMS = {
    "verl": "verl", "trl": "TRL", "openrlhf": "OpenRLHF", "nemo": "NeMo-RL", "skyrl": "SkyRL", "slime": "slime", "roll": "ROLL",
    "areal": "AReaL", "prime": "prime-rl", "ms_swift": "ms-swift", "math_verify": "math-verify",
}  # fmt: skip
"""What a convention's name begins with, and the system's own name; in the order of the page."""

BY_SYSTEM = """\
## By system

For each section above, what a system's conventions are called there and which of our calls does the same. Calls of operators
(`group_norm`) stand in a flow with their rows, `advantages.group_norm(rows, ...)`; those of losses are terms of `loss=`. Bounds
and coefficients are those of the recorded runs or of the section's input: yours go in their place. A convention that no section
is about is mapped in `tests/golden/pieces`.
"""


def contents(chapters: Mapping[str, Sequence[Section]]) -> str:
    """Links to every section, and to every system's table."""
    lines = [
        f"- [{chapter}](#{anchor(chapter)}): " + " · ".join(f"[{s.title}](#{anchor(s.title)})" for s in sections)
        for chapter, sections in chapters.items()
    ]
    systems = " · ".join(f"[{SYSTEMS[name]}](#{anchor(heading(name))})" for name in found(chapters))
    return "\n".join(["**Contents.**\n", *lines, f"- [By system](#by-system): {systems}"]) + "\n"


def by_system(chapters: Mapping[str, Sequence[Section]]) -> str:
    """A table for each system. Errors: AssertionError for a convention of a system that has no name here."""
    parts = [BY_SYSTEM]
    for name, lines in found(chapters).items():
        table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
        parts.append(f"### {heading(name)}\n\n| section | there | ours |\n| --- | --- | --- |\n{table}\n")
    return "\n".join(parts)


def found(chapters: Mapping[str, Sequence[Section]]) -> dict[str, list[tuple[str, str, str]]]:
    """For each system (section, its conventions, our call or why there is none), a line for each row of the page.

    The section stands in its first line only.
    """
    lines: dict[str, list[tuple[str, str, str]]] = {name: [] for name in SYSTEMS}
    last: dict[str, str] = {}
    for section in (section for sections in chapters.values() for section in sections):
        for row in section.rows:
            mine: dict[str, list[str]] = {}
            for convention in row.systems.split():
                mine.setdefault(convention.partition(".")[0], []).append(convention.partition(".")[2])
            for name, conventions in mine.items():
                assert name in lines, f"{section.title}: '{name}' is no system of {', '.join(SYSTEMS)}"
                link = "" if last.get(name) == section.title else f"[{section.title}](#{anchor(section.title)})"
                last[name] = section.title
                call = f"`{row.option}`" if row.option else row.instead
                lines[name].append((link, ", ".join(f"`{one}`" for one in conventions), call))
    return {name: rows for name, rows in lines.items() if rows}


def heading(name: str) -> str:
    """Of a system's table."""
    return f"Coming from {SYSTEMS[name]}"


def anchor(title: str) -> str:
    """What a heading is linked to by, as Markdown makes it of the title."""
    plain = re.sub(r"[^\w\s-]", "", title.encode("ascii", "ignore").decode()).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)
