"""Reference points of losses that learn from single responses."""

from __future__ import annotations

import numpy as np

import flowrl as fr


@fr.operator(writes={"kl_baseline": fr.SAMPLE.f32}, locality="batch")
def kto_baseline(kl_logprobs: fr.SAMPLE.f32, kl_ref_logprobs: fr.SAMPLE.f32):
    """KTO's reference point z0 = max(0, mean over the step of kl_logprobs - kl_ref_logprobs), the same number in every row.

    From Ethayarajh et al. (arXiv 2402.01306): an estimate of KL(policy || ref) from responses that do not belong to their prompt
    (row i's prompt with another row's response), so that it does not follow from the responses that are judged.

    Args (columns):
        kl_logprobs, kl_ref_logprobs: log-probability of that whole mismatched response, the sum over its tokens, under the policy
            before the update and under the reference.

    Rows where either is not finite are left out; 0 without any other.
    """
    with np.errstate(invalid="ignore"):  # minus infinity on both sides
        difference = np.asarray(kl_logprobs, np.float64) - np.asarray(kl_ref_logprobs, np.float64)
    known = difference[np.isfinite(difference)]
    return np.full(len(difference), max(float(known.mean()), 0.0) if len(known) else 0.0)
