"""Run a plan on several processes: every one of them calls `run_ranks` with the same arguments, and is one rank of it.

    torchrun --nproc-per-node 4 my_run.py        each process runs the script, and with it run_ranks(..., plan=plan)
    flowrl run --plan plan.json --nproc 4 ...    the same, from the command line
    python my_run.py                             one process: a plan of one device

A rank does the steps of its own device. It ends with the others: the first error of any rank is the run's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flowrl.engines.launch.board import Board, Failure, RankFailed
from flowrl.engines.launch.place import join
from flowrl.engines.launch.protocol import RankEngine, Site, open_rank_engine
from flowrl.engines.protocol import Host
from flowrl.errors import ConfigError
from flowrl.graph.drift import Drift, without_drift
from flowrl.graph.flows import Flow
from flowrl.graph.nodes import Graph
from flowrl.model import Model
from flowrl.planner.steps import Plan
from flowrl.runtime.applied import apply_offload
from flowrl.runtime.checkpoints import Live
from flowrl.runtime.context import Memory
from flowrl.runtime.local import Prepared, Run, describe_run, find_checkpoint, input_names, prepare, saver_of
from flowrl.runtime.options import OPTION_NAMES, Options
from flowrl.runtime.planned import Bound, bound_of
from flowrl.runtime.program import program_in_order
from flowrl.runtime.ranks.alike import compare_drawn, compare_facts, facts_of
from flowrl.runtime.ranks.desk import Desk
from flowrl.runtime.ranks.exchange import AllRanks, Exchange
from flowrl.runtime.ranks.executor import RankExecutor
from flowrl.runtime.ranks.hosts import SharedHost
from flowrl.runtime.ranks.observe import RankObservation
from flowrl.runtime.ranks.places import Places, places_of

TIMEOUT_S = 1800.0
"""Longest wait of a rank for another one: longer than the longest step."""
MOST_S = 366 * 86400.0
"""Longest one that may be asked for: no wait is without an end."""


def run_ranks(
    flow: Flow | Graph,
    *,
    plan: Plan,
    steps: int = 1,
    seed: int = 0,
    engine: str = "torch",
    options: Options | None = None,
    timeout_s: float = TIMEOUT_S,
    board: Board | None = None,
    **inputs: Any,
) -> Run:
    """Run `flow` as the plan says, as one rank of the job that this process was started for.

    Args:
        flow, steps, seed, engine, options, inputs: as of `run_local`; equal on all ranks.
        plan: rank r does the steps of device r.
        timeout_s: longest wait for another rank, which then is an error that names step, ranks and what was waited for.
        board: what the ranks tell each other; None finds out how this process was started (`flowrl.engines.launch.place`).

    Returns: the run as this rank sees it. Rank 0 has the metrics, the folder and the rows; a model is where its weights are.

    Errors: those of `run_local`; ConfigError for a plan of another number of ranks, or that the engine cannot carry out;
    RankFailed on the ranks that did not fail themselves; WaitTimeout.
    """
    check_timeout(timeout_s)
    given = {name: inputs.pop(name) for name in list(inputs) if name in OPTION_NAMES and name not in input_names(flow)}
    settings = (options or Options()).updated(given)
    board = join(timeout_s=timeout_s) if board is None else board
    board.num_runs += 1
    board.timeout_s = timeout_s
    try:
        return _run(flow, plan, steps, seed, engine, settings, timeout_s, board, inputs)
    except BaseException as error:  # whatever ends this rank ends the others; it is raised again
        if not isinstance(error, RankFailed):
            first = board.fail(Failure.of(board.rank, board.place or "the beginning", error))
            if first.rank != board.rank and not isinstance(error, KeyboardInterrupt):
                raise RankFailed(first, board.place or "the beginning") from error
        raise


def check_timeout(timeout_s: float) -> None:
    """Errors: ConfigError for no time, or none that ends."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MOST_S:
        raise ConfigError(
            f"the longest wait for another rank (timeout_s, --timeout-s) is in seconds, more than 0 and at most {MOST_S:g}; "
            f"found {timeout_s!r}"
        )


def check_ranks(
    flow: Flow | Graph,
    *,
    plan: Plan,
    world: int,
    seed: int = 0,
    options: Options | None = None,
    **inputs: Any,
) -> None:
    """Refuse what `run_ranks` would refuse before it opens a model, without being a rank. Errors: as of `run_ranks`."""
    _ready(flow, plan, world, seed, options or Options(), inputs)


def _ready(
    flow: Flow | Graph, plan: Plan, world: int, seed: int, settings: Options, inputs: Mapping[str, Any]
) -> tuple[Prepared, Bound, Places, tuple[Drift, ...]]:
    """All that is known before the engine is asked. Errors: as of `run_ranks`."""
    graph, drift = without_drift(flow.graph() if isinstance(flow, Flow) else flow, allowed=settings.allow_drift)
    prepared = prepare(graph, inputs, settings, seed)
    bound = bind_ranks(plan, prepared.graph, prepared.models, world=world, allow_drift=settings.allow_drift)
    return prepared.planned(bound), bound, places_of(plan, prepared.graph), drift


