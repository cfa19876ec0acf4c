"""The torch engine on the ranks of a job.

trains or scores, several ranks     sharded as the layout says (`flowrl.engines.mesh`); its ranks call it together
samples, a layout with dp only      a whole copy on each rank, which samples its own prompts
samples, tp                         ranks of a tp group share a copy and make the same calls: that of the torch sampler lies on
                                    the mesh, that of vLLM in vLLM (weights come to each rank whole, and it takes its part)
one rank                            as without ranks
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

from flowrl.engines.host_torch import TorchEngine, TorchHost
from flowrl.engines.launch.across import interface_of
from flowrl.engines.launch.board import Board
from flowrl.engines.launch.protocol import Site
from flowrl.engines.launch.torch_devices import Devices, kind_of
from flowrl.engines.launch.torch_edges import Edges
from flowrl.engines.loading import find_pretrained, load, tokenizer_of
from flowrl.engines.mesh.guard import Patience
from flowrl.engines.mesh.host import open_on_mesh
from flowrl.engines.mesh.ranks import RankMesh
from flowrl.engines.mesh.weights import MeshWeights
from flowrl.engines.protocol import Host
from flowrl.engines.vllm_groups import Team
from flowrl.errors import EngineError, FlowError
from flowrl.mesh import Layout
from flowrl.model import Model, Tokenizer

MEET_S = 300.0
"""Longest wait for the other ranks to import torch and to come to the job's process group."""


class TorchRanks:
    """See `flowrl.engines.launch.protocol.RankEngine`."""

    name = "torch"

    def __init__(self, board: Board) -> None:
        self._board = board
        self._meshes: dict[tuple[tuple[int, ...], Layout, str], RankMesh | None] = {}
        self._devices = Devices(board)
        self._edges = Edges(board, self._devices)
        self._has_group = False
        self._store: TCPStore | None = None

    def check(self, site: Site, model: Model) -> str:
        layout, many = site.layout, len(site.ranks) > 1
        if layout.pp > 1:
            return f"layout {layout} has pipeline stages, which the torch engine lacks; use pp 1"
        if many and "generate" in site.uses and layout.fsdp > 1:
            return (
                f"it samples with copies of the model, each whole or cut by tensor parallelism; found layout {layout}: plan with "
                f"d and t, as d{layout.size}, for sampling"
            )
        return self._devices.look_at(model)

    def open(self, site: Site, model: Model, *, seed: int) -> Host | None:
        self._devices.look_at(model)
        self._devices.take()
        team = self._team(site, model)
        host: Host | None = None
        if is_cut(site, model):
            mesh = self._mesh(site, kind_of(model))
            host = None if mesh is None else open_on_mesh(site.model, model, site.uses, mesh, seed=seed)
        elif self._board.rank in site.ranks:
            host = TorchEngine().open(site.model, self._devices.placed(model), site.uses, seed=seed)
        if host is not None:
            opened = _torch(host)
            opened.team = team
            _writes_when_asked(opened.module)
        return host

    def elsewhere(self, name: str, model: Model, *, seed: int) -> Host:
        return cast(Host, _Elsewhere(name, model, seed))

    def shares_rows(self, site: Site) -> bool:
        return len(site.ranks) > 1 and "generate" not in site.uses

    def handover(self, source: Site, target: Site) -> str:
        return (
            self._edges.how(source, target)
            if self.brings(source, target)
            else "gathered whole on the source's ranks, copied through shared memory"
        )

    def connect(self, edges: Sequence[tuple[Site, Site]]) -> None:
        direct = [edge for edge in edges if self.brings(*edge)]
        if direct:
            self._begin()
            self._edges.connect(direct)

    def brings(self, source: Site, target: Site) -> bool:
        return not self.shares_rows(target)  # into whole copies, in place; a target in shards gathers its own part

    def bring(self, source: Site, giver: Host | None, target: Site, taker: Host | None, version: int) -> int:
        given, taken = (None if host is None else _torch(host) for host in (giver, taker))
        with _brought(given, writes=False), _brought(taken, writes=True):
            return self._edges.run(source, given, target, taken, version)

    def export(self, host: Host, *, keep: bool) -> dict[str, np.ndarray]:
        giver = _torch(host)
        weights = giver.weights
        if not isinstance(weights, MeshWeights) and not keep:
            return {}
        with giver.brought(writes=False):
            if not isinstance(weights, MeshWeights):
                return weights.export()
            weights.keeps = keep
            try:
                found = weights.export()
            finally:
                weights.keeps = True
        return found if keep else {}

    def load(self, host: Host, weights: Mapping[str, np.ndarray], version: int) -> int:
        taker = _torch(host)
        with taker.brought(writes=True):
            taker.weights.load(weights)
        taker.version = version
        return sum(array.nbytes for array in weights.values())

    def blend(self, host: Host, weights: Mapping[str, np.ndarray], decay: float) -> None:
        taker = _torch(host)
        own = taker.weights
        with taker.brought(writes=True):
            masters = {name: _laid_as(taker, name, array) for name, array in weights.items() if name in own.masters}
            buffers = {name: torch.from_numpy(np.array(weights[name])) for name in own.buffers if name in weights}
            own.blend(cast(Any, SimpleNamespace(name="of another site", masters=masters, buffers=buffers)), decay)
        taker.version += 1

    def close(self) -> None:
        for mesh in self._meshes.values():
            if mesh is not None:
                mesh.close()
        self._meshes.clear()
        self._edges.close(lambda: self._meet_all("unmapped", range(self._board.world)))
        if self._has_group and dist.is_initialized():
            self._part()
            dist.destroy_process_group()
        self._edges = Edges(self._board, self._devices)
        self._has_group, self._store = False, None

    def _part(self) -> None:
        """Rank 0 holds the store, so it is the last to leave: others may still write a model together."""
        self._meet_all("left", range(1, self._board.world) if self._board.rank == 0 else ())

    def _meet_all(self, what: str, ranks: Sequence[int]) -> None:
        """Say that this rank has come so far in its end, and wait for others. One that has failed is not waited for."""
        board, key = self._board, f"run{self._board.num_runs}/torch/{what}"
        board.post(f"{key}/{board.rank}", b"")
        try:
            board.get(
                [f"{key}/{rank}" for rank in ranks], timeout_s=self._timeout_s,
                what=lambda missing: f"for the end of {len(missing)} other ranks",
            )  # fmt: skip
        except FlowError:  # they have failed, and said so: nobody needs what is left
            return

    # --------------------------------------------------------------------------------------------------------- inside

    def _mesh(self, site: Site, device: str) -> RankMesh | None:
        """The process groups of a site; sites that lie alike share them. Every rank of the job comes here for each."""
        self._begin()
        key = (site.ranks, site.layout, device)
        if key not in self._meshes:
            place = self._devices.own() if device == "cuda" else torch.device(device)
            self._meshes[key] = RankMesh.join(
                site.layout, f"{site.ranks[0]}-{site.ranks[-1]}:{site.layout}", device=place, ranks=site.ranks,
                patience=Patience(timeout_s=self._timeout_s),
            )  # fmt: skip
        return self._meshes[key]

    @property
    def _timeout_s(self) -> float:
        return self._board.timeout_s

    def _team(self, site: Site, model: Model) -> Team | None:
        """The ranks that share the vLLM engine of this one. Every rank of the job comes here for each site."""
        layout, rank = site.layout, self._board.rank
        if "generate" not in site.uses or model.sampler != "vllm":
            return None
        if layout.tp > 1:
            self._begin()  # they meet in its store
        if rank not in site.ranks:
            return None
        members = site.team_of(rank)
        return Team(
            members.index(rank), len(members), self._devices.own().index or 0,
            f"run{self._board.num_runs}/{site.name}/{members[0]}", self._store if len(members) > 1 else None, self._timeout_s,
        )  # fmt: skip

    def _begin(self) -> None:
        """The job's process group, which all ranks join together, by a store that rank 0 holds."""
        if self._has_group:
            return
        if dist.is_initialized():
            raise EngineError(
                "torch.distributed has a process group already, and the ranks of a plan make one of their own; leave "
                "init_process_group out, or call destroy_process_group before"
            )
        board, wait = self._board, timedelta(seconds=MEET_S)
        key = f"run{board.num_runs}/torch"
        if interface := interface_of(board.address):  # the loop where all ranks are on one host
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        is_first = board.rank == 0
        if is_first:
            store = TCPStore(board.address, 0, board.world, is_master=True, timeout=wait, wait_for_workers=False)
            board.post(key, f"{board.address} {store.port}".encode())
        else:
            (found,) = board.get([key], timeout_s=MEET_S, what=lambda _: "for rank 0, which opens the job's store")
            address, _, port = found.decode().partition(" ")
            store = TCPStore(address, int(port), board.world, is_master=False, timeout=wait)
        self._devices.take()
        self._devices.meet(MEET_S)
        dist.init_process_group(
            self._devices.backend, store=store, rank=board.rank, world_size=board.world,
            timeout=timedelta(seconds=self._timeout_s),
        )  # fmt: skip
        self._has_group, self._store = True, store


