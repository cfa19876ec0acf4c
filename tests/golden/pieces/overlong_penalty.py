"""What a response loses for its length, or for being cut off."""

from __future__ import annotations

from typing import Any

import numpy as np

import flowrl as fr
from flowrl_operators import rewards
from tests.golden.runner import Contract
from tests.golden.vectors import Case

# (most tokens, width of the ramp, factor) as each system calls them
NAMES = {
    "verl": ("max_resp_len", "overlong_buffer_len", "penalty_factor"),
    "nemo": ("max_response_length", "overlong_buffer_length", "overlong_buffer_penalty"),
    "areal": ("max_response_length", "overlong_tokens", "penalty_factor"),
    "openrlhf": ("max_new_tokens", "overlong_buffer_len", "penalty_factor"),
    "ms_swift": ("soft_max_length", "soft_cache_length", None),
    "trl": ("max_completion_len", "soft_punish_cache", None),
}
CAPPED = ("trl", "openrlhf")


def lengths(case: Case) -> fr.Ragged:
    """Responses of the recorded lengths; what stands in them does not matter."""
    counts = [int(n) for n in case.inputs.get("lengths", case.inputs.get("response_lengths"))]
    return fr.Ragged(np.zeros(sum(counts), np.int32), np.concatenate([[0], np.cumsum(counts)]))


def ramp(case: Case, system: str) -> Any:
    most, width, factor = NAMES[system]
    ids = lengths(case)
    before = case.array("scores") if "scores" in case.inputs else np.zeros(len(ids))
    found = rewards.overlong(
        before,
        ids,
        soft=case.params[most] - case.params[width],
        hard=case.params[most],
        weight=case.params[factor] if factor else 1.0,
        cap=system in CAPPED,
    )
    if system == "areal" and "rewards" in case.outputs:  # it divides whole numbers in float32
        wanted = case.wanted("rewards")
        if not np.allclose(found, wanted, rtol=case.rtol, atol=case.atol) and np.allclose(
            found, wanted, rtol=0, atol=1e-6
        ):
            return Contract("a penalty is not rounded to float32", holds=True)
    return {"rewards": found}


def cut_off(case: Case) -> dict[str, Any]:
    coefficient = case.params["coef"]
    how = {"factor": coefficient} if coefficient >= 0 else {"value": coefficient}
    reasons = np.asarray(["length" if cut else "stop" for cut in case.inputs["truncated"]], dtype=object)
    return {"rewards": rewards.stop_properly(case.array("scores"), reasons, **how)}


CONVENTIONS = {"openrlhf.stop_properly": cut_off}
PATTERNS = [(rf"({'|'.join(NAMES)})\.\w+", lambda case, match: ramp(case, match[1]))]
