"""FR-C01, FR-C02, FR-C03: columns that are missing, of another granularity, or written twice. Inference finds them."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import Problem
from flowrl.graph.checks.facts import Facts


def columns(facts: Facts) -> Iterator[Problem]:
    yield from facts.inference.all_problems()
