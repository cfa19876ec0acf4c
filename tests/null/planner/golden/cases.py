"""Plans that are pinned: published models, common clusters, response lengths as histograms.

Hashes of operators' code are left out, so that a change inside an operator changes no plan here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import flowrl as fr
from examples.flows.grpo import grpo
from examples.flows.ppo import ppo
from flowrl.cli.plan import refusal_report, report
from flowrl.cost.offload import ADAM_FP32, ADAM_MASTER, Offload
from flowrl.graph.flows import Flow
from flowrl.graph.schedule import Schedule
from flowrl.planner.choices import Choices, Setting
from flowrl.planner.explain import explain
from flowrl.planner.figures import placement_of
from flowrl.planner.planning import plan_found, problem_of
from flowrl.planner.problem import Found, Problem
from flowrl.planner.relax import Refusal, explain as refusal_of
from flowrl.planner.search import search
from flowrl.planner.steps import Plan, Step
from flowrl_operators import advantages, losses, rewards

DIGITS = 4
"""Of pinned seconds and bytes: less than what rounding changes on other machines."""


@fr.flow
def corrected(prompts, policy, ref, *, beta=1e-3):  # type: ignore[no-untyped-def]
    """GRPO for rows that may be older than the weights."""
    rows = advantages.group_norm(rewards.math(fr.rollout(policy, prompts, n=8)))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    loss = losses.ppo_clip(0.2) * losses.truncated_importance(2.0) + beta * losses.kl("k3")
    return fr.update(policy, rows, loss=loss)


@dataclass(frozen=True)
class Case:
    """One problem, with all that is pinned of its answer."""

    flow: Flow
    model: str
    """Of every role."""
    cluster: str
    workload: fr.Workload
    schedule: Schedule = field(default_factory=fr.Sync)
    choices: Choices = field(default_factory=Choices)
    only: tuple[tuple[str, str, Setting], ...] = ()

    @cached_property
    def _posed(self) -> tuple[Problem, Any]:
        names = [node.name for node in self.flow.graph().inputs if node["kind"] == "weights"]
        problem, graph = problem_of(self.flow, models=dict.fromkeys(names, self.model), cluster=self.cluster,
                                    workload=self.workload, schedule=self.schedule, choices=self.choices)  # fmt: skip
        return replace(problem, only=self.only), graph

    @cached_property
    def found(self) -> Found:
        return search(self._posed[0])

    @cached_property
    def plan(self) -> Plan | None:
        """None where nothing fits."""
        if self.found.best is None:
            return None
        made = plan_found(self.found, self._posed[1])
        return replace(made, graph_hash=made.name, operator_hashes=())

    @cached_property
    def refusal(self) -> Refusal:
        return refusal_of(*self._posed)

    def essence(self) -> dict[str, Any]:
        """What a runtime carries out, and what was predicted of it; or why nothing fits, and what would."""
        if self.plan is None:
            found = self.refusal
            would = [[one.what, rounded(one.seconds)] for one in found.relaxations]
            return {"binding": found.binding, "would_fit": would, "in_vain": list(found.in_vain)}
        outlook = self.plan.predicted
        whole = ("seconds", "latency_s", "bound_s", "device_bytes", "host_bytes")
        return {
            "hash": self.plan.hash,
            "placement": str(placement_of(self.plan)),
            **{name: rounded(getattr(outlook, name)) for name in whole},
            "critical_path": list(outlook.critical_path),
            "steps": [_step(step) for step in self.plan.steps],
        }

    def text(self) -> str:
        """What `flowrl plan` prints, and behind it what `flowrl explain` does."""
        problem, graph = self._posed
        if self.plan is None:
            return refusal_report(problem, self.refusal) + "\n"
        return f"{report(self.plan, self.found)}\n\n{'=' * 128}\n\n{explain(problem, graph, self.found)}\n"


def _step(step: Step) -> dict[str, Any]:
    said: Mapping[str, Any] = {
        "name": step.name,
        "node": step.node,
        "kind": str(step.kind),
        "mesh": [step.mesh.first, step.mesh.size],
        "source": None if step.source is None else [step.source.first, step.source.size],
        "layout": None if step.layout is None else str(step.layout),
        "settings": dict(step.settings),
        "seconds": rounded(step.predicted.seconds),
        "moved_bytes": rounded(step.predicted.num_bytes),
        "memory_bytes": rounded(step.predicted.memory_bytes),
    }
    return {key: value for key, value in said.items() if value not in (None, {}, 0)}


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


L8, L70 = "meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-2-70b-hf"
Q32, MOE, TINY = "Qwen/Qwen2.5-32B", "Qwen/Qwen3-30B-A3B", "HuggingFaceTB/SmolLM2-135M"


def _work(prompts: int, prompt: int, response: fr.Lengths) -> fr.Workload:
    return fr.Workload(prompts, fr.Lengths.fixed(prompt), response)


SHORT = _work(128, 512, fr.Lengths.lognormal(1024, 0.6, cap=4096))
EQUAL = _work(128, 512, fr.Lengths.fixed(1024))
LONG, LONG_ONE = (_work(count, 1024, fr.Lengths.lognormal(4096, 0.8, cap=16384)) for count in (128, 1024))
SEED = _work(32, 512, fr.Lengths.fixed(512))
"""256 sequences of 1,024 tokens."""
PARKED = Choices(offload=(Offload.NONE, Offload.PARK))
CONSENTED, MASTER = (Choices(optimizers=states) for states in ((ADAM_FP32, ADAM_MASTER), (ADAM_MASTER,)))
RESIDENT = (("ref", "offload", "none"),)

CASES = {
    "grpo-8b-8xA100": Case(grpo, L8, "8xA100-80G", SHORT),
    "grpo-8b-8xA100-equal-lengths": Case(grpo, L8, "8xA100-80G", EQUAL),
    "grpo-32b-16xH100": Case(grpo, Q32, "16xH100-80G", LONG),
    "grpo-32b-16xH100-async": Case(corrected, Q32, "16xH100-80G", LONG, fr.Async(1)),
    "ppo-32b-64xH100": Case(ppo, Q32, "64xH100-80G", LONG_ONE),
    "grpo-70b-8xA100": Case(grpo, L70, "8xA100-80G", SEED),
    "grpo-70b-8xA100-parked-only": Case(grpo, L70, "8xA100-80G", SEED, choices=PARKED),
    "grpo-70b-8xA100-bf16-gradients-too": Case(grpo, L70, "8xA100-80G", SEED, choices=CONSENTED),
    "grpo-70b-8xA100-bf16-gradients": Case(grpo, L70, "8xA100-80G", SEED, choices=MASTER),
    "grpo-70b-8xA100-reference-resident": Case(grpo, L70, "8xA100-80G", SEED, only=RESIDENT),
    "grpo-30b-a3b-8xH100": Case(grpo, MOE, "8xH100-80G", SHORT),
    "grpo-135m-1xH100": Case(grpo, TINY, "1xH100-80G", SHORT),
}
