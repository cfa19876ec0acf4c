"""Where training state lies, and what it costs to keep it elsewhere than on the device.

| class | device, own phase | device, other phases | host | time |
|---|---|---|---|---|
| NONE | all | all | 0 | Adam on the device |
| PARK | all | 0 | all | + there and back once per step |
| STREAM_ALL | 0 | 0 | all | per micro-batch: weights in twice, gradients out; Adam on the CPU |
| CPU_OPTIMIZER | bf16 weights, and gradients | weights | optimizer | gradients out, weights in; Adam on the CPU |
| STREAM_OPTIMIZER | the same and buckets | weights | optimizer | optimizer state in (out meanwhile); Adam on the device |

`PARK` is what the param_offload and optimizer_offload switches of other frameworks do: the state is on the device while
training. `STREAM_ALL` is FSDP2's CPUOffloadPolicy; `CPU_OPTIMIZER` is ZeRO-Offload (arXiv 2101.06840).

No class changes numerics: where the optimizer is elsewhere, weights on the device are bf16 copies of its fp32 ones, which is
what a layer computes with in any case, and gradients keep the precision that the optimizer's state says (`gradient_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster


class Offload(Enum):
    """Classes of offload, as plans write them."""

    NONE = "none"
    PARK = "park"
    STREAM_ALL = "all"
    CPU_OPTIMIZER = "opt"
    STREAM_OPTIMIZER = "sopt"


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Bytes per trained parameter that an optimizer and its precision need.

    Example:
        OptimizerState("adam_fp32", total_bytes=16, optimizer_bytes=12, traffic_bytes=28)
    """

    name: str
    total_bytes: float
    """Weights, gradients, master copy and moments while training."""
    optimizer_bytes: float
    """Of these, what only the optimizer's step reads: master copy and moments."""
    traffic_bytes: float
    """Read and written by one step."""
    gradient_bytes: float = 2
    """Of a gradient between micro-batches. Summing in bf16 loses what fp32 keeps, so that two states which differ in it differ in
    numerics."""


ADAM_FP32 = OptimizerState("adam_fp32", 16, 12, 28, gradient_bytes=4)
"""FSDP2: weights, gradients and both moments in fp32. A step reads four of them and writes three."""
ADAM_MASTER = OptimizerState("adam_master", 16, 12, 28)
"""bf16 weights and gradients, fp32 master copy and moments."""
ADAM_BF16 = OptimizerState("adam_bf16", 8, 4, 14)
ADAM_8BIT = OptimizerState("adam_8bit", 10, 6, 16)
"""bf16 weights and gradients, fp32 master copy, int8 moments."""


@dataclass(frozen=True, slots=True)
class StateCost:
    """Training state of one role under a class of offload."""

    train_bytes: float
    """On each device while it trains."""
    idle_bytes: float
    """On each device in other phases."""
    host_bytes: float
    """On all hosts together."""
    optimizer_s: float
    """The optimizer's step with the copies it waits for."""
    move_s: float = 0.0
    """Parking: there and back, once per step."""
    to_device_s: float = 0.0
    """Copies per micro-batch that overlap with compute."""
    to_host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OffloadConstants:
    """Calibrated numbers of offload."""

    bucket_bytes: float = 2**30
    """Of a bucket in which optimizer state is streamed."""
    num_buckets: int = 2
    """One computes while the other is copied."""
    weight_bytes: float = 2
    """Of a weight on the device where the optimizer is elsewhere."""
    stored_bytes: float = 4
    """Of a weight and of a gradient that crosses to the host under STREAM_ALL."""


def adam_s(params_per_device: float, cluster: Cluster, state: OptimizerState = ADAM_FP32) -> float:
    """Seconds of a step on the device: `28·n / (B_hbm·eta_adam)` for fp32; bound by memory."""
    return state.traffic_bytes * params_per_device / (cluster.device.hbm_bytes_s * cluster.efficiency.adam)


def state_cost(
    shape: ModelShape,
    cluster: Cluster,
    *,
    shards: int,
    nodes: int = 1,
    offload: Offload = Offload.NONE,
    park_weights: bool = False,
    state: OptimizerState = ADAM_FP32,
    constants: OffloadConstants | None = None,
) -> StateCost:
    """Bytes and seconds of a model's training state over `shards` devices on `nodes` nodes.

    With LoRA: `2·N/S` for the frozen base and `total_bytes·N_lora/S`. `park_weights` moves the bf16 weights that the two
    optimizer classes leave on the device to the host too: `+2·N` there, `2·2·N/S / B_p`. Copies run at the rate one device
    has while all copy. `cpu_adam_params_s` is per node.
    """
    if shards < 1 or nodes < 1:
        raise ConfigError(f"training state needs at least one shard and one node; found {shards} and {nodes}")
    keep = constants or OffloadConstants()
    frozen = 0.0 if shape.lora is None else keep.weight_bytes * (shape.params() - _score(shape))
    trained = float(shape.trainable_params())
    pcie = cluster.host_link.bytes_s * shards  # of all devices of the role together
    everything = frozen + state.total_bytes * trained
    weights = frozen + keep.weight_bytes * trained
    optimizer = state.optimizer_bytes * trained
    on_device_s = adam_s(trained / shards, cluster, state)
    on_host_s = trained / (cluster.host.cpu_adam_params_s * nodes)
    if park_weights and offload not in (Offload.CPU_OPTIMIZER, Offload.STREAM_OPTIMIZER):
        raise ConfigError(
            f"park_weights goes with offload 'opt' or 'sopt', which leave weights on the device; found '{offload.value}'"
        )
    match offload:
        case Offload.NONE:
            return StateCost(everything / shards, everything / shards, 0.0, on_device_s)
        case Offload.PARK:
            return StateCost(everything / shards, 0.0, everything, on_device_s, move_s=2 * everything / pcie)
        case Offload.STREAM_ALL:
            into = 2 * (frozen + keep.stored_bytes * trained) / pcie  # for the forward and the backward pass
            out = keep.stored_bytes * trained / pcie
            return StateCost(0.0, 0.0, everything, on_host_s, to_device_s=into, to_host_s=out)
        case Offload.CPU_OPTIMIZER:
            copies = (2 * keep.weight_bytes + keep.weight_bytes) * trained / pcie  # fp32 gradients out, weights in
            step_s, buckets = on_host_s + copies, 0.0
        case Offload.STREAM_OPTIMIZER:
            step_s, buckets = optimizer / pcie + on_device_s, keep.num_buckets * keep.bucket_bytes
    on_device = (weights + state.gradient_bytes * trained) / shards + buckets
    return StateCost(
        on_device,
        0.0 if park_weights else weights / shards,
        optimizer + (weights if park_weights else 0.0),
        step_s,
        move_s=2 * weights / pcie if park_weights else 0.0,
    )


def megatron_state_bytes(params: float, *, data: int, tensor: int = 1, pipeline: int = 1) -> float:
    """Bytes on each device with Megatron's distributed optimizer: `(6 + 12/dp)·N / (tp·pp)`.

    bf16 weights and fp32 gradients are whole in each data-parallel rank; master copy and moments are cut over them.
    """
    return (6 + 12 / data) * params / (tensor * pipeline)


def _score(shape: ModelShape) -> int:
    return sum(weight.num_params for weight in shape.modules() if weight.kind == "score")
