"""An operator called on arrays: its columns must belong together, which in a table they always do."""

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import DataError


@fr.operator(writes={"advantages": fr.TOKEN.f32})
def shared(reward: fr.SAMPLE.f32, loss_mask: fr.TOKEN.bool, values: fr.TOKEN.f32 = None, *, scale: float = 1.0):
    return fr.Ragged.like(scale * loss_mask.spread(reward), loss_mask)


REWARD = np.asarray([1.0, 2.0])
MASK = fr.Ragged(np.ones(3, bool), np.asarray([0, 1, 3]))


def test_columns_that_belong_together_are_taken() -> None:
    values = fr.Ragged(np.zeros(3), np.asarray([0, 1, 3]))
    assert shared(REWARD, MASK, values, scale=2.0).to_list() == [[2.0], [4.0, 4.0]]
    assert shared(REWARD, MASK, values=values).to_list() == shared(REWARD, MASK, None).to_list()


def test_rows_are_counted() -> None:
    with pytest.raises(DataError, match="'shared' needs columns of equally many rows; found reward 3, loss_mask 2"):
        shared(np.ones(3), MASK)


@pytest.mark.parametrize("by_name", [False, True])
def test_tokens_are_counted_in_every_row(by_name: bool) -> None:
    values = fr.Ragged(np.zeros(3), np.asarray([0, 2, 3]))  # as many in all
    with pytest.raises(DataError, match="in row 0, loss_mask has 1 and values 2"):
        _ = shared(REWARD, MASK, values=values) if by_name else shared(REWARD, MASK, values)


def test_each_of_many_columns_is_counted() -> None:
    @fr.operator(writes={"total": fr.SAMPLE.f32})
    def total(*part: fr.SAMPLE.f32.named_by("parts"), parts: tuple[str, ...]):
        return sum(part)

    assert total(REWARD, REWARD, REWARD, parts=("a", "b", "c")).tolist() == [3.0, 6.0]
    with pytest.raises(DataError, match="equally many rows; found part 2, part 2, part 1"):
        total(REWARD, REWARD, np.ones(1), parts=("a", "b", "c"))
