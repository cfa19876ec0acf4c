"""Runs the program of a weights edge on one device, step after step.

[Note: What a failed run leaves]
Parameters are written in place while a run goes on, so that a run that fails leaves some of the old weights and some of the new.
The target is then stale: `check` raises, and no further run is taken but one with verify="full", which compares every element
and, when it passes, makes the target whole again. All ranks decide alike: the version is set only after every one of them said
that its part arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowrl.engines.reshard.control import Control
from flowrl.engines.reshard.copies import CopyList, Fills, bytes_of, in_slot, view_of
from flowrl.engines.reshard.device import Bucket, Message, buckets_of
from flowrl.engines.reshard.lanes import lanes_for
from flowrl.engines.reshard.program import Piece, Program
from flowrl.engines.reshard.sampling import Sampler
from flowrl.engines.reshard.slots import Region, Shelf
from flowrl.engines.reshard.transports import Stretch, Traffic, Transport
from flowrl.engines.reshard.verify import Digests, Drawn, Oracle, compare, compare_whole
from flowrl.errors import ConfigError, EngineError, StaleWeightsError, WaitTimeout

Verify = Literal["full", "sample", "off"]
MODES: tuple[Verify, ...] = ("off", "sample", "full")
NUM_SLOTS = 2


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run did on this device.

    Example:
        Ran(version=7, seconds=0.0061, sent_bytes=1133510656, received_bytes=1133510656, local_bytes=6482300928,
            num_buckets=9, verify="sample", num_checked=12)
    """

    version: int
    seconds: float
    """From the moment all devices were there until all had agreed."""
    sent_bytes: int
    received_bytes: int
    local_bytes: int
    num_buckets: int
    verify: Verify
    num_checked: int
    """Boxes hashed on both ends, on all devices; with verify="full" bytes compared on this device."""
    lanes_s: Mapping[str, float] = field(default_factory=dict)
    """On a GPU: seconds until each lane was empty, and until all was enqueued."""


