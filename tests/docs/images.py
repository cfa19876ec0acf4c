"""The pictures in docs/images: pinned plans and a small run, as a browser shows their pages.

    python -m tests.docs.images            # all; needs a Chromium (see tests/cpu/viz/chromium.py)
    python -m tests.docs.images moe        # those whose name begins so

Plans are those of tests/null/planner/golden, but for `split`, which is one of its problems with another placement; so a picture
changes when a pinned plan does. Pictures are not compared by any test: fonts differ between machines. Look at each before it is
committed.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import flowrl as fr
from examples.gallery.runs import RUNS
from examples.tiny import CharTokenizer
from flowrl.planner.steps import Plan
from flowrl.runtime.rundir import RunDir
from flowrl.viz.frame import asset
from flowrl.viz.palette import css
from flowrl.viz.run.compare import compare_html
from flowrl.viz.run.page import run_html
from tests.cpu.viz.chromium import Chromium, browser
from tests.null.planner.golden.cases import CASES, Case

FOLDER = Path(__file__).parents[2] / "docs" / "images"
WIDTH = 1200
COLOURS = 128
"""Of a picture: what pages are drawn in, and enough between for the edges of letters."""
LARGE_BYTES = 60_000
SPECIAL = 3
"""Tokens of the tiny model that stand for no text."""
RUN_FOLDER = tempfile.TemporaryDirectory()


@dataclass(frozen=True, slots=True)
class Shot:
    """A picture of neighbouring parts of a page."""

    name: str
    page: str
    first: str
    """CSS selector of the part at the top."""
    last: str = ""
    """And of the one at the bottom; else the same."""
    before: str = ""
    """JavaScript that is run first."""


COLOURED = """(() => {
  const viewer = document.getElementById("viewer"), choice = document.getElementById("ask-colour");
  if (!document.documentElement.dataset.viewed) return false;
  if (choice.value) return viewer.dataset.shown;
  choice.value = [...choice.options].map((one) => one.value).find((one) => one.endsWith("rollout_logprobs"));
  delete viewer.dataset.shown;
  choice.dispatchEvent(new Event("change"));
})()"""
"""The viewer shows responses, with their tokens coloured."""

SHOTS = (
    Shot("8b-time", "grpo-8b-8xA100", "header", "#devices"),
    Shot("async-versions", "split", "header", "#versions"),
    Shot("async-time", "split", "#timeline"),
    Shot("async-memory", "split", "#memory"),
    Shot("async-one-mesh", "grpo-32b-16xH100-async", "header", "#versions"),
    Shot("64-time", "ppo-32b-64xH100", "header", "#timeline"),
    Shot("64-devices", "ppo-32b-64xH100", "#devices"),
    Shot("64-dataflow", "ppo-32b-64xH100", "#dataflow"),
    Shot("70b-time", "grpo-70b-8xA100", "header", "#timeline"),
    Shot("70b-memory", "grpo-70b-8xA100", "#memory"),
    Shot("70b-steps", "grpo-70b-8xA100", "#steps"),
    Shot("moe-why", "grpo-30b-a3b-8xH100", "#why"),
    Shot("run-curves", "run", "header", "#curves"),
    Shot("run-responses", "run", "#responses", before=COLOURED),
    Shot("runs-differ", "compared", "#settings"),
)


def of_case(case: Case) -> str:
    """The page of a pinned plan, with its flow."""
    return planned(case, None).to_html(graph=case.flow)


def planned(case: Case, placement: str | None) -> Plan:
    names = [node.name for node in case.flow.graph().inputs if node["kind"] == "weights"]
    return fr.plan(
        case.flow,
        models=dict.fromkeys(names, case.model),
        cluster=case.cluster,
        workload=case.workload,
        schedule=case.schedule,
        placement=placement,
        choices=case.choices,
    )


def split() -> str:
    """Sampling and training on a node each: with one mesh nothing overlaps."""
    case = CASES["grpo-32b-16xH100-async"]
    return planned(case, "gen:... | (policy:... + ref:...)").to_html(graph=case.flow)


@cache
def ran(seed: int = 0, lr: float = 1e-2) -> RunDir:
    """GRPO on the gallery's tiny model, which learns to say a digit again and to end there."""
    run = replace(RUNS["grpo"], max_tokens=4, steps=60, lr=lr)
    with chdir(RUN_FOLDER.name):
        made = run.run(out="runs", name=f"grpo-lr-{lr:g}", record=("*",), seed=seed)
    if made.path is None:
        raise RuntimeError("a run with out= writes a folder")
    return RunDir.open(Path(RUN_FOLDER.name, made.path))


