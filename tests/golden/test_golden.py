"""Every golden file, at its own tolerance, outputs and gradients."""

from pathlib import Path

import pytest

from tests.golden.exclusions import EXCLUDED
from tests.golden.runner import run_file
from tests.golden.vectors import DATA, read_file

FILES = sorted(DATA.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file(path: Path) -> None:
    failed = [str(verdict) for verdict in run_file(path) if verdict.state == "FAIL"]
    assert not failed, "\n".join(failed)


def test_few_are_excluded_and_none_in_vain() -> None:
    there = {read_file(path)[:2] for path in FILES}
    assert len(EXCLUDED) <= len(there) / 6
    assert set(EXCLUDED) <= there