class Resharder:
    """One device's end of a weights edge. All devices of the program make one, and call `run` together.

    Example:
        board = board_for(program.devices, rank, group=gloo)
        end = Resharder(program, rank, source=dict(trained.named_parameters()), target=dict(engine.named_parameters()),
                        transport=PeerCopyTransport(board, device=device, group=gloo), control=board)
        end.run(version=7)

    Args:
        device: number of this device in the program.
        source: local shards by name, DTensors or plain tensors; empty where the device holds nothing. May lie in pinned host
            memory, when the program was made with `is_on_host`.
        target: live parameters by the names of the engine's storage; they are written in place.
        rebuild: called after the weights have arrived and before the version is set: derived weights, ties, caches.
        oracle: whole tensors, for verify="full"; see `GatheredOracle`.
        timeout_s: how long the end of a run is waited for on a GPU.
    """

    def __init__(
        self,
        program: Program,
        device: int,
        *,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        transport: Transport,
        control: Control,
        rebuild: Callable[[], None] | None = None,
        oracle: Oracle | None = None,
        verify: Verify = "sample",
        timeout_s: float = 60.0,
    ) -> None:
        self.program, self.device = program, device
        self.version: int | None = None
        """Of the weights that are there; None before the first run."""
        self._stale = ""
        self._source = _locals(source, program.source.get(device), program, device, side=0)
        self._target = _locals(target, program.target.get(device), program, device, side=1)
        given = [(name, tensor) for side in (source, target) for name, tensor in side.items()]
        self._pointers = [(name, tensor, _held(tensor).data_ptr()) for name, tensor in given]
        self._transport, self._control = transport, control
        self._rebuild, self._oracle, self._verify, self._timeout_s = rebuild, oracle, verify, timeout_s
        self._at = self._place()
        self._lanes = lanes_for(self._at)
        self._digests = Digests(Sampler(program), device, self._source, self._target, self._at)
        self._slots = tuple(
            torch.empty(program.slot_bytes.get(device, 0), dtype=torch.uint8, device=self._at) for _ in range(NUM_SLOTS)
        )
        self._buckets = buckets_of(program, device)
        self._packs = tuple(CopyList(self._pack(one) for one in bucket.packs) for bucket in self._buckets)
        self._unpacks = tuple(CopyList(self._unpack(one) for one in bucket.unpacks) for bucket in self._buckets)
        self._local = CopyList(
            (view_of(self._target, copy.target), view_of(self._source, copy.source))
            for copy in program.copies.get(device, ())
        )
        shelf = program.target.get(device)
        self._fills = Fills(view_of(self._target, region) for region in (shelf.fills if shelf is not None else ()))
        transport.bind([self._traffic(bucket) for bucket in self._buckets])
        mine = [piece for piece in program.pieces if device in (piece.sender, piece.receiver)]
        self._sent_bytes = sum(piece.num_bytes for piece in mine if piece.sender == device)
        self._received_bytes = sum(piece.num_bytes for piece in mine if piece.receiver == device)
        self._local_bytes = sum(copy.num_bytes for copy in program.copies.get(device, ()))

    @property
    def is_stale(self) -> bool:
        return bool(self._stale)

    def check(self) -> None:
        """Errors: StaleWeightsError while the target does not hold one version of the weights."""
        if self._stale:
            raise StaleWeightsError(
                f"the weights that '{self.program.edge}' brings to device {self.device} are stale: {self._stale}; run the edge "
                'again with verify="full", when the cause is gone'
            )

    def run(self, version: int, *, verify: Verify | None = None) -> Ran:
        """Bring the source's weights to the target; all devices call this together, with equal arguments.

        Nothing may write to the source or read the target meanwhile. Returns when every device has all of it.

        Errors: WaitTimeout, EngineError; the target is stale then on all devices. StaleWeightsError, when it was stale already
        and `verify` is not "full".
        """
        mode = verify or self._verify
        if mode not in MODES:
            raise ConfigError(f"verify is one of {', '.join(MODES)}; found {mode!r}")
        if mode != "full":
            self.check()
        if mode == "full" and self._oracle is None:
            raise ConfigError('verify="full" compares with whole tensors; give the Resharder an oracle')
        self._control.begin()
        try:
            self._refuse_moved()
            self._agree(version, mode)
            began = time.perf_counter()
            self._stale = f"the run to version {version} has not ended"
            drawn, lanes_s = self._move(version, mode)
            if self._rebuild is not None:
                self._rebuild()
            num_checked = self._commit(version, mode, drawn)
        except BaseException as error:  # whatever it was, the target is neither old nor new; it is raised again
            self._stale = f"the run to version {version} failed: {str(error) or type(error).__name__}"
            self._control.fail()
            if not isinstance(error, Exception):
                raise
            kind = WaitTimeout if isinstance(error, WaitTimeout) else EngineError
            raise kind(
                f"weights edge '{self.program.edge}' to version {version} failed on device {self.device}: {error}"
            ) from error
        self.version, self._stale = version, ""
        return Ran(
            version, time.perf_counter() - began, self._sent_bytes, self._received_bytes, self._local_bytes,
            len(self._buckets), mode, num_checked, lanes_s,
        )  # fmt: skip

    # ---------------------------------------------------------------------------------------------------- a run

    def _agree(self, version: int, mode: Verify) -> None:
        """All are there, and want the same."""
        want = [version, MODES.index(mode)]
        found = self._control.exchange(want, f"the start of version {version} of '{self.program.edge}'")
        for device, one in zip(self.program.devices, found, strict=True):
            if one != want:
                raise EngineError(
                    f"weights edge '{self.program.edge}': device {device} runs version {one[0]} with verify={MODES[one[1]]!r}, "
                    f"device {self.device} version {version} with verify={mode!r}"
                )

    def _move(self, version: int, mode: Verify) -> tuple[Drawn | None, dict[str, float]]:
        lanes, transport = self._lanes, self._transport
        began = time.perf_counter()
        lanes.begin()
        with lanes.on("local"):
            self._local.run()
            self._fills.run()
            lanes.mark("local", 0)
        lanes.close("local")
        last = len(self._buckets) - 1
        self._pack_lane(0)
        for index in range(last + 1):
            lanes.after("wire", "pack", index)
            lanes.after("wire", "unpack", index - NUM_SLOTS)
            with lanes.on("wire"):
                transport.start(index)
                lanes.mark("wire", index)
            self._unpack_lane(index - 1)
            self._pack_lane(index + 1)
        self._unpack_lane(last)
        if last >= 0:
            with lanes.on("pack"):
                for index in range(max(0, last - 1), last + 1):
                    transport.release(index)
        lanes.close("wire")
        drawn = None
        if mode == "sample":  # behind all that arrives, and enqueued before this thread waits
            lanes.after("unpack", "local", 0)
            with lanes.on("unpack"):
                drawn = self._digests.start(version)
        enqueued_s = time.perf_counter() - began
        if mode == "sample":
            self._digests.prepare(version + 1)  # see [Note: Samples are drawn while others wait] in `verify`
        found = lanes.end(self._timeout_s, f"version {version} of '{self.program.edge}' on device {self.device}")
        return drawn, {**found, "enqueued": enqueued_s} if found else {}

    def _pack_lane(self, index: int) -> None:
        """Fill the slot of a bucket, as soon as what was in it has left and arrived."""
        if not 0 <= index < len(self._buckets):
            return
        lanes, before = self._lanes, index - NUM_SLOTS
        lanes.after("pack", "wire", before)
        lanes.after("pack", "unpack", before)
        with lanes.on("pack"):
            if before >= 0:
                self._transport.release(before)
            self._packs[index].run()
            self._transport.ready(index)
            lanes.mark("pack", index)

    def _unpack_lane(self, index: int) -> None:
        if index < 0:
            return
        lanes = self._lanes
        lanes.after("unpack", "wire", index)
        with lanes.on("unpack"):
            self._transport.finish(index)
            self._unpacks[index].run()
            lanes.mark("unpack", index)

    def _commit(self, version: int, mode: Verify, drawn: Drawn | None) -> int:
        """Check what arrived, and agree that it did."""
        what = f"the end of version {version} of '{self.program.edge}'"
        if mode == "full" and self._oracle is not None:
            compared = compare_whole(self.program, self.device, self._target, self._oracle)
            self._control.exchange([1], what)
            return compared
        found = self._control.exchange([1, *(drawn.numbers() if drawn is not None else ())], what)
        if drawn is None:
            return 0
        compare(
            drawn.chosen, {d: one[1:] for d, one in zip(self.program.devices, found, strict=True)}, self.program.edge
        )
        return len(drawn.chosen)

    # ------------------------------------------------------------------------------------------------- prepared once

    def _place(self) -> torch.device:
        """Where slots lie: with the target, else with the source."""
        for tensor in (*self._target.values(), *self._source.values()):
            if tensor.device.type != "cpu":
                return tensor.device
        return torch.device("cpu")

    def _pack(self, piece: Piece) -> tuple[Tensor, Tensor]:
        source = view_of(self._target if piece.hop else self._source, piece.source)
        return self._staged(piece, piece.packed_at, source), source

    def _unpack(self, piece: Piece) -> tuple[Tensor, Tensor]:
        target = view_of(self._target, piece.target)
        return target, self._staged(piece, piece.unpacked_at, target)

    def _staged(self, piece: Piece, at: int | None, like: Tensor) -> Tensor:
        slot = self._slots[piece.bucket % NUM_SLOTS]
        return in_slot(slot, at or 0, piece.num_bytes, getattr(torch, piece.dtype), tuple(like.shape))

    def _traffic(self, bucket: Bucket) -> Traffic:
        return Traffic(
            tuple(self._stretch(bucket.index, message, is_sender=True) for message in bucket.sends),
            tuple(self._stretch(bucket.index, message, is_sender=False) for message in bucket.receives),
        )

    def _stretch(self, index: int, message: Message, *, is_sender: bool) -> Stretch:
        if message.at is not None:
            slot = self._slots[index % NUM_SLOTS]
            return Stretch(message.peer, slot[message.at : message.at + message.num_bytes])
        piece = message.piece
        region: Region = piece.source if is_sender else piece.target
        tensors = self._source if is_sender and not piece.hop else self._target
        return Stretch(message.peer, bytes_of(view_of(tensors, region)))

    def _refuse_moved(self) -> None:
        """Views were made of storage that must stay."""
        for name, tensor, pointer in self._pointers:
            if _held(tensor).data_ptr() != pointer:
                raise EngineError(
                    f"'{name}' has other storage than when the edge was made; write parameters in place, or make the Resharder "
                    "anew"
                )


