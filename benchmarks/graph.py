"""What it costs before a model does anything: `import flowrl`, a flow built and checked, a step on the null engine.

python -m benchmarks graph
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import flowrl as fr
from benchmarks.common import ROOT, median, report, table
from examples import grpo, ppo

TARGETS_MS = {"import flowrl": 300.0, "build and check PPO": 20.0}


def import_ms() -> float:
    """Of `import flowrl` in a fresh process, interpreter start left out."""
    code = "import time; start = time.perf_counter(); import flowrl; print(time.perf_counter() - start)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    return 1000 * float(done.stdout)


def build_and_check_ms() -> float:
    """Trace PPO from its function and run all checks, nothing remembered from before."""
    start = time.perf_counter()
    problems = ppo.ppo.check(kl=0.05)
    spent = time.perf_counter() - start
    if problems:
        raise SystemExit(f"PPO has problems: {problems}")
    return 1000 * spent


def null_step_ms(flow: Any, models: tuple[str, ...], steps: int) -> float:
    """Of one step of 32 prompts on the null engine, observed as a run is but with nothing written."""
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(256)]
    inputs: dict[str, Any] = {name: fr.Model(None, head="value" if name == "critic" else "lm") for name in models}
    run = fr.run_local(
        flow, steps=steps, engine="null", prompts=rows, max_tokens=16, progress="off", out=None, **inputs
    )
    run.close()
    return 1000 * median(run.history("time/step_s"))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks graph", description="what it costs before a model does anything"
    )
    parser.add_argument("--quick", action="store_true", help="3 repetitions instead of 9")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args(argv)
    repeat, steps = (3, 10) if args.quick else (9, 50)
    ppo.ppo.graph()  # the packs' modules are imported at first use, which is not what is measured
    measured: dict[str, Callable[[], float]] = {
        "import flowrl": import_ms,
        "build and check PPO": build_and_check_ms,
        "a step of GRPO, null engine, 32 prompts x 8": lambda: null_step_ms(grpo.grpo, ("policy", "ref"), steps),
        "a step of PPO, null engine, 32 prompts": lambda: null_step_ms(ppo.ppo, ("policy", "ref", "critic"), steps),
    }
    numbers: dict[str, Any] = {}
    rows: list[list[str]] = []
    for name, function in measured.items():
        values = [function() for _ in range(repeat)]
        numbers[name] = {"ms": median(values), "least_ms": min(values), "target_ms": TARGETS_MS.get(name)}
        target = f"< {TARGETS_MS[name]:g}" if name in TARGETS_MS else ""
        rows.append([name, f"{median(values):.1f}", f"{min(values):.1f}", target])
    text = table(["", "ms, median", "least", "target"], rows)
    report("graph", text, {"repetitions": repeat, "measured": numbers}, save=args.save)
    return 0