class _Elsewhere:
    """A model that other ranks hold: rows that come as text are encoded here as there."""

    version = 0
    device = ""
    max_context: int | None = None

    def __init__(self, name: str, model: Model, seed: int) -> None:
        self.name = name
        self._model, self._seed = model, seed

    @cached_property
    def tokenizer(self) -> Tokenizer:
        model = self._model
        if isinstance(model.source, str | Path):
            from transformers import AutoConfig

            from flowrl.engines.mesh.sources import empty_module

            place = find_pretrained(self.name, model.source)
            if "gguf_file" not in place.options:
                module: nn.Module = empty_module(self.name, AutoConfig.from_pretrained(place.path, **place.options))
                return tokenizer_of(self.name, model, module, place)[0]
        return load(self.name, replace(model, device="cpu"), seed=self._seed, trains=False).tokenizer

    def close(self) -> None:
        pass


def is_cut(site: Site, model: Model) -> bool:
    """Whether no rank of a site has all of the model."""
    if "generate" not in site.uses:
        return len(site.ranks) > 1
    return site.layout.tp > 1 and model.sampler == "transformers"


def _writes_when_asked(module: nn.Module) -> None:
    """Transformers writes a model on rank 0 of a job only, and passes over others without a word. Here whoever is asked writes:
    one rank of those that hold the model."""
    if hasattr(module, "should_save_on_this_rank"):
        module.should_save_on_this_rank = lambda is_main_process: is_main_process  # type: ignore[assignment]


def _brought(host: TorchHost | None, *, writes: bool) -> AbstractContextManager[None]:
    return nullcontext() if host is None else host.brought(writes=writes)


def _laid_as(host: TorchHost, name: str, array: np.ndarray) -> Tensor:
    return host.weights.placed(array, host.weights.masters[name])


def _torch(host: Host) -> TorchHost:
    if not isinstance(host, TorchHost):
        raise EngineError(f"the torch engine has torch models; '{host.name}' is a {type(host).__name__}")
    return host
