"""How much is measured. Every number is a choice, not a result."""

from __future__ import annotations

from dataclasses import dataclass, replace

MIB = 2**20


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One transformer layer. Example: LayerShape(hidden=4096, heads=32, kv_heads=8, ffn=14336)."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int


@dataclass(frozen=True, slots=True)
class Effort:
    """Shapes, sizes and rounds. Products and layers are in bf16 on a GPU, in fp32 on a CPU."""

    rounds: int
    """Of each measurement; the median counts."""
    products: tuple[tuple[int, int, int], ...]
    """(m, n, k): a large one, one of a layer, and last a thin one, as in a decode step of many sequences."""
    layers: tuple[LayerShape, ...]
    """Small to large: how much of the peak is reached depends on it."""
    num_layers: int
    rows: int
    sequence: int
    vocab: int
    chunk: int
    """Tokens of a loss at once."""
    copy_bytes: int
    adam_params: int
    """On each device."""
    decode_batches: tuple[int, ...]
    decode_context: int
    host_copy_bytes: tuple[int, ...]
    host_adam_params: int
    """On all processes together."""
    collective_bytes: tuple[int, ...]

    @classmethod
    def of(cls, *, is_gpu: bool, quick: bool) -> Effort:
        """The choice for a machine."""
        if not is_gpu:
            return _CPU_QUICK if quick else _CPU
        return _GPU_QUICK if quick else _GPU


_LAYERS = (
    LayerShape(1024, 16, 4, 4096),
    LayerShape(2048, 16, 4, 8192),
    LayerShape(4096, 32, 8, 14336),
)
_GPU = Effort(
    rounds=5,
    products=((8192, 8192, 8192), (8192, 14336, 4096), (512, 14336, 4096)),
    layers=_LAYERS,
    num_layers=3,
    rows=4,
    sequence=2048,
    vocab=2**17,
    chunk=1024,
    copy_bytes=2048 * MIB,
    adam_params=2**28,
    decode_batches=(1, 32, 256),
    decode_context=1024,
    host_copy_bytes=(MIB, 16 * MIB, 256 * MIB),
    host_adam_params=2**26,
    collective_bytes=tuple(2**power for power in (13, 16, 19, 22, 25, 27, 29)),
)
_GPU_QUICK = replace(
    _GPU,
    rounds=3,
    layers=(_LAYERS[0], _LAYERS[2]),
    num_layers=2,
    copy_bytes=512 * MIB,
    adam_params=2**27,
    decode_context=512,
    host_copy_bytes=(MIB, 64 * MIB),
    host_adam_params=2**24,
    collective_bytes=tuple(2**power for power in (13, 20, 24, 28)),
)
_CPU = Effort(
    rounds=5,
    products=((512, 512, 512), (512, 1024, 256), (32, 1024, 256)),
    layers=(LayerShape(128, 4, 2, 512), LayerShape(256, 4, 2, 1024), LayerShape(512, 8, 4, 2048)),
    num_layers=2,
    rows=2,
    sequence=128,
    vocab=4096,
    chunk=64,
    copy_bytes=64 * MIB,
    adam_params=2**21,
    decode_batches=(1, 8, 32),
    decode_context=128,
    host_copy_bytes=(MIB, 64 * MIB),
    host_adam_params=2**22,
    collective_bytes=tuple(2**power for power in (10, 14, 18, 22)),
)
_CPU_QUICK = replace(
    _CPU,
    rounds=3,
    products=((256, 256, 256), (256, 512, 128), (16, 512, 128)),
    layers=(LayerShape(64, 4, 2, 256), LayerShape(256, 4, 2, 1024)),
    num_layers=1,
    sequence=64,
    vocab=1024,
    chunk=32,
    decode_batches=(1, 4, 16),
    decode_context=64,
    host_copy_bytes=(MIB, 32 * MIB),
    host_adam_params=2**20,
    collective_bytes=(2**10, 2**16, 2**20),
)
