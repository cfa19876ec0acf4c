"""Put the tables of the last saved run into the page about speed.

    python -m benchmarks.tables --save && python -m benchmarks.tables.page

A table of the page is replaced by the one of `benchmarks/results/tables.md` whose header has the same first cell; the
sentences around them are for people to write.
"""

from __future__ import annotations

import re

from benchmarks.common import RESULTS, ROOT

PAGE = ROOT / "docs" / "tables" / "speed.md"
_PART = re.compile(r"<!-- tables -->.*?<!-- /tables -->", re.DOTALL)
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def tables_of(text: str) -> dict[str, str]:
    """The tables of a text by the first cell of their header."""
    return {_name(found): found for found in _TABLE.findall(text)}


def with_tables(page: str, measured: str) -> str:
    """The page with the measured tables in place of its own.

    Errors: SystemExit for a table of the page that was not measured.
    """
    known = tables_of(measured)

    def fresh(found: re.Match[str]) -> str:
        name = _name(found[0])
        if name not in known:
            raise SystemExit(f"no table '{name}' was measured; measure all parts: python -m benchmarks.tables --save")
        return known[name]

    return _PART.sub(lambda part: _TABLE.sub(fresh, part[0]), page)


def _name(table: str) -> str:
    return table.split("|")[1].strip()


def main() -> None:
    measured = (RESULTS / "tables.md").read_text()
    PAGE.write_text(with_tables(PAGE.read_text(), measured))


if __name__ == "__main__":
    main()
