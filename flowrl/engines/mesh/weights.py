"""The parameters of a sharded module by name: whole where asked, else what each rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowrl.engines.mesh.ranks import RankMesh, local_part, whole_of
from flowrl.engines.weights import Weights, to_numpy
from flowrl.errors import EngineError


class MeshWeights(Weights):
    """Weights whose tensors are DTensors. Every rank calls what gives or takes whole tensors, in the same order."""

    def __init__(self, name: str, module: nn.Module, mesh: RankMesh, *, compute: torch.dtype) -> None:
        super().__init__(name, module)
        self.mesh = mesh
        self.keeps = True
        """Whether `array` keeps what it gathers; a rank that does not only takes part."""
        self._compute = compute

    @property
    def dtype(self) -> torch.dtype:
        """That the module computes in; it is stored in the masters' type."""
        return self._compute

    def make_masters(self, dtype: torch.dtype) -> None:
        """The sharded parameters are the masters already: they are rounded when they are gathered."""
        if dtype != torch.float32:
            params = [param for param in self.parameters.values() if param.is_floating_point()]
            trained = [param for param in params if param.requires_grad] or params
            kept = {param.dtype for param in trained}
            if kept != {torch.float32}:
                raise EngineError(
                    f"model '{self.name}' was sharded for scoring, in {', '.join(map(str, kept))}; it has no fp32 masters to "
                    "train or average; open it for 'update'"
                )
            self.has_masters = True

    def array(self, tensor: Tensor) -> np.ndarray:
        found = self.whole(tensor)
        return to_numpy(found) if self.keeps else np.zeros(0, np.float32)

    def placed(self, array: np.ndarray, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return super().placed(array, like)
        placed = torch.empty_like(like, requires_grad=False)
        self.fill(placed, torch.from_numpy(np.array(array)))
        return placed

    def fill(self, tensor: Tensor, whole: Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(local_part(whole, tensor))
        else:
            tensor.copy_(whole)

    def whole(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        with self.mesh.guard.waiting(f"a whole parameter of model '{self.name}'"):
            return whole_of(tensor)

    def blend(self, source: Weights, decay: float) -> None:
        others: Mapping[str, Any] = source.masters
        for name, master in self.masters.items():
            theirs = others.get(name)
            if theirs is None:
                continue  # named by `match`, with what is near
            if getattr(theirs, "placements", None) != getattr(master, "placements", None) or getattr(
                theirs, "device_mesh", None
            ) != getattr(master, "device_mesh", None):
                raise EngineError(
                    f"model '{self.name}' and model '{source.name}' lie on their ranks in other ways ('{name}'), so one cannot "
                    "be blended into the other in place; give both one mesh and layout, or reshard first"
                )
        super().blend(source, decay)
