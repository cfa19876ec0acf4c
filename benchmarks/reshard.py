"""Weights from a trainer's shards into an engine's parameters on two GPUs, beside gathering each parameter whole.

python -m benchmarks reshard [--models 0.5B,7B,32B] [--repeats 20] [--save]
python -m benchmarks reshard --tiny                      the same program on a CPU (gloo), to see that it works

Random weights in the shapes of Qwen2.5. Milliseconds are of the slower process, from the moment both are there until both have
agreed that all arrived, with the sampled check. Every case ends with a run in which each element is compared with whole tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import report, table
from benchmarks.reshard_worker import Case, Job
from flowrl.engines.calibrate.processes import read, run_processes

EDGES = (("f2", "t2"), ("f2", "d2"), ("d1", "d1"))
DEADLINE_S = 420.0
SHARED = Path("/dev/shm")
TARGETS = {
    ("7B", "f2", "t2"): 12.0,
    ("7B", "f2", "d2"): 30.0,
    ("7B", "d1", "d1"): 58.0,
    ("32B", "f2", "t2"): 45.0,
} | {("0.5B", source, target): 10.0 for source, target in EDGES}
"""(Model, source, target) -> most milliseconds. Beside source and target, tensors take 320 MiB at most."""
HEADING = """\
extra: the most that tensors take beside source and target. beside: what the device lacks besides, such as NCCL's own buffers.
rate: bytes of the busiest device over all of the milliseconds. of the bound: how much of the time the busiest device's bytes
would take at the rate of one large copy. check: milliseconds that the sampled check takes."""


def cases(models: Sequence[str], *, tiny: bool) -> list[Case]:
    if tiny:
        return [
            Case(f"tiny {a} -> {b}", "tiny", a, b, how, bucket_mib=1)
            for a, b in EDGES
            for how in ("gloo", "whole tensors")
        ]
    found = []
    for model in models:
        source = f"Qwen/Qwen2.5-{model}"
        for a, b in EDGES if model != "32B" else EDGES[:1]:
            found += [Case(f"{model} {a} -> {b}", source, a, b, how) for how in ("peer copy", "nccl", "whole tensors")]
        if model == "7B":
            found.append(Case("7B f2 -> t2, fp32 shards", source, "f2", "t2", "peer copy", source_dtype="float32"))
            found.append(Case("7B f2 -> t2, buckets of 48 MiB", source, "f2", "t2", "peer copy", bucket_mib=48))
    return found


def measured(todo: Sequence[Case], repeats: int, *, is_gpu: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """(bytes per second of the link, what each case takes). A case that failed has only `error`."""
    with tempfile.TemporaryDirectory(prefix="flowrl-reshard-", dir=SHARED if SHARED.is_dir() else None) as folder:
        jobs = [Job(rank, 2, folder, is_gpu, repeats, tuple(todo)).to_json() for rank in range(2)]
        ended = run_processes("benchmarks.reshard_worker", jobs, Path(folder), DEADLINE_S)
        results = read(Path(folder), 2, ended)
        if ended:
            for rank in range(2):
                print(f"{ended}\n{(Path(folder) / f'{rank}.err').read_text(errors='replace')[-3000:]}")
    link: dict[str, float] = {}
    for one in results.values.get("link", []):
        link |= one
    found: list[dict[str, Any]] = []
    for number in range(len(todo)):
        ends = results.values.get(str(number), [])
        if len(ends) < 2:
            found.append({"error": results.errors.get(str(number), ended or "not measured")})
        else:
            found.append({name: max(end[name] for end in ends) for name in ends[0] if name != "lanes_ms"})
            found[-1]["lanes_ms"] = [end.get("lanes_ms") for end in ends]
    return link, found


def row(case: Case, found: dict[str, Any], link: dict[str, float]) -> list[str]:
    if "error" in found:
        return [case.name, case.transport, found["error"][:100], *[""] * 8]
    mib, ms = 2.0**20, found["median_ms"]
    key = (case.name.split()[0], case.source, case.target)
    best_ms = TARGETS.get(key)
    is_ours = case.transport != "whole tensors" and best_ms is not None
    rate = link.get("both_ways" if case.source != "d1" else "one_way")
    part = 1e3 * found["wire_bytes"] / rate / ms if rate else None
    return [
        case.name,
        case.transport,
        f"{ms:.2f}",
        f"{found['p90_ms']:.2f}",
        f"<= {best_ms:g}" if is_ours else "",
        f"{found['extra_bytes'] / mib:,.0f} MiB",
        f"{max(0, found['device_bytes'] - found['extra_bytes']) / mib:,.0f} MiB",
        f"{found['wire_bytes'] / 2**30:.2f} GiB",
        f"{found['wire_bytes'] / ms / 1e6:,.0f} GB/s",
        "" if part is None else f"{100 * part:.0f} %",
        f"{ms - found['off_ms']:.2f}" if "off_ms" in found else "",
    ]


def main(argv: Sequence[str]) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks reshard", description=__doc__)
    options.add_argument("--models", default="0.5B,7B,32B")
    options.add_argument("--repeats", type=int, default=20)
    options.add_argument("--tiny", action="store_true", help="on a CPU")
    options.add_argument("--json", help="also write all numbers to this file")
    options.add_argument("--save", action="store_true")
    given = options.parse_args(argv)
    is_gpu = torch.cuda.device_count() >= 2 and not given.tiny
    if not is_gpu and not given.tiny:
        print("reshard needs two CUDA devices; --tiny runs it on a CPU")
        return 2
    os.environ.pop(
        "PYTORCH_CUDA_ALLOC_CONF", None
    )  # memory of expandable segments cannot be mapped by others everywhere
    todo = cases(given.models.split(","), tiny=given.tiny)
    link, found = measured(todo, given.repeats, is_gpu=is_gpu)
    numbers = {
        "link_bytes_s": link,
        "cases": [{"case": str(case), "measured": one} for case, one in zip(todo, found, strict=True)],
    }
    if given.json:
        Path(given.json).write_text(json.dumps(numbers, indent=1))
    header = [
        "edge",
        "way",
        "ms, median",
        "p90",
        "target",
        "extra",
        "beside",
        "busiest",
        "rate",
        "of the bound",
        "check",
    ]
    text = table(header, [row(case, one, link) for case, one in zip(todo, found, strict=True)])
    rates = ", ".join(f"{name.replace('_', ' ')} {rate / 1e9:.0f} GB/s" for name, rate in link.items())
    where = f"2 x {torch.cuda.get_device_name(0)}; one copy of 1 GiB: {rates}" if is_gpu else "CPU, gloo"
    report("reshard", f"{where}\n\n{HEADING}\n\n{text}", numbers, save=given.save)
    return 1 if any("error" in one for one in found) else 0
