"""A complete run as a value: flow, inputs and options, frozen; loadable as `module:function` or from a settings file.

Example:
    def small() -> Recipe:
        return Recipe(grpo(group_size=4), {"prompts": data, "policy": fr.Model("path")}, steps=100)

    # flowrl run my_project/runs.py:small
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flowrl.errors import ConfigError, Problem
from flowrl.graph.flows import Flow
from flowrl.graph.nodes import Graph
from flowrl.model import Model
from flowrl.recipe.binding import bind_inputs, names_of
from flowrl.recipe.settings import Names, Settings, read_settings, settings_of_arguments
from flowrl.recipe.targets import find
from flowrl.runtime.options import Options
from flowrl.schema.columns import nearest

if TYPE_CHECKING:
    from flowrl.planner.steps import Plan
    from flowrl.runtime.local import Run


@dataclass(frozen=True)
class Recipe:
    """Everything a run needs. Making one loads and reads nothing."""

    flow: Flow | Graph
    """A flow (its default configuration) or a graph: `grpo(group_size=4)`."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """One value for each input of the flow, as in `fr.run_local`."""
    steps: int = 1
    seed: int = 0
    engine: str = "torch"
    """`torch`, or `null`: no models, a dry run in milliseconds."""
    options: Options = field(default_factory=Options)
    plan: Plan | None = None
    """Executed step by step, as in `fr.run_local`."""

    def __post_init__(self) -> None:
        if not isinstance(self.flow, Flow | Graph):
            raise ConfigError(f"a Recipe needs a flow (@fr.flow) or a graph; found {type(self.flow).__name__}")
        for name, least in (("steps", 0), ("seed", None)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
                raise ConfigError(f"a Recipe needs a whole number as {name}; found {value!r}")
        if not isinstance(self.options, Options):
            raise ConfigError(f"a Recipe's options are an Options; found {type(self.options).__name__}")
        object.__setattr__(self, "inputs", dict(self.inputs))  # the caller's dict may change later

    @property
    def graph(self) -> Graph:
        """The graph as written, neither pruned nor merged."""
        return self.flow.graph() if isinstance(self.flow, Flow) else self.flow

    @property
    def names(self) -> Names:
        """What settings may name: configuration and inputs."""
        return names_of(self.flow)

    def replace(self, **changes: Any) -> Recipe:
        """The same recipe with some fields replaced."""
        return replace(self, **changes)

    def configured(self, settings: Settings) -> Recipe:
        """The same recipe with settings laid over it.

        Errors: ConfigError with every setting that nothing reads.
        """
        from flowrl.engines import ENGINES

        graph = self.flow.graph(**settings.config) if isinstance(self.flow, Flow) else self.flow
        engine = settings.run.get("engine", self.engine)
        if engine not in ENGINES:
            raise ConfigError(f"there is no engine '{engine}'; {nearest(engine, ENGINES)}")
        return self.replace(
            flow=graph,
            inputs=bind_inputs(graph, self.inputs, settings, engine),
            options=self.options.updated(settings.options),
            **settings.run,
        )

    def check(self) -> tuple[Problem, ...]:
        """All problems of the flow, with the models and data it is given; inputs that are missing are no problem here."""
        from flowrl.graph.checks import find_problems

        graph = self.graph
        kinds = {node.name: node["kind"] for node in graph.inputs}
        models = {
            n: v if isinstance(v, Model) else Model(v) for n, v in self.inputs.items() if kinds.get(n) == "weights"
        }
        tables = {n: v for n, v in self.inputs.items() if kinds.get(n) == "rows"}
        schemas = {}
        if tables:
            from flowrl.runtime.data import Data

            schemas = {name: Data.of(value, name=name).schema for name, value in tables.items()}
        found = find_problems(graph, schedule=self.options.schedule, models=models or None, data=schemas or None)
        return tuple(found)

    def run(self) -> Run:
        """Run it in this process; see `fr.run_local`."""
        from flowrl.runtime.local import run_local

        return run_local(
            self.flow,
            steps=self.steps,
            seed=self.seed,
            engine=self.engine,
            options=self.options,
            plan=self.plan,
            **self.inputs,
        )


def load(target: str) -> Recipe:
    """The recipe that `FILE.py:NAME` or `module.sub:NAME` names.

    NAME is a function without arguments that returns a Recipe, a Recipe, a flow or a graph; the last two give a recipe
    without inputs. NAME may be left out where the file defines exactly one flow; `FILE.txt` is a graph in its text form.

    Errors: ConfigError when it is none of these; TraceError when importing it raises.
    """
    found = find(target)
    if isinstance(found, Flow | Graph):
        return Recipe(found)
    if callable(found) and not isinstance(found, type | Recipe):
        made = _called(found, target)
        if isinstance(made, Recipe):
            return made
        raise ConfigError(f"{target} returned {type(made).__name__}; a recipe function returns a flowrl.recipe.Recipe")
    if isinstance(found, Recipe):
        return found
    raise ConfigError(
        f"{target} is a {type(found).__name__}; it should be a flow (@fr.flow), a graph, a Recipe, or a function that returns one"
    )


def _called(function: Any, target: str) -> Any:
    import inspect

    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        raise ConfigError(
            f"{target} takes arguments, so it is no recipe (a function without arguments that returns a Recipe); "
            "a flow is marked with @fr.flow"
        ) from None
    return function()


__all__ = ["Names", "Recipe", "Settings", "load", "read_settings", "settings_of_arguments"]
