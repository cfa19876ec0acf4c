"""Rewards: what a response is worth, and what is added to that.

Rules that look at one response (`math`, `exact`, `format`) are functions of one row; a row that fails or takes too long gets
NaN and says why in `row_error`. `overlong` and `kl_shaped` work on columns.
"""

from flowrl_operators.rewards._kl import kl_estimate, kl_shaped
from flowrl_operators.rewards._rules import NUMBER, exact, format, math
from flowrl_operators.rewards._shaping import overlong

__all__ = ["NUMBER", "exact", "format", "kl_estimate", "kl_shaped", "math", "overlong"]
