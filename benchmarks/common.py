"""What every benchmark uses: tables, results on disk, and what machine it was."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("FLOWRL_BENCH_CACHE", "~/.cache/flowrl-bench")).expanduser()
"""Environments of other libraries; outside the repository, so that no tool looks into them."""


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; columns as wide as what is in them."""
    text = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in text]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def machine(packages: Sequence[str] = ("flowrl", "torch", "transformers", "numpy")) -> dict[str, Any]:
    """What was measured on, and how busy it was: a load above the number of cores makes numbers worthless."""
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def report(name: str, text: str, numbers: Mapping[str, Any], *, save: bool, file: str | None = None) -> None:
    """Print a table; with `save`, write it and the numbers to `benchmarks/results/`, with the command that made them.

    `file` is the name of what is written where that is not `name`, as when results of several machines are kept.
    """
    about = machine()
    print(f"\n{text}\n")
    print(f"{about['processor']}, {about['cores']} cores, load {about['load']}, Python {about['python']}")
    if not save:
        return
    RESULTS.mkdir(exist_ok=True)
    command = shlex.join(["python", "-m", "benchmarks", name, *sys.argv[2:]])
    made = {"command": command, "date": time.strftime("%Y-%m-%d"), "machine": about, **numbers}
    file = file or name
    (RESULTS / f"{file}.json").write_text(json.dumps(made, indent=2) + "\n")
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v)
    (RESULTS / f"{file}.md").write_text(
        f"{text}\n\n`{command}` on {about['processor']}, {about['cores']} cores, Python {about['python']}; {versions}\n"
    )
    print(f"written to {RESULTS.relative_to(ROOT)}/{file}.json and .md")
