"""`flowrl run --plan PLAN.json --nproc N`: the same command in N processes, each a rank of the run."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from flowrl.cli import OK
from flowrl.engines.launch.place import Place
from flowrl.engines.launch.spawn import run_job
from flowrl.errors import ConfigError, FlowError

if TYPE_CHECKING:
    from flowrl.recipe import Recipe
    from flowrl.runtime.local import Run

ENTRY = "flowrl.cli.ranks:as_rank"


def is_rank() -> bool:
    """Whether a launcher (torchrun, or this command itself) has started this process as one of several."""
    return Place.of(os.environ).world > 1


def launch(recipe: Recipe, arguments: list[str], *, nproc: int, timeout_s: float) -> int:
    """Start the ranks and wait for them; what cannot run is refused before.

    Errors: ConfigError for no plan, or one for another number of ranks; RunError with the first error of any rank.
    """
    from flowrl.runtime.ranks import check_ranks

    if recipe.plan is None:
        raise ConfigError(
            f"--nproc {nproc} needs a plan, which says what each process does: --plan plan.json (flowrl plan ... --out plan.json)"
        )
    check_ranks(recipe.flow, plan=recipe.plan, world=nproc, seed=recipe.seed, options=recipe.options, **recipe.inputs)
    run_job(ENTRY, {"arguments": arguments, "timeout_s": timeout_s}, nproc)
    return OK


def as_rank(said: dict[str, Any]) -> None:
    """What each process does. Rank 0 says where the results lie."""
    from flowrl.cli.commands import recipe_of, say_finished, say_where
    from flowrl.cli.parser import build_parser

    recipe = recipe_of(build_parser("", "").parse_args(said["arguments"]))
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
