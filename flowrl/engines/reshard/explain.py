"""What a weights edge costs, before anything moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.cost.text import aligned, size_text, time_text
from flowrl.engines.reshard.program import DTYPE_BYTES, Program, wire_dtype
from flowrl.mesh import Cluster
from flowrl.planner.boxes import Tensor, volume
from flowrl.planner.reshard import Reshard, received_bytes


@dataclass(frozen=True, slots=True)
class Explained:
    """Bytes of an edge, and predicted seconds."""

    edge: str
    local_bytes: dict[int, int]
    """Copied on each device from its own shard."""
    peer_bytes: dict[tuple[int, int], int]
    """Sent, by (sender, receiver)."""
    wire_bytes: int
    bound_bytes: int
    """The fewest that any way could send: what each device needs and does not hold."""
    gather_bytes: int
    """What devices would receive if each gathered whole tensors and cut them."""
    num_buckets: int
    bucket_bytes: int
    staging_bytes: int
    """Most that a device takes besides source and target: two slots."""
    predicted_s: float | None
    """None without a cluster."""

    @property
    def ratio(self) -> float:
        """Wire bytes over the bound; 1 where nothing moves."""
        return self.wire_bytes / self.bound_bytes if self.bound_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "edge": self.edge,
            "local_bytes": {str(device): found for device, found in self.local_bytes.items()},
            "peer_bytes": [{"from": a, "to": b, "bytes": found} for (a, b), found in self.peer_bytes.items()],
            "wire_bytes": self.wire_bytes,
            "bound_bytes": self.bound_bytes,
            "ratio": self.ratio,
            "gather_bytes": self.gather_bytes,
            "buckets": self.num_buckets,
            "bucket_bytes": self.bucket_bytes,
            "staging_bytes": self.staging_bytes,
            "predicted_s": self.predicted_s,
        }

    def __str__(self) -> str:
        sums = {
            device: (sum(n for (_, b), n in self.peer_bytes.items() if b == device),
                     sum(n for (a, _), n in self.peer_bytes.items() if a == device), local)
            for device, local in self.local_bytes.items()
        }  # fmt: skip
        devices = [["device", "receives", "sends", "copies on itself"]]
        devices += [[str(device), *(size_text(n) for n in found)] for device, found in sums.items()]
        peers = [["from", "to", "sent"]]
        peers += [[str(a), str(b), size_text(found)] for (a, b), found in self.peer_bytes.items()]
        facts = [
            ["on the wire", f"{size_text(self.wire_bytes)} in all"],
            ["lower bound", f"{size_text(self.bound_bytes)}; the ratio is {self.ratio:.4f}"],
            ["by gathering", f"{size_text(self.gather_bytes)}, if each device gathered whole tensors"],
            ["buckets", f"{self.num_buckets} of at most {size_text(self.bucket_bytes)}"],
            ["staging", f"{size_text(self.staging_bytes)} on the fullest device"],
            [
                "predicted",
                "give a cluster" if self.predicted_s is None else f"{time_text(self.predicted_s)} on the wire",
            ],
        ]
        parts = [self.edge, *aligned(devices, "rrrr"), "", *aligned(peers, "rrr"), "", *aligned(facts, "ll")]
        return "\n".join(parts)


def explain(program: Program, found: Reshard, tensors: Sequence[Tensor], cluster: Cluster | None) -> Explained:
    """The figures of a program that was made from `found`. The bound is computed apart from the program's moves."""

    def size(tensor: Tensor) -> int:
        return DTYPE_BYTES[wire_dtype(*program.dtypes[tensor.name])]

    bound = received_bytes(tensors, found.source, found.target, element_bytes=size)
    sizes = {tensor.name: size(tensor) for tensor in tensors}
    whole = sum(math.prod(tensor.shape) * size(tensor) for tensor in tensors)
    gathered = 0
    for device in found.target.devices:
        slots = program.source[device].slots if device in program.source else {}
        own = sum(volume(slot.box) * sizes[name] for name, held in slots.items() for slot in held)
        gathered += whole - own
    return Explained(
        program.edge,
        {device: sum(copy.num_bytes for copy in program.copies.get(device, ())) for device in program.devices},
        program.peers(),
        program.wire_bytes,
        sum(bound.values()),
        gathered,
        program.num_buckets,
        program.bucket_bytes,
        2 * max(program.slot_bytes.values(), default=0),
        None if cluster is None else found.time_s(cluster, bucket_bytes=program.bucket_bytes),
    )
