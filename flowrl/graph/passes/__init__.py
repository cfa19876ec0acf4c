"""Passes over graphs: each is one function in one file, from a graph to an equal but cheaper one, with notes in words."""

from __future__ import annotations

from collections.abc import Callable

from flowrl.errors import FlowError
from flowrl.graph.infer import infer
from flowrl.graph.nodes import Graph
from flowrl.graph.passes.merge import merge
from flowrl.graph.passes.needs import needed_columns
from flowrl.graph.passes.note import Note
from flowrl.graph.passes.prune import prune

Pass = Callable[[Graph], tuple[Graph, tuple[Note, ...]]]

PASSES: tuple[Pass, ...] = (prune, merge, prune)
"""Every pass, in order. What a merge leaves over (half of a copied pair) is pruned after it."""


def optimise(graph: Graph) -> tuple[Graph, tuple[Note, ...]]:
    """A graph that gives the same outputs with less work, and what was left out or merged, in words.

    Each pass is checked: it must not bring a problem that was not there before.
    """
    notes: list[Note] = []
    for run in PASSES:
        before = graph
        graph, made = run(before)
        notes.extend(made)
        _verify(getattr(run, "__name__", str(run)), before, graph)
    return graph, tuple(notes)


def _verify(name: str, before: Graph, after: Graph) -> None:
    if infer(before).all_problems():
        return  # a check reports these; where a problem is told may move with the nodes
    new = infer(after).all_problems()
    if new or len(after.outputs) != len(before.outputs):
        shown = "\n".join(map(str, new)) or "it lost an output"
        raise FlowError(f"pass '{name}' broke flow '{before.name}'; please report this with the flow's text:\n{shown}")


__all__ = ["PASSES", "Note", "Pass", "needed_columns", "optimise"]
