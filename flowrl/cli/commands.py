"""What each command does. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.cli import OK, PROBLEMS
from flowrl.errors import ConfigError, FlowError
from flowrl.graph.nodes import Graph

if TYPE_CHECKING:
    from flowrl.recipe import Recipe
    from flowrl.runtime.local import Run
    from flowrl.runtime.rundir import RunDir


def check(args: argparse.Namespace) -> int:
    """Print the graph, what is pruned and merged, and every problem."""
    from flowrl.graph.passes import optimise

    recipe = _recipe(args)
    graph = recipe.graph
    print(str(graph).rstrip())
    problems = recipe.check()
    _, notes = optimise(graph)
    print("\npruned and merged:" if notes else "\nnothing to prune or merge")
    for note in notes:
        print(f"  {note}")
    if not problems:
        print("\nno problems")
        return OK
    print(f"\n{_counted(len(problems), 'problem')}:\n")
    print("\n\n".join(map(str, problems)))
    return PROBLEMS


def show(args: argparse.Namespace) -> int:
    """Print the graph in one of its forms."""
    from flowrl.graph.passes import optimise

    graph = _recipe(args).graph
    if args.until is not None:
        try:
            graph = graph.slice(until=args.until)
        except FlowError as error:
            raise ConfigError(str(error)) from error
    if args.optimised:
        graph, _ = optimise(graph)
    print((_drawn(graph) if args.format == "mermaid" else str(graph)).rstrip())
    return OK


def _drawn(graph: Graph) -> str:
    from flowrl.viz.mermaid import to_mermaid

    return to_mermaid(graph)


def run(args: argparse.Namespace) -> int:
    """Run a flow or a recipe, here or on several ranks; say where its results lie, also when it was interrupted or failed."""
    from flowrl.cli import ranks

    recipe = recipe_of(args)
    _refuse_missing(recipe)
    if args.nproc is not None or args.launcher is not None:
        return ranks.launch(recipe, args.arguments, nproc=args.nproc, timeout_s=args.timeout_s, launcher=args.launcher)
    name = recipe.options.name or recipe.graph.name
    began = time.time()
    try:
        with ranks.run_recipe(recipe, timeout_s=args.timeout_s) if ranks.is_rank() else recipe.run() as done:
            if ranks.is_first():
                say_finished(name, done)
    except KeyboardInterrupt:
        say_where(recipe.options.out, name, "interrupted", began)
        raise
    except FlowError as error:
        if not isinstance(error, ConfigError):
            say_where(recipe.options.out, name, "failed", began)
        raise
    return OK


def resume(args: argparse.Namespace) -> int:
    """Give the command that started a run again, with its folder to go on from."""
    from flowrl.cli.parser import build_parser
    from flowrl.runtime.checkpoints import Checkpoint
    from flowrl.runtime.rundir import RunDir

    found = Checkpoint.find(args.path)
    told = RunDir.open(found.run).info.get("options", {}).get("command")
    if not told:
        raise ConfigError(
            f"run '{found.run}' was not started by `flowrl run`, so its command is not known; run your script with "
            f"resume={str(found.run)!r}"
        )
    given = {"--steps": args.steps, "--plan": args.plan, "--nproc": args.nproc}
    more = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    arguments = [*told, *more, "--set", f"resume={json.dumps(str(args.path))}"]
    again = build_parser("", "").parse_args(arguments)
    again.arguments = arguments
    return run(again)


def say_finished(name: str, run: Run) -> None:
    """Print what a run has done, and where its results lie."""
    where = f"results in {run.path}" if run.path else "nothing was written"
    print(f"{name}: finished {_counted(len(run.metrics), 'step')}; {where}", flush=True)


def _refuse_missing(recipe: Recipe) -> None:
    """The error of a missing input, in the words of the command line."""
    from flowrl.graph.passes import optimise

    graph, _ = optimise(recipe.graph)
    missing = []
    for node in graph.inputs:
        if node.name not in recipe.inputs and node["kind"] in ("weights", "rows"):
            option = f"--model {node.name}=SOURCE" if node["kind"] == "weights" else f"--data {node.name}=FILE"
            section = f"models.{node.name}" if node["kind"] == "weights" else f"data.{node.name}"
            missing.append(f"{option} ([{section}] in a settings file)")
    if missing:
        raise ConfigError(f"flow '{graph.name}' needs {', '.join(missing)}")


def say_where(out: str | None, name: str, how: str, began: float) -> None:
    """Print the folder that the run which `began` in this process has written, if it came that far."""
    from flowrl.runtime.rundir import RunDir

    for path in sorted(Path(out).glob(f"{name}-*/run.json")) if out is not None else ():
        folder = RunDir.open(path.parent)
        if folder.info.get("pid") == os.getpid() and float(folder.info.get("started_s", 0.0)) >= began:
            print(
                f"{name}: {how} after {_counted(len(folder.metrics()), 'step')}; results in {folder.path}", flush=True
            )


def ops(args: argparse.Namespace) -> int:
    """List operators, show one, try them, or compare two versions."""
    from flowrl.cli import ops as packed

    match args.ops_command:
        case "list":
            return packed.list_packs(args.pack, as_json=args.json, words=args.search)
        case "show":
            return packed.show_operator(args.operator, as_json=args.json)
        case "test":
            return packed.test(args.operator, args.config, args.cases)
    return packed.compat(args.old, args.new)


def new(args: argparse.Namespace) -> int:
    """Write a pack to begin with."""
    from flowrl.cli.new import write_pack

    return write_pack(args.name, Path(args.into))


def runs(args: argparse.Namespace) -> int:
    """Print the status of a run and the metrics of its last steps."""
    from flowrl.engines import REMARKS
    from flowrl.runtime.rundir import RunDir

    folder = RunDir.open(args.path)
    info, metrics = folder.info, folder.metrics()
    remark = REMARKS.get(str(info.get("engine")), "")
    print(f"{folder.path}: {folder.status}, {_counted(len(metrics), 'step')}{f' ({remark})' if remark else ''}")
    if info.get("error"):
        print(f"error: {info['error']}")
    if not metrics:
        return OK
    shown = _spread(metrics, 6)
    names = sorted(
        {name for row in shown for name, value in row.items() if name != "step" and isinstance(value, int | float)}
    )
    rows = [[name, *(_number(row.get(name)) for row in shown)] for name in names]
    print(table([["step", *(str(row["step"]) for row in shown)], *rows], right=True))
    if bars := _plan_bars(folder):
        print(f"\n{bars}")
    return OK


def _plan_bars(folder: RunDir) -> str:
    """The plan of a run in letters, with what was measured; nothing for a run without one."""
    from flowrl.cli.view import plan_of
    from flowrl.planner.measured import compare

    plan = plan_of(folder)
    return "" if plan is None else plan.to_text(measured=compare(plan, folder.events())).rstrip()


def calibrate(args: argparse.Namespace) -> int:
    """Measure this machine and write it as a cluster."""
    from flowrl.cli import calibrate as measured

    return measured.calibrate(Path(args.out), devices=args.devices, quick=args.quick)


def table_command(args: argparse.Namespace) -> int:
    """List tables, show rows, count, export, or query."""
    from flowrl.cli import table as rows

    match args.table_command:
        case "ls":
            return rows.list_tables(args.path, as_json=args.json)
        case "head":
            return rows.head(args.path, args.n, args.columns)
        case "stats":
            return rows.stats(args.path, as_json=args.json)
        case "export":
            return rows.export(args.path, args.out, args.columns, args.rows)
    return rows.sql(args.path, args.query)


def plan(args: argparse.Namespace) -> int:
    """Plan a flow, explain a plan, or compare two."""
    from flowrl.cli import plan as planned

    match args.command:
        case "plan":
            return planned.plan(args)
        case "explain":
            return planned.explain(args)
    return planned.diff(args)


def view(args: argparse.Namespace) -> int:
    """Write the page of a run, a plan or several runs, or serve it."""
    from flowrl.cli.view import view as viewed

    return viewed(args)


def audit(args: argparse.Namespace) -> int:
    """Print what a layout makes of a model."""
    from flowrl.cli.audit import audit as audited

    return audited(args)


def reshard_explain(args: argparse.Namespace) -> int:
    """Print what moves from one layout to another."""
    from flowrl.cli.reshard import reshard_explain as explained

    return explained(args)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "check": check,
    "show": show,
    "run": run,
    "resume": resume,
    "plan": plan,
    "explain": plan,
    "diff": plan,
    "audit": audit,
    "reshard-explain": reshard_explain,
    "view": view,
    "ops": ops,
    "new": new,
    "runs": runs,
    "calibrate": calibrate,
    "table": table_command,
}


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The recipe of a target, with the settings file, the command line and the file of a plan laid over it."""
    recipe = _recipe(args)
    told = _without_resume(getattr(args, "arguments", ()))
    if told:
        recipe = recipe.replace(options=recipe.options.updated({"command": told}))
    if getattr(args, "checkpoint_every", None) is not None:
        recipe = recipe.replace(options=recipe.options.updated({"checkpoint_every": args.checkpoint_every}))
    if getattr(args, "plan", None) is None:
        return recipe
    from flowrl.planner.steps import Plan

    return recipe.replace(plan=Plan.load(args.plan))


