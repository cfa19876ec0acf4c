"""How large pages are and how long they take: to draw, and to open in a browser, from a file and without a network.

python -m benchmarks pages
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import median, report, table
from flowrl.viz.html import plan_html
from flowrl.viz.run.page import run_html
from tests.cpu.viz.chromium import Chromium, browser
from tests.docs.images import LOADED, of_case
from tests.null.planner.golden.cases import CASES
from tests.null.viz.cases import large
from tests.null.viz.run_cases import as_bytes, large_run

MOST_BYTES, MOST_MS = 400_000, 1000.0
"""Of the page of a plan of 64 devices: its size, and until a browser has it complete."""
PLANS: dict[str, Callable[[], str]] = {
    "plan, 1 device": lambda: of_case(CASES["grpo-135m-1xH100"]),
    "plan, 8 devices, 70B": lambda: of_case(CASES["grpo-70b-8xA100"]),
    "plan, 16 devices, asynchronous": lambda: of_case(CASES["grpo-32b-16xH100-async"]),
    "plan, 64 devices, PPO": lambda: of_case(CASES["ppo-32b-64xH100"]),
    "plan, 64 devices, 18 steps by hand": lambda: plan_html(large()),
}


def opened_ms(chromium: Chromium, page: Path, ready: str) -> float:
    """Until the page is complete and its script has run. Raises SystemExit where it asked for something or complained."""
    start = time.perf_counter()
    chromium.open(page)
    chromium.wait(ready)
    spent = 1000 * (time.perf_counter() - start)
    if chromium.said or [url for url in chromium.requests if url != page.as_uri()]:
        raise SystemExit(f"{page.name}: asked for {chromium.requests}, said {chromium.said}")
    return spent


def waited_ms(chromium: Chromium, action: str) -> float:
    """From an action of JavaScript on the viewer until it shows what was asked for."""
    start = time.perf_counter()
    chromium.run(f"(() => {{delete document.getElementById('viewer').dataset.shown; {action}}})()")
    chromium.wait("document.getElementById('viewer').dataset.shown")
    return 1000 * (time.perf_counter() - start)


def plans(chromium: Chromium, folder: Path, repeat: int) -> dict[str, dict[str, float]]:
    found = {}
    for name, draw in PLANS.items():
        page = folder / "plan.html"
        page.write_text(draw(), encoding="utf-8")
        waits = [opened_ms(chromium, page, "document.documentElement.dataset.ready") for _ in range(repeat)]
        loads = float(chromium.run(LOADED))
        found[name] = {"bytes": page.stat().st_size, "open_ms": median(waits), "load_event_ms": loads}
    return found


def run_page(chromium: Chromium, folder: Path, steps: int, rows: int) -> dict[str, float]:
    made = large_run(folder, steps=steps, rows=rows)
    start = time.perf_counter()
    text = run_html(made, pieces=as_bytes, most_bytes=96 * 2**20)
    draw_s = time.perf_counter() - start
    page = folder / "run.html"
    page.write_text(text, encoding="utf-8")
    open_ms = opened_ms(chromium, page, "document.documentElement.dataset.viewed")
    search = (
        f"document.getElementById('ask-words').value = 'needle{steps // 2}'; document.getElementById('ask-go').click();"
    )
    search_ms = waited_ms(chromium, search)
    said = str(chromium.run("document.getElementById('ask-said').textContent"))
    if said != "1 response in 1 group":
        raise SystemExit(f"the search found {said}")
    clear = "document.getElementById('ask-words').value = ''; document.getElementById('ask-go').click();"
    waited_ms(chromium, clear)
    asked = "const e = document.getElementById('ask-low'); e.value = '1'; e.dispatchEvent(new Event('change'));"
    return {
        "bytes": page.stat().st_size,
        "draw_s": draw_s,
        "open_ms": open_ms,
        "search_ms": search_ms,
        "filter_ms": waited_ms(chromium, asked),
        "heap_bytes": float(chromium.run("performance.memory.usedJSHeapSize")),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pages", description="pages in a browser")
    parser.add_argument("--quick", action="store_true", help="once instead of 5 times, and a run of 20 steps")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args(argv)
    command = browser()
    if command is None:
        print("there is no Chromium on this machine: apt-get install chromium, or name one in FLOWRL_TEST_BROWSER")
        return 2
    steps = 20 if args.quick else 500
    with tempfile.TemporaryDirectory() as name, Chromium(command, Path(name, "profile")) as chromium:
        of_plans = plans(chromium, Path(name), 1 if args.quick else 5)
        of_run = run_page(chromium, Path(name), steps, 512)
    targets = f"< {MOST_BYTES / 1000:.0f} kB, < {MOST_MS:.0f} ms"
    rows: list[list[Any]] = [
        [what, f"{one['bytes'] / 1000:.0f} kB", f"{one['open_ms']:.0f}", targets if "64" in what else ""]
        for what, one in of_plans.items()
    ]
    what = f"run, {steps} steps of 512 responses"
    rows.append([what, f"{of_run['bytes'] / 1e6:.1f} MB", f"{of_run['open_ms']:.0f}", ""])
    rows.append(["- search in all of its texts", "", f"{of_run['search_ms']:.0f}", ""])
    rows.append(["- filter by reward", "", f"{of_run['filter_ms']:.0f}", ""])
    text = table(["page", "size", "ms until it is there", "target"], rows)
    heap = f"{of_run['heap_bytes'] / 2**20:.0f} MiB"
    text += f"\n\nThe script of the run's page holds {heap}; writing the page took {of_run['draw_s']:.0f} s."
    report("pages", text, {"plans": of_plans, "run": of_run}, save=args.save)
    return 0
