"""`flowrl view`: a run or a plan as a page; runs over each other; a run while it goes on."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowrl.cli import OK
from flowrl.errors import ConfigError, FlowError
from flowrl.planner.measured import PLAN_FILE
from flowrl.planner.steps import Plan
from flowrl.runtime.rundir import RunDir
from flowrl.schema.files import check_writable, is_file, write_file
from flowrl.viz.run.responses import Pieces

MIB = 2**20
TOKENS = "--tokenizer is for the tokens of a run; leave it away"


def view(args: argparse.Namespace) -> int:
    """Write the page, or serve it. Errors: ConfigError for what is neither a run nor a plan."""
    if args.compare:
        if args.target is not None:
            raise ConfigError("--compare takes the runs itself: flowrl view --compare RUN RUN")
        _refuse(args, "serve", "--serve follows a run, and --compare writes a page")
        _refuse(args, "tokenizer", TOKENS)
        return _compared(args.compare, args.out)
    if args.target is None:
        raise ConfigError("view takes the folder of a run or a PLAN.json; or --compare RUN RUN")
    path = Path(args.target)
    if is_file(path):
        _refuse(args, "serve", "--serve follows a run, and a plan does not change")
        _refuse(args, "tokenizer", TOKENS)
        return _plan(path, args.out)
    folder = RunDir.open(path)
    if args.serve:
        if args.out is not None:
            raise ConfigError("--serve writes no file; leave --out away")
        return _serve(folder, args.port, args.tokenizer)
    return _run(folder, args.out, args.most_mb, args.tokenizer)


def _refuse(args: argparse.Namespace, name: str, why: str) -> None:
    if getattr(args, name):
        raise ConfigError(why)


def _plan(path: Path, out: str | None) -> int:
    page = Plan.load(path).to_html()
    return _written(page, Path(out) if out is not None else path.with_suffix(".html"))


def _run(folder: RunDir, out: str | None, most_mb: float, tokenizer: str | None) -> int:
    from flowrl.viz.run.page import run_html

    if not most_mb > 0:
        raise ConfigError(f"--most-mb is a number above 0; found {most_mb:g}")
    page = run_html(folder, pieces=pieces_of(folder, tokenizer), most_bytes=int(most_mb * MIB))
    return _written(page, Path(out) if out is not None else folder.path / "view.html")


def _compared(runs: Sequence[str], out: str | None) -> int:
    from flowrl.viz.run.compare import compare_html

    return _written(compare_html([RunDir.open(run) for run in runs]), Path(out or "compare.html"))


def _serve(folder: RunDir, port: int, tokenizer: str | None) -> int:
    from flowrl.viz.run.serve import LiveView

    try:
        live = LiveView(folder, pieces_of(folder, tokenizer), port=port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port {port}: nothing can be served there ({error}); 0 takes a port that is free"
        ) from error
    with live:
        said = "on this machine only, for who has this address, until Ctrl-C"
        print(f"{folder.path}: {folder.status}; {said}:\n{live.url}", flush=True)
        try:
            live.serve()
        except KeyboardInterrupt:  # the way to end it
            print("ended")
    return OK


def _written(page: str, path: Path) -> int:
    check_writable(path, "--out")
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(page, encoding="utf-8", errors="backslashreplace")
    os.replace(aside, path)
    print(f"written to {path} ({len(page) / MIB:.1f} MiB)")
    return OK


def pieces_of(folder: RunDir, tokenizer: str | None = None) -> Pieces | None:
    """What the token ids of a run are as text, where its tokenizer is on this machine.

    Args:
        tokenizer: take this one. Errors: ConfigError where it is not here.
    """
    info = folder.info
    if tokenizer is not None:
        found = _find(tokenizer)
        if found is None:
            raise ConfigError(
                f"--tokenizer {tokenizer}: there is none on this machine; give a folder that has one, or a name that was "
                "downloaded before"
            )
        return found
    if info.get("engine") == "null":
        return _as_bytes
    models = [str(one.get("source")) for one in dict(info.get("models", {})).values() if isinstance(one, dict)]
    if not folder.edges():
        return None
    return next((found for source in models if (found := _find(source)) is not None), None)


def _find(source: str) -> Pieces | None:
    try:
        # by name, as engines are: this command stays quick where no tokens were recorded
        find: Callable[[str], Pieces | None] = importlib.import_module("flowrl.engines.token_text").hugging_face
        return find(source)
    except ImportError:
        return None


def _as_bytes(ids: Sequence[int]) -> list[bytes | None]:
    """Of the null engine, whose tokens are bytes."""
    return [bytes([one]) if 0 <= one < 256 else None for one in ids]


def write_pictures(made: Plan, graph: Any, *, html: str | None, trace: str | None, svg: str | None) -> list[str]:
    """Files of `flowrl plan`: the page, the trace for Perfetto, one picture. Returns the paths that were written."""
    written = []
    for path, draw in (
        (html, lambda: made.to_html(graph=graph)),
        (trace, lambda: made.to_trace()),
        (svg, lambda: made.to_svg(graph=graph)),
    ):
        if path is not None:
            write_file(path, draw())
            written.append(path)
    return written


def plan_of(folder: RunDir) -> Plan | None:
    """The plan of a run, where it had one that can be read."""
    path = folder.path / PLAN_FILE
    if not path.is_file():
        return None
    try:
        return Plan.load(path)
    except FlowError:  # of another version: what else the run holds is still worth seeing
        return None