def _held(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _locals(
    given: Mapping[str, Tensor], shelf: Shelf | None, program: Program, device: int, *, side: int
) -> dict[str, Tensor]:
    """Local tensors that fit a shelf. Errors: ConfigError that names the first one that is missing or does not fit."""
    what = ("source", "target")[side]
    if shelf is None:
        return {}
    found: dict[str, Tensor] = {}
    wanted = {slot.region.storage: program.dtypes[name][side] for name, slots in shelf.slots.items() for slot in slots}
    for name, dtype in wanted.items():
        if name not in given:
            raise ConfigError(
                f"the {what} of '{program.edge}' on device {device} lacks '{name}'; found {len(given)} tensors"
            )
        tensor = _held(given[name]).detach()  # no graph
        if tuple(tensor.shape) != tuple(shelf.shapes[name]):
            raise ConfigError(
                f"the {what} '{name}' on device {device} has local shape {tuple(tensor.shape)}; the layouts of "
                f"'{program.edge}' give it {tuple(shelf.shapes[name])}"
            )
        if str(tensor.dtype) != f"torch.{dtype}":
            raise ConfigError(
                f"the {what} '{name}' on device {device} is {tensor.dtype}; the program was made for {dtype}"
            )
        if not tensor.is_contiguous():
            raise ConfigError(
                f"the {what} '{name}' on device {device} has strides {tensor.stride()}; it must be contiguous"
            )
        found[name] = tensor
    return found
