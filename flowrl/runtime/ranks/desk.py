"""What one rank is doing right now, and what it may use for it: shared by the executor, the models and the operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from flowrl.engines.launch.protocol import RankEngine
from flowrl.runtime.ranks.exchange import Exchange
from flowrl.runtime.ranks.places import Places


@dataclass
class Desk:
    """One rank's."""

    exchange: Exchange
    engine: RankEngine
    places: Places
    path: str = ""
    """Of the node that is being computed."""
    _rounds: list[str] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def is_alone(self) -> bool:
        return self.exchange.board.world == 1

    def step_begins(self, step: int) -> None:
        self.exchange.step = step
        self._counts.clear()

    def node_begins(self, path: str) -> None:
        """A node is computed now; a wait of another rank for this one will say so."""
        self.path = path
        self.exchange.begin()
        self.exchange.board.at(f"step {self.exchange.step}, at '{path}'")

    @contextmanager
    def round(self, path: str, number: int) -> Iterator[None]:
        """A round of a node that holds a sub-graph: the same nodes are computed again in the next one."""
        self._rounds.append(f"{path}.{number}")
        try:
            yield
        finally:
            self._rounds.pop()

    def key(self, what: str = "") -> str:
        """Of the next exchange of this node: the same on every rank that computes it, unlike any other of the run."""
        stem = "/".join((str(self.exchange.step), *self._rounds, self.path, *([what] if what else [])))
        self._counts[stem] = self._counts.get(stem, 0) + 1
        return f"{stem}/{self._counts[stem]}"

    @property
    def workers(self) -> tuple[int, ...]:
        """Ranks that work on the node."""
        return self.places.ranks_of[self.path]
