"""`flowrl plan`, `flowrl explain` and `flowrl diff`: from a flow to a plan, why it is so, and what differs from another one."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flowrl.cli import OK, PROBLEMS
from flowrl.cli.view import write_pictures
from flowrl.cost.text import aligned, size_text, time_text
from flowrl.errors import ConfigError, TextError
from flowrl.graph.nodes import Graph
from flowrl.graph.schedule import Schedule
from flowrl.mesh import Cluster
from flowrl.mesh.devices import Efficiency
from flowrl.mesh.placement import Placement
from flowrl.model import Model
from flowrl.planner.choices import Choices
from flowrl.planner.diff import diff as difference
from flowrl.planner.explain import Explanation, explain as reasons_of, explain_plan
from flowrl.planner.figures import (
    Summary,
    alternative_lines,
    binding_lines,
    full_line,
    idle_line,
    overlap_line,
    phase_table,
    phases,
    placement_of,
    summary,
    tail_lines,
    tie_line,
)
from flowrl.planner.offered import check_placement
from flowrl.planner.planning import plan_found, problem_of
from flowrl.planner.problem import LEAST_CHANGE, Found, Problem
from flowrl.planner.relax import Refusal, Relaxation, explain as refusal_of
from flowrl.planner.report import Searched
from flowrl.planner.search import search
from flowrl.planner.steps import Plan
from flowrl.planner.workload import Lengths, Workload
from flowrl.planner.workload_text import Parts, parse_lengths, read_parts
from flowrl.recipe import Recipe, Settings, load, read_settings, settings_of_arguments
from flowrl.recipe.typed import WrongType, convert
from flowrl.schema.columns import nearest
from flowrl.schema.escaped import escaped
from flowrl.schema.fields import MOST_DIGITS, shown
from flowrl.schema.files import MOST_NAME, check_writable, is_file, is_folder, quoted

_JOINED = re.compile(r",\s*(?=[A-Za-z_]\w*=)")
"""Between two models in one argument."""


def plan(args: argparse.Namespace) -> int:
    """Plan a flow and print the verdict, the steps, and the memory of each phase; without a plan that fits, what would."""
    given: dict[Path, list[str]] = {}
    for option in ("out", "html", "trace", "svg"):
        if (path := getattr(args, option)) is not None:
            check_writable(path, f"--{option}")
            given.setdefault(Path(path).resolve(), []).append(f"--{option}")
    for where, options in given.items():
        if len(options) > 1 and (is_file(where) or not where.exists()):
            raise ConfigError(f"{' and '.join(options)} name one file, {quoted(where)}; give each a name of its own")
    problem, graph = _asked(args)
    found = search(problem)
    if found.best is None:
        return _refuse(problem, graph, args.json)
    made = plan_found(found, graph)
    if args.out is not None:
        made.to_json(args.out)
    drawn = write_pictures(made, graph, html=args.html, trace=args.trace, svg=args.svg)
    if args.json:
        print(json.dumps(_as_json(made, problem), indent=1, default=str))
    else:
        print(report(made, found))
        if written := [path for path in (args.out, *drawn) if path is not None]:
            print(f"\nwritten to {', '.join(written)}")
    return OK


def explain(args: argparse.Namespace) -> int:
    """Why a plan is as it is; with --alt, what another placement would make of it."""
    if args.target.endswith(".json"):
        if args.alt is not None:
            raise ConfigError("--alt plans again, which needs the flow: name it instead of the file of a plan")
        _say(explain_plan(_read(args.target)), args.json)
        if not args.json:
            print("\n(what each other choice would cost: flowrl explain FILE.py:FLOW with what it was planned from)")
        return OK
    problem, graph = _asked(args)
    found = search(problem)
    if found.best is None:
        return _refuse(problem, graph, args.json)
    if args.alt is None:
        _say(reasons_of(problem, graph, found), args.json)
        return OK
    return _compare(problem, graph, found, args)


def diff(args: argparse.Namespace) -> int:
    """What differs between two plans in files. Exits with 1 when something does."""
    found = difference(_read(args.first), _read(args.second))
    print(json.dumps(asdict(found) | {"is_equal": found.is_equal}, indent=1) if args.json else found)
    return OK if found.is_equal else PROBLEMS


# ------------------------------------------------------------------------------------------------------- what is asked


def _asked(args: argparse.Namespace) -> tuple[Problem, Graph]:
    """The problem that the command line, the settings file and the recipe pose. Errors: ConfigError with all that is missing."""
    recipe = _recipe(args)
    parts: tuple[Callable[[], Any], ...] = (
        lambda: _models(recipe),
        lambda: _cluster(args.cluster),
        lambda: _workload(args, recipe),
    )
    found: list[Any] = []
    missing: list[str] = []
    for part in parts:
        try:
            found.append(part())
        except ConfigError as error:
            missing.append(str(error))
    if missing:
        raise ConfigError(missing[0] if len(missing) == 1 else "\n- ".join(["a plan lacks:", *missing]))
    models, cluster, workload = found
    problem, graph = problem_of(
        recipe.graph,
        models=models,
        cluster=cluster,
        workload=workload,
        schedule=recipe.options.schedule if args.schedule is None else parse_schedule(args.schedule),
        placement=None if args.placement is None else _placement(args.placement),
        choices=Choices() if args.headroom is None else Choices(headroom=args.headroom),
    )
    problem = _with_lora(problem, args.lora)
    return (problem if args.tie is None else replace(problem, tie=args.tie)), graph


def _recipe(args: argparse.Namespace) -> Recipe:
    if args.target.endswith(".json"):
        raise ConfigError(f"{args.target} is no flow; a plan in a file is read by: flowrl explain {args.target}")
    joined = next((item for item in args.model if _JOINED.search(item)), None)
    if joined is not None:
        raise ConfigError(
            f"--model takes models one by one, with spaces between them: --model {_JOINED.sub(' ', joined)}"
        )
    for option, items in (("--model", args.model), ("--config", args.config), ("--lora", args.lora)):
        _refuse_repeated(option, items)
    recipe = load(args.target)
    base = Settings() if args.settings is None else read_settings(args.settings, recipe.names)
    said = settings_of_arguments(recipe.names, config=args.config, models=args.model)
    return recipe.configured(said.over(base))


def _refuse_repeated(option: str, items: list[str]) -> None:
    """Raise `ConfigError` for a name that is given twice: nobody could tell which of the two was meant."""
    names = [item.partition("=")[0].strip() for item in items]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        given = ", ".join(item for item, name in zip(items, names, strict=True) if name == twice)
        raise ConfigError(f"{option} names '{twice}' more than once: {given}; give it once")


def _models(recipe: Recipe) -> dict[str, Any]:
    """Input of the flow -> where its shape is read from. Errors: ConfigError naming the models that were not given."""
    from flowrl.graph.passes import optimise

    graph, _ = optimise(recipe.graph)
    weights = [node.name for node in recipe.graph.inputs if node["kind"] == "weights"]
    given = {name: recipe.inputs[name] for name in weights if name in recipe.inputs}
    given = {name: value for name, value in given.items() if _source(value) != "null"}
    needed = [node.name for node in graph.inputs if node["kind"] == "weights" and node.name not in given]
    if needed:
        asked = ", ".join(f"--model {name}=NAME" for name in needed)
        raise ConfigError(
            f"flow '{graph.name}' needs {asked}: a published name, a folder with a config.json, or that file; no weights are read"
        )
    return given


def _source(value: Any) -> Any:
    return value.source if isinstance(value, Model) else value


def _cluster(text: str | None) -> Cluster:
    if text is None:
        raise ConfigError("--cluster: a name such as 8xA100-80G, or a file that flowrl calibrate wrote")
    return Cluster.of(_existing(text) if text.endswith(".toml") else text)


def _existing(path: str) -> str:
    if not is_file(path):
        beside = (
            [one.name for one in Path(path).parent.glob("*") if one.is_file()] if is_folder(Path(path).parent) else []
        )
        raise ConfigError(f"there is no file {quoted(path)}; {nearest(Path(path).name[:MOST_NAME], beside)}")
    return path


def parse_schedule(text: str) -> Schedule:
    """`sync`, `async`, `async:2`. Errors: ConfigError saying so."""
    kind, colon, staleness = text.partition(":")
    try:
        found: Schedule = convert(f"{kind}({staleness})" if colon else text, Schedule)
    except WrongType as error:
        raise ConfigError(
            f"--schedule is sync, or async:K with K the most versions that rows may be old; found {text!r}"
        ) from error
    return found


def _placement(text: str) -> Placement:
    try:
        return Placement.parse(text)
    except TextError as error:
        raise ConfigError(
            f"a placement is groups of roles, such as 'gen:d4t2 | (policy:f8 + ref:...)' or 'gen:d4t2 | ...': {error}"
        ) from error


def _workload(args: argparse.Namespace, recipe: Recipe) -> Workload:
    """Options of the command line over --workload over what the recipe says."""
    said = Parts(
        prompts=args.prompts,
        prompt_lengths=_lengths(args.prompt_tokens, "--prompt-tokens", is_fixed=True),
        response_lengths=_lengths(args.response_tokens, "--response-tokens", is_fixed=False),
    )
    base = Parts() if args.workload is None else _read_workload(args.workload)
    return said.over(base).over(Parts(prompts=_batch(recipe))).whole()


def _lengths(text: str | None, option: str, *, is_fixed: bool) -> Lengths | None:
    return None if text is None else parse_lengths(text, option, is_fixed=is_fixed)


def _read_workload(path: str) -> Parts:
    if not path:
        raise ConfigError("--workload needs a FILE.toml or the folder of a run; found ''")
    if is_folder(path):
        return Parts.of(Workload.of_run(path))
    return read_parts(_existing(path))


def _batch(recipe: Recipe) -> int | None:
    """Prompts of an iteration, where the recipe has data: the batch of its first data set."""
    for node in recipe.graph.inputs:
        if node["kind"] == "rows" and node.name in recipe.inputs:
            own = getattr(recipe.inputs[node.name], "batch", None)
            return own if isinstance(own, int) else recipe.options.batch
    return None


def _with_lora(problem: Problem, said: list[str]) -> Problem:
    """Adapters for models that are trained; engines sample from the merged weights."""
    ranks: dict[str, int] = {}
    trained = [role.model for role in problem.roles if role.is_trained]
    for item in said:
        name, _, rank = item.partition("=")
        if not name or not rank.isascii() or not rank.isdecimal() or len(rank) > MOST_DIGITS or int(rank) < 1:
            raise ConfigError(f"--lora takes MODEL=RANK, such as policy=16; found {shown(item)}")
        if name not in trained:
            raise ConfigError(f"--lora {name}: the flow trains no such model; {nearest(name, trained)}")
        for role in problem.roles:
            if role.model == name:
                role.shape.check_rank(int(rank))
        ranks[name] = int(rank)
    roles = tuple(
        replace(role, shape=role.shape.with_lora(ranks[role.model]))
        if role.is_trained and role.model in ranks
        else role
        for role in problem.roles
    )
    return replace(problem, roles=roles)


def _read(path: str) -> Plan:
    return Plan.load(_existing(path))


# ------------------------------------------------------------------------------------------------------------- answers


def report(made: Plan, found: Found) -> str:
    """What `flowrl plan` prints of a plan."""
    figures = summary(made, found.problem)
    lines = [_verdict(made, figures), "", *_figure_lines(made, figures)]
    lines += ["", str(made)]
    lines += ["", "memory of each step on its fullest device (predicted):", *_indented(phase_table(phases(made)))]
    lines += ["", "other plans, and why each lost (predicted):", *_indented(alternative_lines(made))]
    return escaped("\n".join(lines), keep="\n")


def _verdict(made: Plan, figures: Summary) -> str:
    cluster = made.cluster
    kind = (
        f"async, rows up to {made.max_staleness} version{'s' * (made.max_staleness > 1)} old"
        if made.max_staleness
        else "sync"
    )
    return f"fits: predicted {time_text(figures.seconds)} per iteration on {cluster.num_devices}x{cluster.device.name}, {kind}"


def _figure_lines(made: Plan, figures: Summary) -> list[str]:
    rows = [("placement", str(placement_of(made)))]
    if figures.tokens_per_s is not None:
        rows.append(
            ("throughput", f"predicted {figures.tokens_per_s:,.0f} tokens/s ({figures.tokens:,} tokens per iteration)")
        )
    if made.max_staleness:
        rows.append(
            (
                "latency",
                f"predicted {time_text(figures.latency_s)} of one iteration alone, from its first call to its last",
            )
        )
    for line in binding_lines(figures, made):
        what, _, said = line.partition(": ")
        rows.append(("bottleneck" if what == "time" else what, f"predicted {said}"))
    rows += [("idle", line) for line in (idle_line(made),) if line]
    rows += [("warning", line) for line in (full_line(made),) if line]
    rows += [("tail", f"predicted {line}") for line in tail_lines(made)]
    gap = (
        "there is no faster one"
        if figures.gap < LEAST_CHANGE
        else f"this one is at most {figures.gap:.1%} above the best"
    )
    rows.append(("bound", f"predicted: no plan takes less than {time_text(figures.bound_s)}; {gap}"))
    searched = made.searched
    if searched is not None:
        rows.append(("search", _searched(searched)))
    rows += [(what, line) for what, line in (("overlap", overlap_line(made)), ("tie", tie_line(made))) if line]
    rows.append(("figures", calibration(made.cluster)))
    return aligned(rows, "ll")


def _searched(found: Searched) -> str:
    counts = (
        (found.placements, "placement", "looked at"),
        (found.simulated, "plan", "simulated"),
        (found.pruned, "branch", "left by a bound"),
        (found.unfit, "placement", "where nothing fits"),
    )
    said = [
        f"{count} {name}{'' if count == 1 else 'es' if name.endswith('h') else 's'} {how}"
        for count, name, how in counts
        if count or name == "plan"
    ]
    if not found.is_exhaustive:
        said.append(f"the rest by a random search (seed {found.seed})")
    return ", ".join(said)


def calibration(cluster: Cluster) -> str:
    """Where the numbers that a plan counts with come from."""
    if cluster.calibrated_at:
        notes = f"; not measured: {'; '.join(cluster.notes)}" if cluster.notes else ""
        return f"measured on {cluster.calibrated_at}{notes}"
    peaks = "published peaks" if cluster.is_published else "peaks and links as given"
    if cluster.efficiency == Efficiency():
        return f"{peaks}, assumed efficiencies: nothing was measured on this cluster"
    return f"{peaks}, efficiencies as given: nothing says that they were measured"


def _refuse(problem: Problem, graph: Graph, as_json: bool) -> int:
    refusal = refusal_of(problem, graph)
    print(
        json.dumps({"fits": False, "code": "FR-P01", **asdict(refusal)}, indent=1)
        if as_json
        else refusal_report(problem, refusal)
    )
    return PROBLEMS


def refusal_report(problem: Problem, refusal: Refusal) -> str:
    """What `flowrl plan` prints where nothing fits."""
    cluster = problem.cluster
    kind = f"async:{problem.schedule.max_staleness}" if problem.schedule.max_staleness else "sync"
    asked = f", placement {problem.placement}" if problem.placement is not None else ""
    headroom = problem.choices.headroom
    free = f" with {headroom:.0%} kept free" if headroom else ""
    lines = [
        f"FR-P01: no plan fits {cluster.num_devices}x{cluster.device.name} "
        f"({size_text(cluster.device.memory_bytes)} per device{free}, {size_text(cluster.host.memory_bytes)} per host), "
        f"{kind}{asked}",
        f"binding: {refusal.binding}",
    ]
    tried = "; ".join(refusal.in_vain)
    if not refusal.relaxations:
        lines.append("nothing that was tried would fit: use smaller models, or many more devices")
        return escaped("\n".join([*lines, *([f"tried: {tried}"] if tried else [])]), keep="\n")
    rows = [("change", "per iteration", "")]
    rows += [(one.what, time_text(one.seconds), _price(one)) for one in refusal.relaxations]
    lines += ["", "would fit (each was planned; seconds are predicted):", *_indented(aligned(rows, "lrl"))]
    return escaped("\n".join([*lines, *([f"not enough alone: {tried}"] if tried else [])]), keep="\n")


def _price(one: Relaxation) -> str:
    said = ["an iteration does less"] * one.changes_work + ["changes numerics"] * one.changes_numerics
    return ", ".join(said)


def _compare(problem: Problem, graph: Graph, found: Found, args: argparse.Namespace) -> int:
    """The best plan beside the best one with another placement."""
    ours = plan_found(found, graph)
    asked = replace(problem, placement=_placement(args.alt))
    check_placement(asked)
    best = f"best   {placement_of(ours)}: predicted {time_text(ours.predicted.seconds)} per iteration"
    other = search(asked)
    if other.best is None:
        if not args.json:
            print(f"{best}\n")
        return _refuse(asked, graph, args.json)
    theirs = plan_found(other, graph)
    changes = difference(ours, theirs)
    if args.json:
        found_json: Mapping[str, Any] = {
            "best": _as_json(ours, problem),
            "alt": _as_json(theirs, asked),
            "diff": asdict(changes),
        }
        print(json.dumps(found_json, indent=1, default=str))
        return OK
    less = theirs.predicted.seconds - ours.predicted.seconds
    verdict = "as fast" if not less else f"{time_text(abs(less))} {'slower' if less > 0 else 'faster'}"
    print(best)
    print(f"--alt  {placement_of(theirs)}: predicted {time_text(theirs.predicted.seconds)} per iteration, {verdict}")
    print(f"\n{changes}")
    return OK


def _say(found: Explanation, as_json: bool) -> None:
    if not as_json:
        print(found)
        return
    values = {key: value for key, value in asdict(found).items() if key != "plan"}
    print(json.dumps({"plan": found.plan.hash, **values}, indent=1, default=str))


def _as_json(made: Plan, problem: Problem) -> dict[str, Any]:
    figures = summary(made, problem)
    derived = {"tokens_per_s": figures.tokens_per_s, "gap": figures.gap}
    return {
        "fits": True,
        "predicted": asdict(figures) | derived,
        "calibration": calibration(made.cluster),
        "phases": [asdict(phase) for phase in phases(made)],
        "plan": json.loads(made.to_json()),
    }


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
