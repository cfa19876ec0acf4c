"""Pinned plans are the same on every Python, whatever way it sums floats."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_they_do_not_depend_on_how_floats_are_summed() -> None:
    """Python 3.12 sums floats with compensation, and 3.11 one after the other: here all of them exactly."""
    program = """
        import builtins, json, math
        plain = builtins.sum
        def exact(values, start=0):
            values = list(values)
            is_float = any(type(value) is float for value in values) and all(math.isfinite(value) for value in values)
            return start + math.fsum(values) if is_float else plain(values, start)
        builtins.sum = exact
        from tests.null.planner.golden.cases import CASES
        from tests.null.planner.golden.files import contents
        print(json.dumps([path.name for name in CASES for path, text in contents(name, CASES[name]).items()
                          if path.read_text(encoding="utf-8") != text]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, cwd=ROOT,
                          check=True, timeout=300)  # fmt: skip
    assert json.loads(done.stdout) == []
