"""Places for the nodes of a layered drawing, without graphviz.

1. Layers: each node stands one layer behind the last of those it comes from (longest path); what comes from nothing, right
   before its first use.
2. An edge over several layers gets a dummy node in each layer between.
3. Order in a layer: sweeps forth and back sort each layer by the barycentre of its neighbours; the order with the fewest
   crossings is kept. Nodes of the same band stay together, in the order of bands.
4. Every band is as wide as its fullest layer; nodes of a layer stand as near to the middle of their neighbours as their order
   and their band allow.

Deterministic: ties go by the order in which nodes are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

SWEEPS = 12
SLIM = 0.3
"""Room that an edge takes where it passes a layer, in widths of a node."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where nodes and the bends of edges stand."""

    nodes: dict[str, tuple[int, float]]
    """Layer, and the centre inside it, in widths of a node."""
    bends: dict[tuple[str, str], tuple[tuple[int, float], ...]]
    """For each edge, where it passes the layers between its ends."""
    num_layers: int
    width: float
    """Of the fullest layer, in widths of a node."""
    bands: tuple[tuple[str, float, float], ...]
    """Name, beginning and width of each band."""


@dataclass(slots=True)
class _Net:
    layers: list[list[str]]
    band: dict[str, int]
    before: dict[str, list[str]] = field(default_factory=dict)
    behind: dict[str, list[str]] = field(default_factory=dict)
    chains: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def size(self, name: str) -> float:
        return SLIM if name.startswith("\0") else 1.0


def place(nodes: Sequence[str], edges: Sequence[tuple[str, str]], bands: Mapping[str, str] | None = None) -> Places:
    """Layout of an acyclic graph.

    Args:
        bands: for each node the name of the band it stands in; bands are ordered by their first node.

    Raises ValueError for a cycle, or an edge of a node that is not there.
    """
    given = dict.fromkeys(nodes, "") if bands is None else {name: bands[name] for name in nodes}
    names = list(dict.fromkeys(given.values()))
    net = _net(nodes, list(dict.fromkeys(edges)), {name: names.index(band) for name, band in given.items()})
    _order(net)
    firsts, widths = _bands(net, len(names))
    centres = _centres(net, firsts, widths)
    layer_of = {name: index for index, layer in enumerate(net.layers) for name in layer}
    at = {name: (layer_of[name], centres[name]) for name in layer_of}
    return Places(
        {name: at[name] for name in nodes},
        {edge: tuple(at[dummy] for dummy in chain) for edge, chain in net.chains.items()},
        len(net.layers),
        sum(widths),
        tuple((name, firsts[index], widths[index]) for index, name in enumerate(names)),
    )


