"""The standard columns: one place that owns their names, types and meaning.

An operator may write columns of other names; these are the ones the language's own nodes read and write.
"""

from __future__ import annotations

from flowrl.schema.columns import Column, TableSchema
from flowrl.schema.types import PROMPT, SAMPLE, TOKEN, TURN

# What a data set may bring.
PROMPT_ID = Column("prompt_id", PROMPT.str, "identity of the input row; the group key", from_data=True)
PROMPT_TEXT = Column("prompt", PROMPT.str, "text of the input row", from_data=True)
PROMPT_IDS = Column("prompt_ids", PROMPT.i32["*"], "token ids of the prompt as the model sees it", from_data=True)
ANSWER = Column("answer", PROMPT.str, "reference answer a reward may compare with", from_data=True)
PAIR_ID = Column("pair_id", SAMPLE.str, "rows of one preference pair share it", from_data=True)
CHOSEN = Column("chosen", SAMPLE.bool, "true for the preferred row of a pair", from_data=True)

# What a rollout writes; a data set of responses may bring them too.
SAMPLE_ID = Column("sample_id", SAMPLE.str, "identity of the response: prompt_id and sample index", from_data=True)
SAMPLE_INDEX = Column("sample_index", SAMPLE.i32, "index of the response among those of its prompt")
RESPONSE = Column("response", SAMPLE.str, "text of the sampled answer", from_data=True)
RESPONSE_IDS = Column("response_ids", TOKEN.i32, "token ids of the response", from_data=True)
RESPONSE_MASK = Column("response_mask", TOKEN.bool, "true where a token belongs to the response", from_data=True)
LOSS_MASK = Column("loss_mask", TOKEN.bool, "true where a token trains", from_data=True)
FINISH_REASON = Column("finish_reason", SAMPLE.str, "'stop' (end token or stop string), 'length', or 'environment'")
NUM_TURNS = Column("num_turns", SAMPLE.i32, "turns the policy took")
ROLE = Column("role", SAMPLE.str, "name the rollout gave its rows", from_data=True)
SOURCE_ID = Column("source_id", PROMPT.str, "sample_id of the row this prompt was made from")
TEMPERATURE = Column(
    "temperature", SAMPLE.f32, "temperature the row was sampled at; log-probabilities of its tokens are taken at it"
)
MIN_POLICY_VERSION = Column("min_policy_version", SAMPLE.i32, "least version that sampled a token of the row")
MAX_POLICY_VERSION = Column("max_policy_version", SAMPLE.i32, "greatest version that sampled a token of the row")
ROLLOUT_LOGPROBS = Column(
    "rollout_logprobs", TOKEN.f32, "nats; of each sampled token under the distribution it was sampled from"
)

# What models and operators write.
OLD_LOGPROBS = Column("old_logprobs", TOKEN.f32, "nats; same tokens, recomputed by the trainer before the update")
REF_LOGPROBS = Column("ref_logprobs", TOKEN.f32, "nats; same tokens under the frozen reference")
TEACHER_IDS = Column("teacher_ids", TOKEN.i32["k"], "the teacher's k likeliest tokens at each position")
TEACHER_LOGPROBS = Column("teacher_logprobs", TOKEN.f32["k"], "nats; their log-probabilities under the teacher")
VALUES = Column("values", TOKEN.f32, "critic's prediction at each token")
RETURNS = Column("returns", TOKEN.f32, "discounted sum of rewards from each token on")
TOKEN_REWARDS = Column("token_rewards", TOKEN.f32, "reward paid at each token, e.g. shaped by a KL penalty")
REWARD = Column("reward", SAMPLE.f32, "scalar per response")
ADVANTAGE = Column("advantage", SAMPLE.f32, "advantage per response")
ADVANTAGES = Column("advantages", TOKEN.f32, "advantage per token")
BASELINE = Column("baseline", SAMPLE.f32, "reward a response is compared with")
STEP_VALUE = Column("step_value", TURN.f32, "value of each reasoning step")
ROW_ERROR = Column("row_error", SAMPLE.str, "empty, or why an operator failed on the row")

STANDARD = TableSchema(
    (
        PROMPT_ID, PROMPT_TEXT, PROMPT_IDS, ANSWER, PAIR_ID, CHOSEN, SAMPLE_ID, SAMPLE_INDEX, RESPONSE, RESPONSE_IDS,
        RESPONSE_MASK, LOSS_MASK, FINISH_REASON, NUM_TURNS, ROLE, SOURCE_ID, TEMPERATURE, MIN_POLICY_VERSION, MAX_POLICY_VERSION,
        ROLLOUT_LOGPROBS, OLD_LOGPROBS, REF_LOGPROBS, TEACHER_IDS, TEACHER_LOGPROBS, VALUES, RETURNS, TOKEN_REWARDS,
        REWARD, ADVANTAGE, ADVANTAGES, BASELINE, STEP_VALUE, ROW_ERROR,
    )
)  # fmt: skip

DATA_COLUMNS = TableSchema(tuple(c for c in STANDARD if c.from_data))
"""What an input of a flow offers before its data set is known; the run checks that the data set really has them."""

KEYS = ("prompt_id", "sample_id", "source_id")
"""Identities; `select` keeps them."""

LIVE = {
    "logprobs": TOKEN.f32,
    "entropy": TOKEN.f32,
    "values": TOKEN.f32,
    "logits": TOKEN.f32["V"],
    "scores": SAMPLE.f32,
}
"""What a model computes with gradient inside an update; they exist in losses only and are never stored.

`logprobs` and `entropy` are of the sampled token's distribution at the sampling temperature, `values` from a value head,
`scores` a scalar per response from a reward head.
"""
