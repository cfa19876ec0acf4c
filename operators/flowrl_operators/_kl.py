"""Estimators of a KL divergence at single tokens: one arithmetic for losses (torch) and operators (NumPy)."""

from __future__ import annotations

from typing import Any

from flowrl.errors import ConfigError

KL_KINDS = ("k1", "k2", "k3", "abs")


def check_kl_kind(kind: str) -> None:
    """Refuse an estimator that is none. Errors: ConfigError."""
    if kind not in KL_KINDS:
        full = "; the exact sum over the vocabulary is losses.full_kl() or losses.reverse_kl(), as a reward rewards.full_kl(rows)"
        hint = full if kind == "full" else ""
        raise ConfigError(f"kind of a KL estimate is one of {', '.join(KL_KINDS)}; found {kind!r}{hint}")


def kl_estimate(xp: Any, difference: Any, kind: str, log_ratio_clip: float | None = None) -> Any:
    """Of KL(p || q) at each token drawn from p, with d = log p - log q: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    From Schulman, "Approximating KL divergence" (2020).

    Args:
        xp: the module the values belong to, `torch` or `numpy`.
        log_ratio_clip: in k3, d is held within this on both sides, in its linear part too, so that k3 stays >= 0 (as in verl).
    """
    check_kl_kind(kind)
    match kind:
        case "k1":
            return difference
        case "abs":
            return abs(difference)
        case "k2":
            return difference * difference / 2
    held = difference if log_ratio_clip is None else difference.clip(-log_ratio_clip, log_ratio_clip)
    # close to 0, where training is, exp(-d) - 1 would lose all digits of a float32
    return xp.expm1(-held) + held
