"""`fr.apply_loss`: what a column must be for a loss to read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flowrl as fr
from flowrl.errors import ConfigError, OperatorError, SchemaError
from flowrl_operators import losses

MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
LOGPROBS = torch.full((2, 3), -1.0)
ADVANTAGE = torch.tensor([1.0, -1.0])


def value(loss: Any, columns: dict[str, Any], mask: torch.Tensor = MASK) -> float:
    return float(fr.apply_loss(loss, columns, mask, average="token_sum")[0])


def test_a_number_per_row_and_one_per_token_are_told_apart() -> None:
    spread = ADVANTAGE[:, None].expand(2, 3)
    assert value(losses.reinforce(), {"logprobs": LOGPROBS, "advantage": ADVANTAGE}) == 1.0
    assert value(losses.reinforce(), {"logprobs": LOGPROBS, "advantages": spread}) == 1.0
    with pytest.raises(
        SchemaError, match=r"'advantage' is one number per row.*\[2, 3\], goes by the name 'advantages'"
    ):
        value(losses.reinforce(), {"logprobs": LOGPROBS, "advantage": spread})
    with pytest.raises(SchemaError, match="tensor \\[2\\]; found list"):
        value(losses.reinforce(), {"logprobs": LOGPROBS, "advantage": [1.0, -1.0]})


@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "logprobs"])
def test_a_token_column_is_not_one_number_per_row(name: str) -> None:
    # as many tokens train as there are rows, so that the shapes would fit
    columns = {"logprobs": LOGPROBS, "old_logprobs": LOGPROBS, "advantages": LOGPROBS, name: ADVANTAGE}
    with pytest.raises(SchemaError, match=rf"column '{name}' has shape \[2\].*\[2, 3\], a value at each token"):
        value(losses.ppo_clip(), columns, torch.tensor([[1, 1, 0], [0, 0, 0]]))
    with pytest.raises(SchemaError, match=rf"column '{name}' is per token, a tensor \[2, 3\]; found list"):
        value(losses.ppo_clip(), columns | {name: [1.0, -1.0]})


def test_a_row_column_is_not_one_number_per_token() -> None:
    columns = {"logprobs": LOGPROBS, "ref_logprobs": LOGPROBS, "chosen": torch.ones(2, 3, dtype=torch.bool)}
    with pytest.raises(SchemaError, match=r"'chosen' has shape \[2, 3\].*\[2\], a value per row"):
        value(losses.kto(baseline=None), columns)


def test_inner_dimensions_are_counted() -> None:
    with pytest.raises(SchemaError, match=r"'logits' has shape \[2, 3\].*\[2, 3, V\]"):
        value(losses.full_kl(), {"logits": LOGPROBS, "ref_logits": LOGPROBS[..., None]})


@fr.loss(on_policy=False)
def of_any_kind(logprobs, level):
    return logprobs * (level if level.shape == logprobs.shape else level.sum())


def test_an_undeclared_column_may_be_of_either_kind() -> None:
    assert value(of_any_kind(), {"logprobs": LOGPROBS, "level": LOGPROBS}) == 5.0
    assert value(of_any_kind(), {"logprobs": LOGPROBS, "level": torch.ones(2)}) == -10.0
    with pytest.raises(SchemaError, match="per token, or \\[2\\] per row"):
        value(of_any_kind(), {"logprobs": LOGPROBS, "level": torch.ones(3)})


@pytest.mark.parametrize("name", ["old_logprob", "old_log_prob", "old_log_probs", "oldlogprobs"])
def test_a_misspelt_column_is_not_done_without(name: str) -> None:
    columns = {"logprobs": LOGPROBS, "advantage": ADVANTAGE, name: LOGPROBS - 1}
    with pytest.raises(SchemaError, match=f"reads the column '{name}'.*did you mean 'old_logprobs'"):
        value(losses.ppo_clip(), columns)
    # where the right one is there, the other is something of the caller's
    assert value(losses.ppo_clip(), columns | {"old_logprobs": LOGPROBS}) == -1.0


def test_columns_of_other_losses_may_be_there() -> None:
    names = ("ref_logprobs", "rollout_logprobs", "teacher_logprobs", "values", "returns", "step_weights")
    others = dict.fromkeys(names, LOGPROBS)
    assert value(losses.ppo_clip(), {"logprobs": LOGPROBS, "advantage": ADVANTAGE, **others}) == -1.0


@fr.loss(on_policy=False)
def coarse(logprobs, level):
    return logprobs * level


@fr.loss(on_policy=False)
def refusing(logprobs, level):
    raise ConfigError("level makes no sense")


def test_what_to_declare_is_said_where_a_number_per_row_does_not_fit() -> None:
    columns = {"logprobs": LOGPROBS, "level": torch.ones(2)}
    with pytest.raises(OperatorError, match='declare levels: fr.TOKEN.f32.or_broadcast\\("level"\\)'):
        value(coarse(), columns)
    with pytest.raises(OperatorError, match="level makes no sense") as caught:
        value(refusing(), columns)
    assert "declare" not in str(caught.value)


@pytest.mark.parametrize("option", [{"level": "geometrical"}, {"clip": -0.2}])
def test_a_wrong_option_is_refused_before_a_batch(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="found"):
        losses.ppo_clip(**option)
    with pytest.raises(ConfigError, match="found"):
        losses.ppo_clip(LOGPROBS[0], LOGPROBS[0], LOGPROBS[0], **option)


@pytest.mark.parametrize("totals", [fr.Totals(4, 2), fr.Totals(5, 1), fr.Totals(0, 0), fr.Totals(-5, -5)])
def test_a_part_has_no_more_than_the_whole(totals: fr.Totals) -> None:
    columns = {"logprobs": LOGPROBS, "advantage": ADVANTAGE}
    with pytest.raises(ConfigError, match="at least those of a part, 5 tokens in 2 rows; found"):
        fr.apply_loss(losses.reinforce(), columns, MASK, totals=totals)
    assert float(fr.apply_loss(losses.reinforce(), columns, MASK, totals=fr.Totals(5, 2))[0]) == pytest.approx(0.2)


def test_totals_and_mask_are_looked_at() -> None:
    columns = {"logprobs": LOGPROBS, "advantage": ADVANTAGE}
    with pytest.raises(ConfigError, match=r"fr.Totals\(num_tokens, num_rows\); found int"):
        fr.apply_loss(losses.reinforce(), columns, MASK, totals=5)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="0 or not, at each token; found NaN"):
        fr.apply_loss(losses.reinforce(), columns, MASK * float("nan"))
