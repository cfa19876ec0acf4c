"""What holds for every draft: checked after each pass."""

from __future__ import annotations

from collections.abc import Callable

from flowrl.errors import ConfigError, FlowError
from flowrl.planner.draft import Draft
from flowrl.planner.network import network


def run(passes: tuple[Callable[[Draft], Draft], ...], draft: Draft) -> Draft:
    """All passes, each followed by `check`."""
    for one in passes:
        draft = one(draft)
        check(draft, getattr(one, "__name__", str(one)))
    return draft


def check(draft: Draft, name: str) -> None:
    """Errors: FlowError, when a pass left a draft that no plan can be made of: that is a mistake in the pass."""
    try:
        network([step.task for step in draft.steps], draft.problem.cluster.devices_per_node)
    except ConfigError as error:
        raise _broken(draft, name, str(error)) from error
    names = {step.name for step in draft.steps}
    for step in draft.steps:
        if step.devices[-1] >= draft.problem.cluster.num_devices:
            raise _broken(draft, name, f"step '{step.name}' uses device {step.devices[-1]}")
    for hold in (*draft.resident, *(hold for step in draft.steps for hold in step.predicted.holds)):
        missing = {hold.from_task, hold.until_task} - names - {""}
        if missing:
            raise _broken(draft, name, f"hold '{hold.what}' names the step '{missing.pop()}', which is not there")
    for one in draft.parked:
        missing = {*one.uses, *one.state.writers} - names
        if missing:
            raise _broken(draft, name, f"'{one.state.role}' is used by the step '{missing.pop()}', which is not there")


def _broken(draft: Draft, name: str, why: str) -> FlowError:
    return FlowError(f"pass '{name}' of the planner broke the plan of '{draft.graph.name}'; please report this: {why}")
