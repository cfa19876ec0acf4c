"""Torch tensors as values of rows: taken where they share their memory with NumPy, refused otherwise."""

import numpy as np
import pytest
import torch

from flowrl.errors import SchemaError
from flowrl.schema import SAMPLE, TOKEN
from flowrl.store.layout import decode, prepare_rows
from flowrl.store.rows import RowBatch

TYPES = {"ids": TOKEN.i32, "mask": TOKEN.bool, "logits": TOKEN.f16[2], "reward": SAMPLE.f32}


def row(tokens: int) -> dict[str, torch.Tensor]:
    return {
        "ids": torch.arange(2 * tokens, dtype=torch.int32)[::2],  # not contiguous
        "mask": torch.arange(tokens) % 2 == 0,
        "logits": torch.randn(tokens, 2, generator=torch.Generator().manual_seed(tokens)).half(),
        "reward": torch.tensor(0.5),
    }


@pytest.mark.parametrize("mixed", [False, True])
def test_tensors_are_taken_as_arrays(mixed: bool) -> None:
    rows = [row(3), row(0), row(5)]
    arrays = [{name: value.numpy() for name, value in one.items()} for one in rows]
    prepared = prepare_rows([*rows[:2], arrays[2]] if mixed else rows, TYPES)
    root = np.zeros(prepared.nbytes, np.uint8)
    prepared.write(root)
    batch = RowBatch.from_rows(arrays, TYPES)
    for layout in prepared.layouts:
        found = decode(layout, root, 3)
        assert np.array_equal(found, batch[layout.name]) if layout.name == "reward" else found == batch[layout.name]


def test_wider_tensors_are_converted_as_arrays_are() -> None:
    prepared = prepare_rows([{"ids": torch.tensor([1, 2])}], {"ids": TOKEN.i32})
    root = np.zeros(prepared.nbytes, np.uint8)
    prepared.write(root)
    assert decode(prepared.layouts[0], root, 1).values.tolist() == [1, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, requires_grad=True), torch.zeros(2, device="meta")]
)
def test_tensors_without_an_array_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(SchemaError, match="Tensor in row 1 that NumPy cannot take"):
        prepare_rows([{"values": torch.zeros(2)}, {"values": tensor}], {"values": TOKEN.f32})
