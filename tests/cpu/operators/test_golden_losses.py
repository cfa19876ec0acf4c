"""Loss terms against the numbers and gradients of other systems.

The averages over tokens and rows that a vector's number needs are written out here, as each system takes them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowrl.engines.segments import Segments
from flowrl_operators import losses
from tests.golden.vectors import Case, cases, read, to_array

Average = Callable[[Tensor, Segments, int], Tensor]

# L [T] packed, its rows, number of all rows
TOKEN_MEAN: Average = lambda L, rows, n: L.sum() / len(L)  # noqa: E731
TOKEN_SUM: Average = lambda L, rows, n: L.sum()  # noqa: E731
ROW_MEANS: Average = lambda L, rows, n: rows.mean(L).sum() / (rows.lengths > 0).sum()  # noqa: E731
ALL_ROW_MEANS: Average = lambda L, rows, n: rows.mean(L).sum() / n  # noqa: E731
SUM_OF_ROW_MEANS: Average = lambda L, rows, n: rows.mean(L).sum()  # noqa: E731
ROW_SUMS: Average = lambda L, rows, n: L.sum() / (rows.lengths > 0).sum()  # noqa: E731


class Packed:
    """A case's matrices as a loss gets them: only the tokens of the mask, row after row."""

    def __init__(self, case: Case, mask: str = "mask") -> None:
        self.case = case
        self.mask = torch.tensor(case.array(mask)) > 0
        self.num_rows = len(self.mask)
        self.segments = Segments.of(self.mask.nonzero()[:, 0], self.num_rows)

    def whole(self, name: str) -> Tensor:
        """The matrix as a leaf to differentiate by."""
        return torch.tensor(self.case.array(name), requires_grad=True)

    def tokens(self, matrix: Tensor | str) -> Tensor:
        if isinstance(matrix, str):
            matrix = torch.tensor(self.case.array(matrix))
        return matrix[self.mask]


def value(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def check_gradient(case: Case, loss: Tensor, leaf: Tensor, wanted: str) -> None:
    (gradient,) = torch.autograd.grad(loss, leaf)
    case.close(gradient.numpy(), case.wanted(wanted))


POLICY: dict[str, tuple[dict[str, Any], Average]] = {
    "policy_loss__verl.ppo_dualclip_token-mean": ({"dual": 3.0}, TOKEN_MEAN),
    "policy_loss__verl.ppo_dualclip_token_adv": ({"dual": 3.0}, TOKEN_MEAN),
    "policy_loss__verl.ppo_dualclip_token-sum": ({"dual": 3.0}, TOKEN_SUM),
    "policy_loss__verl.ppo_dualclip_seq-mean-token-mean": ({"dual": 3.0}, ROW_MEANS),
    "policy_loss__verl.ppo_dualclip_seq-mean-token-sum": ({"dual": 3.0}, ROW_SUMS),
    "policy_loss__verl.clip_higher_dapo": ({"high": 0.28, "dual": 10.0}, TOKEN_MEAN),
    "policy_loss__openrlhf.ppo_token": ({}, TOKEN_MEAN),
    "policy_loss__openrlhf.ppo_sample": ({}, ROW_MEANS),
    "policy_loss__openrlhf.ppo_dual_clip": ({"dual": 3.0}, TOKEN_MEAN),
    "policy_loss__trl.dapo": ({"log_ratio_clip": None}, TOKEN_MEAN),
    "policy_loss__trl.clip_higher_dapo": ({"high": 0.28, "log_ratio_clip": None}, TOKEN_MEAN),
    "policy_loss__trl.grpo": ({"log_ratio_clip": None}, ALL_ROW_MEANS),
    "policy_loss__nemo.ppo_token": ({"log_ratio_clip": None}, TOKEN_MEAN),
    "policy_loss__areal.ppo": ({"log_ratio_clip": None}, TOKEN_MEAN),
    "policy_loss__slime.ppo_token": ({"log_ratio_clip": None}, TOKEN_SUM),
    "policy_loss__slime.ppo_sample": ({"log_ratio_clip": None}, SUM_OF_ROW_MEANS),
    "policy_loss__roll.dual_clip": ({"dual": 1.4, "log_ratio_clip": None}, ROW_MEANS),
}


def tolerance(file: str, case: Case) -> Case:
    # these add 1e-8 to the count they divide by, which shows in the ninth digit where the count is small
    padded = ("seq-mean-token-mean", "openrlhf.ppo_sample", "openrlhf.sample", "roll.dual_clip", "nemo.mse")
    return replace(case, rtol=2e-8, atol=2e-9) if file.endswith(padded) else case


@cases(*POLICY)
def test_ppo_clip(file: str, case: Case) -> None:
    config, average = POLICY[file]
    packed, case = Packed(case), tolerance(file, case)
    leaf = packed.whole("log_probs")
    output, metrics = losses.ppo_clip.function(
        packed.tokens(leaf), packed.tokens("old_log_probs"), packed.tokens("advantages"), **config
    )
    loss = average(output, packed.segments, packed.num_rows)
    case.close(loss.item(), case.wanted("loss"))
    check_gradient(case, loss, leaf, "grad_log_prob")
    if "actor/pg_clipfrac" in case.outputs:
        # clipped share of the tokens; the divisor there has 1e-8 added
        replace(case, rtol=1e-7).close(metrics["clip_fraction"].mean().item(), case.wanted("actor/pg_clipfrac"))


@cases("policy_loss__verl.gpg", "policy_loss__nemo.reinforce")
def test_reinforce(file: str, case: Case) -> None:
    packed = Packed(case)
    leaf = packed.whole("log_probs")
    loss = losses.reinforce.function(packed.tokens(leaf), packed.tokens("advantages")).mean()
    case.close(loss.item(), case.wanted("loss"))
    check_gradient(case, loss, leaf, "grad_log_prob")


@cases("policy_loss__trl.grpo_kl_beta")
def test_clip_plus_kl(file: str, case: Case) -> None:
    packed = Packed(case)
    leaf = packed.whole("log_probs")
    live = packed.tokens(leaf)
    clip, _ = losses.ppo_clip.function(
        live, packed.tokens("old_log_probs"), packed.tokens("advantages"), log_ratio_clip=None
    )
    kl, _ = losses.kl.function(live, packed.tokens("ref_log_probs"), kind="k3", log_ratio_clip=None)
    loss = ALL_ROW_MEANS(clip + case.params["beta"] * kl, packed.segments, packed.num_rows)
    case.close(loss.item(), case.wanted("loss"))
    check_gradient(case, loss, leaf, "grad_log_prob")


@cases("entropy_bonus__verl.token-mean")
def test_entropy_bonus(file: str, case: Case) -> None:
    packed = Packed(case)
    leaf = packed.whole("logits")
    distribution = leaf.log_softmax(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    output, _ = losses.entropy_bonus.function(packed.tokens(entropy))
    case.close(-output.mean().item(), case.wanted("entropy_loss"))
    check_gradient(case, -output.mean(), leaf, "grad_logits")


def test_loss_of_interest_is_read() -> None:
    """The vectors are there, and extreme ratios among them: otherwise a missing bound could not be noticed."""
    names = {case.name.partition("_")[0] for case in read("policy_loss__verl.ppo_dualclip_token-mean")}
    assert {"extreme", "holes", "ragged"} <= names
    assert to_array([["nan"]]).size == 1
