"""Losses before a run: what a weight is, which options are looked at and when, arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import ConfigError, TraceError
from flowrl.graph.drift import without_drift
from flowrl.graph.losses import Loss, refuse_lone_weights
from flowrl.graph.nodes import Graph
from flowrl.graph.text import from_text, to_text
from flowrl_operators import advantages, losses, rewards


def check_size(*, size: float, kind: str) -> None:
    if not size > 0:
        raise ConfigError(f"sized needs size > 0; found {size!r}")


@fr.loss(on_policy=False, check=check_size)
def sized(logprobs, *, size: float = 1.0, kind: str = "a"):
    return size * logprobs


@fr.loss(on_policy=False)
def unchecked(logprobs, *, size: float = 1.0, kind: str = "a"):
    return size * logprobs


@fr.loss(weight=True)
def weight(logprobs):
    return logprobs


@fr.loss(corrects=True)
def correction(logprobs):
    return logprobs


@fr.loss(corrects=True, weight=False)
def corrected(logprobs):
    return logprobs


def trained_on(loss: Any) -> Graph:
    @fr.flow
    def trained(prompts, policy):
        rows = advantages.group_norm(rewards.exact(fr.rollout(policy, prompts, n=4)))
        return fr.update(policy, rows, loss=loss)

    return trained.graph()


def test_what_corrects_is_a_weight_unless_it_says_otherwise() -> None:
    assert [loss().weight for loss in (weight, correction, corrected, sized)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (weight(), "'weight'"),
        (weight() + sized(), "'weight'"),
        (sized() - 0.5 * correction(), "'correction'"),
        (weight() * correction() + sized(), "'weight' and 'correction'"),
        ((sized() + weight()) * (corrected() + correction()), "'weight' and 'correction'"),
    ],
)
def test_a_weight_by_itself_is_refused(loss: Loss, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"test_losses.py:\d+: {named} only weighs? a loss"):
        trained_on(loss)


@pytest.mark.parametrize(
    "loss",
    [
        sized() * weight(),
        weight() * correction() * sized() + corrected(),
        sized() * (weight() + correction()),
        (sized() + weight()) * corrected(),
        2.0 * (weight() * sized()),
    ],
)
def test_a_weight_multiplies(loss: Loss) -> None:
    refuse_lone_weights(loss)
    assert trained_on(loss)["update"]["loss"] == loss


def test_the_text_says_what_a_weight_is() -> None:
    graph = trained_on(sized() * weight())
    text = to_text(graph)
    assert "  weight True" in text
    again = from_text(text)
    assert again == graph
    assert [term.weight for term in again["update"]["loss"].terms()] == [False, True]


def test_options_are_looked_at_when_a_loss_is_called() -> None:
    with pytest.raises(ConfigError, match=r"sized needs size > 0; found -1\.0"):
        sized(-1.0)
    with pytest.raises(ConfigError, match="a number as size"):
        sized("1")
    assert sized(2.0).config == (("kind", "a"), ("size", 2.0))


def test_a_check_is_no_part_of_a_loss() -> None:
    assert sized.properties == unchecked.properties
    again = fr.loss(on_policy=False)(sized.function)
    assert again.hash == sized.hash


def test_the_options_of_a_text_are_looked_at_before_a_run() -> None:
    text = to_text(trained_on(losses.ppo_clip(0.3)))
    graph = from_text(text)
    assert without_drift(graph, allowed=False) == (graph, ())
    wrong = from_text(text.replace("ppo_clip(clip=0.3)", "ppo_clip(clip=-0.3)"))
    with pytest.raises(ConfigError, match=r"ppo_clip needs clip > 0.*found clip=-0\.3"):
        without_drift(wrong, allowed=False)


def test_a_loss_is_divided_by_a_number() -> None:
    assert sized() / 4 == 0.25 * sized()
    assert (sized() + unchecked()) / 2 == 0.5 * (sized() + unchecked())
    for wrong in (0, True, "2", sized()):
        with pytest.raises(TraceError, match="divided by a number that is not 0"):
            sized() / wrong


def test_totals_of_parts_are_summed() -> None:
    parts = [fr.Totals.of(np.array([3, 0]), ["a", "b"]), fr.Totals.of(np.array([2]), ["a"])]
    assert sum(parts) == fr.Totals(5, 2, 3, {"a": 5, "b": 0})
    with pytest.raises(TypeError):
        sum(parts, 1)


def test_an_operator_on_arrays_says_which_columns_it_needs() -> None:
    reward = np.array([1.0, 0.0])
    with pytest.raises(
        ConfigError, match="'group_norm' on arrays needs the columns reward, group, first.*found 1 value$"
    ):
        advantages.group_norm(reward)
    with pytest.raises(ConfigError, match="found 0 values and reward by name"):
        advantages.group_norm(reward=reward)
    assert advantages.group_norm(reward, np.array(["p", "p"])).shape == (2,)
