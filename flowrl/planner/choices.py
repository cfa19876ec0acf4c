"""What the planner may choose from, and one thing that it chose: an option of a role."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowrl.cost.generation import EngineConstants
from flowrl.cost.memory import LogitBytes, MemoryConstants
from flowrl.cost.offload import ADAM_FP32, Offload, OffloadConstants, OptimizerState
from flowrl.cost.train import TrainConstants
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Layout
from flowrl.planner.rows import RowConstants
from flowrl.planner.workload import MOST_TOKENS
from flowrl.schema.columns import nearest
from flowrl.schema.fields import check_fields, is_int, shown

MOST_VALUES = 64
"""Of one choice: every option of a role is looked at with each."""

Setting = str | int | float | bool
HEADROOM = 0.0
"""Part of a device's memory that plans leave free."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the planner may choose from, and the calibrated numbers it counts with."""

    micro_batch_tokens: tuple[int, ...] = (4096, 8192, 16384, 32768)
    """Per device: a tensor-parallel group of tp devices takes tp times as many together. The longest sequence sets the least."""
    recompute: tuple[bool, ...] = (True, False)
    offload: tuple[Offload, ...] = tuple(Offload)
    optimizers: tuple[OptimizerState, ...] = (ADAM_FP32,)
    """The one the user asked for, then those whose other numerics the user consents to."""
    utilization: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
    """Shares of a device's memory for an engine."""
    tensor_parallel: tuple[int, ...] = (1, 2, 4, 8)
    """Of engines."""
    pipeline: tuple[int, ...] = (1, 2, 4, 8)
    """Stages of engines; more than 1 only where tensor parallelism inside a node does not hold the model."""
    train_tensor_parallel: tuple[int, ...] = (1, 2, 4, 8)
    """Of trainers and frozen models; more than 1 only where it is faster, or less does not fit."""
    sequence_parallel: bool = True
    """Whether norms are cut too where a trainer or a frozen model is tensor-parallel."""
    headroom: float = HEADROOM
    """Part of each device's memory that plans leave free, for what the memory model does not know; from 0 to below 1."""
    loss: str = "cross_entropy"
    logit_chunk: int | None = 1024
    memory: MemoryConstants = field(default_factory=MemoryConstants)
    train: TrainConstants = field(default_factory=TrainConstants)
    engine: EngineConstants = field(default_factory=EngineConstants)
    moving: OffloadConstants = field(default_factory=OffloadConstants)
    rows: RowConstants = field(default_factory=RowConstants)

    def __post_init__(self) -> None:
        for name in ("micro_batch_tokens", "tensor_parallel", "pipeline", "train_tensor_parallel"):
            found = getattr(self, name)
            if not isinstance(found, tuple) or not found or not all(is_int(one) and one >= 1 for one in found):
                raise ConfigError(
                    f"Choices needs whole numbers of at least 1 for {name}, one or more; found {shown(found)}"
                )
            if len(found) > MOST_VALUES or max(found) > MOST_TOKENS:
                raise ConfigError(
                    f"Choices takes {MOST_VALUES} values of {name} at most, each up to {MOST_TOKENS:,}; found {len(found)}, up "
                    f"to {max(found)}"
                )
        check_fields(self)
        for name in ("recompute", "offload", "optimizers"):
            if not getattr(self, name):
                raise ConfigError(f"Choices needs at least one value for {name}; left out, the field has its default")
        if not 0 <= self.headroom < 1:
            raise ConfigError(
                f"headroom is the part of a device's memory that plans leave free, from 0 to below 1; found {self.headroom!r}"
            )
        if not self.utilization or not all(0 < share <= 1 for share in self.utilization):
            raise ConfigError(f"Choices needs shares above 0 to 1 for utilization; found {self.utilization!r}")
        names = [state.name for state in self.optimizers]
        if len(set(names)) != len(names):
            raise ConfigError(f"plans tell optimizers by their names, and these are equal: {names}")
        if self.loss not in LogitBytes.__dataclass_fields__:
            raise ConfigError(
                f"Choices has no loss '{self.loss}'; {nearest(self.loss, LogitBytes.__dataclass_fields__)}"
            )
        if self.logit_chunk is not None and self.logit_chunk < 1:
            raise ConfigError(f"logit_chunk is tokens, at least 1, or None for all at once; found {self.logit_chunk}")

    def room_bytes(self, cluster: Cluster) -> int:
        """Of a device's memory, what plans may fill: all but the headroom."""
        return int(cluster.device.memory_bytes * (1 - self.headroom))


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a role on a mesh.

    Example:
        Option("ref", Layout.parse("f8"), seconds=(19.4,), static_bytes=2.0e9, dynamic_bytes=6.1e9,
               settings=(("micro_batch_tokens", 8192), ("offload", "none")))
    """

    role: str
    layout: Layout
    seconds: tuple[float, ...]
    """Of each call of the role, in their order; copies from and to hosts included."""
    static_bytes: float
    """On each device while others of the set work."""
    dynamic_bytes: float
    """On each device during its own calls, besides the static ones."""
    host_bytes: float = 0.0
    """On all hosts of the mesh together."""
    numerics: int = 0
    """0: what the user asked for; above: how far down the list of optimizers."""
    handover_bytes: float = 0.0
    """On each device, besides the static ones, while new weights wait for their engine: shards of the trainer, weights of the
    engine."""
    is_on_host: bool = False
    """Its weights must be loaded from the hosts before they can be handed out."""
    has_context: bool = False
    """It runs in processes that keep a device context."""
    settings: tuple[tuple[str, Setting], ...] = ()
    slot_utilization: tuple[float, ...] = ()
    """Of an engine, predicted for each call: the part of its slots' steps that sample a token."""

    @property
    def peak_bytes(self) -> float:
        return self.static_bytes + self.dynamic_bytes

    @property
    def costs(self) -> tuple[float, ...]:
        """What one option can be better in than another: lower is better in each."""
        return (*self.seconds, self.static_bytes, self.dynamic_bytes, self.host_bytes, self.numerics, self.handover_bytes,
                self.is_on_host)  # fmt: skip
