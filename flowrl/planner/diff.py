"""Two plans side by side: which inputs differ, which steps, and what that does to the predicted seconds and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.cost.text import aligned, change_text, size_text, time_text
from flowrl.mesh import Mesh
from flowrl.planner.codec import encode
from flowrl.planner.figures import mesh_name
from flowrl.planner.steps import Plan, Step
from flowrl.schema.escaped import escaped

NO_INPUTS = frozenset({"steps", "predicted", "searched", "meshes"})
"""Fields of a plan that are found by planning, not given to it."""
LONG = 60


@dataclass(frozen=True, slots=True)
class Change:
    """One value that is another one. A value that one side does not have is None there."""

    what: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        return f"{escaped(self.what)}: {_shown(self.before)} -> {_shown(self.after)}"


@dataclass(frozen=True, slots=True)
class StepChange:
    """A step that both plans have, and that they do in different ways."""

    step: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A predicted number of both plans; None where a plan has no such step."""

    what: str
    before: float | None
    after: float | None
    unit: str
    """`s` or `bytes`."""

    @property
    def row(self) -> tuple[str, str, str, str]:
        text = time_text if self.unit == "s" else size_text
        values = (self.before, self.after)
        here, there = ("" if value is None else text(value) for value in values)
        is_both = self.before is not None and self.after is not None
        # a change of what is shown as equal is none that anybody would notice: 0.02 ms and 0.03 ms are 0.0 ms
        has_change = is_both and self.before and here != there
        return (
            escaped(self.what),
            here,
            there,
            change_text(self.after or 0.0, self.before or 0.0) if has_change else "",
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """How a plan differs from another. `str` says it in full."""

    inputs: tuple[Change, ...]
    """Of what the plans were made from: flow, operators, cluster, workload, schedule."""
    removed: tuple[str, ...]
    """Steps that only the first has."""
    added: tuple[str, ...]
    """Steps that only the second has."""
    changed: tuple[StepChange, ...]
    is_reordered: bool
    """Whether the steps that both have come in another order."""
    figures: tuple[Figure, ...]
    """Predicted: of the whole, then of each step that either has."""

    @property
    def is_equal(self) -> bool:
        """Whether the two do the same, from the same inputs, with the same predictions."""
        moved = any(one.before != one.after for one in self.figures)
        return not (self.inputs or self.removed or self.added or self.changed or self.is_reordered or moved)

    def __str__(self) -> str:
        if self.is_equal:
            return "the plans are equal"
        lines: list[str] = []
        if self.inputs:
            lines += ["inputs that differ:", *(f"  {one}" for one in self.inputs), ""]
        if self.removed or self.added or self.changed or self.is_reordered:
            lines.append("steps:")
            lines += [f"  - {escaped(name)}" for name in self.removed]
            lines += [f"  + {escaped(name)}" for name in self.added]
            for one in self.changed:
                lines.append(f"  ~ {escaped(one.step)}")
                lines += [f"      {change}" for change in one.changes]
            if self.is_reordered:
                lines.append("  the steps that both plans have stand in another order")
        else:
            lines.append("the steps are the same")
        rows = [("predicted", "first", "second", "change"), *(one.row for one in self.figures)]
        return "\n".join([*lines, "", *aligned(rows, "lrrr")])


def diff(first: Plan, second: Plan) -> Difference:
    """What changes from one plan to another. Steps are the same where their names are."""
    before = {step.name: step for step in first.steps}
    after = {step.name: step for step in second.steps}
    both = [name for name in before if name in after]
    changed = []
    for name in both:
        changes = tuple(_step_changes(first, before[name], second, after[name]))
        if changes:
            changed.append(StepChange(name, changes))
    return Difference(
        inputs=tuple(_input_changes(first, second)),
        removed=tuple(name for name in before if name not in after),
        added=tuple(name for name in after if name not in before),
        changed=tuple(changed),
        is_reordered=both != [name for name in after if name in before],
        figures=tuple(_figures(first, second)),
    )


def _step_changes(first: Plan, before: Step, second: Plan, after: Step) -> Iterator[Change]:
    def said(plan: Plan, step: Step) -> dict[str, str]:
        found = {
            "node": step.node,
            "kind": str(step.kind),
            "mesh": mesh_name(plan, step.mesh),
            "from": "" if step.source is None else mesh_name(plan, step.source),
            "layout": "" if step.layout is None else str(step.layout),
            "reads": ", ".join(step.reads),
            "waits for": ", ".join(step.after),
        }
        return found | {key: str(value) for key, value in step.settings}

    one, other = said(first, before), said(second, after)
    for key, here, there in (("mesh", before.mesh, after.mesh), ("from", before.source, after.source)):
        if _devices(here) == _devices(there):  # the same, whatever it is called
            one[key] = other[key]
        else:
            one[key], other[key] = f"{one[key]}{_devices(here)}", f"{other[key]}{_devices(there)}"
    yield from _changes(one, other)


def _devices(mesh: Mesh | None) -> str:
    """` of devices 0 to 7`; nothing for no mesh."""
    if mesh is None:
        return ""
    last = mesh.first + mesh.size - 1
    return f" of device {last}" if mesh.size == 1 else f" of devices {mesh.first} to {last}"


def _input_changes(first: Plan, second: Plan) -> Iterator[Change]:
    """Leaf by leaf; lengths of prompts and responses by what describes them."""
    said = [{key: value for key, value in encode(plan).items() if key not in NO_INPUTS} for plan in (first, second)]
    for values, plan in zip(said, (first, second), strict=True):
        if plan.workload is not None:
            for name in ("prompt_lengths", "response_lengths"):
                lengths = getattr(plan.workload, name)
                spread = f", {len(lengths.tokens)} different" if len(lengths.tokens) > 1 else ""
                said_shortly = f"mean {lengths.mean:.0f}, longest {lengths.longest}{spread}"
                values["workload"][name] = {"": said_shortly, "all": encode(lengths)}
    one, other = (dict(_leaves(values)) for values in said)
    seen = list(_changes(one, other))
    shown = {change.what for change in seen}
    for change in seen:
        parent = change.what.partition(".all.")[0]
        if parent == change.what:
            yield change
        elif parent not in shown:  # histograms that differ although their descriptions do not
            shown.add(parent)
            yield Change(parent, "another histogram", "with the same mean and longest")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, f"{path}.{key}" if path and key else path or key)
    elif isinstance(value, list) and any(isinstance(one, list | Mapping) for one in value):
        for index, one in enumerate(value):
            is_pair = isinstance(one, list) and len(one) == 2 and isinstance(one[0], str)
            yield from _leaves(one[1], f"{path}.{one[0]}") if is_pair else _leaves(one, f"{path}.{index}")
    elif value is not None:
        yield path, str(value)


