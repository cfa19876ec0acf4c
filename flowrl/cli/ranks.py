"""`flowrl run --plan PLAN.json --nproc N`, or `--launcher ray`: the same command in several processes, each a rank of the run."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flowrl.cli import OK
from flowrl.engines.launch.place import Place
from flowrl.engines.launch.ray_options import RayOptions, gpus_of_rank, hosts_of
from flowrl.engines.launch.spawn import run_job
from flowrl.errors import ConfigError, FlowError
from flowrl.model import Model

if TYPE_CHECKING:
    from flowrl.recipe import Recipe
    from flowrl.runtime.local import Run

ENTRY = "flowrl.cli.ranks:as_rank"
RAY_JOB = "flowrl.engines.launch.ray_job"
"""Loaded by name: it imports ray."""


def is_rank() -> bool:
    """Whether a launcher (torchrun, or this command itself) has started this process as one of several."""
    return Place.of(os.environ).world > 1


def launch(
    recipe: Recipe, arguments: list[str], *, nproc: int | None, timeout_s: float, launcher: str | None = None
) -> int:
    """Start the ranks and wait for them; what cannot run is refused before.

    Args:
        nproc: how many; None: as many as the plan uses devices.
        launcher: of `LAUNCHERS`; None: processes of this host.

    Errors: ConfigError for no plan, or one for another number of ranks; RunError with the first error of any rank.
    """
    from flowrl.runtime.ranks.run import check_ranks, check_timeout

    option = f"--nproc {nproc}" if launcher is None else f"--launcher {launcher}"
    check_timeout(timeout_s)
    if is_rank():
        place = Place.of(os.environ)
        raise ConfigError(
            f"{option} starts ranks, and this process is rank {place.rank} of {place.world} already, as RANK and WORLD_SIZE say "
            f"(set by torchrun, or by a cluster's job): leave out {option.partition(' ')[0]}, or unset both"
        )
    if recipe.plan is None:
        raise ConfigError(
            f"{option} needs a plan, which says what each process does: --plan plan.json (flowrl plan ... --out plan.json)"
        )
    if nproc is None:
        nproc = 1 + max((device for step in recipe.plan.steps for device in step.devices), default=0)
    check_ranks(recipe.flow, plan=recipe.plan, world=nproc, seed=recipe.seed, options=recipe.options, **recipe.inputs)
    LAUNCHERS[launcher or "processes"](recipe, {"arguments": arguments, "timeout_s": timeout_s}, nproc)
    return OK


def _in_processes(recipe: Recipe, said: dict[str, Any], nproc: int) -> None:
    run_job(ENTRY, said, nproc)


def _on_ray(recipe: Recipe, said: dict[str, Any], nproc: int) -> None:
    assert recipe.plan is not None
    models = [value for value in recipe.inputs.values() if isinstance(value, Model)]
    options = RayOptions(gpus=gpus_of_rank(recipe.engine, models, recipe.plan.cluster))
    importlib.import_module(RAY_JOB).run_job(ENTRY, said, nproc, options=options, hosts=hosts_of(recipe.plan, nproc))


LAUNCHERS: dict[str, Callable[[Recipe, dict[str, Any], int], None]] = {"processes": _in_processes, "ray": _on_ray}
"""How ranks are started: `--launcher`."""


def as_rank(said: dict[str, Any]) -> None:
    """What each process does. Rank 0 says where the results lie."""
    from flowrl.cli.commands import recipe_of, say_finished, say_where
    from flowrl.cli.parser import build_parser

    args = build_parser("", "").parse_args(said["arguments"])
    args.arguments = said["arguments"]
    recipe = recipe_of(args)
    name, began = recipe.options.name or recipe.graph.name, time.time()
    try:
        with run_recipe(recipe, timeout_s=said["timeout_s"]) as done:
            if is_first():
                say_finished(name, done)
    except KeyboardInterrupt:
        say_where(recipe.options.out, name, "interrupted", began)
        raise
    except FlowError:
        say_where(recipe.options.out, name, "failed", began)
        raise


def is_first() -> bool:
    """Whether this is rank 0, which speaks for all."""
    return Place.of(os.environ).rank == 0


def run_recipe(recipe: Recipe, *, timeout_s: float) -> Run:
    """A recipe with a plan, as one rank of this process's job."""
    from flowrl.runtime.ranks import run_ranks

    if recipe.plan is None:
        raise ConfigError("several processes need a plan, which says what each of them does: --plan plan.json")
    return run_ranks(
        recipe.flow, plan=recipe.plan, steps=recipe.steps, seed=recipe.seed, engine=recipe.engine, options=recipe.options,
        timeout_s=timeout_s, **recipe.inputs,
    )  # fmt: skip
