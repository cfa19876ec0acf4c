"""Programs of weights edges: buckets within their limits, one message where one is enough, and few group calls."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest

from flowrl.cost.shapes import ModelShape
from flowrl.engines.reshard.buckets import ALIGN_BYTES, PASS_ON_GAP, Buckets, align, cut
from flowrl.engines.reshard.device import buckets_of
from flowrl.engines.reshard.program import Program, check_coverage, compile_program, program_for, wire_dtype
from flowrl.engines.reshard.sampling import Sampler
from flowrl.engines.reshard.slots import VLLM_JOINS, Recipe, Region, lay
from flowrl.errors import ConfigError
from flowrl.mesh import Layout
from flowrl.planner.boxes import Holding, volume
from flowrl.planner.reshard import received_bytes, reshard

SHAPE = ModelShape.of("Qwen/Qwen2.5-0.5B")
TENSORS = SHAPE.modules()
BUCKET = 16 * 2**20


def holding(text: str, first: int = 0, **options: int) -> Holding:
    layout = Layout.parse(text)
    return Holding(layout, tuple(range(first, first + layout.size)), kv_heads=SHAPE.kv_heads, is_tied=True, **options)


def program(source: str, target: str, first: int = 0, **options: object) -> Program:
    return program_for(TENSORS, holding(source), holding(target, first), bucket_bytes=BUCKET, **options)  # type: ignore[arg-type]


EDGES = [("f2", "t2", 0), ("f2", "d2", 0), ("d1", "d1", 1), ("f8", "d4t2", 0), ("f8", "t2", 8), ("f4", "d2t2", 2)]


@pytest.mark.parametrize(("source", "target", "first"), EDGES)
def test_bytes_and_calls(source: str, target: str, first: int) -> None:
    made = program(source, target, first)
    bound = received_bytes(TENSORS, holding(source), holding(target, first))
    assert made.wire_bytes == sum(bound.values())
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for (sender, receiver), num_bytes in made.peers().items():
        sent[sender] += num_bytes
        received[receiver] += num_bytes
    assert all(received[device] == num_bytes for device, num_bytes in bound.items())
    assert made.num_buckets <= math.ceil(max(*sent.values(), *received.values()) / BUCKET) + 2
    assert all(num_bytes <= BUCKET for num_bytes in made.slot_bytes.values())
    aligned = sum(align(piece.num_bytes) for piece in made.pieces)
    assert aligned <= 1.001 * made.wire_bytes


@pytest.mark.parametrize(("source", "target", "first"), EDGES)
def test_both_ends_list_the_same_messages(source: str, target: str, first: int) -> None:
    made = program(source, target, first)
    seen = {device: buckets_of(made, device) for device in made.devices}
    for index in range(made.num_buckets):
        sent, received = defaultdict(list), defaultdict(list)
        for device, buckets in seen.items():
            bucket = buckets[index]
            for message in bucket.sends:
                sent[device, message.peer].append((message.num_bytes, message.piece.tensor))
            for message in bucket.receives:
                received[message.peer, device].append((message.num_bytes, message.piece.tensor))
            used = [(piece.packed_at, piece.num_bytes) for piece in bucket.packs]
            used += [(piece.unpacked_at, piece.num_bytes) for piece in bucket.unpacks]
            end = 0
            for at, num_bytes in sorted(used):
                assert at is not None and at >= end and at % ALIGN_BYTES == 0  # nothing of a slot is used twice
                end = at + num_bytes
            assert end <= made.slot_bytes[device]
        assert sent == received


def test_what_lies_in_one_stretch_is_not_staged() -> None:
    pieces = [piece for piece in program("f2", "d2").pieces if piece.num_bytes >= 2**20]
    assert pieces
    assert all(piece.packed_at is None and piece.unpacked_at is None for piece in pieces)
    rows = [piece for piece in program("f2", "t2").pieces if piece.tensor.endswith("down_proj.weight")]
    assert all(
        piece.packed_at is not None and piece.unpacked_at is None for piece in rows
    )  # columns, gathered by the sender
    cast = program("f2", "d2", source_dtype="float32").pieces
    assert all(piece.packed_at is not None and piece.dtype == "bfloat16" for piece in cast)
    host = program("f2", "d2", is_on_host=True).pieces
    assert all(piece.packed_at is not None for piece in host)


def test_small_pieces_of_a_pair_are_one_message() -> None:
    made = program("f2", "d2")
    for bucket in buckets_of(made, 0):
        staged = [message for message in bucket.sends if message.at is not None]
        assert len(staged) <= 1
    assert any(len(bucket.packs) > 10 for bucket in buckets_of(made, 0))


def test_what_is_passed_on_arrived_two_buckets_before() -> None:
    made = program_for(
        TENSORS, holding("f2"), holding("d4", first=4), devices_per_node=4, bucket_bytes=BUCKET
    )  # the engine is on another node: each byte crosses once
    arrived = {}
    for piece in made.pieces:
        if not piece.hop:
            for row in range(*(piece.box[0] if piece.box else (0, 1))):
                arrived[piece.tensor, row, piece.receiver] = piece.bucket
    passed = [piece for piece in made.pieces if piece.hop]
    assert passed
    for piece in passed:
        assert all(
            piece.bucket >= arrived[piece.tensor, row, piece.sender] + PASS_ON_GAP for row in range(*piece.box[0])
        )


def test_the_same_arguments_give_the_same_program_once() -> None:
    assert program("f8", "d4t2") is program("f8", "d4t2")
    found = reshard(TENSORS, holding("f8"), holding("d4t2"))
    assert compile_program(TENSORS, found, bucket_bytes=BUCKET).pieces == program("f8", "d4t2").pieces


def test_moves_that_do_not_cover_are_refused() -> None:
    found = reshard(TENSORS, holding("f2"), holding("t2"))
    with pytest.raises(ConfigError, match="device 0 needs .* elements of .*; the program gives it"):
        compile_program(TENSORS, replace(found, moves=found.moves[1:]))
    made = program("f2", "t2")
    with pytest.raises(ConfigError, match="some come twice"):
        check_coverage(made.target, made.copies, (*made.pieces, made.pieces[0]))
    with pytest.raises(ConfigError, match="whole number of 256 bytes; found 1000"):
        compile_program(TENSORS, found, bucket_bytes=1000)
    with pytest.raises(ConfigError, match="elements of type 'int8'"):
        compile_program(TENSORS, found, source_dtype="int8")


def test_the_wire_has_the_shorter_type() -> None:
    assert wire_dtype("float32", "bfloat16") == wire_dtype("bfloat16", "float32") == "bfloat16"
    assert wire_dtype("float16", "bfloat16") == "bfloat16"


# ---------------------------------------------------------------------------------------------------------------- parts


def test_boxes_are_cut_without_breaking_a_stretch() -> None:
    assert cut(((0, 10), (0, 4)), 12) == (((0, 3), (0, 4)), [((3, 10), (0, 4))])
    first, left = cut(((2, 4), (0, 10), (0, 5)), 17)
    assert first == ((2, 3), (0, 3), (0, 5))
    assert left == [((2, 3), (3, 10), (0, 5)), ((3, 4), (0, 10), (0, 5))]
    assert cut(((5, 6),), 1) == (((5, 6),), [])
    for most in range(1, 60):
        first, left = cut(((2, 4), (0, 10), (0, 3)), most)
        assert volume(first) <= most
        assert volume(first) + sum(map(volume, left)) == 60


def test_buckets_fill_and_never_overflow() -> None:
    buckets = Buckets(1024, 256)
    used: dict[tuple[str, int, int], int] = defaultdict(int)
    for number in range(60):
        sender, receiver = number % 3, (number + 1 + number % 2) % 3
        for bucket, part in buckets.deal(
            ((0, 90 + number),), 4, sender, receiver, packed=True, unpacked=number % 4 == 0
        ):
            for key in (("sent", sender, bucket), ("received", receiver, bucket), ("staged", sender, bucket)):
                used[key] += align(4 * volume(part))
            if number % 4 == 0:
                used["staged", receiver, bucket] += align(4 * volume(part))
    assert max(used.values()) == 1024


def test_regions_know_their_stretches() -> None:
    whole = (8, 6, 4)
    assert Region("w", (2, 0, 0), (3, 6, 4)).is_contiguous(whole)
    assert Region("w", (2, 1, 0), (1, 3, 4)).is_contiguous(whole)
    assert Region("w", (2, 1, 1), (1, 1, 2)).is_contiguous(whole)
    assert not Region("w", (2, 1, 0), (2, 3, 4)).is_contiguous(whole)
    assert not Region("w", (0, 0, 1), (8, 6, 3)).is_contiguous(whole)


def test_an_engine_joins_renames_and_pads() -> None:
    recipe = Recipe(VLLM_JOINS, renames=(("model.embed_tokens.weight", "lm_head.weight"),))
    shelf = lay(TENSORS, holding("t2", vocab_multiple=64 * 2), 1, recipe)
    hidden = SHAPE.hidden
    (q,), (k,), (v,) = (shelf.slots[f"model.layers.3.self_attn.{name}_proj.weight"] for name in "qkv")
    assert {q.region.storage, k.region.storage, v.region.storage} == {"model.layers.3.self_attn.qkv_proj.weight"}
    assert [one.region.start[0] for one in (q, k, v)] == [0, hidden // 2, hidden // 2 + 64]
    assert shelf.shapes["model.layers.3.self_attn.qkv_proj.weight"] == (hidden // 2 + 128, hidden)
    assert shelf.shapes["model.layers.3.self_attn.qkv_proj.bias"] == (hidden // 2 + 128,)
    assert shelf.shapes["model.layers.3.mlp.gate_up_proj.weight"] == (SHAPE.ffn, hidden)
    rows = math.ceil(SHAPE.vocab / 128) * 128 // 2
    assert shelf.shapes["lm_head.weight"] == (rows, hidden)
    (fill,) = shelf.fills or (None,)
    missing = 2 * rows - SHAPE.vocab
    assert (fill is None) == (missing == 0)
    assert fill is None or (fill.start[0], fill.shape[0]) == (rows - missing, missing)


def test_samples_are_the_same_for_all_and_change_with_the_version() -> None:
    made = program("f8", "d4t2")
    sampler = Sampler(made)
    assert sampler.draw(5) == Sampler(made).draw(5) != sampler.draw(6)
    drawn = sampler.draw(5)
    assert {one.sender == one.receiver for one in drawn} == {True, False}
    assert all(one.source.shape == one.target.shape for one in drawn)
    assert all(2 * math.prod(one.source.shape) <= sampler.most_bytes for one in drawn)
    boxes = len(made.pieces) + sum(map(len, made.copies.values()))
    assert 0.009 * boxes <= len(drawn) <= 0.01 * boxes + 2
