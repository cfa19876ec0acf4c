"""What the ranks of a job ask of an engine: a model on a mesh of ranks, and its weights from one mesh to another."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flowrl.engines.launch.board import Board
from flowrl.engines.protocol import Host
from flowrl.errors import ConfigError
from flowrl.mesh import Layout
from flowrl.mesh.layout import Coordinate
from flowrl.model import Model
from flowrl.schema.columns import nearest


@dataclass(frozen=True, slots=True)
class Site:
    """Where weights of a model are: ranks of the job and a layout on them.

    Example:
        Site("policy", (0, 1, 2, 3), Layout.parse("f2t2"), frozenset({"logprobs", "update"}))
    """

    model: str
    ranks: tuple[int, ...]
    """In the order of the layout's ranks."""
    layout: Layout
    uses: frozenset[str]
    """What is done with the model here; see `flowrl.engines.protocol.USES`."""

    @property
    def name(self) -> str:
        """Unlike that of any other site of a run."""
        last = f"-{self.ranks[-1]}" if len(self.ranks) > 1 else ""
        samples = "+" if "generate" in self.uses else ""
        return f"{self.model}@{self.ranks[0]}{last}:{self.layout}{samples}"

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """One rank of the job for each share of rows: of ranks that see the same rows the first."""
        at = (self.layout.coordinate(rank) for rank in range(self.layout.size))
        firsts = {(c.dp, c.fsdp): self.layout.rank(Coordinate(c.dp, 0, c.fsdp, 0)) for c in at}
        return tuple(self.ranks[firsts[key]] for key in sorted(firsts))

    def team_of(self, rank: int) -> tuple[int, ...]:
        """Ranks of the job that see the same rows as one of them, which is among them: a tp group, in its order."""
        mine = self.layout.coordinate(self.ranks.index(rank))
        group = (self.layout.rank(Coordinate(mine.dp, mine.pp, mine.fsdp, tp)) for tp in range(self.layout.tp))
        return tuple(self.ranks[one] for one in group)

    def lies_as(self, other: Site) -> bool:
        """Whether both lay a model on the same ranks in the same way."""
        return (self.ranks, self.layout) == (other.ranks, other.layout)


class RankEngine(Protocol):
    """Opens models on sites. Every rank of the job calls `open` for every site, in the same order."""

    name: str

    def check(self, site: Site, model: Model) -> str:
        """Why the engine cannot do what is asked of a site; "" when it can. Loads nothing."""
        ...

    def open(self, site: Site, model: Model, *, seed: int) -> Host | None:
        """The model on this rank; None where the rank is not of the site."""
        ...

    def elsewhere(self, name: str, model: Model, *, seed: int) -> Host:
        """What a rank without the model knows of it: name, tokenizer, longest context. It computes nothing."""
        ...

    def shares_rows(self, site: Site) -> bool:
        """Whether all ranks of the site are to call its hosts with all rows, which they share out themselves."""
        ...

    def handover(self, source: Site, target: Site) -> str:
        """How new weights come from one site to another, in words, for the trace."""
        ...

    def connect(self, edges: Sequence[tuple[Site, Site]]) -> None:
        """Get ready for weights from site to site. Every rank calls it once, after `open`, with all edges of the run."""
        ...

    def brings(self, source: Site, target: Site) -> bool:
        """Whether `bring` does this edge; else whole weights are exported, passed on and loaded."""
        ...

    def bring(self, source: Site, giver: Host | None, target: Site, taker: Host | None, version: int) -> int:
        """Bring weights from site to site; bytes that this rank took. All ranks of both sites call it."""
        ...

    def export(self, host: Host, *, keep: bool) -> dict[str, np.ndarray]:
        """Whole weights by name. All ranks of the site call it; those with `keep` get them, the others need not."""
        ...

    def load(self, host: Host, weights: Mapping[str, np.ndarray], version: int) -> int:
        """Take whole weights; bytes taken. All ranks of the site call it."""
        ...

    def blend(self, host: Host, weights: Mapping[str, np.ndarray], decay: float) -> None:
        """weights = decay * weights + (1 - decay) * those given. All ranks of the site call it."""
        ...

    def close(self) -> None:
        """End what was opened between the ranks."""
        ...


RANK_ENGINES = {
    "null": "flowrl.engines.launch.null_ranks:NullRanks",
    "torch": "flowrl.engines.launch.torch_ranks:TorchRanks",
}
"""Engine name to `module:class`, called with the job's board."""


def open_rank_engine(name: str, board: Board) -> RankEngine:
    """The engine of that name for the ranks of a job; its module is imported here and nowhere else."""
    if name not in RANK_ENGINES:
        raise ConfigError(f"there is no engine '{name}' for several ranks; {nearest(name, RANK_ENGINES)}")
    module, _, attribute = RANK_ENGINES[name].partition(":")
    made: Any = getattr(importlib.import_module(module), attribute)
    engine: RankEngine = made(board)
    return engine
