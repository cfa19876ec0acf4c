"""Run the comparison and say which targets were met."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import numpy as np
import torch

from benchmarks.common import median, report, table
from benchmarks.tables import environment, kills, latency, reads, stall
from benchmarks.tables.handoff import Channel, Handoff, chunks_of, expected
from benchmarks.tables.limits import Limit
from benchmarks.tables.ours import KERNELS, TableChannel, TableStore, group_latency, name_of, stored_bytes
from benchmarks.tables.targets import HEADER, TARGETS
from benchmarks.tables.workload import (
    FULL,
    LOGITS,
    MAX_PROMPT,
    MAX_RESPONSE,
    QUICK,
    W1,
    W2,
    Workload,
    load,
    statistics,
)


@dataclass
class Measured:
    """What a run found."""

    figures: dict[str, dict[str, float]] = field(default_factory=lambda: {kernel: {} for kernel in KERNELS})
    """By kernel: what the targets are about."""
    tables: list[str] = field(default_factory=list)
    """Markdown."""
    numbers: dict[str, Any] = field(default_factory=dict)

    def both(self, name: str, value: float) -> None:
        """A figure that no kernel changes."""
        for figures in self.figures.values():
            figures[name] = value


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    groups: int
    kills: int
    anchors: bool
    """Whether other stores take part."""


def interleaved(rounds: int, ways: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Each way once a round; the order turns, so that nobody always comes after the same neighbour."""
    names = list(ways)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            found[name].append(ways[name]())
    return found


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return median([a / b for a, b in zip(mine, theirs, strict=True)])


# ------------------------------------------------------------------------------------------------------------- rows 1-4


@contextmanager
def channels(plan: Plan) -> Iterator[Handoff]:
    """Every way to hand rows over that is installed."""
    near: list[Channel] = [TableChannel(kernel) for kernel in KERNELS]
    apart: list[Channel] = []
    from benchmarks.tables.anchors import arrow_files, flight, pipes

    near += [
        pipes.PickledRows(),
        pipes.PickledColumns(),
        arrow_files.ArrowFiles(),
        arrow_files.ArrowFilesLz4(),
        flight.Flight(),
        flight.Flight(kernel=True),
    ]
    if plan.anchors:
        from benchmarks.tables.anchors import ray_actors

        near += [pipes.DataProtoBytes(), pipes.TorchShared()]
        ray_actors.start()
        apart = [ray_actors.RayRows(), ray_actors.RayColumns(), ray_actors.TransferQueue()]
    handoff = Handoff(near, apart)
    try:
        yield handoff
    finally:
        handoff.close()
        if plan.anchors:
            ray_actors.stop()


def hand_over(measured: Measured, workload: Workload, plan: Plan) -> None:
    found: dict[str, dict[str, list[float]]] = {}
    with channels(plan) as handoff:
        for key, names, num_rows in (("w1", W1, workload.size.rows), ("w2", W2, workload.size.logit_rows)):
            chunks = chunks_of(workload, names, num_rows)
            wanted = expected(chunks, names)
            for name in handoff.channels:
                _, done = handoff.round(name, chunks, names, check=True)
                if done.digest != wanted:
                    raise SystemExit(f"{name}: other values came out than went in")
            found[key] = interleaved(
                plan.rounds,
                {name: lambda n=name, c=chunks, k=names: handoff.round(n, c, k)[0] for name in handoff.channels},
            )
            for kernel in KERNELS:
                for name, speeds in found[key].items():
                    measured.figures[kernel][f"{key}/{name}"] = ratio(found[key][name_of(kernel)], speeds)
    best = name_of("numba")
    rows = [
        [
            name,
            *(
                cell
                for key in found
                for cell in (_thousands(found[key][name]), f"{ratio(found[key][best], found[key][name]):.1f}x")
            ),
        ]
        for name in found["w1"]
    ]
    header = ["rows to another process", "W1 rows/s", "the table is", "W2 rows/s", "the table is"]
    measured.tables.append(table(header, rows))
    measured.numbers["handoff rows/s"] = found


def _thousands(values: Sequence[float]) -> str:
    middle, least, most = (f"{value / 1000:.3g}" if value < 1e6 else f"{value / 1000:.0f}" for value in (
        median(values), min(values), max(values)
    ))  # fmt: skip
    return f"{middle}k ({least}-{most})"


# -------------------------------------------------------------------------------------------------------- rows 5-7 and 11


