"""Lengths that a run recorded, as the workload of the next plan.

Each event of a rollout in `trace.jsonl` says how long the prompts and the responses of its rows are:

    {"what": "compute", "node": "rollout", "step": 3, ..., "attributes": {"kind": "rollout", "lengths":
        {"prompt": {"tokens": [61, 64], "counts": [16, 48]}, "response": {"tokens": [12, 90, 256], "counts": [40, 20, 4]}}}}

Lengths are put into bins that are 1/32 of their length wide, each told by the mean of what is in it; the longest has a bin of its
own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.errors import ConfigError, RunError
from flowrl.planner.workload import Lengths, Workload
from flowrl.schema.columns import nearest
from flowrl.schema.fields import is_int, is_number, shown
from flowrl.trace import LENGTHS, Event, read_lines, read_trace

BIN_BITS = 5
"""A length of k bits is told by its first `BIN_BITS + 1`."""
STEPS = 20


def recorded(prompts: np.ndarray, responses: np.ndarray) -> dict[str, Any]:
    """What an event says of the lengths of its rows. Rows without a prompt or a response are left out of the count of that."""
    return {"prompt": _histogram(prompts), "response": _histogram(responses)}


def _histogram(lengths: np.ndarray) -> dict[str, list[int]]:
    known = np.sort(np.asarray(lengths, np.int64).reshape(-1))
    known = known[known > 0]
    if not len(known):
        return {"tokens": [], "counts": []}
    shifts = np.maximum(0, np.floor(np.log2(known)).astype(np.int64) - BIN_BITS)
    bins = known >> shifts << shifts
    bins[known == known[-1]] = known[-1] + 1  # the longest for itself: it decides what must fit
    _, first, counts = np.unique(bins, return_index=True, return_counts=True)
    means = np.rint(np.add.reduceat(known, first) / counts).astype(np.int64)
    return {"tokens": means.tolist(), "counts": counts.tolist()}


def workload_of_run(
    path: str | Path, *, prompts: int | None = None, node: str | None = None, last: int = STEPS
) -> Workload:
    """See `Workload.of_run`."""
    path = Path(path)
    events = [event for event in _events(path) if LENGTHS in event.attributes]
    if not events:
        raise RunError(
            f"run '{path}' recorded no lengths: its trace has no rollout that sampled something. Runs of older versions have "
            "none; give lengths with Lengths.of(...)"
        )
    names = sorted({event.node for event in events})
    if node is not None and node not in names:
        raise ConfigError(f"run '{path}' has no lengths of a node '{node}'; {nearest(node, names)}")
    if last < 1:
        raise ConfigError(f"lengths are those of at least one step; found last={last}")
    steps = sorted({event.step for event in events})[-last:]
    taken = [event for event in events if event.step >= steps[0] and node in (None, event.node)]
    if not taken:
        raise RunError(f"node '{node}' of run '{path}' sampled nothing in its last {last} steps; take more with last=")
    info = _info(path)
    return Workload(
        _batch(path, info, prompts),
        _joined(path, taken, "prompt"),
        _joined(path, taken, "response"),
        rounds=_rounds(path, steps[0]),
    )


def _events(path: Path) -> list[Event]:
    if not (path / "run.json").is_file():
        raise RunError(f"'{path}' is not the folder of a run (no run.json)")
    return read_trace(path / "trace.jsonl")


def _info(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"'{path / 'run.json'}' cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise RunError(
            f"'{path / 'run.json'}' is a JSON object; found {shown(found)}: the file was changed by something else"
        )
    return found


def _batch(path: Path, info: Mapping[str, Any], prompts: int | None) -> int:
    """Prompts of an iteration: what all of the run's data sets give at once."""
    if prompts is not None:
        return prompts
    data = info.get("data") or {}
    sets = data.items() if isinstance(data, dict) else ()
    said = {name: one.get("batch") if isinstance(one, dict) else None for name, one in sets}
    batches = {name: int(one) for name, one in said.items() if one and is_int(one)}
    if len(set(batches.values())) != 1:
        raise ConfigError(
            f"run '{path}' does not say how many prompts an iteration has (batches: {batches}); give prompts="
        )
    return next(iter(batches.values()))


def _joined(path: Path, events: Iterable[Event], what: str) -> Lengths:
    counts: Counter[int] = Counter()
    for event in events:
        try:
            one = event.attributes[LENGTHS][what]
            for tokens, count in zip(one["tokens"], one["counts"], strict=True):
                counts[int(tokens)] += int(count)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RunError(
                f"lengths of step {event.step} in '{path / 'trace.jsonl'}' are no histogram ({error!r}); the file was changed by "
                "something else"
            ) from error
    if not counts:
        raise RunError(f"run '{path}' has no {what} of at least one token in these steps; take more with last=")
    tokens = sorted(counts)
    return Lengths(tuple(tokens), tuple(float(counts[one]) for one in tokens))


def _rounds(path: Path, first: int) -> float:
    """Groups that a refill tried for each that it passed on; 1 for a run without one."""
    tried = passed = 0.0
    for line in read_lines(path / "metrics.jsonl"):
        step = line.get("step", -1)
        if not is_int(step) or step < first:
            continue
        for name, value in line.items():
            groups = line.get(f"{name.removesuffix('tried')}groups") if name.endswith("/tried") else None
            if groups is not None and is_number(value) and is_number(groups):
                tried, passed = tried + value, passed + groups
    return max(1.0, tried / passed) if passed > 0 else 1.0