def _without_resume(arguments: Sequence[str]) -> tuple[str, ...]:
    """A command as it was before `flowrl resume` gave it again."""
    kept = list(arguments)
    for index in range(len(kept) - 2, -1, -1):
        if kept[index] == "--set" and kept[index + 1].startswith("resume="):
            del kept[index : index + 2]
    return tuple(kept)


def _recipe(args: argparse.Namespace) -> Recipe:
    """The recipe of a target, with the settings file and the command line laid over it."""
    from flowrl.recipe import Settings, load, read_settings, settings_of_arguments

    recipe = load(args.target)
    names = recipe.names
    file = getattr(args, "settings", None)
    base = read_settings(file, names) if file is not None else Settings()
    said = settings_of_arguments(
        names,
        run={name: getattr(args, name, None) for name in ("steps", "seed", "engine")},
        config=args.config,
        models=getattr(args, "model", ()),
        data=getattr(args, "data", ()),
        options=getattr(args, "set", ()),
    )
    return recipe.configured(said.over(base))


def table(rows: Sequence[Sequence[str]], *, right: bool = False) -> str:
    """Rows as aligned columns; with `right`, all columns but the first are set to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if right and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _spread(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """At most `count` rows: the first, the last, and some evenly between."""
    if len(rows) <= count:
        return rows
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]


def _number(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    return str(value)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
