"""One rank walks the plan: it computes what is its own, and what that needs.

    all ranks        the same actions in the same order, made from all steps of the plan
    a node of mine   its inputs are brought here (rows that others made are read where they lie), then it is computed
    another's node   passed over; if something of mine needs it later, its rows are waited for then
    rank 0           at the end of a step also reads what is left: it writes the metrics

[Note: No two ranks wait for each other] A rank waits only for nodes that stand earlier in the order that all ranks share, and the
ranks of a mesh come to their common work in that order. So the rank that is furthest behind never waits.

[Note: What all ranks do alike] Data sets are drawn by every rank, as a cursor is a few numbers; a node that holds a sub-graph and
draws more as it goes is followed by every rank, round by round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from flowrl.engines.protocol import Parks
from flowrl.graph.kinds import KINDS
from flowrl.graph.nodes import Node
from flowrl.planner.steps import Step
from flowrl.planner.tasks import StepKind
from flowrl.runtime import planned
from flowrl.runtime.context import Context, StepLog, Table, Value, Version
from flowrl.runtime.executor import chosen, needed
from flowrl.runtime.planned import Moved, PlannedExecutor, unknown_state
from flowrl.runtime.program import Act, Action
from flowrl.runtime.ranks.alike import compare_drawn, digest_of
from flowrl.runtime.ranks.desk import Desk
from flowrl.runtime.ranks.hosts import SharedHost
from flowrl.runtime.ranks.places import models_in
from flowrl.runtime.ranks.work import WORK, Operate
from flowrl.store.rows import RowBatch

REPORTER = 0
"""The rank that writes metrics and the run's folder."""


