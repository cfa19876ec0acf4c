"""A data set that has what a flow reads under another name: the fix of FR-C01."""

from typing import Any

import pytest

import flowrl as fr
from flowrl.graph.checks import find_problems
from tests.null.graph.flows import grpo


@pytest.mark.parametrize(
    ("row", "fix"),
    [
        (
            {"level": 1, "question": "1+1=", "answer": "2"},
            'columns={"prompt": "question", ...}',
        ),  # not prompt_id, no number
        ({"sum": "1+1=", "the_prompt": "?", "answer": "2"}, 'columns={"prompt": "the_prompt", ...}'),
        ({"level": 1, "answer": "2"}, "and none that could be 'prompt'; add the column"),  # an answer is an answer
    ],
)
def test_c01_says_which_column_of_the_data_may_be_meant(row: dict[str, Any], fix: str) -> None:
    schema = fr.Data([row]).schema
    (problem,) = find_problems(grpo.graph(), data={"prompts": schema})
    assert problem.found.startswith("reads column 'prompt'")
    assert fix in problem.fix
    assert "did you mean" not in problem.fix
