"""FR-V02: the schedule lets rows be older than the loss says it tolerates."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import Problem
from flowrl.graph.checks.facts import Facts, problem
from flowrl.graph.losses import tolerated_staleness


def staleness(facts: Facts) -> Iterator[Problem]:
    asked = facts.schedule.max_staleness
    for scope, node in facts.nodes("update"):
        rows = scope.rows(node.source("rows"))
        tolerated = tolerated_staleness(node["loss"])
        if rows.sampled_by is None or tolerated is None or asked <= tolerated:
            continue
        strictest = next((t.short_name for t in node["loss"].terms() if t.max_staleness == tolerated), "the loss")
        schedule = f"fr.Async(max_staleness={tolerated})" if tolerated else "fr.Sync()"
        yield problem(
            "FR-V02",
            node,
            f"the schedule lets rows be {asked} version{'s' if asked > 1 else ''} old; '{strictest}' tolerates {tolerated}",
            f"schedule={schedule}, or a correction that tolerates {asked}: loss * losses.truncated_importance(2.0)",
        )
