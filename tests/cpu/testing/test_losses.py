"""The kit catches every loss that breaks a property, and no other."""

import subprocess
import sys

import pytest
import torch

from flowrl.testing import ConformanceError, check_loss, loss_cases
from flowrl.testing._losses import PROPERTIES
from tests.cpu.testing import broken

RIGHT = (
    (broken.clipped, {}),
    (broken.whole, {}),
    (broken.from_logits, {}),
    (broken.pairs, {}),
    (broken.weighted, {"stop_gradient": "the weight is a constant"}),
    (broken.correction, {}),
    (broken.straight_through, {"stop_gradient": "rounding passes the gradient through"}),
)


@pytest.mark.parametrize("case", [c for loss, more in RIGHT for c in loss_cases(loss, **more)], ids=str)
def test_right_losses_pass(case):
    case.check()


@pytest.mark.parametrize(
    ("name", "loss", "says"), broken.BROKEN, ids=[f"{name}-{loss.__name__}" for name, loss, _ in broken.BROKEN]
)
def test_each_broken_loss_is_caught(name, loss, says):
    (case,) = [case for case in loss_cases(loss) if case.property == name]
    with pytest.raises(ConformanceError) as caught:
        case.check()
    message = str(caught.value)
    assert says in message
    assert message.startswith(f"{loss.__name__} breaks '{name}' ({PROPERTIES[name].says}):\n")


def test_every_property_has_a_loss_that_breaks_it():
    assert {name for name, _, _ in broken.BROKEN} == set(PROPERTIES)


def test_a_stop_gradient_that_is_declared_is_still_checked():
    """The gradient must be that of the loss with the held parts constant."""
    check_loss(broken.weighted, stop_gradient="the weight is a constant")
    with pytest.raises(ConformanceError, match="'wrong_backward'|wrong_backward breaks 'gradients'"):
        check_loss(broken.wrong_backward, stop_gradient="none, in truth")


def test_a_failure_names_the_tensors():
    with pytest.raises(ConformanceError) as caught:
        check_loss(broken.cut_off)
    text = str(caught.value)
    assert "  input     logprobs = [[" in text and "mask = [[" in text
    assert "  expected  [" in text and "  found     [0" in text


def test_configurations_and_columns():
    asked = []

    def ids(rng, lengths):
        asked.append(len(lengths))
        return [rng.integers(0, 3, n) for n in lengths]

    for cases in (
        loss_cases(broken.clipped, config=[{}, {"clip": 0.5}]),
        loss_cases(broken.clipped(0.1)),
        loss_cases(broken.from_logits, columns={"response_ids": ids}),
    ):
        next(case for case in cases if case.property == "columns").check()
    assert asked
    with pytest.raises(ConformanceError, match=r"clipped\(clip=nan\) breaks 'columns'"):
        check_loss(broken.clipped, config=[{}, {"clip": float("nan")}])


def test_the_kit_leaves_torch_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_loss(broken.clipped)
    assert torch.equal(torch.rand(3), expected)


def test_importing_the_kit_is_light():
    code = "import sys, flowrl.testing; print([m for m in ('torch', 'pytest', 'hypothesis') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
