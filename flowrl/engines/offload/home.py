"""The state of one model: what of it may leave the device, and that nobody uses it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flowrl.engines.offload.memory import HostMemory
from flowrl.engines.offload.park import Parked
from flowrl.engines.weights import Weights
from flowrl.errors import EngineError


class Home:
    """Where the state of a model is.

    Args:
        weights: its parameters, buffers and masters.
        moments: the optimizer's state on the device, as it is then.
        device: that it works on.

    Example:
        home = Home("policy", weights, lambda: trainer.store.tensors(), device)
        home.offload()
        module(ids)                # EngineError: it is parked
        home.onload()
    """

    def __init__(
        self, name: str, weights: Weights, moments: Callable[[], Iterator[Tensor]], device: torch.device
    ) -> None:
        self.name, self.device = name, device
        self._module = weights.module
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.memory = HostMemory(device)
        own = {id(parameter) for parameter in weights.parameters.values()}

        def model() -> Iterator[Tensor]:
            yield from weights.parameters.values()
            yield from self._module.buffers()

        def training() -> Iterator[Tensor]:
            yield from (master for master in weights.masters.values() if id(master) not in own and not weights.leads)
            yield from weights.gradients().values()
            yield from moments()

        self.model = Parked(name, model, self.memory, device, faces=model)
        """Parameters and buffers."""
        self.training = Parked(name, training, self.memory, device)
        """Masters of their own, moments, gradients."""

    @property
    def is_here(self) -> bool:
        return self.model.is_here and self.training.is_here

    def offload(self, *, writes: bool = True, keep_model: bool = False) -> int:
        """All of it to the host, or what only training needs; bytes copied. Both begin before either is waited for."""
        leaving = [self.training, *(() if keep_model else (self.model,))]
        leaving = [parked for parked in leaving if parked.is_here]
        copied = 0
        for parked in leaving:
            copied += parked.begin_offload(writes=writes)
        for parked in leaving:
            parked.finish()
        if not self.model.is_here and not self._hooks:
            self._guard()
        return copied

    def onload(self, *, training: bool = True) -> int:
        """All of it to the device, or without what only training needs; bytes copied."""
        coming = [parked for parked in (self.model, self.training) if not parked.is_here]
        if not training:
            coming = [parked for parked in coming if parked is self.model]
        copied = 0
        for parked in coming:
            copied += parked.begin_onload()
        for parked in coming:
            parked.finish()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        return copied

    def require(self, what: str, *, training: bool = False) -> None:
        """Errors: EngineError when the model, or what training needs, is not on the device."""
        if not self.model.is_here or (training and not self.training.is_here):
            raise EngineError(
                f"model '{self.name}' is parked in host memory, and {what} needs it on {self.device}; bring it back first "
                "(onload(), or an onload step of the plan before this one)"
            )

    @contextmanager
    def brought(self, *, writes: bool, training: bool = True) -> Iterator[None]:
        """On the device inside; then again where it was.

        Args:
            writes: whether it is changed inside.
            training: whether what only training needs is brought too.
        """
        was_model, was_training = self.model.is_here, self.training.is_here
        self.onload(training=training)
        try:
            yield
        finally:
            if not was_model or not was_training:
                self.offload(writes=writes, keep_model=was_model)

    def close(self) -> None:
        """Give host memory back. What is parked is lost."""
        self.memory.trim()

    def _guard(self) -> None:
        """No module with parameters of its own may be called: one inside may be used without the model."""

        def refuse(module: nn.Module, args: object) -> None:
            self.require(f"a call of {type(module).__name__}")

        for part in self._module.modules():
            if part is self._module or next(part.parameters(recurse=False), None) is not None:
                self._hooks.append(part.register_forward_pre_hook(refuse, prepend=True))
