"""Where a plan has each node done: sites of models, and the ranks of everything else. Made once, before anything is opened.

Rank r of a job is device r of the plan. Nodes are named by their path (`refill/rollout` inside a sub-graph).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from flowrl.engines.launch.protocol import Site
from flowrl.errors import ConfigError
from flowrl.graph.kinds import KINDS
from flowrl.graph.nodes import Graph, Node
from flowrl.mesh import Layout, Mesh
from flowrl.planner.steps import Plan, Step
from flowrl.planner.tasks import StepKind
from flowrl.runtime.local import USE_OF
from flowrl.schema.columns import nearest


@dataclass(frozen=True, slots=True)
class Places:
    """Who does what."""

    sites: tuple[Site, ...]
    """All sites, in the order of the plan."""
    site_of: dict[str, Site]
    """Path of a node that runs a model -> the site where it does."""
    model_of: dict[str, str]
    """Path of a node that runs or changes a model -> input of the graph that the model is."""
    source_of: dict[str, str]
    """Path of a node that takes weights from another model -> that model."""
    ranks_of: dict[str, tuple[int, ...]]
    """Path of a node -> ranks that work on it."""
    main: dict[str, Site] = field(default_factory=dict)
    """Model -> the site that has its newest weights: where it trains, else its first."""

    def sites_of(self, model: str) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if site.model == model)

    def others(self, model: str) -> tuple[Site, ...]:
        """Sites that get a model's new weights from its main one."""
        return tuple(site for site in self.sites_of(model) if site != self.main[model])


def places_of(plan: Plan, graph: Graph) -> Places:
    """Read a plan for a graph, which is the plan's after pruning and merging.

    Errors: ConfigError for a call of a model without a step, and for two nodes that train one model in different places.
    """
    reader = _Reader(plan)
    reader.read(graph)
    reader.complete()
    return reader.places()


@dataclass
class _Reader:
    plan: Plan
    site_of: dict[str, Site] = field(default_factory=dict)
    model_of: dict[str, str] = field(default_factory=dict)
    source_of: dict[str, str] = field(default_factory=dict)
    ranks_of: dict[str, tuple[int, ...]] = field(default_factory=dict)
    trained: dict[str, list[str]] = field(default_factory=dict)
    """Model -> paths of the nodes that train it."""
    changed: dict[str, str] = field(default_factory=dict)
    """Path of a node that changes weights and runs nothing -> its model."""

    def __post_init__(self) -> None:
        self.steps: dict[str, Step] = {step.node: step for step in self.plan.steps if step.kind is StepKind.COMPUTE}

    def read(
        self, graph: Graph, prefix: str = "", outer: Mapping[str, str] | None = None, at: Mesh | None = None
    ) -> None:
        """All nodes of a graph; `outer` are the models that a sub-graph captured, `at` is where its rows come from."""
        model = dict(outer or {})
        home: dict[str, Mesh] = {"prompts": at} if at is not None else {}
        for node in graph:
            path = prefix + node.name
            source = dict(node.inputs).get("model", dict(node.inputs).get("then", ""))
            if node.kind == "input":
                model.setdefault(node.name, node.name)
            elif source in model:
                model[node.name] = model[source]
            kind = KINDS[node.kind]
            if node.name not in home:  # else the rows that a sub-graph begins with
                home[node.name] = self._home(path, node, home)
            self.ranks_of[path] = tuple(home[node.name].devices)
            if node.body is not None:
                self.read(node.body, f"{path}/", model, home[node.name])
                if path.replace("/", ".") not in self.steps:
                    self.ranks_of[path] = self.ranks_of[f"{path}/{node.body.outputs[0]}"]
            elif kind.uses_model:
                self._call(path, node, model[source])
            elif kind.changes_model:
                self.model_of[path] = self.changed[path] = model[source]
                self.source_of[path] = model[node.source("source")]

    def _home(self, path: str, node: Node, home: Mapping[str, Mesh]) -> Mesh:
        """The mesh of a node's step; of one without a step, that of the rows it takes."""
        step = self.steps.get(path.replace("/", "."))
        if step is not None:
            return step.mesh
        from_rows = [home[source] for port, source in node.inputs if port in ("rows", "right") and source in home]
        return from_rows[0] if from_rows else Mesh(self.plan.steps[0].mesh.first, 1)

    def _call(self, path: str, node: Node, model: str) -> None:
        step = self.steps.get(path.replace("/", "."))
        if step is None or step.layout is None:
            raise ConfigError(
                f"plan '{self.plan.name}' has no step with a layout for '{path}', which runs model '{model}'; plan this flow "
                f"again ({nearest(path, self.steps)})"
            )
        self.model_of[path] = model
        self.site_of[path] = self._site(model, step.mesh, step.layout, USE_OF[node.kind])
        self.ranks_of[path] = self.site_of[path].ranks
        if KINDS[node.kind].changes_model:
            self.trained.setdefault(model, []).append(path)

    def _site(self, model: str, mesh: Mesh, layout: Layout, use: str) -> Site:
        """The site of a use, which is one with all uses of the model there; what samples holds weights of its own."""
        made = Site(model, tuple(mesh.devices), layout, frozenset({use}))
        for known in self._sites(model):
            is_apart = ("generate" in known.uses) != (use == "generate") and len(known.ranks) > 1
            if known.lies_as(made) and not is_apart:
                made = replace(known, uses=known.uses | {use})
                self.site_of = {path: made if site == known else site for path, site in self.site_of.items()}
        return made

    def complete(self) -> None:
        """Places for what has no step of its own: nodes that only change weights, and models that are only read."""
        for path, model in self.changed.items():
            source = self.source_of[path]
            for name, other in ((model, source), (source, model)):
                if not self._sites(name):
                    like = self._sites(other)
                    where = like[0] if like else Site(other, (self.plan.steps[0].mesh.first,), Layout(), frozenset())
                    self.site_of[f"{path}:{name}"] = replace(where, model=name, uses=frozenset({"source"}))
            taken = self._sites(source)[:1] if source not in self.trained else [self.site_of[self.trained[source][0]]]
            ranks = {rank for site in (*self._sites(model), *taken) for rank in site.ranks}
            self.ranks_of[path] = tuple(sorted(ranks))

    def _sites(self, model: str) -> list[Site]:
        return list(dict.fromkeys(site for site in self.site_of.values() if site.model == model))

    def places(self) -> Places:
        sites = tuple(dict.fromkeys(self.site_of.values()))
        main = {site.model: site for site in reversed(sites)}
        for model, paths in self.trained.items():
            found = {self.site_of[path] for path in paths}
            if len(found) > 1:
                raise ConfigError(
                    f"plan '{self.plan.name}' trains model '{model}' in {len(found)} places "
                    f"({', '.join(sorted(site.name for site in found))}); give its updates one mesh and layout"
                )
            main[model] = found.pop()
        return Places(sites, self.site_of, self.model_of, self.source_of, self.ranks_of, main)


def models_in(node: Node, path: str, places: Places) -> Iterator[tuple[str, Site]]:
    """(model, site) of all that a node runs, in its sub-graph too."""
    for other, site in places.site_of.items():
        if other == path or (node.body is not None and other.startswith(f"{path}/")):
            yield places.model_of[other], site