def stores(plan: Plan) -> list[Callable[[list[dict[str, Any]], Sequence[str]], reads.Store]]:
    from benchmarks.tables.anchors import arrow_files, memory

    made: list[Any] = [lambda rows, names, k=kernel: TableStore(rows, names, k) for kernel in KERNELS]
    made += [memory.ListOfRows, arrow_files.ArrowReader, arrow_files.ArrowLz4Reader, arrow_files.ArrowLz4ByChunk]
    if plan.anchors:
        from benchmarks.tables.anchors import files

        made += [memory.PaddedTensorDict, memory.Cpprb, memory.TorchrlMemmap]
        made += [files.HuggingFace, files.HuggingFaceTorch, files.Lance]
    return made


def read(measured: Measured, workload: Workload, plan: Plan) -> None:
    rows = reads.Rows(workload.rows(W1, 0, workload.size.rows), W1)
    order = np.random.default_rng(1).permutation(len(rows.rows))
    limit = Limit(workload, W1, len(rows.rows))
    held: list[reads.Store] = []
    try:
        for make in stores(plan):
            store = make(rows.rows, W1)
            held.append(store)
            reads.check(store, rows, order[: store.random_rows])
            if isinstance(store, TableStore):
                reads.check_batches(f"{store.name}, reuse", store.reusing(), rows, range(len(order)))
        ways: dict[str, Callable[[], float]] = {}
        # never two ways of one store after each other: the second would find its rows in the processor's cache
        for store in held:
            ways[f"seq/{store.name}"] = lambda s=store: reads.speed(s.sequential(), len(order))
        ways["limit/padded"] = lambda: limit.speed(padded=True)
        for store in held:
            part = order[: store.random_rows]
            ways[f"rand/{store.name}"] = lambda s=store, p=part: reads.speed(s.random(p), len(p))
        ways["limit/packed"] = lambda: limit.speed(padded=False)
        tables = [store for store in held if isinstance(store, TableStore)]
        for store in tables:
            ways[f"reuse seq/{store.name}"] = lambda s=store: reads.speed(s.reusing(), len(order))
        ways["limit/padded, two"] = lambda: limit.speed(padded=True, buffers=2)
        for store in tables:
            ways[f"packed/{store.name}"] = lambda s=store: reads.speed(s.packed(), len(order))
        for store in tables:
            ways[f"reuse rand/{store.name}"] = lambda s=store: reads.speed(s.reusing(shuffle=True), len(order))
        found = interleaved(plan.rounds, ways)
        _read_figures(measured, found)
        add_column(measured, held, plan, len(order))
    finally:
        for store in held:
            store.close()
    measured.tables.append(
        table(
            ["32 rows padded, one process", "in order, rows/CPU-s", "at random"],
            [[s.name, _thousands(found[f"seq/{s.name}"]), _thousands(found[f"rand/{s.name}"])] for s in held]
            + [
                [
                    "  reuse=True, " + s.name,
                    _thousands(found[f"reuse seq/{s.name}"]),
                    _thousands(found[f"reuse rand/{s.name}"]),
                ]
                for s in held
                if isinstance(s, TableStore)
            ]
            + [
                ["  packed, " + s.name, _thousands(found[f"packed/{s.name}"]), ""]
                for s in held
                if isinstance(s, TableStore)
            ]
            + [["limit of memory, padded", _thousands(found["limit/padded"]), ""]]
            + [["  into two buffers in turn", _thousands(found["limit/padded, two"]), ""]]
            + [["limit of memory, packed", _thousands(found["limit/packed"]), ""]],
        )
    )
    measured.numbers["read rows/CPU-s"] = found


FIXED = ("tensordict padded, trimmed", "cpprb")
LZ4_ROW = "Arrow IPC file LZ4, a row at a time"


def _read_figures(measured: Measured, found: dict[str, list[float]]) -> None:
    for kernel in KERNELS:
        figures, mine = measured.figures[kernel], name_of(kernel)
        for figure, other in (
            ("list", "list + pad_sequence"),
            ("HF", "HF datasets numpy"),
            ("LZ4", LZ4_ROW),
            ("cpprb", "cpprb"),
        ):
            for how in ("seq", "rand"):
                if f"{how}/{other}" in found:
                    figures[f"{how}/{figure}"] = ratio(found[f"{how}/{mine}"], found[f"{how}/{other}"])
                    figures[f"reuse {how}/{figure}"] = ratio(found[f"reuse {how}/{mine}"], found[f"{how}/{other}"])
        for how in ("seq", "reuse seq"):
            fixed = [ratio(found[f"{how}/{mine}"], found[f"seq/{name}"]) for name in FIXED if f"seq/{name}" in found]
            if fixed:
                figures[f"{how}/fixed"] = min(fixed)
        figures["limit/padded"] = ratio(found[f"seq/{mine}"], found["limit/padded"])
        figures["limit/padded, two"] = ratio(found[f"seq/{mine}"], found["limit/padded, two"])
        figures["limit/padded, reuse"] = ratio(found[f"reuse seq/{mine}"], found["limit/padded"])
        figures["limit/packed"] = ratio(found[f"packed/{mine}"], found["limit/packed"])


