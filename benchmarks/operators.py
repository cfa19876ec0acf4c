"""What the pack's advantages cost: group operators over 8,192 groups, GAE over 8 million tokens, each beside a plainer way.

python -m benchmarks operators
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import flowrl as fr
from benchmarks.common import median, report, table
from flowrl_operators import advantages

TARGETS_MS = {"group": 50.0, "gae": 500.0}


def _lengths(rows: int, tokens: int) -> np.ndarray:
    """Lengths of responses, lognormal: half of them below 0.8 of the mean, the longest about eight times it."""
    draw = np.random.default_rng(0).lognormal(0.0, 0.7, rows)
    return np.maximum((draw * tokens / draw.sum()).astype(np.int64), 1)


def _group_by_group(call: Any, reward: np.ndarray, keys: np.ndarray, *more: Any) -> np.ndarray:
    """The same operator, called once for each group."""
    advantage = np.zeros(len(reward))
    for rows in advantages.groups_of(keys):
        advantage[rows] = call(reward[rows], keys[rows], *(None if each is None else each.take(rows) for each in more))
    return advantage


def _gae_by_loop(reward: np.ndarray, values: fr.Ragged, gamma_lam: float) -> np.ndarray:
    """GAE (gamma 1) from the last token to the first, all rows at once: what a padded table makes plain."""
    width = int(values.lengths.max())
    place = np.arange(width) < values.lengths[:, None]
    padded = np.zeros((len(values), width))
    padded[place] = values.values
    advantage, running = np.zeros_like(padded), np.zeros(len(values))
    ends = values.lengths - 1
    for t in range(width - 1, -1, -1):
        following = padded[:, t + 1] if t + 1 < width else 0.0
        delta = following - padded[:, t] + np.where(ends == t, reward, 0.0)
        running = np.where(place[:, t], delta + gamma_lam * running, 0.0)
        advantage[:, t] = running
    return advantage[place]


def _measure(function: Callable[[], Any], repeat: int) -> list[float]:
    spent = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        spent.append(1000 * (time.perf_counter() - start))
    return spent


def _cases(is_quick: bool) -> list[tuple[str, str, Callable[[], Any], Callable[[], Any] | None]]:
    """(what, its target's name, ours, the plainer way)."""
    rows, groups, sequences, tokens = (4096, 512, 512, 500_000) if is_quick else (65_536, 8192, 8192, 8_000_000)
    draw = np.random.default_rng(1)
    number = draw.permutation(np.repeat(np.arange(groups), rows // groups))
    keys = np.asarray([f"prompt-{i:06d}" for i in number], object)
    reward = draw.choice([0.0, 1.0, 0.5], rows).astype(np.float32)
    mask = fr.Ragged(np.ones(rows * 16, bool), np.arange(rows + 1) * 16)
    a = advantages

    def by_group(call: Any, *more: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        return lambda: call(reward, keys, *more), lambda: _group_by_group(call, reward, keys, *more)

    offsets = np.concatenate(([0], np.cumsum(_lengths(sequences, tokens))))
    values = fr.Ragged(draw.normal(size=int(offsets[-1])).astype(np.float32), offsets)
    whole = fr.Ragged(np.ones(len(values.values), bool), offsets)
    holes = fr.Ragged(np.arange(len(values.values)) % 500 >= 100, offsets)
    final = draw.normal(size=sequences).astype(np.float32)

    def gae(trains: fr.Ragged, **options: Any) -> Callable[[], Any]:
        return lambda: a.gae(final, values, trains, None, None, **options)

    named = f"{rows:,} rows in {groups:,} groups"
    long = f"{len(values.values) / 1e6:.1f} M tokens in {sequences:,} rows"
    return [
        (f"group_norm, {named}", "group", *by_group(a.group_norm, None)),
        (f"group_norm with a loss mask, {named}", "group", *by_group(a.group_norm, mask)),
        (f"rloo, {named}", "group", *by_group(a.rloo, None)),
        (f"opo, {named}", "group", *by_group(a.opo, mask)),
        (f"pass_at_k, {named}", "group", *by_group(a.pass_at_k, None)),
        (f"gae, {long}", "gae", gae(whole), None),
        (f"gae, not whitened, {long}", "gae", gae(whole, whiten=False), lambda: _gae_by_loop(final, values, 0.95)),
        (f"gae, a fifth tool output, {long}", "gae", gae(holes), None),
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks operators", description="what the pack's advantages cost"
    )
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the size, 3 repetitions instead of 9")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args(argv)
    repeat = 3 if args.quick else 9
    numbers: dict[str, Any] = {}
    rows: list[list[str]] = []
    for name, target, ours, plain in _cases(args.quick):
        found = _measure(ours, repeat)
        slow = _measure(plain, 1)[0] if plain is not None else None
        numbers[name] = {"ms": median(found), "least_ms": min(found), "plain_ms": slow, "target_ms": TARGETS_MS[target]}
        beside = f"{slow:.0f}" if slow is not None else ""
        ratio = f"{slow / median(found):.1f}x" if slow is not None else ""
        rows.append([name, f"{median(found):.1f}", f"{min(found):.1f}", f"< {TARGETS_MS[target]:g}", beside, ratio])
    text = table(["", "ms, median", "least", "target", "group by group, or token by token, ms", "ratio"], rows)
    report("operators", text, {"repetitions": repeat, "measured": numbers}, save=args.save)
    return 0
