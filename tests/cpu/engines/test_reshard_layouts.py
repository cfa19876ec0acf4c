"""Random changes of layout, all ranks in one process: what arrives is what whole tensors cut by torch would give, bit for bit.

The oracle cuts whole tensors with `torch.chunk` and slices of its own; it knows nothing of boxes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from flowrl.engines.reshard.control import Loop, LoopControl
from flowrl.engines.reshard.program import Program, compile_program
from flowrl.engines.reshard.resharder import Ran, Resharder
from flowrl.engines.reshard.slots import Join, Recipe
from flowrl.engines.reshard.transports import LoopTransport
from flowrl.mesh import Layout
from flowrl.planner.boxes import Holding, even_stages
from flowrl.planner.reshard import received_bytes, reshard

HEAD = 2  # elements of one attention head
HIDDEN = 24
JOINS = Recipe((Join("qkv_proj", ("q_proj", "k_proj", "v_proj")), Join("gate_up_proj", ("gate_proj", "up_proj"))))


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    kind: str = "up"
    split_axis: int | None = None
    layer: int | None = None
    parts: tuple[int, ...] = ()


def tensors(layers: int, kv_heads: int, vocab: int, *, tied: bool) -> Iterator[Tensor]:
    yield Tensor("model.embed_tokens.weight", (vocab, HIDDEN), "embedding", 0)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for kind, rows in (("q", 8 * HEAD), ("k", kv_heads * HEAD), ("v", kv_heads * HEAD)):
            yield Tensor(f"{at}.self_attn.{kind}_proj.weight", (rows, HIDDEN), kind, 0, layer)
            yield Tensor(f"{at}.self_attn.{kind}_proj.bias", (rows,), kind, 0, layer)
        yield Tensor(f"{at}.self_attn.o_proj.weight", (HIDDEN, 8 * HEAD), "o", 1, layer)
        for kind in ("gate", "up"):
            yield Tensor(f"{at}.mlp.{kind}_proj.weight", (40, HIDDEN), kind, 0, layer)
        yield Tensor(f"{at}.mlp.down_proj.weight", (HIDDEN, 40), "down", 1, layer)
        yield Tensor(f"{at}.mlp.experts.down_proj", (3, HIDDEN, 8), "experts_down", 2, layer)
        yield Tensor(f"{at}.norm.weight", (HIDDEN + 1,), "norm", None, layer)  # odd: shards are uneven
    yield Tensor("model.norm.weight", (HIDDEN,), "norm")
    if not tied:
        yield Tensor("lm_head.weight", (vocab, HIDDEN), "head", 0)


@dataclass(frozen=True)
class Case:
    """One random change of layout."""

    seed: int
    source: Holding
    target: Holding
    listed: tuple[Tensor, ...]
    kv_heads: int
    source_dtype: str
    target_dtype: str
    bucket_bytes: int
    direct_bytes: int
    per_node: int | None
    is_joined: bool

    def __str__(self) -> str:
        return f"{self.seed}: {self.source.layout} on {self.source.devices} -> {self.target.layout} on {self.target.devices}"


def drawn(seed: int) -> Case:
    draw = random.Random(seed)
    layers, kv_heads, tied = draw.choice((1, 2, 3)), draw.choice((1, 2, 4)), draw.random() < 0.4

    def holding(texts: tuple[str, ...], devices: list[int], multiple: int = 1) -> Holding:
        layout = Layout.parse(draw.choice(texts))
        order = devices[: layout.size]
        draw.shuffle(order)
        stages = even_stages(layers, layout.pp) if layout.pp > 1 else ()
        return Holding(layout, order, kv_heads, multiple, stages, is_tied=tied)

    first = 0 if draw.random() < 0.6 else 8  # on the same devices, or apart
    source = holding(("f1", "f2", "f4", "f8", "f3", "f5", "t2", "t4", "f2t2", "f4t2", "f2t4", "f3t2", "d2f2", "d2f2t2", "p2f2",
                      "p2t2"), list(range(8)))  # fmt: skip
    target = holding(
        ("d1", "t2", "t4", "t8", "d2", "d4", "d2t2", "d4t2", "d2t4", "t2@div", "d2t2@div", "d2t4@div", "p2", "p2t2", "p2d2", "f4",
         "f2t2"),
        list(range(first, first + 8)), draw.choice((1, 1, 64)),
    )  # fmt: skip
    if target.layout.fsdp > 1:
        target = replace(target, vocab_multiple=1)
    listed = tuple(tensors(layers, kv_heads, draw.choice((61, 64, 97)), tied=tied))
    source_dtype, target_dtype = draw.choice(
        (("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"))
    )
    return Case(
        seed, source, target, listed, kv_heads, source_dtype, target_dtype,
        bucket_bytes=draw.choice((512, 1024, 4096, 2**20)), direct_bytes=draw.choice((0, 128, 2**20)),
        per_node=draw.choice((None, 4, 2)), is_joined=target.layout.fsdp == 1 and draw.random() < 0.5,
    )  # fmt: skip


def whole_of(case: Case, version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * case.seed + version)
    dtype = getattr(torch, case.source_dtype)
    return {one.name: torch.randn(one.shape, generator=generator).to(dtype) for one in case.listed}


def oracle_local(case: Case, holding: Holding, rank: int, tensor: Tensor, whole: torch.Tensor) -> torch.Tensor | None:
    """What torch gives a rank: a stage's tensors, a block of tensor parallelism, a chunk of that."""
    layout, at = holding.layout, holding.layout.coordinate(rank)
    if layout.pp > 1:
        if tensor.layer is not None:
            firsts = [0, *itertools.accumulate(holding.stage_layers)]
            if not firsts[at.pp] <= tensor.layer < firsts[at.pp + 1]:
                return None
        elif tensor.kind == "embedding":
            if at.pp not in ((0, layout.pp - 1) if holding.is_tied else (0,)):
                return None
        elif at.pp != layout.pp - 1:
            return None
    found, axis = whole, tensor.split_axis
    if axis is not None and layout.tp > 1:
        if tensor.kind in ("embedding", "head"):
            rows = -(-tensor.shape[0] // holding.vocab_multiple) * holding.vocab_multiple
            step = -(-rows // layout.tp)
            found = found[at.tp * step : (at.tp + 1) * step]
        elif tensor.kind in ("k", "v") and layout.tp > case.kv_heads:
            found = found.chunk(case.kv_heads, axis)[at.tp * case.kv_heads // layout.tp]
        else:
            found = found.chunk(layout.tp, axis)[at.tp]
    if layout.fsdp > 1:
        chunks = found.chunk(layout.fsdp, 0)
        found = chunks[at.fsdp] if at.fsdp < len(chunks) else found[:0]
    return found.contiguous()


def storage_of(case: Case, locals_: dict[str, torch.Tensor], holding: Holding) -> dict[str, torch.Tensor]:
    """Local tensors as the target's engine stores them: joined, and with rows for the padded vocabulary."""
    found: dict[str, torch.Tensor] = {}
    for tensor in case.listed:
        if tensor.name not in locals_:
            continue
        local = locals_[tensor.name]
        if tensor.kind in ("embedding", "head") and holding.vocab_multiple > 1 and local.numel():
            rows = -(-tensor.shape[0] // holding.vocab_multiple) * holding.vocab_multiple
            step = -(-rows // holding.layout.tp)
            local = torch.cat([local, local.new_zeros(step - len(local), HIDDEN)])
        name = tensor.name
        if case.is_joined:
            for part, into in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("gate", "gate_up"), ("up", "gate_up")):
                name = name.replace(f".{part}_proj.", f".{into}_proj.")
        found[name] = torch.cat([found[name], local]) if name in found else local
    return {name: local for name, local in found.items() if local.numel()}


def compiled(case: Case) -> Program:
    found = reshard(case.listed, case.source, case.target, devices_per_node=case.per_node)
    return compile_program(
        case.listed, found, source_dtype=case.source_dtype, target_dtype=case.target_dtype,
        target_recipe=JOINS if case.is_joined else None, bucket_bytes=case.bucket_bytes, direct_bytes=case.direct_bytes,
    )  # fmt: skip


def sides(case: Case, version: int) -> tuple[dict[int, dict[str, torch.Tensor]], dict[int, dict[str, torch.Tensor]]]:
    """(source by device, what the target must become by device)."""
    whole = whole_of(case, version)
    made: list[dict[int, dict[str, torch.Tensor]]] = []
    for holding in (case.source, case.target):
        side = {}
        for rank, device in enumerate(holding.devices):
            parts = {one.name: oracle_local(case, holding, rank, one, whole[one.name]) for one in case.listed}
            side[device] = {name: local for name, local in parts.items() if local is not None}
        made.append(side)
    dtype = getattr(torch, case.target_dtype)
    expected = {device: storage_of(case, parts, case.target) for device, parts in made[1].items()}
    return made[0], {d: {n: t.to(dtype) for n, t in parts.items()} for d, parts in expected.items()}


def run_all(resharders: list[Resharder], version: int, **options: str) -> list[Ran]:
    with ThreadPoolExecutor(len(resharders)) as pool:
        return [one.result(60) for one in [pool.submit(end.run, version, **options) for end in resharders]]


def ends(case: Case, program: Program, source: dict, target: dict, **options) -> list[Resharder]:
    loop = Loop(program.devices, timeout_s=20)
    found = []
    for device in program.devices:
        control = LoopControl(loop, device)
        found.append(
            Resharder(
                program, device, source=source.get(device, {}), target=target.get(device, {}),
                transport=LoopTransport(loop, control), control=control, **options,
            )
        )  # fmt: skip
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("first", range(0, 420, 30))
def test_random_layouts_are_exact(first: int) -> None:
    for seed in range(first, first + 30):
        case = drawn(seed)
        program = compiled(case)
        source, expected = sides(case, version=1)
        target = {d: {n: torch.full_like(t, torch.nan) for n, t in parts.items()} for d, parts in expected.items()}
        pointers = {(d, n): t.data_ptr() for d, parts in target.items() for n, t in parts.items()}
        made = ends(case, program, source, target)
        for version in (1, 2):  # the second with other weights in the same storage
            if version == 2:
                newer, expected = sides(case, version=2)
                for device, parts in source.items():
                    for name, local in parts.items():
                        local.copy_(newer[device][name])
            ran = run_all(made, version)
            for device, parts in expected.items():
                assert parts.keys() == target[device].keys()
                for name, local in parts.items():
                    assert torch.equal(bits(local), bits(target[device][name])), (str(case), version, device, name)
        assert pointers == {(d, n): t.data_ptr() for d, parts in target.items() for n, t in parts.items()}

        size = min(getattr(torch, dtype).itemsize for dtype in (case.source_dtype, case.target_dtype))
        bound = received_bytes(case.listed, case.source, case.target, element_bytes=size)
        assert program.wire_bytes == sum(bound.values()), str(case)
        assert {one.received_bytes for one in ran} == {bound.get(device, 0) for device in program.devices}
        assert all(2 * n <= 2 * case.bucket_bytes for n in program.slot_bytes.values())
        assert all(one.version == 2 and one.num_checked > 0 for one in ran)


def test_the_cases_are_those_that_matter() -> None:
    cases = [drawn(seed) for seed in range(420)]
    layouts = {str(case.source.layout) for case in cases} | {str(case.target.layout) for case in cases}
    assert {"f2t4", "f5", "d2f2t2", "t2p2", "t8", "d2t4@div"} <= layouts
    assert sum(case.target.layout.tp > case.kv_heads for case in cases) > 50  # key-value heads are repeated
    assert sum(case.target.vocab_multiple > 1 for case in cases) > 50
    assert sum(case.source.is_tied and case.target.layout.pp > 1 for case in cases) > 10
    assert sum(any(piece.hop for piece in compiled(case).pieces) for case in cases[:100]) > 10
    assert sum(case.is_joined for case in cases) > 100
