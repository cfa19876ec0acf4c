"""Losses that teach nothing or fall over: one error with the loss's line, before a step is taken."""

import sys

import pytest
import torch

import flowrl as fr
from examples.tiny import tiny_model
from flowrl.errors import OperatorError
from flowrl_operators import losses

PROMPTS = [{"prompt": "21=", "answer": "12"}, {"prompt": "31=", "answer": "13"}]


@fr.reward
def length(response):
    return float(len(response))


def update_with(loss):
    @fr.flow
    def flow(prompts, policy):
        return fr.update(policy, length(fr.rollout(policy, prompts, n=2)), loss=loss)

    return fr.run_local(
        flow, prompts=PROMPTS, policy=tiny_model(0), out=None, progress="off", max_tokens=4, batch=2
    ).metrics[-1]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda logprobs, reward: logprobs.detach(), "does not depend on the model"),
        (lambda logprobs, reward: torch.ones(len(logprobs)), "does not depend on the model"),
        (lambda logprobs, reward: logprobs > 0, "does not depend on the model"),
        (lambda logprobs, reward: logprobs.to(torch.complex64), "found torch.complex64"),
        (lambda logprobs, reward: 1 / 0, "ZeroDivisionError"),
        (lambda logprobs, reward: sys.exit(3), "SystemExit: 3"),
        (lambda logprobs, reward: logprobs * reward, r"its columns: logprobs \[\d+\], reward \[4\]"),
        (lambda logprobs, reward: logprobs * reward, r"declare rewards: fr.TOKEN.f32.or_broadcast\(\"reward\"\)"),
        (lambda logprobs, reward: reward * 2.0, r'is declared @fr.loss\(per="sample"\)'),
        (lambda logprobs, reward: logprobs.mean(), "averaging is the update's business"),
        (lambda logprobs, reward: (logprobs, {}, 3), r"returns the loss, or \(loss, .*found 3 values"),
        (lambda logprobs, reward: logprobs.mul_(2), "changes 'logprobs' in place"),
    ],
)
def test_a_loss_that_cannot_teach(function, reason):
    @fr.loss
    def broken(logprobs, reward):
        return function(logprobs, reward)

    with pytest.raises(OperatorError, match=f"broken.*{reason}"):
        update_with(broken())


def test_a_term_without_gradient_beside_one_with_is_fine():
    @fr.loss
    def constant(logprobs):
        return torch.ones(len(logprobs))

    assert update_with(losses.sft() + constant())["update/steps"] == 1


def test_a_loss_that_is_zero_here_takes_its_step():
    @fr.loss
    def zero(logprobs):
        return logprobs * 0

    assert update_with(zero())["update/grad_norm"] == 0.0
