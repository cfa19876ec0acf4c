"""Reference points of losses that learn from single responses."""

from __future__ import annotations

import numpy as np

import flowrl as fr


@fr.operator(writes={"kl_baseline": fr.SAMPLE.f32}, locality="batch")
def kto_baseline(old_logprobs: fr.TOKEN.f32, ref_logprobs: fr.TOKEN.f32, loss_mask: fr.TOKEN.bool = None):
    """KTO's reference point z0 = max(0, mean over rows of h), h the sum over a response's tokens of old_logprobs - ref_logprobs.

    From Ethayarajh et al. (arXiv 2402.01306): an estimate of KL(policy || ref), the same number in every row. Its rows are
    mismatched ones, each prompt with the response to another prompt, so that the point does not follow from the responses
    that are judged; their table gives it to the judged ones by a join:

        other = fr.logprobs(policy, fr.logprobs(ref, mismatched, out="ref_logprobs"), out="old_logprobs")
        rows = fr.join(rows, advantages.kto_baseline(other).select("kl_baseline"), on="prompt_id")

    Rows without a token that trains, or with a number that is not finite, are left out; 0 without any other.
    """
    inside = np.ones(len(old_logprobs.values), bool) if loss_mask is None else loss_mask.values.astype(bool)
    with np.errstate(invalid="ignore"):  # minus infinity on both sides
        difference = old_logprobs.values.astype(np.float64) - ref_logprobs.values
    rows, count = old_logprobs.row_index[inside], len(old_logprobs)
    score = np.bincount(rows, weights=difference[inside], minlength=count)
    known = score[np.isfinite(score) & (np.bincount(rows, minlength=count) > 0)]
    return np.full(count, max(float(known.mean()), 0.0) if len(known) else 0.0)