def layers_of(nodes: Sequence[str], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The longest way to each node, in edges; what comes from nothing stands right before its first use.

    Raises ValueError for a cycle.
    """
    before: dict[str, list[str]] = {name: [] for name in nodes}
    behind: dict[str, list[str]] = {name: [] for name in nodes}
    for source, target in edges:
        if source not in before or target not in before:
            raise ValueError(f"the edge {source!r} -> {target!r} has an end that is no node")
        before[target].append(source)
        behind[source].append(target)
    waiting = {name: len(before[name]) for name in nodes}
    ready = [name for name in nodes if not waiting[name]]
    found: dict[str, int] = {}
    while ready:
        name = ready.pop(0)
        found[name] = max((found[one] + 1 for one in before[name]), default=0)
        for later in behind[name]:
            waiting[later] -= 1
            if not waiting[later]:
                ready.append(later)
    if len(found) < len(nodes):
        raise ValueError(f"a cycle goes through {', '.join(sorted(set(nodes) - set(found)))}")
    for name in nodes:
        if not before[name] and behind[name]:
            found[name] = min(found[later] for later in behind[name]) - 1
    return found


def _net(nodes: Sequence[str], edges: Sequence[tuple[str, str]], band: dict[str, int]) -> _Net:
    layer_of = layers_of(nodes, edges)
    net = _Net([[] for _ in range(max(layer_of.values(), default=-1) + 1)], dict(band))
    for name in nodes:
        net.layers[layer_of[name]].append(name)
        net.before[name], net.behind[name] = [], []
    for number, (source, target) in enumerate(edges):
        chain = []
        last = source
        for layer in range(layer_of[source] + 1, layer_of[target]):
            dummy = f"\0{number}\0{layer}"  # no name of a node begins so: they are printed
            net.layers[layer].append(dummy)
            net.band[dummy] = band[target]
            net.before[dummy], net.behind[dummy] = [], []
            _connect(net, last, dummy)
            chain.append(dummy)
            last = dummy
        _connect(net, last, target)
        net.chains[source, target] = chain
    return net


def _connect(net: _Net, source: str, target: str) -> None:
    net.behind[source].append(target)
    net.before[target].append(source)


def _order(net: _Net) -> None:
    for layer in net.layers:
        layer.sort(key=lambda name: net.band[name])
    best, fewest = [list(layer) for layer in net.layers], crossings(net.layers, net.behind)
    for sweep in range(SWEEPS):
        forth = sweep % 2 == 0
        order = range(1, len(net.layers)) if forth else range(len(net.layers) - 2, -1, -1)
        for index in order:
            near = net.layers[index - 1 if forth else index + 1]
            turn = {name: place for place, name in enumerate(near)}
            neighbours = net.before if forth else net.behind
            now = {name: place for place, name in enumerate(net.layers[index])}

            def centre(
                name: str, turn: dict[str, int] = turn, now: dict[str, int] = now, near: list[str] = near
            ) -> float:
                places = [turn[one] for one in neighbours[name]]  # noqa: B023 (called before the next turn)
                return sum(places) / len(places) if places else now[name] * len(near) / max(1, len(now))

            net.layers[index].sort(key=lambda name: (net.band[name], centre(name), now[name]))
        found = crossings(net.layers, net.behind)
        if found < fewest:
            best, fewest = [list(layer) for layer in net.layers], found
    net.layers[:] = best


def crossings(layers: Sequence[Sequence[str]], behind: Mapping[str, Sequence[str]]) -> int:
    """Pairs of edges between neighbouring layers that cross."""
    total = 0
    for left, right in pairwise(layers):
        turn = {name: place for place, name in enumerate(right)}
        ends = [(place, turn[target]) for place, name in enumerate(left) for target in behind[name]]
        total += sum((a - c) * (b - d) < 0 for i, (a, b) in enumerate(ends) for c, d in ends[i + 1 :])
    return total


def _bands(net: _Net, count: int) -> tuple[list[float], list[float]]:
    """Where each band begins, and how wide it is: as its fullest layer."""
    widths = [
        max((sum(net.size(name) for name in layer if net.band[name] == band) for layer in net.layers), default=0.0)
        for band in range(count)
    ]
    return [sum(widths[:band]) for band in range(count)], widths


def _centres(net: _Net, firsts: Sequence[float], widths: Sequence[float]) -> dict[str, float]:
    """A place for each node: in its order, inside its band, near its neighbours."""
    centres: dict[str, float] = {}
    parts = [
        (index, band, [name for name in layer if net.band[name] == band])
        for index, layer in enumerate(net.layers)
        for band in dict.fromkeys(net.band[name] for name in layer)
    ]
    for _, band, mine in parts:
        at = firsts[band] + (widths[band] - sum(map(net.size, mine))) / 2
        for name in mine:
            centres[name] = at + net.size(name) / 2
            at += net.size(name)
    for sweep in range(4):
        forth = sweep % 2 == 0
        for _, band, mine in sorted(parts, key=lambda part: part[0] if forth else -part[0]):
            _settle(net, mine, centres, net.before if forth else net.behind, firsts[band], firsts[band] + widths[band])
    return centres


def _settle(
    net: _Net,
    mine: Sequence[str],
    centres: dict[str, float],
    neighbours: Mapping[str, Sequence[str]],
    first: float,
    last: float,
) -> None:
    """Move the nodes of a layer towards the mean of their neighbours, without overlapping and without leaving the band."""
    sizes = [net.size(name) for name in mine]
    wanted = [
        sum(centres[one] for one in neighbours[name]) / len(neighbours[name]) if neighbours[name] else centres[name]
        for name in mine
    ]
    low = first
    for place, name in enumerate(mine):
        high = last - sum(sizes[place:]) + sizes[place] / 2
        centres[name] = min(max(wanted[place], low + sizes[place] / 2), high)
        low = centres[name] + sizes[place] / 2
