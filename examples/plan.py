"""What a step of GRPO would take on several clusters, before one is rented. Nothing is loaded; every figure is predicted.

    python -m examples.plan                                   # Qwen2.5-7B
    python -m examples.plan meta-llama/Llama-2-70b-hf plan.html

A second argument is a file: the page of the plan that takes least of a device's time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import flowrl as fr
from examples.grpo import grpo
from flowrl.planner.figures import placement_of

CLUSTERS = ("4xA100-80G", "8xA100-80G", "16xA100-80G", "8xH100-80G", "16xH100-80G")
# mean 1024, spread 0.6 of the logarithm, max_tokens 4096: take those of your own runs, fr.Workload.of_run("runs/grpo-1")
WORKLOAD = fr.Workload(128, fr.Lengths.fixed(512), fr.Lengths.lognormal(1024, 0.6, cap=4096))


@dataclass(frozen=True)
class Tried:
    """A cluster, and the plan for it or why there is none."""

    cluster: str
    plan: fr.Plan | None
    refused: str = ""

    @property
    def device_s(self) -> float:
        """Predicted seconds of all devices together for one step: what is paid for."""
        return float("inf") if self.plan is None else self.plan.predicted.seconds * self.plan.cluster.num_devices

    def __str__(self) -> str:
        if self.plan is None:
            return f"{self.cluster:12} does not fit: {self.refused}"
        seconds = f"predicted {self.plan.predicted.seconds:7.1f} s a step, {self.device_s / 3600:5.2f} device hours"
        return f"{self.cluster:12} {seconds}  {placement_of(self.plan)}"


def try_out(model: str, clusters: Sequence[str] = CLUSTERS, workload: fr.Workload = WORKLOAD) -> list[Tried]:
    """A plan for each cluster."""
    found = []
    for cluster in clusters:
        try:
            plan = fr.plan(grpo, models={"policy": model, "ref": model}, cluster=cluster, workload=workload)
            found.append(Tried(cluster, plan))
        except fr.PlanError as error:  # FR-P01: what is short, and what would fit
            found.append(Tried(cluster, None, str(error).partition("Binding: ")[2].partition(". Would")[0]))
    return found


def main(arguments: Sequence[str]) -> list[Tried]:
    """Print a line for each cluster."""
    found = try_out(arguments[0] if arguments else "Qwen/Qwen2.5-7B")
    print(*found, sep="\n")
    best = min(found, key=lambda one: one.device_s)
    if best.plan is not None and len(arguments) > 1:
        best.plan.to_html(arguments[1], graph=grpo)
        print(f"\n{arguments[1]}: the plan on {best.cluster}")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
