"""Cuts a module for the ranks of a mesh: tensor parallelism first, then FSDP2, layer by layer.

    Root                         gathered once for a whole micro-batch: last norm, head, a tied embedding
      layers.0 ... layers.N-1    each gathered when it runs, in forward and backward
      embedding                  the same, unless it is tied to the head

[Note: The root runs a function]
A forward pass here is more than one call of one module: the backbone runs once (or twice, see `flowrl.engines.prefix`), the
head in slices, and a loss follows. FSDP2 wants one module whose forward encloses everything. So the root's forward takes
the function that does all of it, and calls it: hooks, gathers and the end of the backward pass are then those of one
module, and nothing that runs inside needs to know of sharding. The head lies in the root's own group, so it makes no
collectives of its own: ranks may call it as often as their rows need.

[Note: One layer at a time]
A layer's values are read on the host, put on the device, cut and freed before the next one is read. No rank ever holds more
of a model on its device than its shard and one whole layer, which training gathers too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from flowrl.engines.mesh.plans import cut_layer, cut_rest, cut_vocabulary, family_of
from flowrl.engines.mesh.ranks import RankMesh
from flowrl.engines.mesh.sequence import cut_sequence
from flowrl.engines.mesh.sources import Source, StateDict, materialise
from flowrl.engines.modules import output_layer, repeated_layers
from flowrl.errors import ConfigError

T = TypeVar("T")


class Root(nn.Module):
    """See [Note: The root runs a function]."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, call: Callable[[], T]) -> T:
        return call()


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """A module whose parameters lie on the ranks of a mesh as DTensors."""

    module: nn.Module
    root: Root
    layers: tuple[nn.Module, ...]
    mesh: RankMesh

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call what runs the module or parts of it. Every rank must, with as many passes of the backbone inside."""
        found: T = self.root(lambda: function(*args))
        return found

    def release(self) -> None:
        """Free what is still gathered: after passes without a backward pass, which would do so."""
        for part in self._parts():
            part.reshard()

    def keep_gathered(self) -> None:
        """From now on a layer that was gathered stays so until `release`: for calls that run it many times."""
        for part in self._parts():
            part.set_reshard_after_forward(False, recurse=False)

    def add_over_copies(self, does: bool) -> None:
        """Whether the next backward passes add gradients over dp: only the last of an optimizer step needs to, the others add
        over fsdp alone."""
        if self.mesh.layout.dp > 1:
            for part in self._parts():
                part.set_requires_all_reduce(does, recurse=False)

    def _parts(self) -> Iterator[FSDPModule]:
        return (part for part in self.root.modules() if isinstance(part, FSDPModule))


@dataclass(frozen=True, slots=True)
class Precision:
    """Types of numbers."""

    stored: torch.dtype | None = None
    """Of the sharded parameters, which the optimizer moves; None leaves them as they are."""
    frozen: torch.dtype | None = None
    """Of sharded parameters that do not train; None: as `stored`."""
    compute: torch.dtype | None = None
    """Of gathered parameters; None: as stored."""
    reduce: torch.dtype = torch.float32
    """In which gradients are added over ranks."""


def shard(
    name: str,
    module: nn.Module,
    mesh: RankMesh,
    *,
    source: Source | None = None,
    precision: Precision | None = None,
) -> Sharded:
    """Cut a module in place. Nothing is sent between ranks: each reads what it needs.

    Args:
        name: of the model, in errors.
        module: on the host, with values; or with parameters on the meta device, whose values `source` has.
        source: tensors by the names of the module's state dict; those it lacks come from the module.

    Errors: ConfigError for a family that tp does not know or heads that it does not divide; EngineError for missing values.
    """
    precision = precision or Precision()
    family = family_of(name, module, mesh.layout.tp) if mesh.layout.tp > 1 else None
    source = source or StateDict({})
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute, reduce_dtype=precision.reduce if precision.compute is not None else None
    )
    options: dict[str, Any] = {"mesh": mesh.shard_axes, "mp_policy": policy}
    layers = tuple(find_layers(name, module))
    if family is not None and family.sequence is not None:
        cut_sequence([layer for _, layer in layers], *family.sequence, mesh.tp_axis)
    for path, layer in layers:
        materialise(layer, f"{path}.", source, mesh.device, precision.stored, precision.frozen)
        if family is not None:
            cut_layer(layer, family, mesh.tp_axis)
        fully_shard(layer, **options)
    materialise(module, "", source, mesh.device, precision.stored, precision.frozen)
    if family is not None:
        cut_vocabulary(module, mesh.tp_axis)
        cut_rest(module, mesh.tp_axis)
    embedding = _lone_embedding(module)
    if embedding is not None:
        fully_shard(embedding, **options)
    root = Root(module)
    root.train(module.training)
    fully_shard(root, **options)
    found = Sharded(module, root, tuple(layer for _, layer in layers), mesh)
    for part in found._parts():
        part.set_gradient_divide_factor(1.0)  # gradients are sums: every token has its weight already
        part.set_force_sum_reduction_for_comms(True)
        if hasattr(part, "set_reduce_scatter_unused_params"):
            part.set_reduce_scatter_unused_params(
                True
            )  # a parameter that one rank's rows do not reach is reached elsewhere
    return found


def find_layers(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """`repeated_layers`. Errors: ConfigError when there are none."""
    found = repeated_layers(module)
    if not found:
        raise ConfigError(
            f"model '{name}': a {type(module).__name__} has no list of layers that could be gathered one by one; give a "
            "Transformers-like module (layers in an nn.ModuleList), or run it on one device"
        )
    return found


def _lone_embedding(module: nn.Module) -> nn.Module | None:
    """The embedding, when it is a module of its own that shares nothing with the head."""
    ask: Any = getattr(module, "get_input_embeddings", None)
    embedding: Any = ask() if callable(ask) else None
    if not isinstance(embedding, nn.Module) or not any(True for _ in embedding.parameters()):
        return None
    head = output_layer(module)
    mine = {id(param) for param in embedding.parameters()}
    others = set() if head is None else {id(param) for param in head.parameters()}
    return None if mine & others else embedding
