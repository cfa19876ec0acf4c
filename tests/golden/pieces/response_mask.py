"""Which tokens of a padded response belong to it."""

from __future__ import annotations

from typing import Any

from flowrl_operators.adapters import padded
from tests.golden.vectors import Case


def _until_end(case: Case) -> dict[str, Any]:
    ends = case.params["eos_token"]
    ends = tuple(ends) if isinstance(ends, list) else (ends,)
    return {"mask": padded.until_end(case.array("response_id").astype(int), ends).astype(int)}


CONVENTIONS = {"verl.get_response_mask": _until_end}
