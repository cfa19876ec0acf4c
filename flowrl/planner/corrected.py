"""What a run measured, put into the cluster that the next plan is made for.

Example:
    better = corrected(run.compare(), cluster)
    better.cluster.to_toml("cluster.toml")          # and fr.plan(..., cluster=better.cluster)

A step's seconds are one number, and a cluster has many. What a step of a kind mostly consists of is scaled by measured over
predicted; what it holds besides (an optimizer's step, the overhead of a decode step, copies) stays as it is, so that a correction
is exact where that is small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

from flowrl.errors import ConfigError
from flowrl.graph.kinds import KINDS
from flowrl.mesh import Cluster
from flowrl.planner.measured import Comparison, StepMeasured
from flowrl.planner.tasks import StepKind

PARTS = {
    "train": ("train", "train_attention"),
    "forward": ("forward", "forward_attention"),
    "sample": ("decode_flops", "decode_hbm"),
}
"""Work to the fields of `Efficiency` that its seconds go with. Whether a decode step was bound by arithmetic or by memory is not
in its time, so both are scaled."""
BESIDE = {"train": "train_", "forward": "forward_"}
"""Work to how the fields of `Overheads` begin that its seconds go with."""


@dataclass(frozen=True, slots=True)
class Corrected:
    """A cluster with the figures of a run."""

    cluster: Cluster
    ratios: tuple[tuple[str, float], ...]
    """(`train`, `forward` or `sample`, measured over predicted seconds of all steps that do this)."""
    left: tuple[str, ...]
    """What was measured and cannot be put down to one figure, or only in part, in words."""
    changed: tuple[tuple[str, float, float], ...] = ()
    """(`efficiency.train`, before, after) for each figure that is another one now."""

    def __str__(self) -> str:
        lines = [f"{work}: measured {ratio:.2f} of what was predicted" for work, ratio in self.ratios]
        lines += [f"  {name}: {before:.4g} -> {after:.4g}" for name, before, after in self.changed]
        lines += [f"left: {line}" for line in self.left]
        return "\n".join(lines) or "nothing was measured, and nothing changed"


def corrected(comparison: Comparison, cluster: Cluster, *, weight: float = 1.0) -> Corrected:
    """The cluster with efficiencies with which the plan would have predicted what was measured.

    Args:
        cluster: the one that the plan was made for.
        weight: how much this run counts against what the cluster says already, above 0 to 1: ratios enter as `ratio ** weight`,
            so that with 0.3 after each run the figures are an exponentially weighted mean, and one odd run does little.

    Errors: ConfigError for another weight.
    """
    if not 0 < weight <= 1:
        raise ConfigError(f"weight is above 0 and at most 1; found {weight!r}")
    given = cluster
    ratios: list[tuple[str, float]] = []
    left: list[str] = []
    for work in PARTS:
        steps = [step for step in comparison.steps if step.runs and _work(step) == work]
        predicted, measured = sum(s.predicted_s for s in steps), sum(s.measured_s or 0.0 for s in steps)
        if not (predicted > 0 and measured > 0):
            continue
        ratios.append((work, measured / predicted))
        cluster, capped = _scaled(cluster, work, (measured / predicted) ** weight)
        left += capped
    left += _left(comparison, {name for name, _ in ratios})
    return Corrected(cluster, tuple(ratios), tuple(left), tuple(_changed(given, cluster)))


def _work(step: StepMeasured) -> str:
    kind = KINDS.get(step.node_kind)
    if step.kind is not StepKind.COMPUTE or kind is None or not kind.uses_model:
        return ""
    return "train" if kind.changes_model else "forward" if kind.is_forward else "sample"


def _scaled(cluster: Cluster, work: str, ratio: float) -> tuple[Cluster, list[str]]:
    """(the cluster on which the work takes `ratio` times as long, what a fraction of a peak cannot say)."""
    parts = {name: getattr(cluster.efficiency, name) / ratio for name in PARTS[work]}
    capped = [
        f"{work}: efficiency.{name} would be {value:.2f}, and no part of a peak is above 1; give the device a higher peak"
        for name, value in parts.items()
        if value > 1
    ]
    efficiency = replace(cluster.efficiency, **{name: min(1.0, value) for name, value in parts.items()})
    prefix = BESIDE.get(work)
    names = [one.name for one in fields(cluster.overheads) if prefix is not None and one.name.startswith(prefix)]
    overheads = replace(cluster.overheads, **{name: getattr(cluster.overheads, name) * ratio for name in names})
    return replace(cluster, efficiency=efficiency, overheads=overheads), capped


def _changed(before: Cluster, after: Cluster) -> Iterator[tuple[str, float, float]]:
    for table in ("efficiency", "overheads"):
        then, now = getattr(before, table), getattr(after, table)
        for one in fields(then):
            here, there = getattr(then, one.name), getattr(now, one.name)
            if here != there:
                yield f"{table}.{one.name}", here, there


def _left(comparison: Comparison, known: Iterable[str]) -> list[str]:
    """What remains, in words."""
    found: list[str] = []
    if "sample" in known:
        found.append(
            "sample: prompts are read at efficiency.forward, and each decode step has an overhead; both stay as they are"
        )
    if "train" in known:
        found.append("train: the optimizer's step and what moves besides stay as they are")
    moves = [step.name for step in comparison.steps if step.kind is not StepKind.COMPUTE and step.runs]
    if moves:
        why = (
            "one process moves little or nothing, which says nothing about links"
            if comparison.processes == 1
            else f"{comparison.processes} processes waited for each other in them, too; figures of links stay as they are"
        )
        found.append(f"moves ({', '.join(moves)}): {why}")
    others = [step.name for step in comparison.steps if step.kind is StepKind.COMPUTE and step.runs and not _work(step)]
    if others:
        found.append(f"operators ({', '.join(others)}): no figure of a cluster stands for them")
    return found
