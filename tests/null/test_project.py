"""What the project's own files must keep true."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACK = tomllib.loads((ROOT / "operators" / "pyproject.toml").read_text())


def names(requirements: list[str]) -> set[str]:
    """The distributions that a list of requirements asks for."""
    return {re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0] for requirement in requirements}


def test_core_depends_on_these_and_nothing_more() -> None:
    expected = {"torch", "transformers", "networkx", "lz4", "pyarrow", "numpy", "rich"}
    assert names(CORE["project"]["dependencies"]) == expected


def test_core_and_pack_are_released_together() -> None:
    assert CORE["project"]["version"] == PACK["project"]["version"]
    assert CORE["project"]["requires-python"] == PACK["project"]["requires-python"]


def test_pack_is_found_by_its_entry_point() -> None:
    assert PACK["project"]["entry-points"]["flowrl.operators"] == {"core": "flowrl_operators"}
    assert names(PACK["project"]["dependencies"]) == {"flowrl"}


def test_every_requirement_is_pinned() -> None:
    pinned = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", (ROOT / "requirements" / "constraints.txt").read_text(), re.M))
    extras = CORE["project"]["optional-dependencies"]
    needed = names(
        CORE["project"]["dependencies"] + extras["cpu"] + extras["dev"] + extras["docs"] + extras["examples"]
    )
    assert needed <= pinned.keys()
