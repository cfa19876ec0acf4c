"""How long a search for a plan takes, each in a process of its own so that nothing is remembered from before.

python -m benchmarks planner [--quick] [--only NAME]

Seconds are those of `search(problem)` or `explain(problem)` on one core, imports left out; those of the processor leave out what
other processes took meanwhile. What a plan takes is predicted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import ROOT, median, report, table
from flowrl.cost.shapes import ModelShape
from flowrl.graph.schedule import Async, Schedule, Sync
from flowrl.mesh import Cluster
from flowrl.planner.problem import Problem
from flowrl.planner.relax import explain
from flowrl.planner.roles import Call, Role
from flowrl.planner.search import search
from flowrl.planner.workload import Lengths, Workload


@dataclass(frozen=True, slots=True)
class Case:
    """One problem, and the seconds in which it should be solved."""

    model: str
    cluster: str
    sequences: int
    workload: Workload
    target_s: float
    has_critic: bool = False
    """A critic that is trained and a reward model, besides policy and reference."""
    schedule: Schedule = field(default_factory=Sync)
    fits: bool = True

    @property
    def problem(self) -> Problem:
        shape = ModelShape.of(self.model)
        roles = _roles(shape, self.sequences, self.has_critic)
        return Problem(roles, Cluster.named(self.cluster), self.workload, schedule=self.schedule)


def _roles(shape: ModelShape, sequences: int, has_critic: bool) -> tuple[Role, ...]:
    scored = ("rollout", "old", "score", *(("values", "reward") if has_critic else ()))
    roles = [
        Role("gen", "policy", shape, (Call("rollout", "gen", "generate", sequences),), weights_from="policy"),
        Role("policy", "policy", shape, (Call("old", "policy", "forward", sequences, ("rollout",)),
                                          Call("update", "policy", "train", sequences, scored))),
        Role("ref", "ref", shape, (Call("score", "ref", "forward", sequences, ("rollout",)),)),
    ]  # fmt: skip
    if has_critic:
        roles += [
            Role("critic", "critic", shape, (Call("values", "critic", "forward", sequences, ("rollout",)),
                                              Call("update_critic", "critic", "train", sequences, scored))),
            Role("judge", "judge", shape, (Call("reward", "judge", "forward", sequences, ("rollout",)),)),
        ]  # fmt: skip
    return tuple(roles)


def _work(prompts: int, prompt: int, response: int, cap: int) -> Workload:
    return Workload(prompts, Lengths.fixed(prompt), Lengths.lognormal(response, 0.6, cap=cap))


SMALL, MIDDLE, LARGE = "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B", "meta-llama/Llama-2-70b-hf"
W8, W64, W512 = _work(128, 512, 1024, 4096), _work(128, 1024, 4096, 16384), _work(512, 1024, 4096, 16384)
CASES = {
    "3 roles, 8 devices": Case(SMALL, "8xA100-80G", 1024, W8, 0.1),
    "3 roles, 8 devices, async": Case(SMALL, "8xA100-80G", 1024, W8, 0.1, schedule=Async(1)),
    "5 roles, 8 devices": Case(SMALL, "8xA100-80G", 1024, W8, 1.0, True),
    "5 roles, 64 devices": Case(MIDDLE, "64xH100-80G", 1024, W64, 3.0, True),
    "5 roles, 64 devices, async": Case(MIDDLE, "64xH100-80G", 1024, W64, 3.0, True, Async(1)),
    "5 roles, 512 devices": Case(MIDDLE, "512xH100-80G", 4096, W512, 30.0, True),
    "5 roles, 512 devices, async": Case(MIDDLE, "512xH100-80G", 4096, W512, 30.0, True, Async(1)),
    "why 5 roles of 70B do not fit 8": Case(LARGE, "8xA100-80G", 256, _work(256, 512, 512, 512), 5.0, True, fits=False),
}


def one(name: str) -> dict[str, Any]:
    """Solve one case, here and now."""
    case = CASES[name]
    problem = case.problem
    start, worked = time.perf_counter(), time.process_time()
    found = search(problem)
    numbers: dict[str, Any] = {}
    if not case.fits:
        numbers["refusal"] = str(explain(problem))
    numbers |= {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - worked}
    if (found.best is not None) != case.fits:
        raise SystemExit(f"{name}: a plan {'should' if case.fits else 'should not'} fit")
    if found.best is not None:
        numbers |= {"step_s": found.best.seconds, "gap": found.gap, "placement": str(found.best.placement)}
    counts = ("placements", "simulated", "pruned", "is_exhaustive")
    return numbers | {key: getattr(found, key) for key in counts} | {"others": len(found.others)}


def measure(name: str, repeat: int) -> dict[str, Any]:
    """The same in fresh processes; the median of their seconds."""
    command = [sys.executable, "-m", "benchmarks", "planner", "--in-process", name]
    found = [
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, cwd=ROOT).stdout)
        for _ in range(repeat)
    ]
    timed = {key: median([each[key] for each in found]) for key in ("seconds", "cpu_s")}
    return {**found[0], **timed, "target_s": CASES[name].target_s}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks planner", description="how long a search for a plan takes"
    )
    parser.add_argument("--quick", action="store_true", help="once each, and nothing on 512 devices")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--in-process", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.in_process:
        print(json.dumps(one(args.in_process)))
        return 0
    names = [args.only] if args.only else [name for name in CASES if not (args.quick and "512" in name)]
    numbers = {name: measure(name, 1 if args.quick else 3) for name in names}
    rows = [
        [name, f"{found['seconds']:.3f}", f"{found['cpu_s']:.3f}", f"< {found['target_s']:g}", found["placements"],
         found["pruned"], "yes" if found["is_exhaustive"] else "no", f"{found['step_s']:.1f}" if "step_s" in found else "none"]
        for name, found in numbers.items()
    ]  # fmt: skip
    header = ["", "s, median", "of processor", "target", "placements", "pruned", "to the end", "predicted step, s"]
    report("planner", table(header, rows), {"measured": numbers}, save=args.save)
    return 0
