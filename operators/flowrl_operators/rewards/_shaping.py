"""What is added to a reward."""

from __future__ import annotations

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError


@fr.operator(writes={"reward": fr.SAMPLE.f32})
def overlong(
    reward: fr.SAMPLE.f32,
    response_ids: fr.TOKEN.i32,
    *,
    soft: int,
    hard: int | None = None,
    weight: float = 1.0,
    replace: bool = True,
):
    """Add DAPO's soft punishment of long responses to `reward`.

    From DAPO (arXiv 2503.14476), eq. 13, n the number of response tokens: 0 for n <= soft, (soft - n) / (hard - soft) up to
    hard, -1 beyond. The paper has soft 16384 and hard 20480.

    Args:
        soft: tokens that cost nothing.
        hard: tokens from which the punishment is whole; None takes 5/4 of soft, the paper's ratio.
        weight: multiplies the punishment.
        replace: true, because `reward` is rewritten: this adds to the reward that is there.
    """
    end = soft * 5 // 4 if hard is None else hard
    if not replace:
        raise ConfigError("overlong adds to the reward that is there, so replace stays True")
    if soft < 0 or end < soft:
        raise ConfigError(f"overlong needs 0 <= soft <= hard; found soft={soft}, hard={end}")
    length = response_ids.lengths.astype(np.float64)
    ramp = (soft - length) / max(end - soft, 1)
    punishment = np.where(length <= soft, 0.0, np.where(length <= end, ramp, -1.0))
    return np.asarray(reward, np.float64) + weight * punishment