def add_column(measured: Measured, held: Sequence[reads.Store], plan: Plan, num_rows: int) -> None:
    """A float32 column for rows that are there already; each time of another name."""
    values = np.random.default_rng(2).standard_normal(num_rows).astype(np.float32)
    growing = [store for store in held if hasattr(store, "add_column")]
    tables = [store for store in growing if isinstance(store, TableStore)]
    before = [store.table.stats() for store in tables]
    names = iter(range(1_000_000))

    def seconds(store: Any) -> float:
        start = time.perf_counter()
        store.add_column(f"later_{next(names)}", values)
        return time.perf_counter() - start

    found = interleaved(plan.rounds, {store.name: lambda s=store: seconds(s) for store in growing})
    for store, was in zip(tables, before, strict=True):
        figures, now = measured.figures[store.kernel], store.table.stats()
        figures["column/ms"] = 1000 * median(found[store.name])
        figures["column/rewritten"] = sum(
            abs(column.stored_bytes - now.columns[name].stored_bytes) for name, column in was.columns.items()
        )
    measured.tables.append(
        table(
            [f"a float for each of {num_rows} rows, later", "ms"],
            [[name, f"{1000 * median(times):.2f}"] for name, times in found.items()],
        )
    )
    measured.numbers["add column s"] = found


# ------------------------------------------------------------------------------------------------------------- rows 8-9


def count_bytes(measured: Measured, workload: Workload) -> None:
    rows, logit_rows = workload.size.rows, workload.size.logit_rows
    padded = rows * (MAX_PROMPT * workload.width("prompt_ids") + MAX_RESPONSE * sum(workload.width(n) for n in W1[1:]))
    ragged, resident = stored_bytes(workload, W1, rows)
    whole, cold = stored_bytes(workload, (*W1, "response"), rows, compression="lz4")
    logits, cold_logits = stored_bytes(workload, (LOGITS,), logit_rows, compression="lz4")
    _, cold_logits_zstd = stored_bytes(workload, (LOGITS,), logit_rows, compression="zstd")
    for name, value in (
        ("bytes/padded", resident / padded),
        ("bytes/ragged", resident / ragged),
        ("cold/w1", cold / whole),
        ("cold/logits", cold_logits / logits),
        ("cold/logits zstd", cold_logits_zstd / logits),
    ):
        measured.both(name, value)
    per_row = [
        ("padded, same dtypes", padded / rows),
        ("ragged", ragged / rows),
        ("table in memory", resident / rows),
        ("with text", whole / rows),
        ("with text, table compressed (lz4)", cold / rows),
        ("64 logits", logits / logit_rows),
        ("64 logits, table compressed (lz4)", cold_logits / logit_rows),
        ("64 logits, table compressed (zstd)", cold_logits_zstd / logit_rows),
    ]
    measured.tables.append(table(["W1", "bytes a row"], [[name, f"{value:,.0f}"] for name, value in per_row]))
    measured.numbers["bytes a row"] = dict(per_row)


# -------------------------------------------------------------------------------------------------------- rows 10, 12, 13


def groups(measured: Measured, workload: Workload, plan: Plan) -> None:
    found = {"list[dict] through a pipe": latency.through_a_pipe(workload, W1, plan.groups)}
    for kernel in KERNELS:
        for spin, what in ((False, "group"), (True, "group spinning")):
            times = group_latency(workload, W1, kernel, plan.groups, spin=spin)
            found[f"{name_of(kernel)}, {'spins' if spin else 'waits'}"] = times
            p50, p99 = stall.percentiles(times, 50, 99)
            measured.figures[kernel] |= {f"{what}/p50": 1000 * p50, f"{what}/p99": 1000 * p99}
    cells = [[name, *(f"{1000 * p:.2f}" for p in stall.percentiles(times, 50, 99))] for name, times in found.items()]
    measured.tables.append(table(["8 rows to padded elsewhere", "p50 ms", "p99 ms"], cells))
    measured.numbers["group s"] = {name: stall.percentiles(times, 50, 99) for name, times in found.items()}