@dataclass(kw_only=True)
class RankExecutor(PlannedExecutor):
    """Walks the program of all ranks, as one of them."""

    desk: Desk
    shared: dict[str, SharedHost]
    """The models, as `hosts`."""
    _behind: dict[str, set[str]] = field(default_factory=dict)
    """Model -> names of its sites that lack its newest weights."""
    _drawn: dict[str, str] = field(default_factory=dict)
    """Data set -> digest of the rows that this rank has drawn in the step at hand."""

    @property
    def is_reporter(self) -> bool:
        return self.desk.rank == REPORTER

    def step(self, number: int) -> tuple[dict[str, Value], StepLog]:
        """One iteration; on rank 0 all values and the whole log, elsewhere what this rank computed."""
        self.desk.step_begins(number)
        self._drawn = {}
        return super().step(number)

    def _input(self, node: Node) -> Value:
        value = super()._input(node)
        if isinstance(value, Table) and not self.desk.is_alone:
            self._drawn[node.name] = digest_of(value.batch)
        return value

    def _complete(self, context: Context, asked: frozenset[str], logs: dict[str, StepLog]) -> None:
        if self.is_reporter:
            for node in self.graph:
                if node.name in asked:
                    self._ensure(node, context, logs)
        ended = self.desk.exchange.end_step(self._drawn)
        compare_drawn(self.desk.exchange.step - 1, ended)

    def _context(self, number: int) -> Context:
        return replace(super()._context(number), operate=Operate(self.desk))

    # ---------------------------------------------------------------------------------------------------- what is mine

    def _act(self, action: Action, context: Context, logs: dict[str, StepLog], ahead: dict[str, Value]) -> None:
        node = self.graph[action.node]
        is_mine = self._is_mine(node, node.name)
        match action.act:
            case Act.RUN:
                self._refresh(node, node.name)
                if is_mine:
                    self._ensure(node, context, logs)
                self._changed(node, node.name)
            case Act.AHEAD:
                self._refresh(node, node.name)
                if is_mine:
                    for source in (action.base, *(s for p, s in node.inputs if p != "rows")):
                        self._ensure(self.graph[source], context, logs)
                    context.log = logs.setdefault(node.name, StepLog())
                    ahead[node.name] = self._ahead(node, action, context)
            case Act.JOIN if node.name in ahead:
                for _, source in node.inputs:
                    self._ensure(self.graph[source], context, logs)
                context.log = logs.setdefault(node.name, StepLog())
                self._join(node, ahead[node.name], context)

    def _is_mine(self, node: Node, path: str) -> bool:
        """Whether this rank works on a node when its turn comes, whatever it needs later."""
        if node.kind == "input":
            return bool(node["kind"] == "rows")
        if node.body is not None:
            return True
        if path in self.desk.places.site_of or path in self.desk.places.source_of:
            return self.desk.rank in self.desk.places.ranks_of[path]
        # what is computed from rows alone waits until somebody needs it, but for work that is this rank's to do for others
        is_work = node.kind in WORK or node.kind == "apply"
        return is_work and self.desk.rank in self.desk.places.ranks_of[path]

    def _ensure(self, node: Node, context: Context, logs: dict[str, StepLog] | None = None) -> None:
        """Have a node's value here, and before it those of its inputs."""
        if node.name in context.values:
            return
        sources = [chosen(node, context.step)] if node.kind == "after" else [source for _, source in node.inputs]
        path = context.path + node.name
        if self._passes(node, path):
            sources = [node.source("model")]
        for source in sources:
            if source not in context.values:
                self._ensure(context.graph[source], context, logs)
        if logs is not None:
            context.log = logs.setdefault(node.name, StepLog())
        if self._passes(node, path):
            value = context.values[node.source("model")]
            assert isinstance(value, Version)
            context.values[node.name] = value
            return
        self._run(node, context)

    def _passes(self, node: Node, path: str) -> bool:
        """Whether a node's new weights are none of this rank's business: it neither makes nor reports them."""
        if not KINDS[node.kind].changes_model or self.desk.rank in self.desk.places.ranks_of[path]:
            return False
        return not self.is_reporter or path in self.desk.places.source_of

    def _value(self, node: Node, context: Context) -> Value:
        self.desk.node_begins(context.path + node.name)
        if node.kind in WORK and not self.desk.is_alone:
            return WORK[node.kind](node, context, self.desk)
        return super()._value(node, context)

    def _run_body(self, context: Context, node: Node, prompts: RowBatch, number: int) -> RowBatch:
        path = context.path + node.name
        with self.desk.round(path, number):
            found = super()._run_body(context, node, prompts, number)
        self.desk.node_begins(path)
        return found

    def _evaluate(self, context: Context) -> None:
        """A sub-graph: this rank's nodes in their order, and what its output needs."""
        asked = needed(context.graph, context.step)
        for node in context.graph:
            if node.name in asked and self._is_mine(node, context.path + node.name):
                self._ensure(node, context)
        for name in context.graph.outputs:
            self._ensure(context.graph[name], context)
        if self.is_reporter:
            for node in context.graph:
                if node.name in asked:
                    self._ensure(node, context)

    # --------------------------------------------------------------------------------------------------------- weights

    def resumed(self) -> None:
        """The sites that have the newest weights have read them; the others get them when they are used."""
        places = self.desk.places
        self._behind = {model: {site.name for site in places.others(model)} for model in places.main}

    def _changed(self, node: Node, path: str) -> None:
        """Note which sites lack the weights that a node has made; every rank notes the same."""
        for model in self._models_changed(node, path):
            others = {site.name for site in self.desk.places.others(model)}
            if path in self.desk.places.source_of:
                others = set()  # a blend reaches every site by itself
            self._behind.setdefault(model, set()).update(others)

    def _models_changed(self, node: Node, path: str) -> Iterator[str]:
        if node.body is not None:
            for inner in node.body:
                yield from self._models_changed(inner, f"{path}/{inner.name}")
        elif KINDS[node.kind].changes_model:
            yield self.desk.places.model_of[path]

    def _refresh(self, node: Node, path: str) -> None:
        """Bring weights to the sites that a node uses, where the plan has no step for it."""
        for model, site in models_in(node, path, self.desk.places):
            if site.name in self._behind.get(model, ()):
                self.desk.node_begins(path)
                self._hand_over(model, {site.name})

    def _hand_over(self, model: str, names: set[str]) -> int:
        behind = self._behind.get(model, set())
        total = 0
        for site in self.desk.places.others(model):
            if site.name in names & behind:
                total += self.shared[model].handover(site)
        behind -= names
        return total

    def publish(self, step: Step) -> Moved:
        """New weights to the sites on the mesh of a reshard, and from there into the samplers."""
        total, how = 0, []
        for model in self._handed_over(step):
            main = self.desk.places.main[model]
            sites = [site for site in self.desk.places.others(model) if site.ranks == tuple(step.mesh.devices)]
            behind = self._behind.get(model, set())
            how += [self.desk.engine.handover(main, site) for site in sites if site.name in behind]
            total += self._hand_over(model, {site.name for site in sites})
            total += self.shared[model].publish()
        return Moved(total, "; ".join(dict.fromkeys(how)) or "the samplers have these weights already")

    # ----------------------------------------------------------------------------------------------------------- moves

    def _move(self, step: Step) -> None:
        if self.desk.rank not in step.devices and step.kind is not StepKind.RESHARD:
            return
        self.desk.node_begins(step.name)
        self.observer.move_begins(step)
        start = time.perf_counter()
        moved = RANK_MOVES[step.kind](self, step)
        if self.desk.rank in step.devices:
            self.observer.move_done(step, moved, start)

    def _parks(self, step: Step) -> Parks | None:
        """This rank's host at the site that a step moves: where the node it names runs, or where the model it names trains."""
        places = self.desk.places
        site = places.site_of.get(step.node.replace(".", "/")) or places.main.get(step.node)
        if site is None:
            if all(host.device in planned.IN_HOST_MEMORY for host in self.hosts.values()):
                return None
            raise unknown_state(step, self.hosts)
        host = self.shared[site.model].hosts.get(site)
        if host is None or host.device in planned.IN_HOST_MEMORY:
            return None
        return host if isinstance(host, Parks) else None


def _where_they_lie(executor: RankExecutor, step: Step) -> Moved:
    host_of = executor.desk.exchange.board.host_of
    if len({host_of[device] for device in step.devices}) > 1:
        return Moved(0, "nothing to move here: who reads rows of another host brings them over, by Arrow Flight")
    return Moved(0, "nothing to move: rows are read where they lie, in the shared memory of the host")


def _by_what_is_read(executor: RankExecutor, step: Step) -> Moved:
    return Moved(0, "nothing to wait for here: ranks wait where they read what others made")


RANK_MOVES: dict[StepKind, Callable[[RankExecutor, Step], Moved]] = {
    StepKind.RESHARD: RankExecutor.publish,
    StepKind.TRANSFER: _where_they_lie,
    StepKind.SYNC: _by_what_is_read,
    StepKind.OFFLOAD: RankExecutor.park,
    StepKind.ONLOAD: RankExecutor.bring,
}
"""Kind of step to what does it on a rank."""
