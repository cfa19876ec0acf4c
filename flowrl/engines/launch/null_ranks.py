"""The null engine on ranks: each rank of a site has the whole model, and all take the same updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flowrl.engines.launch.board import Board
from flowrl.engines.launch.protocol import Site
from flowrl.engines.null import NullHost
from flowrl.engines.protocol import Host
from flowrl.errors import EngineError
from flowrl.model import Model


class NullRanks:
    """See `flowrl.engines.launch.protocol.RankEngine`."""

    name = "null"

    def __init__(self, board: Board) -> None:
        self._rank = board.rank

    def check(self, site: Site, model: Model) -> str:
        return ""

    def open(self, site: Site, model: Model, *, seed: int) -> Host | None:
        return NullHost(site.model, model, seed=seed) if self._rank in site.ranks else None

    def elsewhere(self, name: str, model: Model, *, seed: int) -> Host:
        return NullHost(name, model, seed=seed)

    def shares_rows(self, site: Site) -> bool:
        return False

    def handover(self, source: Site, target: Site) -> str:
        return "copied whole, through shared memory"

    def connect(self, edges: Sequence[tuple[Site, Site]]) -> None:
        pass

    def brings(self, source: Site, target: Site) -> bool:
        return False

    def bring(self, source: Site, giver: Host | None, target: Site, taker: Host | None, version: int) -> int:
        raise EngineError(f"the null engine has no way of its own from {source.name} to {target.name}")

    def export(self, host: Host, *, keep: bool) -> dict[str, np.ndarray]:
        null = _null(host)
        return {"base": null.base, "weights": null.weights} if keep else {}

    def load(self, host: Host, weights: Mapping[str, np.ndarray], version: int) -> int:
        null = _null(host)
        null.base, null.weights, null.version = weights["base"].copy(), weights["weights"].copy(), version
        return null.base.nbytes + null.weights.nbytes

    def blend(self, host: Host, weights: Mapping[str, np.ndarray], decay: float) -> None:
        null = _null(host)
        null.weights = decay * null.weights + (1 - decay) * weights["weights"]
        null.base = decay * null.base + (1 - decay) * weights["base"]
        null.version += 1

    def close(self) -> None:
        pass


def _null(host: Host) -> NullHost:
    if not isinstance(host, NullHost):
        raise EngineError(f"the null engine has null models; '{host.name}' is a {type(host).__name__}")
    return host
