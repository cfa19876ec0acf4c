"""An operator that narrows a mask: the checks trust it behind an environment, and the run holds it to its word."""

from __future__ import annotations

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import CheckError, ConfigError, OperatorError
from flowrl.graph.text import from_text, to_text
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl_operators import advantages, environments, losses, masks, rewards


def tool(text: str) -> str:
    """Says it again."""
    return text


@fr.operator(writes={"loss_mask": fr.TOKEN.bool}, replaces=True, narrows="loss_mask")
def second_half(loss_mask: fr.TOKEN.bool, *, widens: bool = False):
    values = np.concatenate([np.arange(len(row)) >= len(row) // 2 for row in loss_mask])
    return fr.Ragged.like(values if widens else values & loss_mask.values, loss_mask)


@fr.operator(writes={"loss_mask": fr.TOKEN.bool}, replaces=True)
def any_mask(loss_mask: fr.TOKEN.bool):
    return loss_mask


def flow_with(narrowing):
    @fr.flow
    def with_tools(prompts, policy):
        rows = fr.rollout(policy, prompts, n=4, environment=environments.tools([tool]), max_turns=3)
        rows = fr.logprobs(policy, advantages.group_norm(rewards.exact(rows)), out="old_logprobs")
        return fr.update(policy, narrowing(rows), loss=losses.ppo_clip(0.2))

    return with_tools


@pytest.mark.parametrize("narrowing", [second_half, masks.drift(high=2.0), masks.second_moment], ids=str)
def test_a_narrowed_mask_holds_tool_tokens_out(narrowing) -> None:
    graph = fr.check(flow_with(narrowing))
    assert from_text(to_text(graph)) == graph


def test_any_other_operator_must_be_narrowed_in_sight() -> None:
    with pytest.raises(CheckError, match="FR-M01"):
        fr.check(flow_with(any_mask))


def test_a_mask_that_is_wider_after_all_is_refused_when_it_runs() -> None:
    mask = fr.Ragged.of([[True, True, False, False], [False, True]], dtype=bool)
    rows = RowBatch({"loss_mask": mask}, {"loss_mask": fr.TOKEN.bool})
    assert run_operator(second_half.bind(), rows).rows["loss_mask"].values.tolist() == [False] * 5 + [True]
    with pytest.raises(OperatorError, match="narrows 'loss_mask', and its 'loss_mask' is true where that is not"):
        run_operator(second_half.bind(widens=True), rows)


def test_what_is_narrowed_must_be_read() -> None:
    with pytest.raises(ConfigError, match="narrows 'loss_mask', which it does not read"):

        @fr.operator(writes={"loss_mask": fr.TOKEN.bool}, narrows="loss_mask")
        def wrong(reward: fr.SAMPLE.f32):
            return reward
