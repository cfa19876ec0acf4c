"""Whether a plan says all that a run needs: a step for each node that runs a model, and settings that mean something.

The planner's own plans do. Those that were written or changed by hand may not, and a run that quietly did something else would
not be the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from flowrl.cost.offload import Offload
from flowrl.errors import ConfigError
from flowrl.graph.nodes import Graph
from flowrl.planner.steps import Plan
from flowrl.planner.tasks import StepKind
from flowrl.runtime.applied import calls_of
from flowrl.schema.fields import is_int, is_number, shown

OFFLOADS = ("", *(one.value for one in Offload))

VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "micro_batch_tokens": (lambda value: is_int(value) and value >= 1, "a whole number of at least 1"),
    "recompute": (lambda value: isinstance(value, bool), "true or false"),
    "park_weights": (lambda value: isinstance(value, bool), "true or false"),
    "writes": (lambda value: isinstance(value, bool), "true or false"),
    "utilization": (lambda value: is_number(value) and 0 < value <= 1, "a number above 0, 1 at most"),
    "offload": (
        lambda value: value is False or (isinstance(value, str) and value in OFFLOADS),
        f"one of {OFFLOADS[1:]}",
    ),
}
"""Setting of a step that the runtime reads -> whether a value will do, and what will."""


def check_complete(plan: Plan, graph: Graph) -> None:
    """Raise `ConfigError` unless each node that runs a model has one step that computes it, with settings that make sense."""
    found = Counter(step.node for step in plan.steps if step.kind is StepKind.COMPUTE)
    calls = [name for name, _, _ in calls_of(graph)]
    missing = [name for name in calls if not found[name]]
    if missing:
        raise ConfigError(
            f"plan '{plan.name}' has no step for {_quoted(missing)}, which flow '{graph.name}' computes; plan again"
        )
    twice = [name for name in calls if found[name] > 1]
    if twice:
        names = [step.name for step in plan.steps if step.kind is StepKind.COMPUTE and step.node == twice[0]]
        raise ConfigError(
            f"plan '{plan.name}' computes '{twice[0]}' {len(names)} times, in the steps {_quoted(names)}; keep one of them"
        )
    for step in plan.steps:
        for name, value in step.settings:
            will_do, what = VALUES.get(name, (None, ""))
            if will_do is not None and not will_do(value):
                raise ConfigError(f"step '{step.name}' of the plan has {name}={shown(value)}; it is {what}")


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:5]) + (", ..." if len(names) > 5 else "")