def _changes(one: Mapping[str, str], other: Mapping[str, str]) -> Iterator[Change]:
    for key in (*one, *(key for key in other if key not in one)):
        if one.get(key) != other.get(key):
            yield Change(key, one.get(key), other.get(key))


def _figures(first: Plan, second: Plan) -> Iterator[Figure]:
    one, other = first.predicted, second.predicted
    yield Figure("seconds per iteration", one.seconds, other.seconds, "s")
    yield Figure("latency", one.latency_s, other.latency_s, "s")
    yield Figure("bound of the order", one.bound_s, other.bound_s, "s")
    yield Figure("memory of a device", one.device_bytes, other.device_bytes, "bytes")
    yield Figure("memory of a host", one.host_bytes, other.host_bytes, "bytes")
    before = {step.name: step.predicted for step in first.steps}
    after = {step.name: step.predicted for step in second.steps}
    for name in (*before, *(name for name in after if name not in before)):
        here, there = before.get(name), after.get(name)
        yield Figure(f"{name}, seconds", here.seconds if here else None, there.seconds if there else None, "s")
        yield Figure(
            f"{name}, memory", here.memory_bytes if here else None, there.memory_bytes if there else None, "bytes"
        )


def _shown(value: str | None) -> str:
    if not value:
        return "none"
    text = escaped(value)
    return text if len(text) <= LONG else f"{text[: LONG - 3]}..."
