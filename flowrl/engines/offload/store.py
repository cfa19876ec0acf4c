"""What a trainer asks of its optimizer, wherever that keeps its state.

    none, park   ResidentAdamW   torch.optim.AdamW; all on the device (parked: it leaves between updates)
    sopt         StreamedAdamW   the device computes; masters and moments pass through it bucket by bucket
    opt          CpuAdamW        the CPU computes; gradients come to it, new weights go back

All take the same step. Resident and streamed ones on one device are equal to the bit; the CPU rounds in its own way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from flowrl.cost.offload import Offload
from flowrl.engines.offload.state import MOMENTS
from flowrl.engines.weights import Weights
from flowrl.errors import EngineError
from flowrl.model import AdamW


class OptimizerStore(Protocol):
    """AdamW over the trained parameters of one model."""

    def step(self, rate: float) -> None:
        """One step with the gradients that the weights hold. Masters and module have the new weights when it returns; on a
        device, work enqueued later sees them."""
        ...

    def entries(self) -> dict[str, dict[str, Any]]:
        """Of each parameter that has moved, by name: `step`, a number, and the moments, laid out as its master."""
        ...

    def load(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Take entries whose moments are laid out as the masters are; parameters left out start anew."""
        ...

    def held(self) -> dict[str, dict[str, Tensor]]:
        """Of every trained parameter `step` and moments, laid out as its master: its own memory where it can be, to be read from
        and written into. What is not there yet is made, of zeros."""
        ...

    def took(self, held: Mapping[str, Mapping[str, Tensor]]) -> None:
        """After others have written into what `held` gave."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """Its state on the device."""
        ...

    @property
    def host_bytes(self) -> int:
        """Host memory that it keeps, whether a step runs or not."""
        ...


class ResidentAdamW:
    """`torch.optim.AdamW`, beside the masters."""

    def __init__(self, weights: Weights, options: AdamW) -> None:
        self._weights = weights
        self._masters = weights.trained()
        device = next(iter(self._masters.values())).device
        self.optimizer = torch.optim.AdamW(
            list(self._masters.values()),
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=device.type in ("cpu", "cuda"),
        )

    def step(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._weights.publish()

    def entries(self) -> dict[str, dict[str, Any]]:
        held = self.optimizer.state
        return {
            name: {"step": float(held[m]["step"]), **{key: held[m][key] for key in MOMENTS}}
            for name, m in self._masters.items()
            if held.get(m)
        }

    def load(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self.optimizer.state.clear()
        for name, entry in entries.items():
            master = self._masters[name]
            step = torch.tensor(float(entry["step"]), dtype=torch.float32, device=master.device)
            self.optimizer.state[master] = {"step": step, **{key: entry[key] for key in MOMENTS}}

    def held(self) -> dict[str, dict[str, Tensor]]:
        state = self.optimizer.state
        for master in self._masters.values():
            if not state.get(master):
                state[master] = {
                    "step": torch.zeros((), dtype=torch.float32, device=master.device),
                    **{key: torch.zeros_like(master, requires_grad=False) for key in MOMENTS},
                }
        return {name: dict(state[master]) for name, master in self._masters.items()}

    def took(self, held: Mapping[str, Mapping[str, Tensor]]) -> None:
        pass  # its own tensors were written into

    def tensors(self) -> Iterator[Tensor]:
        for entry in self.optimizer.state.values():
            yield from (value for value in entry.values() if isinstance(value, Tensor))

    @property
    def host_bytes(self) -> int:
        return 0


def open_store(weights: Weights, options: AdamW, precision: torch.dtype, offload: Offload) -> OptimizerStore | None:
    """The optimizer of a model, made before anything trains; None for a resident one, which needs nothing made.

    With another one the weights get their masters here, in host memory.

    Errors: EngineError for a class of offload that this engine lacks, a device other than a CPU or a CUDA GPU, and those of
    `HostState`.
    """
    from flowrl.engines.offload.on_cpu import CpuAdamW
    from flowrl.engines.offload.streamed import StreamedAdamW

    match offload:
        case Offload.NONE | Offload.PARK:
            return None
        case Offload.STREAM_OPTIMIZER:
            return StreamedAdamW.over(weights, options, precision)
        case Offload.CPU_OPTIMIZER:
            return CpuAdamW.over(weights, options, precision)
        case Offload.STREAM_ALL:
            raise EngineError(
                f"model '{weights.name}' asks for offload='all', weights that stream in layer by layer, which the torch engine "
                "does not do; use 'sopt' (the optimizer streams), 'opt' (the CPU computes it) or 'park'"
            )
