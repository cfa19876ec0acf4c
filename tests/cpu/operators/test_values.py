"""The loss of critics beyond the vectors."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flowrl as fr
from flowrl.errors import ConfigError, SchemaError
from flowrl_operators import losses

NUMBERS = st.lists(st.floats(-20, 20), min_size=3, max_size=3)


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=50, deadline=None)
@given(NUMBERS, NUMBERS, NUMBERS, st.floats(0.1, 50), st.sampled_from([None, 0.2]))
def test_huber_is_the_squared_error_near_and_linear_far(
    values: list[float], old: list[float], returns: list[float], delta: float, clip: float | None
) -> None:
    given_columns = (tensor(values), tensor(old), tensor(returns))
    squared, _ = losses.value_clip.function(*given_columns, clip=clip)
    huber, _ = losses.value_clip.function(*given_columns, clip=clip, huber=delta)
    assert (huber <= squared + 1e-12).all() and (huber >= 0).all()
    near = squared <= delta**2 / 2
    torch.testing.assert_close(huber[near], squared[near])
    torch.testing.assert_close(huber[~near], (delta * ((2 * squared).sqrt() - delta / 2))[~near])


def test_the_slope_of_a_far_error_is_delta() -> None:
    values = tensor([100.0, -100.0, 0.5]).requires_grad_()
    loss, _ = losses.value_clip(values, values.detach(), torch.zeros(3, dtype=torch.float64), clip=None, huber=2.0)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert gradient.tolist() == [2.0, -2.0, 0.5]


def test_on_plain_tensors_the_earlier_values_have_their_own_name() -> None:
    columns = {
        "values": torch.tensor([[1.0]], requires_grad=True),
        "old_values": torch.tensor([[0.0]]),
        "returns": torch.tensor([[2.0]]),
    }
    loss, metrics = fr.apply_loss(losses.value_clip(0.2), columns, torch.ones(1, 1))
    assert loss.item() == pytest.approx(1.8**2 / 2)
    assert metrics["value_clip_fraction"] == 1
    del columns["old_values"]
    with pytest.raises(SchemaError, match="reads 'old_values'"):
        fr.apply_loss(losses.value_clip(0.2), columns, torch.ones(1, 1))


@pytest.mark.parametrize("options", [{"clip": 0.0}, {"huber": -1.0}])
def test_options_that_make_no_sense(options: dict[str, float]) -> None:
    one = torch.ones(1, requires_grad=True)
    with pytest.raises(ConfigError, match="clip > 0 and huber > 0"):
        losses.value_clip(one, one, one, **options)
