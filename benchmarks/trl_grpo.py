"""GRPO on a tiny model: FlowRL against TRL's GRPOTrainer, on this machine, one after the other, several times.

    python -m benchmarks trl_grpo                  both cases, 3 rounds each; about ten minutes
    python -m benchmarks trl_grpo --quick          fewer and shorter rounds

Both sides get the same warmed-up weights and tokenizer (from one folder), the same prompts in the same order, group size,
token limit, optimizer, clipping and reward, in fp32 and with as many threads; each takes one optimizer step per rollout.
TRL runs in an environment of its own, with the torch and transformers versions of this one. Rounds alternate: FlowRL,
TRL, FlowRL, TRL, ... Each is a fresh process; its first steps do not count.

Printed beside the speed: tokens sampled per step, and the mean reward of the first and last counted steps. The two sides
draw different random numbers, so these are alike and not equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.common import CACHE, ROOT, median, report, table
from benchmarks.task import CASES, Settings, save_start

ROUND_TIMEOUT_S = 1800
INSTALL_TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Round:
    """What one process measured, first steps left out."""

    steps_per_s: float
    cpu_s_per_step: float
    tokens_per_step: float
    first_reward: float
    """Mean of the first tenth of all steps."""
    last_reward: float
    versions: dict[str, str]

    @classmethod
    def of(cls, found: dict[str, Any], skip: int) -> Round:
        wall, cpu, rewards, tokens = found["wall"], found["cpu"], found["rewards"], found["tokens"]
        counted = len(wall) - skip
        part = max(len(rewards) // 10, 1)
        return cls(
            steps_per_s=counted / (wall[-1] - wall[skip - 1]),
            cpu_s_per_step=(cpu[-1] - cpu[skip - 1]) / counted,
            tokens_per_step=sum(tokens[skip:]) / counted,
            first_reward=sum(rewards[:part]) / part,
            last_reward=sum(rewards[-part:]) / part,
            versions=found["versions"],
        )


def trl_python(trl: str | None) -> Path:
    """Python of TRL's environment, which is made if it is not there; `trl` is a version or None for the newest."""
    folder = CACHE / "trl"
    python = folder / "bin" / "python"
    check = "from importlib.metadata import version as v; print(*(v(p).split('+')[0] for p in ('trl', 'torch', 'transformers')))"
    wanted = [_version("torch"), _version("transformers")]
    if python.exists():
        found = subprocess.run([python, "-c", check], capture_output=True, text=True, timeout=300)
        versions = found.stdout.split()
        if found.returncode == 0 and versions[1:] == wanted and trl in (None, versions[0]):
            return python
    print(f"making TRL's environment in {folder}", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    # torch first and by exact version: with the version left open, pip may choose a build with gigabytes of CUDA
    install(python, f"torch=={wanted[0]}")
    install(python, f"trl=={trl}" if trl else "trl", f"transformers=={wanted[1]}", "accelerate", "datasets")
    return python


def install(python: Path, *packages: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S)


def _version(package: str) -> str:
    return metadata.version(package).split("+")[0]


def run_round(python: Path | str, module: str, settings: Settings, start: Path, steps: int) -> dict[str, Any]:
    command = [str(python), "-m", module, "--settings", json.dumps(settings.to_dict())]
    command += ["--start", str(start), "--steps", str(steps)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(settings.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=ROUND_TIMEOUT_S,
        env=environment,
        cwd=ROOT,
    )
    if done.returncode:
        raise SystemExit(f"{module} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(settings: Settings, python: Path, *, rounds: int, steps: int, skip: int) -> dict[str, list[Round]]:
    """Alternate; whoever goes first in one round goes second in the next, so that neither gains from it."""
    sides = {"FlowRL": (sys.executable, "benchmarks.flowrl_worker"), "TRL": (str(python), "benchmarks.trl_worker")}
    found: dict[str, list[Round]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        start = save_start(settings, Path(folder))
        for number in range(rounds):
            for name, (executable, module) in list(sides.items())[:: 1 if number % 2 == 0 else -1]:
                one = Round.of(run_round(executable, module, settings, start, steps + skip), skip)
                print(f"  round {number + 1}  {name:6}  {one.steps_per_s:6.2f} steps/s", file=sys.stderr, flush=True)
                found[name].append(one)
    return found


def row(case: str, name: str, rounds: list[Round]) -> list[str]:
    speeds = [one.steps_per_s for one in rounds]
    return [
        case,
        name,
        f"{median(speeds):.2f}",
        f"{min(speeds):.2f} to {max(speeds):.2f}",
        f"{median([one.tokens_per_step for one in rounds]):.0f}",
        f"{median([one.first_reward for one in rounds]):.2f} -> {median([one.last_reward for one in rounds]):.2f}",
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks trl_grpo", description="GRPO: FlowRL against TRL")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 12 steps")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--case", choices=(*CASES, "all"), default="all")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="counted steps of a round")
    parser.add_argument("--skip", type=int, help="steps before them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl", help="version of TRL; the newest by default")
    args = parser.parse_args(argv)
    rounds = args.rounds or (2 if args.quick else 3)
    steps, skip = args.steps or (12 if args.quick else 120), args.skip or (2 if args.quick else 8)
    python = trl_python(args.trl)
    rows: list[list[str]] = []
    numbers: dict[str, Any] = {}
    learned = True
    for case in CASES if args.case == "all" else (args.case,):
        settings = replace(CASES[case], threads=args.threads)
        print(f"{case}: {settings}", file=sys.stderr)
        found = compare(settings, python, rounds=rounds, steps=steps, skip=skip)
        ratios = [a.steps_per_s / b.steps_per_s for a, b in zip(found["FlowRL"], found["TRL"], strict=True)]
        learned &= all(one.last_reward > one.first_reward for ones in found.values() for one in ones)
        rows += [row(case, name, ones) for name, ones in found.items()]
        rows.append([case, "ratio", f"{median(ratios):.2f}x", f"{min(ratios):.2f} to {max(ratios):.2f}", "", ""])
        numbers[case] = {
            "settings": settings.to_dict(),
            "steps": steps,
            "skipped": skip,
            "ratio": median(ratios),
            "ratios": ratios,
            **{name: [one_to_dict(one) for one in ones] for name, ones in found.items()},
        }
    header = ["case", "", "steps/s", "over rounds", "tokens a step", "mean reward"]
    report("trl_grpo", table(header, rows), {"cases": numbers}, save=args.save)
    if not learned and not args.quick:
        print("a run did not learn: its last rewards are no better than its first ones", file=sys.stderr)
        return 1
    return 0


def one_to_dict(one: Round) -> dict[str, Any]:
    return {name: getattr(one, name) for name in Round.__slots__}
