"""Whose ratio a loss takes, and the precision of a threshold."""

import pytest
import torch
from torch import Tensor

from flowrl.engines.segments import Segments
from flowrl.errors import ConfigError
from flowrl_operators import losses

ROWS = Segments.of(torch.tensor([0, 0, 1]), 2)
OLD = torch.tensor([-1.0, -1.0, -1.0])
A = torch.tensor([1.0, 1.0, -1.0])


def live(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


@pytest.mark.parametrize("loss", [losses.cispo.function, losses.sapo.function])
def test_a_row_has_the_geometric_mean_of_its_ratios(loss) -> None:
    _, metrics = loss(live(-0.5, -1.5, -0.9), OLD, A, ROWS, level="geometric")
    torch.testing.assert_close(metrics["ratio"], torch.tensor([0.0, 0.0, 0.1]).exp())
    with pytest.raises(ConfigError, match="needs the rows of the tokens"):
        loss(live(-0.5, -1.5, -0.9), OLD, A, level="geometric")


def test_a_row_learns_as_one() -> None:
    one, other = live(-0.5, -1.5, -0.9), live(-0.7, -1.3, -0.9)  # same means
    for x in (one, other):
        losses.sapo.function(x, OLD, A, ROWS, level="geometric")[0].sum().backward()
    torch.testing.assert_close(one.grad, other.grad)


def test_a_threshold_in_single_precision() -> None:
    # of three tokens half learn: the middle one is the threshold, and in float32 it is rounded up
    entropy = torch.tensor([0.1, 1 / 3, 0.9], dtype=torch.float64)
    assert losses.top_entropy.function(entropy, share=0.5)[0].tolist() == [0, 1, 1]
    assert losses.top_entropy.function(entropy, share=0.5, threshold="float32")[0].tolist() == [0, 0, 1]
    assert losses.top_entropy.function(entropy.float(), share=0.5, threshold="float32")[0].tolist() == [0, 1, 1]
    with pytest.raises(ConfigError, match="threshold"):
        losses.top_entropy(threshold="half")
