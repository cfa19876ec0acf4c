"""Rewards: what a response is worth, and what is added to that.

Rules that look at one response (`math`, `exact`, `code`, `judge`, ...) are functions of one row; a row that fails or takes too
long gets NaN and says why in `row_error`. What works on columns (`overlong`, `cosine`, `kl_shaped`, ...) changes the reward that
is there. `total` adds named parts.
"""

from flowrl_operators.rewards._code import code, code_block
from flowrl_operators.rewards._extract import ANSWER_TAG, BOXED, NUMBER, boxed, last_match
from flowrl_operators.rewards._judge import judge
from flowrl_operators.rewards._kl import (
    adaptive_kl_shaped,
    kl_estimate,
    kl_penalised,
    kl_shaped,
    next_kl_coefficient,
    token_kl,
)
from flowrl_operators.rewards._math import gsm8k, gsm8k_answer, math
from flowrl_operators.rewards._parts import total
from flowrl_operators.rewards._sandbox import sandbox_protects
from flowrl_operators.rewards._shaping import brevity, cosine, overlong, repeated_share, repetition, stop_properly
from flowrl_operators.rewards._text import (
    THINK,
    Overlap,
    choice,
    choice_letter,
    exact,
    f1,
    format,
    normalised,
    regex,
    short_answer,
    tags,
    word_overlap,
)

__all__ = [
    "ANSWER_TAG",
    "BOXED",
    "NUMBER",
    "THINK",
    "Overlap",
    "adaptive_kl_shaped",
    "boxed",
    "brevity",
    "choice",
    "choice_letter",
    "code",
    "code_block",
    "cosine",
    "exact",
    "f1",
    "format",
    "gsm8k",
    "gsm8k_answer",
    "judge",
    "kl_estimate",
    "kl_penalised",
    "kl_shaped",
    "last_match",
    "math",
    "next_kl_coefficient",
    "normalised",
    "overlong",
    "regex",
    "repeated_share",
    "repetition",
    "sandbox_protects",
    "short_answer",
    "stop_properly",
    "tags",
    "token_kl",
    "total",
    "word_overlap",
]
