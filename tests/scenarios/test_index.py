"""The table of faults names tests that exist, and every test here is in it."""

import re
from pathlib import Path

HERE = Path(__file__).parent
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", (HERE / "README.md").read_text())


def names_in(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE))


def test_every_test_that_is_named_exists() -> None:
    assert len(NAMED) > 60
    missing = [f"{file}::{name}" for file, name in NAMED if name not in names_in(HERE.parent / file)]
    assert not missing


def test_every_test_here_is_named() -> None:
    named = {(file.removeprefix("scenarios/"), name) for file, name in NAMED if file.startswith("scenarios/")}
    here = {(path.name, name) for path in HERE.glob("test_*.py") for name in names_in(path)}
    assert here - {item for item in here if item[0] == "test_index.py"} == named
