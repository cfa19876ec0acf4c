"""How fast a loader hands out batches, and how long a trainer that works 3 ms on each waits for the next one.

python -m benchmarks.loader [--quick] [--layout packed]

Rows are like those of GRPO in shape (see `benchmarks.tables.workload`); their values are random, which no copy notices.
Compared with torch's DataLoader over a list of rows and `pad_sequence`. Ways are measured in turns, warm.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.common import machine, median, table
from benchmarks.tables.stall import Trainer, percentiles, torch_loader
from flowrl.schema import PROMPT, SAMPLE, TOKEN, Ragged
from flowrl.store.kernels import choose
from flowrl.store.loader import Loader
from flowrl.store.rows import RowBatch

TARGET_US = 150.0
"""Median wait with a batch made ahead."""
TORCH_COLUMNS = ("prompt_ids", "response_ids", "loss_mask", "rollout_logprobs", "ref_logprobs", "values")


def rows_of(count: int, width: int = 0) -> RowBatch:
    """Rows of GRPO; with `width`, also that many top logits in fp16 for each token."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(448), 0.75, count), 32, 2048).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    prompts = np.concatenate([[0], np.cumsum(draw.integers(128, 513, count))])
    total = int(offsets[-1])
    columns: dict[str, Any] = {
        "prompt_ids": Ragged(draw.integers(0, 32000, prompts[-1]).astype(np.int32), prompts),
        "response_ids": Ragged(draw.integers(0, 32000, total).astype(np.int32), offsets),
        "loss_mask": Ragged(draw.random(total) < 0.9, offsets),
        "rollout_logprobs": Ragged(draw.random(total, dtype=np.float32), offsets),
        "ref_logprobs": Ragged(draw.random(total, dtype=np.float32), offsets),
        "values": Ragged(draw.random(total, dtype=np.float32), offsets),
        "reward": draw.random(count, dtype=np.float32),
    }
    types = {
        "prompt_ids": PROMPT.i32["*"], "response_ids": TOKEN.i32, "loss_mask": TOKEN.bool, "rollout_logprobs": TOKEN.f32,
        "ref_logprobs": TOKEN.f32, "values": TOKEN.f32, "reward": SAMPLE.f32,
    }  # fmt: skip
    if width:
        logits = draw.standard_normal((total, width), dtype=np.float32).astype(np.float16)
        columns["teacher_logits"] = Ragged(logits, offsets)
        types["teacher_logits"] = TOKEN.f16[width]
    return RowBatch(columns, types)


def drain(batches: Iterable[Any], rows: int) -> float:
    """Rows per second when nothing is done with them."""
    start = time.perf_counter()
    for part in batches:
        del part
    return rows / (time.perf_counter() - start)


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows, one round")
    parser.add_argument("--layout", choices=("padded", "packed"), default="padded")
    options = parser.parse_args(list(argv))
    torch.set_num_threads(1)  # the trainer leaves a core to the loader
    count, rounds = (1024, 1) if options.quick else (4096, 5)
    batch = rows_of(count)
    plain = [{name: np.asarray(row[name], batch[name].dtype) for name in row} for row in batch.rows()]
    ways: dict[str, Any] = {}
    for ahead in (0, 1, 2, 4):
        ways[f"flowrl prefetch={ahead}"] = Loader(
            batch, batch_rows=32, layout=options.layout, shuffle=True, device="cpu", prefetch=ahead
        )
    for workers in (0, 2):
        ways[f"torch DataLoader workers={workers} (padded)"] = torch_loader(plain, TORCH_COLUMNS, workers)
    trainer = Trainer()
    drained: dict[str, list[float]] = {name: [] for name in ways}
    waits: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        drain(way, count)  # warm: compiled, memory touched, processes started
    for _ in range(rounds):
        for name, way in ways.items():
            drained[name].append(drain(way, count))
            waits[name] += trainer.waits(way)
    lines = []
    for name in ways:
        middle, high = percentiles(waits[name], 50, 99)
        lines.append([name, f"{median(drained[name]) / 1e3:.1f}k", f"{middle * 1e6:.0f}", f"{high * 1e6:.0f}"])
    print(table(["loader", "drain rows/s", "wait p50 us", "wait p99 us"], lines))
    about = machine()
    print(
        f"{about['processor']}, {about['cores']} cores, load {about['load']}, kernel {choose()}, layout {options.layout}"
    )
    ahead = [
        percentiles(waits[name], 50)[0] * 1e6 for name in ways if name.startswith("flowrl") and not name.endswith("=0")
    ]
    print(f"target: p50 of at most {TARGET_US:.0f} us with prefetch; {'met' if max(ahead) <= TARGET_US else 'MISSED'}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