def _run(
    flow: Flow | Graph,
    plan: Plan,
    steps: int,
    seed: int,
    engine: str,
    settings: Options,
    timeout_s: float,
    board: Board,
    inputs: dict[str, Any],
) -> Run:
    prepared, bound, places, drift = _ready(flow, plan, board.world, seed, settings, inputs)
    checkpoint = find_checkpoint(prepared.graph, settings, steps=steps, seed=seed, engine=engine)
    opened = open_rank_engine(engine, board)
    refuse(opened, places, prepared.models)
    exchange = Exchange(board, timeout_s, f"run{board.num_runs}")
    compare_facts(
        exchange,
        facts_of(
            prepared.models, flow=prepared.graph.hash[:12], plan=plan.hash[:12], seed=seed, steps=steps, engine=engine,
            batch=settings.batch, max_tokens=settings.max_tokens,
        ),
    )  # fmt: skip
    desk = Desk(exchange, opened, places)
    board.at("the opening of the models")
    shared = open_shared(opened, places, prepared.models, desk, seed)
    hosts: dict[str, Host] = dict(shared)
    bound.check_hosts({site.name: host for one in shared.values() for site, host in one.hosts.items()})
    live = Live(
        prepared.graph, shared, prepared.data, Memory(), owns=lambda path: board.rank == places.ranks_of[path][0]
    )
    if checkpoint is not None:
        board.at(f"the checkpoint '{checkpoint.path}'")
        checkpoint.read(live)
    run = Run(prepared.graph, prepared.notes, None, hosts=hosts, plan=plan)
    about = describe_run(prepared, settings, bound, drift, steps=steps, seed=seed, engine=engine, ranks=board.world)
    own = replace(bound, program=replace(bound.program, steps=_own_steps(bound, places, board.rank)))
    with RankObservation(
        run, settings, about, steps=steps, bound=own, exchange=exchange, resumed=checkpoint
    ) as observation:
        executor = _executor(prepared, bound, shared, desk, observation, seed, settings, live.memory)
        saver = saver_of(run.path, settings, about, AllRanks(exchange))
        if checkpoint is not None:
            executor.resumed()
        for step in range(0 if checkpoint is None else checkpoint.step, steps):
            observation.step_begins(step)
            run.last, log = executor.step(step)
            observation.step_done(step, log)
            if saver.is_due(step + 1, steps):
                board.at(f"the checkpoint after step {step}")
                observation.save(step, partial(saver.write, step + 1, live))
        exchange.step = -1
        board.at("the end of the run")
        observation.close_traces()
        compare_drawn(steps - 1, exchange.end())
    return run


def _executor(
    prepared: Prepared,
    bound: Bound,
    shared: dict[str, SharedHost],
    desk: Desk,
    observation: RankObservation,
    seed: int,
    settings: Options,
    memory: Memory,
) -> RankExecutor:
    return RankExecutor(
        prepared.graph, dict(shared), prepared.data, seed, settings.max_tokens, memory,
        before=observation.node_begins, after=observation.node_done, reward_workers=settings.reward_workers,
        program=bound.program, observer=observation, desk=desk, shared=shared,
    )  # fmt: skip


def _own_steps(bound: Bound, places: Places, rank: int) -> dict[str, str]:
    """The plan's steps that this rank works on, by path of the node: what it only reads is none of its time."""
    return {path: name for path, name in bound.program.steps.items() if rank in places.ranks_of.get(path, ())}


def bind_ranks(plan: Plan, graph: Graph, models: Mapping[str, Model], *, world: int, allow_drift: bool) -> Bound:
    """Check that a plan is for this graph and so many ranks, and apply its settings to the models.

    Errors: as of `flowrl.runtime.planned.bind`; ConfigError when the number of ranks is not the plan's.
    """
    if not isinstance(plan, Plan):
        raise ConfigError(f"plan is an fr.Plan (fr.plan(...), fr.Plan.load(path)); found {type(plan).__name__}")
    if not plan.steps:
        raise ConfigError(f"plan '{plan.name}' has no steps; make one with fr.plan(...)")
    used = max(device for step in plan.steps for device in step.devices) + 1
    most = max(used, plan.cluster.num_devices)
    if not used <= world <= most:
        needs = f"{used} rank{'s' if used > 1 else ''}" if used == most else f"{used} to {most} ranks"
        raise ConfigError(
            f"plan '{plan.name}' uses the devices 0 to {used - 1} of {plan.cluster.num_devices}, so it needs {needs}; this job "
            f"has {world}: start {used} (--nproc {used}), or plan for {world}"
        )
    bound = bound_of(plan, graph, models, lambda: program_in_order(plan.steps, graph), allow_drift=allow_drift)
    return replace(bound, applied=apply_offload(plan, graph, bound.applied))


def refuse(engine: RankEngine, places: Places, models: Mapping[str, Model]) -> None:
    """Errors: ConfigError with all that the engine cannot do of what the plan asks, before anything is loaded."""
    found = [f"{site.name}: {why}" for site in places.sites if (why := engine.check(site, models[site.model]))]
    if found:
        raise ConfigError(f"the {engine.name} engine cannot carry out this plan: {'; '.join(found)}")


def open_shared(
    engine: RankEngine, places: Places, models: Mapping[str, Model], desk: Desk, seed: int
) -> dict[str, SharedHost]:
    """Every model of the run, as this rank sees it; what was opened is closed again when a later one fails."""
    opened: dict[Site, Host] = {}
    try:
        for site in places.sites:
            host = engine.open(site, models[site.model], seed=seed)
            if host is not None:
                opened[site] = host
        engine.connect([(places.main[name], other) for name in places.main for other in places.others(name)])
        shared = {}
        for name in places.main:
            mine = {site: host for site, host in opened.items() if site.model == name}
            elsewhere = None if mine else engine.elsewhere(name, models[name], seed=seed)
            shared[name] = SharedHost(name, models[name], desk, mine, elsewhere)
        return shared
    except BaseException:
        for host in opened.values():
            host.close()
        raise
