"""Predicted seconds and bytes of a sharded training step against measured ones, on one device and on several.

python -m benchmarks predict [--devices 1,2] [--models 0.5B,1.5B,7B] [--cluster FILE.toml] [--save]
python -m benchmarks predict --tiny                      the same program on a CPU (gloo), to see that it works

The machine is calibrated first (`flowrl calibrate`; or give the file that it wrote). Then each model takes steps with plain
torch: FSDP2, fp32 weights, gradients and Adam, bf16 compute, recomputed layers, a loss in chunks (`predict_worker.py`). Weights
and tokens are random. Predictions know the shape of the model and the file of the cluster, and nothing of these runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import report, table
from benchmarks.predict_worker import CHUNK, Case, Job
from flowrl.cost.compute import forward_s
from flowrl.cost.configs import known_models, shape_of_config
from flowrl.cost.memory import train_memory
from flowrl.cost.train import forward_pass_s, train_step
from flowrl.engines.calibrate import calibrate
from flowrl.engines.calibrate.processes import read, run_processes
from flowrl.mesh import Cluster, Mesh

MICRO_BATCHES = {
    "0.5B": ((4, 2048), (32, 2048)),
    "1.5B": ((4, 2048), (16, 2048), (1, 16384)),
    "7B": ((2, 2048), (4, 2048)),
}
"""(Sequences, tokens of each) of a micro-batch on one device."""
TINY = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip
TIME_WITHIN, MEMORY_WITHIN = 0.15, 0.08
"""What a prediction may miss by, as parts of what is measured."""
DEADLINE_S = 240.0
HEADING = """\
A step is two micro-batches on each device and Adam. forward and backward add up to compute; score is a forward pass without
gradients over one micro-batch; communication is what a step gathers and reduces, with nothing else going on (in a step it is
hidden); state is weights, gradients and moments; allocated is the most that tensors take at once; device is the most that is
taken from the device, with what the allocator holds and the context."""


def cases(models: Sequence[str], *, tiny: bool) -> list[Case]:
    if tiny:
        return [Case("tiny", TINY, rows, 64, steps=2) for rows in (2, 4)]
    return [
        Case(f"Qwen2.5-{name}", known_models()[f"Qwen/Qwen2.5-{name}"], rows, sequence)
        for name in models
        for rows, sequence in MICRO_BATCHES[name]
    ]


def predicted(case: Case, cluster: Cluster, devices: int) -> dict[str, float]:
    """Seconds and bytes of one step of a case on the first devices of a cluster."""
    shape = shape_of_config(case.config)
    one = [case.sequence] * (case.rows * devices)
    lengths = one * case.micro_batches
    step = train_step(shape, cluster, Mesh(0, devices), lengths, tokens=case.tokens)
    memory = train_memory(shape, cluster, shards=devices, tokens=case.tokens, chunk=CHUNK)
    forward = forward_s(shape, cluster, devices, lengths, micro_batches=case.micro_batches, is_sharded=True)
    parts = (
        memory.state_bytes,
        memory.gather_bytes,
        memory.gradient_bytes,
        memory.activation_bytes,
        memory.logit_bytes,
    )
    return {
        "forward_s": forward,
        "backward_s": step.compute_s - forward,
        "compute_s": step.compute_s,
        "optimizer_s": step.optimizer_s,
        "communication_s": step.communication_s,
        "step_s": step.total_s,
        "score_s": forward_pass_s(shape, cluster, Mesh(0, devices), one, tokens=case.tokens),
        "state_bytes": memory.state_bytes,
        "allocated_bytes": sum(parts),
        "device_bytes": memory.total_bytes,
    }


def measured(todo: Sequence[Case], devices: int, *, is_gpu: bool) -> list[dict[str, Any]]:
    """What each case takes: the slowest process of each number. A case that failed has only `error`."""
    with tempfile.TemporaryDirectory(prefix="flowrl-predict-") as folder:
        jobs = [Job(rank, devices, folder, is_gpu, tuple(todo)).to_json() for rank in range(devices)]
        ended = run_processes("benchmarks.predict_worker", jobs, Path(folder), DEADLINE_S)
        results = read(Path(folder), devices)
        if ended:
            print(f"{ended}\n{(Path(folder) / '0.err').read_text(errors='replace')[-3000:]}")
    found: list[dict[str, Any]] = []
    for index in range(len(todo)):
        of_processes = results.values.get(str(index), [])
        if len(of_processes) < devices:
            found.append({"error": results.errors.get(str(index), ended or "not measured")})
            continue
        slowest = {
            name: max(one[name] for one in of_processes)
            for name, value in of_processes[0].items()
            if isinstance(value, int | float)
        }
        first = of_processes[0]
        slowest |= {name: first[name] for name in ("steps_s", "kernels_s", "most_s") if name in first}
        found.append(slowest)
    return found


def title(case: Case) -> str:
    return f"{case.name}, {case.rows} x {case.sequence:,} tokens"


def ratios(numbers: Sequence[dict[str, Any]]) -> str:
    """Predicted over measured, a line for each case. In parentheses: more than allowed away from 1."""
    terms = list(numbers[0]["predicted"])
    rows = []
    for one in numbers:
        row = [title(Case(**one["case"])), str(one["devices"])]
        for name in terms:
            found = one["measured"].get(name)
            ratio = one["predicted"][name] / found if found else None
            within = TIME_WITHIN if name.endswith("_s") else MEMORY_WITHIN
            row.append("" if ratio is None else f"{ratio:.2f}" if abs(ratio - 1) <= within else f"({ratio:.2f})")
        rows.append(row)
    return table(["predicted / measured", "devices", *(name.rsplit("_", 1)[0] for name in terms)], rows)


def lines(case: Case, devices: int, said: dict[str, float], found: dict[str, Any]) -> list[list[str]]:
    """Rows of the table: predicted, measured, their ratio, and whether that is near enough."""
    where = [title(case), str(devices)]
    if "error" in found:
        return [[*where, "all", "", "", "", found["error"][:60]]]
    rows = []
    for name, value in said.items():
        if name not in found:
            continue
        unit, scale, within = ("ms", 1e3, TIME_WITHIN) if name.endswith("_s") else ("GiB", 2**-30, MEMORY_WITHIN)
        ratio = value / found[name] if found[name] else math.inf
        what = name.rsplit("_", 1)[0]
        verdict = "" if abs(ratio - 1) <= within else "miss"
        rows.append(
            [*where, what, f"{value * scale:.4g} {unit}", f"{found[name] * scale:.4g} {unit}", f"{ratio:.2f}", verdict]
        )
    return rows


def main(argv: Sequence[str]) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks predict", description=__doc__)
    options.add_argument("--devices", default="", help="as 1,2; default: 1 and all")
    options.add_argument("--models", default="0.5B,1.5B,7B")
    options.add_argument("--cluster", help="a file that `flowrl calibrate` wrote; default: calibrate now")
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--quick", action="store_true", help="a quick calibration")
    options.add_argument(
        "--allocator", choices=("expandable", "fixed"), default="expandable", help="segments of PyTorch's allocator"
    )
    options.add_argument("--measured", help="what --json of another run wrote: predict those cases, measure nothing")
    options.add_argument("--json", help="also write all numbers to this file")
    options.add_argument("--save", action="store_true")
    given = options.parse_args(argv)
    if given.measured:
        return again(Path(given.measured), Cluster.from_toml(given.cluster), save=given.save)
    is_gpu = torch.cuda.is_available()
    if not is_gpu and not given.tiny:
        print("predict needs a CUDA device; --tiny runs it on a CPU")
        return 2
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{given.allocator == 'expandable'}"
    most = torch.cuda.device_count() if is_gpu else 2
    counts = [int(one) for one in given.devices.split(",") if one] or sorted({1, most})
    begun = time.perf_counter()
    cluster = Cluster.from_toml(given.cluster) if given.cluster else calibrate(devices=max(counts), quick=given.quick)
    print(cluster.to_toml(), f"\ncalibrated in {time.perf_counter() - begun:.1f} s", flush=True)
    todo = cases(given.models.split(","), tiny=given.tiny)
    numbers = []
    for devices in counts:
        for case, found in zip(todo, measured(todo, devices, is_gpu=is_gpu), strict=True):
            said = predicted(case, cluster, devices)
            numbers.append({"case": asdict(case), "devices": devices, "predicted": said, "measured": found})
        print(f"{devices}: measured after {time.perf_counter() - begun:.1f} s", flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps({"cluster": cluster.to_toml(), "cases": numbers}, indent=1))
    show(numbers, cluster, save=given.save)
    return 0


def again(path: Path, cluster: Cluster, *, save: bool) -> int:
    """Predictions for what an earlier run measured, by a cluster of another calibration."""
    numbers = json.loads(path.read_text())["cases"]
    for one in numbers:
        one["predicted"] = predicted(Case(**one["case"]), cluster, one["devices"])
    show(numbers, cluster, save=save)
    return 0


def show(numbers: list[dict[str, Any]], cluster: Cluster, *, save: bool) -> None:
    rows = [
        row for one in numbers for row in lines(Case(**one["case"]), one["devices"], one["predicted"], one["measured"])
    ]
    header = ["model, micro-batch", "devices", "term", "predicted", "measured", "predicted/measured", ""]
    device, most = cluster.device.name.lower(), max(one["devices"] for one in numbers)
    text = f"{most} x {device}. {HEADING}\n\n{ratios(numbers)}\n\n{table(header, rows)}"
    kept = [{**one, "measured": {k: v for k, v in one["measured"].items() if k != "most_s"}} for one in numbers]
    whole = {"cluster": cluster.to_toml(), "cases": kept}
    report("predict", text, whole, save=save, file=f"predict-{device}")