def as_letters(ids: Any) -> list[bytes | None]:
    """What the tiny model's tokens say."""
    tokenizer = CharTokenizer()
    return [None if one < SPECIAL else tokenizer.decode([one]).encode() for one in ids]


PAGES: dict[str, Callable[[], str]] = {
    "split": split,
    "run": lambda: run_html(ran(), pieces=as_letters),
    "compared": lambda: compare_html([ran(), ran(lr=2e-3)]),
    **{name: (lambda case=case: of_case(case)) for name, case in CASES.items()},
}


def pictures(shots: tuple[Shot, ...], open_: Chromium, folder: Path) -> Iterator[tuple[Shot, bytes]]:
    """PNG of each."""
    made: dict[str, Path] = {}
    for shot in shots:
        if shot.page not in made:
            made[shot.page] = folder / f"{shot.page}.html"
            made[shot.page].write_text(PAGES[shot.page](), encoding="utf-8")
        open_.open(made[shot.page])
        open_.wait("document.documentElement.dataset.ready")
        if shot.before:
            open_.wait(shot.before)
        box = open_.run(
            f"(() => {{const a = document.querySelector({shot.first!r}).getBoundingClientRect(),"
            f"b = document.querySelector({(shot.last or shot.first)!r}).getBoundingClientRect();"
            "return {y: Math.max(0, a.top + scrollY - 8), height: b.bottom - a.top + 16}})()"
        )
        yield shot, small(open_.picture(width=WIDTH, **box))
        print(f"{shot.name}: complete after {open_.run(LOADED)} ms", open_.said or "")


LOADED = "Math.round(performance.timing.loadEventEnd - performance.timing.navigationStart)"


def small(png: bytes) -> bytes:
    """The picture in the colours that pages name and its most frequent others; the edges of letters get the nearest."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    colours, places, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    ours = [
        [int(one[at : at + 2], 16) for at in (1, 3, 5)] for one in re.findall("#[0-9a-f]{6}", css() + asset("page.css"))
    ]
    is_ours = (colours[:, None] == np.array(ours)[None]).all(axis=2).any(axis=1)
    kept = colours[np.sort(np.lexsort((-counts, ~is_ours))[:COLOURS])].astype(np.int32)
    distances = ((colours.astype(np.int32)[:, None] - kept[None]) ** 2).sum(axis=2)
    out = io.BytesIO()
    found = Image.fromarray(distances.argmin(axis=1)[places].reshape(pixels.shape[:2]).astype(np.uint8), "P")
    found.putpalette(kept.astype(np.uint8).tobytes())
    found.save(out, "PNG", optimize=True)
    return out.getvalue()


def main(names: list[str]) -> int:
    command = browser()
    if command is None:
        print("there is no Chromium on this machine: apt-get install chromium, or name one in FLOWRL_TEST_BROWSER")
        return 2
    shots = tuple(shot for shot in SHOTS if not names or shot.name.startswith(tuple(names)))
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "profile")
        profile.mkdir()
        with Chromium(command, profile, width=WIDTH) as opened:
            for shot, png in pictures(shots, opened, Path(folder)):
                (FOLDER / f"{shot.name}.png").write_bytes(png)
                large = "  LARGE" if len(png) > LARGE_BYTES else ""
                print(f"{shot.name}.png: {len(png) / 1000:.0f} kB{large}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
