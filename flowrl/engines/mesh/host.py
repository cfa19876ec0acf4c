"""A model on a mesh of ranks: scores, trains and samples as `TorchHost` does on one device, with the same numbers.

Every rank opens the model and makes the same calls with the same rows, in the same order; every rank gets the whole answer.

[Note: Copies sample by themselves]
Sampling takes as many steps as the longest response of a batch has tokens, which differs from batch to batch. So ranks that
sample meet nobody but their tp group: `generate` is called by the ranks of a tp group with the same requests, and each group
has requests of its own. A layout with fsdp, whose ranks gather every layer together, cannot sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from flowrl.engines import saved
from flowrl.engines.forward import Forward
from flowrl.engines.host_torch import PRECISIONS, TorchHost, check_uses, refuse_untrained
from flowrl.engines.loading import Loaded, find_pretrained, load, tokenizer_of
from flowrl.engines.mesh.passes import Passes
from flowrl.engines.mesh.ranks import RankMesh
from flowrl.engines.mesh.sharding import Precision, shard
from flowrl.engines.mesh.shares import nothing, shared_blocks
from flowrl.engines.mesh.sources import Safetensors, Source, empty_module, missing, safetensors_files
from flowrl.engines.mesh.trainer import MeshTrainer
from flowrl.engines.mesh.vocabulary import VocabularyForward
from flowrl.engines.mesh.weights import MeshWeights
from flowrl.engines.packing import Batch
from flowrl.engines.protocol import Host, Sampled, SampleRequest, SamplingOptions, TokenRows
from flowrl.errors import ConfigError, EngineError
from flowrl.model import Model


def open_on_mesh(name: str, model: Model, uses: frozenset[str], mesh: RankMesh, *, seed: int) -> MeshHost:
    """Load a model and cut it for the ranks of a mesh. Every rank of the mesh calls this.

    A language model in safetensors files is read layer by layer. Any other source is built whole on the host of each rank, and
    only its shards reach the device.

    Errors: those of `TorchEngine.open`; ConfigError for a layout that does not cut the model, or cannot do what it is used for.
    """
    check_uses(name, model, uses)
    if "generate" in uses:
        _check_samples(name, model, mesh)
    loaded, source = _on_host(name, model, uses, seed)
    try:
        refuse_untrained(name, model, loaded, uses)
        return MeshHost(name, model, loaded, uses, mesh, source=source)
    finally:
        if source is not None:
            source.close()


def _on_host(name: str, model: Model, uses: frozenset[str], seed: int) -> tuple[Loaded, Safetensors | None]:
    """The module on the host; with a source, its parameters are on the meta device."""
    if model.head == "lm" and isinstance(model.source, str | Path):
        place = find_pretrained(name, model.source)
        files = safetensors_files(place.path)
        if files and "gguf_file" not in place.options:
            from transformers import AutoConfig

            module = empty_module(name, AutoConfig.from_pretrained(place.path, **place.options))
            source = Safetensors(files, str(getattr(module, "base_model_prefix", "")))
            if not missing(module, source):  # else the files use other names, which Transformers translates
                tokenizer, hf_tokenizer = tokenizer_of(name, model, module, place)
                return Loaded(module, tokenizer, hf_tokenizer, new_head=False), source
            source.close()
    return load(name, replace(model, device="cpu"), seed=seed, trains="update" in uses), None


class MeshHost(TorchHost):
    """One model on a mesh. See `flowrl.engines.protocol.Host`."""

    FORWARD = VocabularyForward
    weights: MeshWeights

    def __init__(
        self,
        name: str,
        model: Model,
        loaded: Loaded,
        uses: frozenset[str],
        mesh: RankMesh,
        *,
        source: Source | None = None,
    ) -> None:
        self.mesh = mesh
        wanted, trains = PRECISIONS[model.precision], "update" in uses
        # what trains is stored in fp32, its masters, and gathered in the precision asked for; what is frozen needs no masters
        if trains:
            precision = Precision(torch.float32, frozen=wanted, compute=None if wanted == torch.float32 else wanted)
        else:
            precision = Precision(wanted)
        self.sharded = shard(name, loaded.module, mesh, source=source, precision=precision)
        super().__init__(name, model, loaded, uses)
        if self._sampler is not None:
            self.sharded.keep_gathered()  # else each token would gather every layer anew

    def _make_weights(self) -> MeshWeights:
        return MeshWeights(self.name, self.module, self.mesh, compute=PRECISIONS[self.spec.precision])

    def _make_forward(self) -> Forward:
        what = f"the first forward passes of model '{self.name}'"
        with self.mesh.guard.waiting(what), torch.no_grad():
            forward = self.sharded.call(super()._make_forward)
        self.sharded.release()
        # probes compare floats: ranks must not decide differently
        found = self.mesh.exchange((forward.split, forward.shares_prompts, forward.packs), what)
        if len({split for split, _, _ in found}) > 1:
            raise EngineError(f"model '{self.name}' gives other hidden states on some ranks than on others: {found}")
        forward.shares_prompts = all(shares for _, shares, _ in found)
        forward.packs = all(packs for _, _, packs in found)
        self.passes = Passes(forward)
        return forward

    def _layers(self) -> Sequence[torch.nn.Module]:
        return self.sharded.layers

    def _make_trainer(self) -> MeshTrainer:
        return MeshTrainer(
            self.forward,
            self.weights,
            self.spec.optimizer,
            self.sharded,
            self.passes,
            micro_batch_tokens=self.spec.micro_batch_tokens,
            max_context=self._context,
            store=self._store,
        )

    # --- sampling ----------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[SampleRequest], options: SamplingOptions) -> list[Sampled]:
        """As on one device, on the ranks of a tp group; see [Note: Copies sample by themselves].

        Errors: those of `TorchHost.generate`; EngineError for a model that was not opened to sample here.
        """
        if self._sampler is None:
            raise EngineError(f"model '{self.name}' was not opened for 'generate'; it has no sampler")
        with self.mesh.guard.waiting(f"responses of model '{self.name}'"), torch.no_grad():
            found: list[Sampled] = self.sharded.call(super().generate, requests, options)
        self.sharded.release()
        return found

    # --- forward passes ----------------------------------------------------------------------------------------------

    def _blocks(self, lengths: np.ndarray, budget: int, units: np.ndarray | None) -> Iterable[np.ndarray]:
        return shared_blocks(lengths, budget, self.mesh.data_size, self.mesh.data_rank, groups=units)

    def _batches(self, rows: TokenRows, *, whole: bool = False) -> list[Batch]:
        self.passes.expect(rows.prompt_ids, whole=whole)
        found = super()._batches(rows, whole=whole)
        return [batch if len(batch.rows) else nothing() for batch in found]

    @torch.no_grad()
    def _run(self, function: Any, *args: Any) -> Any:
        with self.mesh.guard.waiting(f"a forward pass of model '{self.name}'"):
            return self.sharded.call(self.passes.around, function, *args)

    def _joined(self, found: np.ndarray) -> np.ndarray:
        self.sharded.release()
        return self.mesh.total(found, f"what the other ranks found with model '{self.name}'")

    # --- state -------------------------------------------------------------------------------------------------------

    def full_state(self, *, keep_on: int | None = None) -> dict[str, Any]:
        """As `TorchHost.state`, of whole arrays; every rank calls it.

        Args:
            keep_on: the rank that gets them, the others get empty arrays in their place; None: all of them.
        """
        self.weights.keeps = keep_on is None or keep_on == self.mesh.rank
        try:
            return super().state()
        finally:
            self.weights.keeps = True

    def state(self) -> dict[str, Any]:
        """Whole arrays on every rank; see `full_state` to have them on one, and `rank_state` to move nothing."""
        return self.full_state()

    def rank_state(self) -> dict[str, Any]:
        """What this rank holds, nothing gathered: DTensors by parameter name, for torch.distributed.checkpoint.

        Made to be loaded into: optimizer state that is not there yet is made, of zeros.
        """
        self.onload()
        state: dict[str, Any] = {
            "weights": {name: master.detach() for name, master in self.weights.masters.items()},
            "buffers": dict(self.weights.buffers),
            "counters": {"version": self.version, "steps": self.trainer.steps if self.trainer else 0},
        }
        if self.trainer is not None:
            state["optimizer"] = self.trainer.store.held()
        return state

    def restored(self, state: Mapping[str, Any]) -> None:
        """After `torch.distributed.checkpoint.load` has filled what `rank_state` gave, in place: take its counters."""
        counters = state["counters"]
        self.version = int(counters["version"])
        if self.trainer is not None:
            self.trainer.steps = int(counters["steps"])
            self.trainer.store.took(state["optimizer"])

    def write_state(self, path: str, *, is_first: bool = True) -> None:
        """As of `TorchHost`; every rank of the mesh calls it, and each writes its own part."""
        first = self.mesh.rank == 0
        with self._home.brought(writes=False), self.mesh.guard.waiting(f"a checkpoint of model '{self.name}'"):
            saved.write(self, Path(path), group=self.mesh.control, is_first=first)

    def read_state(self, path: str) -> None:
        """As of `TorchHost`, also what another layout, or one process, has written; every rank of the mesh calls it."""
        self.onload()
        self._is_changed = True
        with self.mesh.guard.waiting(f"a checkpoint of model '{self.name}'"):
            saved.read(self, Path(path), group=self.mesh.control)

    def model(self) -> NoReturn:
        """Not here: a sharded module cannot be opened elsewhere. Errors: EngineError, always."""
        raise EngineError(
            f"model '{self.name}' lies in shards on {len(self.mesh.ranks)} ranks; save it and open the folder, or take "
            "full_state()"
        )

    def _save(self, folder: Path) -> None:
        """Every rank calls it, and the first one writes."""
        names = {id(param): name for name, param in self.weights.parameters.items()}
        whole: dict[str, Tensor] = {}
        writes = self.mesh.rank == 0
        gathered = {}
        for name, tensor in (*self.weights.parameters.items(), *self.weights.buffers.items()):
            value = self.weights.whole(tensor)
            if writes:
                gathered[name] = value.to("cpu", PRECISIONS[self.spec.precision] if value.is_floating_point() else None)
        if writes:
            for name, tensor in self.module.state_dict(keep_vars=True).items():
                whole[name] = gathered[names.get(id(tensor), name)]
            self._write(folder, whole)
        self.mesh.exchange(None, f"rank 0, which writes model '{self.name}' to {folder}")

    def blend(self, source: Host, decay: float) -> None:
        """As `TorchHost.blend`. Errors: EngineError when the source lies on its ranks in another way."""
        if not isinstance(source, MeshHost):
            raise EngineError(
                f"model '{self.name}' lies on a mesh and takes weights from models on the same one; '{source.name}' is elsewhere"
            )
        super().blend(source, decay)


def _check_samples(name: str, model: Model, mesh: RankMesh) -> None:
    """Errors: ConfigError where a mesh cannot sample."""
    if mesh.layout.fsdp > 1:
        raise ConfigError(
            f"model '{name}' samples on layout {mesh.layout}, whose {mesh.layout.fsdp} fsdp ranks would gather every layer for "
            f"every token; use a layout of dp and tp, as d{mesh.layout.size}"
        )
    if model.sampler != "transformers":
        raise ConfigError(
            f"model '{name}' lies on a mesh, where the sampler is 'transformers'; found '{model.sampler}', which keeps the "
            "weights in a way of its own"
        )
