"""Terms that look at a whole optimizer step, and averages over rows and prompts: the same whatever a micro-batch holds."""

import numpy as np
import pytest
import torch

import flowrl as fr
from flowrl.engines.trainer_torch import Trainer
from flowrl.errors import ConfigError
from flowrl.graph.averages import Average
from flowrl.schema.ragged import Ragged
from flowrl_operators import losses

BUDGETS = (10_000, 20, 1)


def columns_of(rows, seed=0):
    generator = np.random.default_rng(seed)
    tokens = len(rows.response_ids.values)
    return {
        "advantage": generator.normal(size=len(rows)).astype(np.float32),
        "old_logprobs": Ragged.like(-3 * generator.random(tokens).astype(np.float32), rows.response_ids),
    }


def mask_of(rows):
    """Holes in the rows, and a row that does not train."""
    mask = Ragged.like(
        np.random.default_rng(2).random(len(rows.response_ids.values)) < 0.7, rows.response_ids
    ).to_list()
    mask[3] = [False] * len(mask[3])
    return mask


@pytest.fixture
def sizes(monkeypatch):
    """Rows of each micro-batch."""
    seen, take = [], Trainer._micro_batch

    def micro_batch(self, work, rows, *weights):
        seen.append(len(rows))
        return take(self, work, rows, *weights)

    monkeypatch.setattr(Trainer, "_micro_batch", micro_batch)
    return seen


def taken(kit, loss, budget, **options):
    """(metrics, gradients of the first step) of an update."""
    rows = kit.random_rows(8, seed=1)
    host = kit.open(kit.families["gpt2"](), "update", micro_batch_tokens=budget)
    whole = loss.needs_whole_batch()
    job = kit.job(rows, loss, mask_of(rows), columns=columns_of(rows), is_whole=whole, **options)
    return host.update(job).metrics, kit.gradients(host)


@pytest.mark.parametrize(
    ("loss", "figure"),
    [
        (losses.clip_cov(low_cov=0.05, high_cov=9.0, share=0.1), "cov_fraction"),
        (losses.kl_cov(0.2, coef=0.5), "cov_fraction"),
        (losses.ppo_clip(0.2) * losses.top_entropy(0.3), "learning_fraction"),
    ],
    ids=["clip_cov", "kl_cov", "top_entropy"],
)
def test_a_term_of_the_whole_step_gets_it_whatever_the_budget(kit, sizes, loss, figure):
    metrics, wanted = taken(kit, loss, BUDGETS[0])
    assert 0 < metrics[figure].mean < 1
    for budget in BUDGETS[1:]:
        found, gradients = taken(kit, loss, budget)
        assert found["loss"].mean == pytest.approx(metrics["loss"].mean, rel=1e-5)
        assert found[figure].mean == metrics[figure].mean
        kit.assert_equal_gradients(gradients, wanted)
    assert set(sizes) == {7}  # the row that does not train needs no pass


def test_each_mini_batch_is_a_step_of_its_own(kit, sizes):
    taken(kit, losses.kl_cov(0.2), 1, minibatches=2, shuffle=False)
    assert sizes == [3, 4]


def test_other_losses_are_cut_as_the_budget_says(kit, sizes):
    taken(kit, losses.ppo_clip(0.2), 1)
    assert sizes == [1] * 7


@pytest.mark.parametrize(
    "average",
    [
        Average("token_sum"),
        Average("sequence_mean", rows="all", eps=0.5),
        Average("sequence_sum", rows=4),
        Average("prompt_mean"),
    ],
    ids=lambda average: average.kind,
)
def test_averages_do_not_depend_on_the_budget(kit, average):
    loss = losses.ppo_clip(0.2) + 0.1 * losses.gmpo(0.4)
    options = {"average": average, "prompts": np.array(list("aabbbccd")) if average.key else None}
    metrics, wanted = taken(kit, loss, BUDGETS[0], **options)
    for budget in BUDGETS[1:]:
        found, gradients = taken(kit, loss, budget, **options)
        assert found["loss"].mean == pytest.approx(metrics["loss"].mean, rel=1e-5)
        kit.assert_equal_gradients(gradients, wanted)


def test_the_trainer_and_plain_tensors_average_alike(kit):
    """`fr.apply_loss` on what the model says is what an update reports, rows that do not train counted or not."""
    rows = kit.random_rows(8, seed=1)
    columns, mask = columns_of(rows), mask_of(rows)
    width = int(rows.response_ids.lengths.max())
    scored = kit.open(kit.families["gpt2"](), "logprobs").logprobs(rows)

    def padded(column):
        found = torch.zeros(len(rows), width)
        for row, values in enumerate(column):
            found[row, : len(values)] = torch.as_tensor(np.asarray(values, np.float32))
        return found

    given = {
        "logprobs": padded(scored).requires_grad_(),
        "old_logprobs": padded(columns["old_logprobs"]),
        "advantage": torch.from_numpy(columns["advantage"]),
        "prompt_id": list("aabbbccd"),
    }
    for average in (Average("sequence_mean", rows="all"), Average("constant", length=9), Average("prompt_mean")):
        prompts = np.array(given["prompt_id"]) if average.key else None
        metrics, _ = taken(kit, losses.ppo_clip(0.2), 20, average=average, prompts=prompts)
        value, _ = fr.apply_loss(losses.ppo_clip(0.2), given, padded(mask), **average.params)
        assert metrics["loss"].mean == pytest.approx(value.item(), rel=1e-4)


def test_a_loss_keeps_no_state():
    with pytest.raises(ConfigError, match="a loss keeps no state"):
        fr.loss(locality="stateful")(lambda logprobs: logprobs)
