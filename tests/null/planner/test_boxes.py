"""Boxes: chunks as torch cuts them, and what each rank holds."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from flowrl.errors import ConfigError
from flowrl.mesh import Layout
from flowrl.planner.boxes import Box, Holding, chunk, even_stages, intersect, subtract, volume, without
from tests.null.planner.tensors import Tensor


def holding(layout: str, **options: int | bool | tuple[int, ...]) -> Holding:
    parsed = Layout.parse(layout)
    return Holding(parsed, range(parsed.size), **options)  # type: ignore[arg-type]


def rows(held: Holding, tensor: Tensor) -> list[list[tuple[int, int]]]:
    """The intervals of dimension 0 that each rank holds."""
    return [[box[0] for box in held.boxes(tensor, rank)] for rank in range(held.layout.size)]


def test_chunks_are_those_of_torch() -> None:
    """10 rows over 4 are 3, 3, 3, 1; 5 over 4 are 2, 2, 1, 0."""
    assert [chunk(0, 10, 4, i) for i in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [b - a for a, b in (chunk(0, 5, 4, i) for i in range(4))] == [2, 2, 1, 0]
    assert [b - a for a, b in (chunk(7, 8, 4, i) for i in range(4))] == [1, 0, 0, 0]


def test_fsdp_cuts_rows() -> None:
    assert rows(holding("f4"), Tensor("w", (10, 3), "up", 0)) == [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 10)]]
    assert rows(holding("f4"), Tensor("w", (5, 3), "down", 1)) == [[(0, 2)], [(2, 4)], [(4, 5)], []]
    assert rows(holding("f2"), Tensor("norm", (4,), "norm")) == [[(0, 2)], [(2, 4)]]


def test_tp_cuts_first_and_fsdp_its_block() -> None:
    """With two shards of two blocks, 8 rows: shard 0 of block 1 holds rows 4 and 5."""
    held = holding("f2t2")
    assert rows(held, Tensor("w", (8, 3), "up", 0)) == [[(0, 2)], [(4, 6)], [(2, 4)], [(6, 8)]]
    assert held.boxes(Tensor("w", (8, 4), "down", 1), 1) == (((0, 4), (2, 4)),)


def test_replicas_hold_the_same() -> None:
    held = holding("d2t2")
    tensor = Tensor("w", (8, 3), "up", 0)
    assert held.boxes(tensor, 0) == held.boxes(tensor, 2) != held.boxes(tensor, 1)


def test_key_value_heads_are_repeated_beyond_their_number() -> None:
    tensor = Tensor("k", (4, 3), "k", 0)  # two heads of two rows
    assert rows(holding("t4", kv_heads=2), tensor) == [[(0, 2)], [(0, 2)], [(2, 4)], [(2, 4)]]
    assert rows(holding("t2", kv_heads=2), tensor) == [[(0, 2)], [(2, 4)]]
    with pytest.raises(ConfigError, match="give kv_heads"):
        holding("t2").boxes(tensor, 0)
    with pytest.raises(ConfigError, match="must divide 4 key-value heads"):
        holding("t3", kv_heads=4)


def test_joined_matrices_are_cut_one_by_one() -> None:
    joined = Tensor("qkv", (16, 3), "qkv", 0, parts=(8, 4, 4))
    assert rows(holding("t2", kv_heads=2), joined) == [[(0, 4), (8, 10), (12, 14)], [(4, 8), (10, 12), (14, 16)]]
    assert rows(holding("t4", kv_heads=2), joined)[1] == [(2, 4), (8, 10), (12, 14)]
    # FSDP alone cuts the whole; with tp it cuts the local rows one after the other: 4 + 2 + 2 rows, 4 to each
    assert rows(holding("f2"), joined) == [[(0, 8)], [(8, 16)]]
    assert rows(holding("f2t2", kv_heads=2), joined)[2] == [(8, 10), (12, 14)]
    experts = Tensor("experts", (4, 6, 2), "experts_gate_up", 1, parts=(3, 3))
    assert holding("f2t3").boxes(experts, 1) == (((0, 2), (1, 2), (0, 2)), ((0, 2), (4, 5), (0, 2)))
    with pytest.raises(ConfigError, match="do not add to its 16"):
        holding("t2", kv_heads=2).boxes(Tensor("qkv", (16, 3), "qkv", 0, parts=(8, 4)), 0)


def test_padded_vocabulary() -> None:
    table = Tensor("embed", (10, 3), "embedding", 0)
    assert rows(holding("t4", vocab_multiple=16), table) == [[(0, 4)], [(4, 8)], [(8, 10)], []]
    assert rows(holding("t4"), table) == [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 10)]]
    with pytest.raises(ConfigError, match="4 does not divide"):
        holding("t4").boxes(Tensor("w", (10, 3), "up", 0), 0)


def test_stages() -> None:
    assert even_stages(8, 4) == (2, 2, 2, 2)
    assert even_stages(10, 4) == (2, 3, 3, 2)
    assert even_stages(11, 4) == (3, 3, 3, 2)
    held = holding("p2", stage_layers=(1, 2), is_tied=True)
    names = {
        "embed": Tensor("embed", (4, 2), "embedding", 0),
        "norm": Tensor("norm", (4,), "norm"),
        "first": Tensor("w", (4, 2), "up", 0, layer=0),
        "last": Tensor("w", (4, 2), "up", 0, layer=2),
    }
    stages = {name: [bool(held.boxes(tensor, rank)) for rank in range(2)] for name, tensor in names.items()}
    assert stages == {"embed": [True, True], "norm": [False, True], "first": [True, False], "last": [False, True]}
    with pytest.raises(ConfigError, match="is in layer 3; the stages have 3"):
        held.boxes(Tensor("w", (4, 2), "up", 0, layer=3), 0)
    with pytest.raises(ConfigError, match="needs stage_layers with 2"):
        holding("p2")


def test_devices_fit_the_layout() -> None:
    with pytest.raises(ConfigError, match="needs 4 different devices"):
        Holding(Layout.parse("f4"), [0, 1, 2, 2])


INTERVALS = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted).map(tuple)
BOXES = st.tuples(INTERVALS, INTERVALS, INTERVALS)


def painted(boxes: list[Box]) -> np.ndarray:
    count = np.zeros((6, 6, 6), int)
    for (a, b), (c, d), (e, f) in boxes:
        count[a:b, c:d, e:f] += 1
    return count


@given(BOXES, BOXES)
def test_intersect_and_subtract_share_a_box_between_them(one: Box, other: Box) -> None:
    shared = intersect(one, other)
    assert (painted([shared]) if shared else painted([])).tolist() == (painted([one]) * painted([other])).tolist()
    if shared:
        assert (painted([shared, *subtract(one, shared)]) == painted([one])).all()


@given(BOXES, st.lists(BOXES, max_size=4))
def test_what_is_left(box: Box, held: list[Box]) -> None:
    left = without([box], held)
    assert (painted(left) == painted([box]) * (painted(held) == 0)).all()
    assert sum(volume(one) for one in left) == painted(left).sum()
