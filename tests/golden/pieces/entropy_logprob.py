"""Log-probabilities and entropies from logits: the trainer's own function of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.engines.forward import token_stats
from tests.golden.padded import tensor
from tests.golden.runner import Contract
from tests.golden.vectors import Case


def stats(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """([...] log-probability of the label, [...] entropy) from logits [..., V]."""
    found, entropy = token_stats(logits.flatten(0, -2), labels.flatten(), with_entropy=True)
    assert entropy is not None
    return found.view(labels.shape), entropy.view(labels.shape)


def answer(case: Case, found: re.Match[str]) -> Any:
    leaf = tensor(case, "logits", grad=True)
    labels = torch.tensor(case.inputs["labels"], dtype=torch.int64)
    temperature = case.params.get("temperature", 1.0)  # of the log-probabilities only
    logprobs, _ = stats(leaf / temperature, labels)
    _, entropy = stats(leaf, labels)
    answers = {
        "logprobs": logprobs,
        "grad_logprobs": torch.autograd.grad(logprobs.sum(), leaf)[0],
        "entropy": entropy,
        "grad_entropy": torch.autograd.grad(entropy.sum(), leaf)[0],
    }
    if "keep_mask" in case.inputs:
        # what is sampled from is what was kept, and the label itself
        kept = (tensor(case, "keep_mask") > 0).scatter(-1, labels[:, None], True)
        answers["logprobs_top_p_masked"], _ = stats(leaf.masked_fill(~kept, -torch.inf), labels)
    ours = {name: value.detach().numpy() for name, value in answers.items() if name in case.outputs}
    if np.isneginf(case.array("logits")).any() and np.isnan(case.wanted("entropy")).any():
        return without_impossible_tokens(case, ours)
    return {name: value.reshape(case.wanted(name).shape) for name, value in ours.items()}


def without_impossible_tokens(case: Case, ours: dict[str, np.ndarray]) -> Contract:
    """A token of logit -inf is never drawn and adds 0 to the entropy; 0 * -inf is NaN there."""
    is_known = ~np.isnan(case.wanted("entropy"))
    close = {"rtol": case.rtol, "atol": case.atol}
    promised = finite_entropy(case.array("logits"))
    holds = np.allclose(ours["entropy"], promised, **close)
    holds &= np.allclose(ours["entropy"][is_known], case.wanted("entropy")[is_known], **close)
    holds &= np.allclose(ours["logprobs"], case.wanted("logprobs"), **close)
    return Contract("a token that cannot be drawn adds 0 to the entropy", bool(holds))


def finite_entropy(logits: np.ndarray) -> np.ndarray:
    """[...] entropy over the tokens that can be drawn."""
    shifted = logits - logits.max(-1, keepdims=True)
    chance = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    safe = np.where(chance > 0, chance, 1.0)
    return -(chance * np.log(safe)).sum(-1)


CONVENTIONS: dict[str, Callable[[Case], Any]] = {}

PATTERNS: list[tuple[str, Callable[..., Any]]] = [
    (r"(verl|trl|slime|openrlhf|nemo|areal|skyrl|roll)\.from_logits", answer)
]
