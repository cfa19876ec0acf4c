"""Checks of a run: some boxes hashed at both ends, or every element against whole tensors made another way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowrl.engines.reshard.copies import CopyList, view_of
from flowrl.engines.reshard.program import Program
from flowrl.engines.reshard.sampling import Sample, Sampler
from flowrl.errors import EngineError

Oracle = Callable[[str], Tensor]
"""Name of a tensor -> all of it. All ranks ask for the same names in the same order."""


class Digests:
    """Numbers of the bits of sampled boxes at this device's ends; equal for equal bits at equal places.

    All samples are copied into the rows of one buffer first, so that a few kernels do for all of them.

    [Note: Samples are drawn while others wait] Which boxes a run checks, and their views, take as long to make in Python as a
    small model takes to arrive. So those of the next version are made while this one's weights are on their way (`prepare`), and
    the numbers come back to the host behind the weights, without a wait of their own.
    """

    def __init__(
        self,
        sampler: Sampler,
        device: int,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        at: torch.device,
    ) -> None:
        self._sampler, self._device, self._source, self._target, self._at = sampler, device, source, target, at
        self._bits: Tensor | None = None
        """[ends, words] int64: a row for each end that this device may have in a run."""
        self._next: _Prepared | None = None

    def prepare(self, version: int) -> None:
        """Make ready for a version; nothing is enqueued and no memory of the device is touched."""
        if self._bits is not None and (self._next is None or self._next.version != version):
            self._next = self._made(version, self._bits)

    @torch.no_grad()
    def start(self, version: int) -> Drawn:
        """Enqueue the hashing on the current stream."""
        bits = self._buffer()
        self.prepare(version)
        ready, self._next = self._next, None
        assert ready is not None
        used, odd = bits[: len(ready.places), : ready.width], self._odd[: ready.width]
        used.zero_()
        ready.copies.run()
        torch.sum(used.mul_(odd), 1, out=self._sums[: len(used)])  # wraps around; an odd factor loses no bit
        found = self._sums[: len(used)]
        if self._at.type != "cpu":
            self._on_host[: len(used)].copy_(found, non_blocking=True)
            found = self._on_host[: len(used)]
        return Drawn(ready.chosen, ready.places, found)

    def _buffer(self) -> Tensor:
        if self._bits is None:
            ends, words = 2 * self._sampler.most_samples, self._sampler.most_bytes // 8
            self._bits = torch.zeros(ends, words, dtype=torch.int64, device=self._at)
            self._odd = 2 * torch.arange(1, words + 1, dtype=torch.int64, device=self._at) + 1
            self._sums = torch.zeros(ends, dtype=torch.int64, device=self._at)
            self._on_host = torch.zeros(ends, dtype=torch.int64, pin_memory=self._at.type == "cuda")
        return self._bits

    def _made(self, version: int, bits: Tensor) -> _Prepared:
        chosen = self._sampler.draw(version)
        ends: list[tuple[int, Tensor, torch.dtype]] = []
        for index, sample in enumerate(chosen):
            dtype = getattr(torch, sample.dtype)
            if sample.sender == self._device:
                given = self._target if sample.hop else self._source
                ends.append((2 * index, view_of(given, sample.source), dtype))
            if sample.receiver == self._device:
                ends.append((2 * index + 1, view_of(self._target, sample.target), dtype))
        width = -(-max((view.numel() * dtype.itemsize for _, view, dtype in ends), default=8) // 8)
        pairs = []
        for row, (_, view, dtype) in zip(bits[: len(ends)].view(torch.uint8), ends, strict=True):
            pairs.append((row[: view.numel() * dtype.itemsize].view(dtype).view(view.shape), view))
        return _Prepared(version, chosen, tuple(place for place, *_ in ends), width, CopyList(pairs))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The samples of a run, with the copies into the buffer."""

    version: int
    chosen: tuple[Sample, ...]
    places: tuple[int, ...]
    width: int
    """Words of the longest."""
    copies: CopyList


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples whose hashes are on their way."""

    chosen: tuple[Sample, ...]
    places: tuple[int, ...]
    """Of each hash: twice the sample's number, and one more at the receiver's end."""
    sums: Tensor
    """On the host; there when the lanes are empty."""

    def numbers(self) -> list[int]:
        """Two numbers for each sample, of the sender's end and of the receiver's; 0 for an end that is elsewhere."""
        found = [0] * (2 * len(self.chosen))
        for place, number in zip(self.places, self.sums.tolist(), strict=True):
            found[place] = number
        return found


def compare(chosen: tuple[Sample, ...], numbers: Mapping[int, list[int]], edge: str) -> None:
    """Errors: EngineError that names the first box of which the two ends differ. `numbers` are by device."""
    for index, sample in enumerate(chosen):
        sent, arrived = numbers[sample.sender][2 * index], numbers[sample.receiver][2 * index + 1]
        if sent != arrived:
            raise EngineError(
                f"weights edge '{edge}': {sample.target} of {sample.tensor} on device {sample.receiver} is not what device "
                f"{sample.sender} sent; nothing may write to either side during a run"
            )


def compare_whole(program: Program, device: int, target: Mapping[str, Tensor], oracle: Oracle) -> int:
    """Compare all that a device holds, bit for bit; bytes compared. Asks the oracle for every tensor, also those it lacks.

    Errors: EngineError that names the first tensor that differs and how many of its elements do.
    """
    shelf = program.target.get(device)
    compared = 0
    for name, (_, dtype) in program.dtypes.items():
        whole = oracle(name)
        for slot in shelf.slots.get(name, ()) if shelf is not None else ():
            found = view_of(target, slot.region)
            expected = whole[tuple(slice(*interval) for interval in slot.box)].to(found.device, getattr(torch, dtype))
            differ = int((_bits(expected) != _bits(found)).sum())
            if differ:
                raise EngineError(
                    f"weights edge '{program.edge}': {differ} of {found.numel()} elements of {name} on device {device} differ "
                    "from the source's"
                )
            compared += found.numel() * found.element_size()
    return compared


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


class GatheredOracle:
    """Whole tensors from all ranks of a job: `full_tensor()` of DTensors; of plain shards, box by box from who holds them.

    Args:
        group: on it whole tensors are broadcast where some device has no part of the source; default: the job's.
    """

    def __init__(
        self,
        program: Program,
        device: int,
        source: Mapping[str, Tensor],
        *,
        on: torch.device,
        ranks: Mapping[int, int] | None = None,
        group: dist.ProcessGroup | None = None,
        is_dtensor: bool | None = None,
    ) -> None:
        self._program, self._device, self._source, self._on = program, device, source, on
        self._ranks = ranks or {one: one for one in program.devices}
        self._group = group
        self._is_dtensor = (
            any(isinstance(one, DTensor) for one in source.values()) if is_dtensor is None else is_dtensor
        )
        """Of the source, on every rank, also on one that has no part of it."""
        self._shapes = _whole_shapes(program)

    def __call__(self, name: str) -> Tensor:
        given = self._source.get(name)
        dtype = getattr(torch, self._program.dtypes[name][0])
        if self._is_dtensor:
            whole = given.full_tensor() if isinstance(given, DTensor) else None
            if set(self._program.source) >= set(self._program.devices) and whole is not None:
                return whole
            root = min(device for device, shelf in self._program.source.items() if name in shelf.slots)
            made = (
                torch.empty(self._shapes[name], dtype=dtype, device=self._on) if whole is None else whole.contiguous()
            )
            dist.broadcast(made, self._ranks[root], group=self._group)
            return made
        made = torch.empty(self._shapes[name], dtype=dtype, device=self._on)
        seen = set()
        for device, shelf in self._program.source.items():
            for slot in shelf.slots.get(name, ()):
                if slot.box in seen:
                    continue
                seen.add(slot.box)
                part = torch.empty(slot.region.shape, dtype=dtype, device=self._on)
                if device == self._device:
                    part.copy_(view_of(self._source, slot.region))
                dist.broadcast(part, self._ranks[device], group=self._group)
                made[tuple(slice(*interval) for interval in slot.box)] = part
        return made


def _whole_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for shelf in program.source.values():
        for name, slots in shelf.slots.items():
            for slot in slots:
                before = found.get(name, (0,) * len(slot.box))
                found[name] = tuple(max(size, stop) for size, (_, stop) in zip(before, slot.box, strict=True))
    return found