def stalls(measured: Measured, workload: Workload, plan: Plan) -> None:
    from benchmarks.tables.ours import kernels

    rows = workload.rows(W1, 0, workload.size.rows)
    trainer = stall.Trainer()
    found: dict[str, list[float]] = {}
    ways: dict[str, Any] = {f"DataLoader workers={n}": stall.torch_loader(rows, W1, n) for n in (0, 2)}
    held = {kernel: TableStore(rows, W1, kernel) for kernel in KERNELS}
    try:
        for _ in range(max(plan.rounds // 2, 1)):
            for name, loader in ways.items():
                found.setdefault(name, []).extend(trainer.waits(loader))
            for kernel, store in held.items():
                with kernels.forced(kernel), store.prefetched() as loader:
                    found.setdefault(name_of(kernel), []).extend(trainer.waits(loader))
    finally:
        for store in held.values():
            store.close()
    cells = []
    for name, times in found.items():
        p50, p99 = (1e6 * value for value in stall.percentiles(times, 50, 99))
        cells.append([name, f"{p50:.0f}", f"{p99:.0f}"])
        measured.numbers.setdefault("stall us", {})[name] = [p50, p99]
    for kernel in KERNELS:
        measured.figures[kernel]["stall/p50"] = measured.numbers["stall us"][name_of(kernel)][0]
    measured.tables.append(table(["a trainer of 3 ms waits for its batch", "p50 us", "p99 us"], cells))


def kill(measured: Measured, plan: Plan) -> None:
    killed = kills.many(plan.kills)
    measured.both("kill/corrupt", float(killed.corrupt))
    measured.both("kill/lost", float(killed.lost))
    measured.numbers["kills"] = {"kills": killed.kills, "rows looked at": killed.rows}
    measured.tables.append(f"kill -9 of a writer: {killed.kills} times, {killed.rows:,} committed rows looked at")


# ------------------------------------------------------------------------------------------------------------------ main


def measure(workload: Workload, plan: Plan, parts: Sequence[str]) -> Measured:
    measured = Measured()
    steps: dict[str, Callable[[], None]] = {
        "handoff": lambda: hand_over(measured, workload, plan),
        "read": lambda: read(measured, workload, plan),
        "bytes": lambda: count_bytes(measured, workload),
        "groups": lambda: groups(measured, workload, plan),
        "stall": lambda: stalls(measured, workload, plan),
        "kill": lambda: kill(measured, plan),
    }
    for name in parts:
        start = time.perf_counter()
        steps[name]()
        print(f"  {name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return measured


PARTS = ("handoff", "read", "bytes", "groups", "stall", "kill")


def about(workload: Workload) -> str:
    found = statistics(workload)
    return table(["rows", "this run"], [[name, _shown(value)] for name, value in found.items()])


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description="the experience table against others"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds, no other stores")
    parser.add_argument("--full", action="store_true", help="1000 kills")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--prepare", action="store_true", help="make .venv-anchors with the other stores, and end")
    parser.add_argument("--python", help="a Python that has the other stores")
    parser.add_argument("--here", action="store_true", help="measure with this Python, whatever else there is")
    parser.add_argument("--fresh", action="store_true", help="make the rows again")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = arguments(argv)
    if args.prepare:
        print(f"the other stores are ready: {environment.prepare()}")
        return 0
    if not args.quick and not args.here:
        python = environment.found(args.python)
        if python is not None and not environment.is_this(python):
            return environment.run_again(python, argv)
    torch.set_num_threads(1)
    quiet()
    absent = environment.missing()
    plan = Plan(
        rounds=args.rounds or (2 if args.quick else 7),
        groups=100 if args.quick else 400,
        kills=args.kills or (3 if args.quick else 1000 if args.full else 20),
        anchors=not args.quick and not absent,
    )
    workload = load(QUICK if args.quick else FULL, fresh=args.fresh)
    print(about(workload), flush=True)
    measured = measure(workload, plan, args.only)
    if args.quick:
        measured.tables.insert(0, "A quick run: too few rows for the speeds to mean anything.")
    if not plan.anchors:
        left_out = "--quick" if args.quick else f"not installed: {', '.join(absent)}"
        measured.tables.insert(0, f"Other stores were left out ({left_out}); see --prepare.")
    else:
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in environment.DISTRIBUTIONS)
        measured.tables.append(f"Other stores: {versions}. dm-reverb is left out: it imports tensorflow.")
    for kernel in KERNELS:
        rows = [target.row(measured.figures[kernel], compiled=kernel == "numba") for target in TARGETS]
        measured.tables.append(f"Targets, {kernel} path\n\n{table(HEADER, rows)}")
    numbers = {"workload": statistics(workload), "figures": measured.figures, **measured.numbers}
    report("tables", "\n\n".join([about(workload), *measured.tables]), numbers, save=args.save)
    return 0


def quiet() -> None:
    """Other libraries' notes do not belong into the tables."""
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")
    logging.getLogger("torchrl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
