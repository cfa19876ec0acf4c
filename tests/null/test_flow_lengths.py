"""A flow stays a few lines: the limits of `benchmarks/lines.py`, and that the counting counts."""

import ast
import textwrap

import pytest

from benchmarks.lines import KINDS, LIMITS, PAPER, Body, all_bodies, body_lines, limit

BODIES = all_bodies()


@pytest.mark.parametrize("body", BODIES, ids=lambda b: f"{b.file}:{b.name}")
def test_nothing_is_longer_than_its_limit(body):
    assert body.lines <= (limit(body) or 10), f"{body.file}: {body.name} has {body.lines} lines"


def test_the_limits_are_of_flows_that_exist():
    assert LIMITS == {"grpo": 6, "ppo": 10}
    assert KINDS["operator"] == 3 and KINDS["loss"] == 4
    assert set(LIMITS) <= {body.name for body in BODIES}
    paper = {body.name for body in BODIES if body.file.startswith("examples/flows/") and body.kind == "flow"}
    assert set(PAPER) == paper and len(PAPER) == 16


def test_the_paper_is_stricter_than_the_limit():
    assert limit(Body("examples/flows/grpo.py", "grpo", "flow", 5)) == 5
    assert limit(Body("examples/grpo.py", "grpo", "flow", 5)) == 6
    assert limit(Body("examples/other.py", "other", "flow", 5)) is None


def test_comments_docstrings_and_blank_lines_are_free_and_inner_functions_are_not():
    source = textwrap.dedent(
        '''
        def flow(prompts, policy):
            """A docstring
            of two lines."""
            # a comment

            def attempt(p):
                return p

            rows = call(
                attempt,
            )
            return rows  # a remark
        '''
    )
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert body_lines(function, source) == 6


def test_a_function_of_a_docstring_alone_has_no_lines():
    source = 'def flow():\n    """Nothing."""\n'
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert body_lines(function, source) == 0
