"""Layout of drawings: layers, order, bands; the same every time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from flowrl.viz.layered import SLIM, crossings, layers_of, place

DIAMOND = ["a", "b", "c", "d"], [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "d")]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[str], list[tuple[str, str]], dict[str, str]]:
    names = [f"n{index}" for index in range(draw(st.integers(1, 14)))]
    pairs = [(names[i], names[j]) for j in range(len(names)) for i in range(j)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=24)) if pairs else []
    return names, edges, {name: draw(st.sampled_from("xyz")) for name in names}


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_edges_go_down_and_nodes_of_a_layer_stand_apart(
    case: tuple[list[str], list[tuple[str, str]], dict[str, str]],
) -> None:
    names, edges, bands = case
    found = place(names, edges, bands)
    for source, target in edges:
        chain = [found.nodes[source], *found.bends[source, target], found.nodes[target]]
        assert all(after[0] == before[0] + 1 for before, after in pairwise(chain)), "an edge skips a layer"
    everything = [(*at, 1.0) for at in found.nodes.values()]
    everything += [(*bend, SLIM) for chain in found.bends.values() for bend in chain]
    for layer in range(found.num_layers):
        stand = sorted((centre, size) for at, centre, size in everything if at == layer)
        apart = [(b - a) - (size + other) / 2 for (a, size), (b, other) in pairwise(stand)]
        assert min(apart, default=0.0) >= -1e-9, "two things stand in each other"
    spans = {name: (first, first + width) for name, first, width in found.bands}
    for name in names:
        first, last = spans[bands[name]]
        assert first + 0.5 - 1e-9 <= found.nodes[name][1] <= last - 0.5 + 1e-9, "a node stands outside of its band"
    assert found == place(names, edges, bands)


def test_layers_are_longest_paths_and_inputs_stand_before_their_first_use() -> None:
    assert layers_of(*DIAMOND) == {"a": 0, "b": 1, "c": 1, "d": 2}
    assert layers_of(["a", "b", "c", "late"], [("a", "b"), ("b", "c"), ("late", "c")])["late"] == 1


def test_a_crossing_that_need_not_be_is_taken_out() -> None:
    names = ["a", "b", "x", "y"]
    edges = [("a", "y"), ("b", "x")]
    assert crossings([["a", "b"], ["x", "y"]], {"a": ["y"], "b": ["x"]}) == 1
    found = place(names, edges)
    assert (found.nodes["a"][1] < found.nodes["b"][1]) == (found.nodes["y"][1] < found.nodes["x"][1])


def test_what_is_no_drawing_is_refused() -> None:
    with pytest.raises(ValueError, match="cycle goes through a, b"):
        place(["a", "b"], [("a", "b"), ("b", "a")])
    with pytest.raises(ValueError, match="no node"):
        place(["a"], [("a", "b")])


def test_nothing_and_one_node() -> None:
    assert place([], []).num_layers == 0
    assert place(["a"], []).nodes == {"a": (0, 0.5)}
