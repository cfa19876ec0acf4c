"""The predicted sharding audit: what a layout makes of a model, parameter by parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowrl.cost.audit import FULL, HALF, ITEM_BYTES, Audit, Part
from flowrl.cost.offload import ADAM_FP32, Offload, OptimizerState
from flowrl.cost.shapes import ModelShape, Weight
from flowrl.errors import ConfigError
from flowrl.mesh import Layout
from flowrl.planner.boxes import Boxes, Holding, holding_of, volume
from flowrl.schema.columns import nearest

WRAPS = {"all": "layers and root wrapped", "layers": "only layers wrapped"}
PRECISIONS = {"fp32": FULL, "bf16": HALF}
ON_HOST = {
    Offload.NONE: "",
    Offload.PARK: "",
    Offload.STREAM_ALL: "weights gradients optimizer",
    Offload.CPU_OPTIMIZER: "optimizer",
    Offload.STREAM_OPTIMIZER: "optimizer",
}
"""Class of offload -> what lies on the host while the model trains. What is parked comes back for the step."""


@dataclass(frozen=True, slots=True)
class _Widths:
    """Bytes per element, and the type of weights and gradients."""

    dtype: str
    weight: float
    gradient: float = 0.0
    optimizer: float = 0.0
    on_host: str = ""

    def part(self, weight: Weight, *, held: int, copies: int, devices: int, uneven: float, whole_fix: str) -> Part:
        counts = {"weights": self.weight, "gradients": self.gradient, "optimizer": self.optimizer}
        bytes_of = {name: round(width * held) for name, width in counts.items()}
        away = {name: count if name in self.on_host.split() else 0 for name, count in bytes_of.items()}
        return Part(
            name=weight.name,
            shape=weight.shape,
            dtype=self.dtype,
            devices=devices,
            copies=copies,
            whole_bytes=round(self.weight * weight.num_params),
            param_bytes=bytes_of["weights"] - away["weights"],
            grad_bytes=bytes_of["gradients"] - away["gradients"],
            grad_dtype=self.dtype if self.gradient else "",
            optimizer_bytes=bytes_of["optimizer"] - away["optimizer"],
            uneven_bytes=round(self.weight * uneven),
            host_bytes=sum(away.values()),
            is_trained=self.gradient > 0,
            whole_fix=whole_fix,
        )


def audit_layout(
    shape: ModelShape,
    layout: Layout,
    *,
    wrap: str = "all",
    is_frozen: bool = False,
    precision: str | None = None,
    offload: Offload = Offload.NONE,
    state: OptimizerState = ADAM_FP32,
    name: str = "model",
) -> Audit:
    """What the fullest device of a layout holds of a model while it trains, or for a frozen one, while it is used.

    Args:
        wrap: `all`, or `layers`: what is outside the layers (embedding, last norm, head) is not sharded by `fsdp`.
        precision: `fp32` or `bf16` of frozen weights (of the base, with LoRA); bf16 where it is not said.
        offload: where training state lies. Buckets in which it is streamed are not counted.
        state: the optimizer's; adapters of LoRA are trained with it too.
        name: of the model, for the title.

    Raises `ConfigError` for a wrap or a precision that there is not, and a layout that cannot cut the model.
    """
    if wrap not in WRAPS:
        raise ConfigError(f"there is no wrap '{wrap}'; {nearest(wrap, WRAPS)}")
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(f"there is no precision '{precision}'; {nearest(precision, PRECISIONS)}")
    if is_frozen and shape.lora is not None:
        raise ConfigError("a frozen model has no adapters to train; leave out either LoRA or frozen")
    if is_frozen and ON_HOST[offload]:
        raise ConfigError(
            f"a frozen model has no state of training that offload {offload.value} could move; leave it out"
        )
    if precision is not None and not is_frozen and shape.lora is None:
        raise ConfigError(
            f"precision {precision} is that of frozen weights, and these are trained, in the optimizer's types; leave it out"
        )
    if layout.pp > shape.layers:
        raise ConfigError(
            f"layout {layout} has {layout.pp} stages, and the model {shape.layers} layers; take fewer stages"
        )
    dtype = PRECISIONS[precision or "bf16"]
    frozen = _Widths(dtype, ITEM_BYTES[dtype])
    trained = _trained(state, offload)
    placed = _Placed.of(shape, layout, wrap)
    has_frozen_base = is_frozen or shape.lora is not None
    parts = [
        placed.part(weight, frozen if has_frozen_base and (is_frozen or weight.kind != "score") else trained)
        for weight in shape.modules()
    ]
    parts += [placed.part(weight, trained) for weight in shape.lora_modules()]
    what = "frozen" if is_frozen else f"{state.name}{'' if offload is Offload.NONE else f', offload {offload.value}'}"
    adapters = f", LoRA of rank {shape.lora.rank}" if shape.lora is not None else ""
    title = f"{name}{adapters}, {what}, layout {layout} on {layout.size} device{'' if layout.size == 1 else 's'}, {WRAPS[wrap]}"
    return Audit(title, tuple(parts), is_predicted=True)


def _trained(state: OptimizerState, offload: Offload) -> _Widths:
    """How the bytes of a trained parameter are divided. Optimizers that keep no copy of the weights have them in fp32."""
    on_host = ON_HOST[offload]
    is_copied = state.optimizer_bytes < state.total_bytes and state.name != ADAM_FP32.name
    if is_copied or on_host == "optimizer":  # bf16 weights; what remains is the optimizer's
        return _Widths(HALF, 2, state.gradient_bytes, state.optimizer_bytes, on_host)
    return _Widths(FULL, 4, 4, state.total_bytes - 8, on_host)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A model on the ranks of a layout, seen from the rank that holds most."""

    layers: Holding
    root: Holding
    """Of what is outside the layers."""
    rank: int

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout, wrap: str) -> _Placed:
        loose = replace(layout, dp=layout.dp * layout.fsdp, fsdp=1) if wrap == "layers" else layout
        layers, root = (holding_of(shape, one, range(one.size)) for one in (layout, loose))
        found = cls(layers, root, 0)
        held = [
            sum(_count(found.holding(weight).boxes(weight, rank)) for weight in shape.modules())
            for rank in (range(layout.size) if layout.pp > 1 else ())
        ]
        return replace(found, rank=held.index(max(held))) if held else found

    def holding(self, weight: Weight) -> Holding:
        return self.root if weight.layer is None else self.layers

    def part(self, weight: Weight, widths: _Widths) -> Part:
        holding = self.holding(weight)
        devices = holding.layout.size // holding.layout.pp
        everywhere = [holding.boxes(weight, rank) for rank in range(holding.layout.size)]
        mine = everywhere[self.rank]
        copies = everywhere.count(mine) if mine else 1
        fullest = max(map(_count, everywhere))
        return widths.part(
            weight,
            held=_count(mine),
            copies=copies,
            devices=devices,
            uneven=max(0.0, fullest - weight.num_params * copies / devices) if mine else 0.0,
            whole_fix=_whole_fix(self.layers.layout),
        )


def _whole_fix(layout: Layout) -> str:
    """Why a parameter can be whole under a layout, and what would cut it; "" where wrapping its module would."""
    if layout.fsdp > 1:
        return ""
    if layout.tp > 1:
        return f"Tensor parallelism does not cut them; shards would: {_sharded(layout)}"
    return f"The layout keeps copies; shards would cut them: {_sharded(layout)}"


def _sharded(layout: Layout) -> str:
    """A layout of as many devices with shards: copies become shards; without copies, half of the tensor parallelism does."""
    if layout.dp > 1:
        return str(replace(layout, dp=1, fsdp=layout.dp))
    return str(replace(layout, fsdp=2, tp=layout.tp // 2)) if layout.tp % 2 == 0 else "f instead of t"


def _count(boxes: Boxes) -> int:
    return sum(map(volume, boxes))
