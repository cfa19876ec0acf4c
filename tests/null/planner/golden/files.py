"""Where pinned plans lie: of each case what matters of its plan as JSON, and the printed texts whole."""

from __future__ import annotations

import json
from pathlib import Path

from tests.null.planner.golden.cases import Case

DATA = Path(__file__).with_name("data")


def contents(name: str, case: Case) -> dict[Path, str]:
    """File -> what belongs into it."""
    return {
        DATA / f"{name}.json": json.dumps(case.essence(), indent=1) + "\n",
        DATA / f"{name}.txt": case.text(),
    }
