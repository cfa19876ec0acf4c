"""Random rows, as batches and as the plain Python lists they must agree with."""

from typing import Any

from hypothesis import strategies as st

from flowrl.schema import PROMPT, SAMPLE, TOKEN, TURN, ColumnType
from flowrl.store.rows import RowBatch

TYPES: dict[str, ColumnType] = {
    "prompt_id": PROMPT.str,
    "prompt_ids": PROMPT.i32["*"],
    "is_right": SAMPLE.bool,
    "count": SAMPLE.i64,
    "reward": SAMPLE.f32,
    "embedding": SAMPLE.f16[2],
    "blob": SAMPLE.bytes,
    "response_ids": TOKEN.i32,
    "loss_mask": TOKEN.bool,
    "teacher_ids": TOKEN.i32[3],
    "step_value": TURN.f64,
    "step_text": TURN.str,
}

small = st.integers(-(2**31), 2**31 - 1)
halves = st.integers(-100, 100).map(lambda n: n / 2)


@st.composite
def row(draw: st.DrawFn) -> dict[str, Any]:
    tokens = draw(st.integers(0, 4))
    turns = draw(st.integers(0, 3))
    return {
        "prompt_id": draw(st.sampled_from(["a", "b", "ä€", ""])),
        "prompt_ids": draw(st.lists(small, max_size=3)),
        "is_right": draw(st.booleans()),
        "count": draw(st.integers(-(2**63), 2**63 - 1)),
        "reward": draw(halves),
        "embedding": [draw(halves), draw(halves)],
        "blob": draw(st.binary(max_size=4)),
        "response_ids": draw(st.lists(small, min_size=tokens, max_size=tokens)),
        "loss_mask": draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)),
        "teacher_ids": [[draw(small) for _ in range(3)] for _ in range(tokens)],
        "step_value": draw(st.lists(halves, min_size=turns, max_size=turns)),
        "step_text": draw(st.lists(st.text(max_size=3), min_size=turns, max_size=turns)),
    }


row_lists = st.lists(row(), max_size=6)


def batch_of(rows: list[dict[str, Any]]) -> RowBatch:
    return RowBatch.from_rows(rows, TYPES)
