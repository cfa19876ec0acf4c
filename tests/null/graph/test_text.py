"""The text of a graph: canonical, readable, and parsed back to an equal graph without importing anything."""

import os
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import flowrl as fr
from flowrl.errors import PackError, TextError
from flowrl.graph.code import code_hash
from flowrl.graph.text import from_text, to_text
from tests.null.graph import pieces as p
from tests.null.graph.flows import SIXTEEN, grpo
from tests.null.graph.strategies import graphs

ROOT = Path(__file__).parents[3]

GRPO = """\
flow grpo
  prompts = input(kind="rows")
  policy = input(kind="weights")
  ref = input(kind="weights")
  rollout = rollout(policy, prompts; n=8, temperature=1.0)
  math = apply(rollout; operator=math())
  group_norm = apply(math; operator=group_norm())
  ref_logprobs = logprobs(ref, group_norm; out="ref_logprobs")
  update = update(policy, ref_logprobs; average="token_mean", loss=ppo_clip() + 0.001 * kl())
  return update

operator math = "tests.null.graph.pieces:math"
  hash "HASH"
  reads response: SAMPLE.str
  reads answer: PROMPT.str
  writes reward: SAMPLE.f32
  locality row
  each_row True
  timeout_s 30.0
  on_error "flag"

operator group_norm = "tests.null.graph.pieces:group_norm"
  hash "HASH"
  reads reward: SAMPLE.f32
  writes advantage: SAMPLE.f32
  locality group prompt_id
  min_group 2
  defaults {"eps": 1e-06}

loss ppo_clip = "tests.null.graph.pieces:ppo_clip"
  hash "HASH"
  reads logprobs
  reads old_logprobs: TOKEN.f32 or live logprobs
  reads advantages: TOKEN.f32 or broadcast advantage
  locality row
  defaults {"clip": 0.2, "high": None}

loss kl = "tests.null.graph.pieces:kl"
  hash "HASH"
  reads logprobs
  reads ref_logprobs: TOKEN.f32
  locality row
  defaults {"estimator": "k3"}
"""


def without_hashes(text: str) -> str:
    return "\n".join('  hash "HASH"' if line.startswith("  hash ") else line for line in text.split("\n"))


def test_the_text_of_grpo() -> None:
    assert without_hashes(to_text(grpo.graph())) == GRPO
    assert str(grpo.graph()) == to_text(grpo.graph())


@pytest.mark.parametrize("flow", SIXTEEN, ids=lambda f: f.name)
def test_the_sixteen_flows_come_back_equal(flow: fr.Flow) -> None:
    graph = flow.graph()
    text = to_text(graph)
    back = from_text(text)
    assert back == graph and hash(back) == hash(graph)
    assert to_text(back) == text and back.hash == graph.hash
    assert back.check() == graph.check() == ()


SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW_TO_DRAW)
@given(graphs())
def test_random_graphs_come_back_equal(graph: fr.Graph) -> None:
    comes_back_equal(graph)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=SLOW_TO_DRAW)
@given(graphs())
def test_many_random_graphs_come_back_equal(graph: fr.Graph) -> None:
    comes_back_equal(graph)


def comes_back_equal(graph: fr.Graph) -> None:
    text = to_text(graph)
    back = from_text(text)
    assert back == graph
    assert to_text(back) == text and back.hash == graph.hash
    assert len(text.splitlines()) == text.count("\n")  # no character of a string breaks a line


def test_reading_a_text_imports_no_operator() -> None:
    text = to_text(grpo.graph()).replace("tests.null.graph.pieces", "a_pack_that_is_not_there.losses")
    graph = from_text(text)
    assert graph.check() == ()
    with pytest.raises(PackError, match="a_pack_that_is_not_there"):
        graph["math"]["operator"].resolve()


def test_functions_are_found_again_by_name() -> None:
    graph = from_text(to_text(grpo.graph()))
    assert graph["math"]["operator"].resolve() is p.math.function


def test_equal_flows_have_equal_texts_and_others_do_not() -> None:
    assert grpo.graph().hash == grpo.graph(group_size=8).hash
    different = {grpo.graph(**c).hash for c in ({}, {"group_size": 4}, {"beta": 0.0}, {"beta": 0.5})}
    assert len(different) == 4


def test_two_operators_of_one_name_stay_apart() -> None:
    def make(width: int) -> fr.Operator:
        @fr.operator(writes={f"c{width}": fr.SAMPLE.f32})
        def scaled(reward: fr.SAMPLE.f32):
            return reward * width

        return scaled

    @fr.flow
    def two(prompts, policy):
        return make(2)(make(1)(p.math(fr.rollout(policy, prompts))))

    graph = two.graph()
    text = to_text(graph)
    assert "operator scaled = " in text and "operator scaled_2 = " in text
    assert from_text(text) == graph


def test_comments_blank_lines_and_spacing_are_free() -> None:
    text = to_text(grpo.graph())
    loose = "# a plan\n\n" + text.replace(
        "n=8, ", "n = 8 ,  # eight\n".replace("\n", "").replace("# eight", "")
    ).replace("\noperator", "\n\n   # next\noperator")
    assert from_text(loose) == grpo.graph()
    assert from_text(text.replace("\n", "\r\n")) == grpo.graph()


ERRORS = {
    "empty": ("", "line 1, column 1: expected 'flow'"),
    "no flow": ("graph x\n", "line 1, column 1: expected 'flow'; found 'graph'"),
    "indented": ("  flow x\n", "no indentation"),
    "unknown kind": ("flow x\n  a = inptu(kind=1)\n", "line 2, column 7: expected a kind of node; did you mean 'input'"),
    "unknown source": ("flow x\n  roll_1 = input(kind=1)\n  b = log(roll)\n", "line 3, column 11.*did you mean 'roll_1'"),
    "later source": ("flow x\n  b = log(a)\n  a = input()\n", "line 2, column 11: expected the name of a node above"),
    "name twice": ("flow x\n  a = input()\n  a = input()\n", "line 3, column 3.*'a' is on line 2"),
    "unknown output": ("flow x\n  a = input()\n  return b\n", "line 3, column 10"),
    "node after return": ("flow x\n  a = input()\n  return a\n  b = input()\n", "line 4, column 3: expected no node after"),
    "return twice": ("flow x\n  a = input()\n  return a\n  return a\n", "expected one 'return' line"),
    "too many sources": ("flow x\n  a = input()\n  b = select(a, a)\n", "at most 1 sources \\(rows\\) for 'select'"),
    "some ports": ("flow x\n  a = input()\n  b = join(rows=a, a;)\n", "a port before every source"),
    "not closed": ('flow x\n  a = input(kind="rows"\n', "line 2, column 24: expected .*'\\)'.*the end of the line"),
    "open string": ('flow x\n  a = input(kind="rows)\n', "line 2, column 18: expected a string that ends on its line"),
    "bad escape": ('flow x\n  a = input(kind="\\x1")\n', "line 2, column 18: expected a string with Python's escapes"),
    "unknown character": ("flow x\n  a = input(k=1 ? 2)\n", "line 2, column 17: expected .*found '\\? 2\\)'"),
    "parameter twice": ("flow x\n  a = input(k=1, k=2)\n", "each parameter once"),
    "no value": ("flow x\n  a = input(k=)\n", "line 2, column 15: expected a value; found '\\)'"),
    "undeclared operator": ("flow x\n  a = input(k=math(1))\n", "expected a declared operator"),
    "undeclared function": ("flow x\n  a = input(k=math)\n", "expected a value or a declared function"),
    "operator without call": ('flow x\n  a = input(k=f)\noperator f = "m:f"\n', "expected '\\(' after 'f'"),
    "loss plus number": ('flow x\n  a = input(k=f() + 1)\nloss f = "m:f"\n', "a loss after '\\+'"),
    "loss divided": ('flow x\n  a = input(k=f() / 2)\nloss f = "m:f"\n', "a number or a loss"),
    "where of two": ("flow x\n  a = input(k=where(1, 2))\n", "expected 3 arguments for 'where'"),
    "tuple in expression": ('flow x\n  a = input(k=col("c") + (1,))\n', "columns or constants on both sides"),
    "declared twice": ('flow x\nfunction f = "m:f"\nfunction f = "m:g"\n', "line 3, column 10.*not declared above"),
    "unknown declaration": ('flow x\noperater f = "m:f"\n', "line 2, column 1: expected 'flow' once"),
    "unknown field": ('flow x\nloss f = "m:f"\n  writes c: TOKEN.f32\n', "line 3, column 3: expected a field of 'loss'"),
    "unknown type": ('flow x\nloss f = "m:f"\n  reads c: TOKENS.f32\n', "line 3, column 12: expected a column type"),
    "unknown locality": ('flow x\nloss f = "m:f"\n  locality rows\n', "expected a locality; did you mean 'row'"),
    "deeper": ("flow x\n  a = input()\n    b = input()\n", "line 3, column 5: expected a line indented by 2 spaces"),
    "words after": ("flow x\n  a = input() b\n", "line 2, column 15: expected the end of the line; found 'b'"),
    "code": ("flow x\n  a = input(k=__import__('os').system('true'))\n", "line 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_a_text_that_does_not_parse(name: str) -> None:
    text, message = ERRORS[name]
    with pytest.raises(TextError, match=message):
        from_text(text)


def test_every_cut_of_a_text_is_refused_or_a_graph() -> None:
    text = to_text(grpo.graph())
    for end in range(0, len(text), 7):
        try:
            from_text(text[:end])
        except TextError as error:
            assert str(error).startswith("line ")


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.null.graph.flows import SIXTEEN
print(*[flow.graph().hash for flow in SIXTEEN])
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_hash_is_the_same_in_another_process_and_folder(tmp_path: Path, seed: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = shlex.join(["env", "-C", str(tmp_path), f"PYTHONHASHSEED={seed}", sys.executable, "script.py", str(ROOT)])
    with os.popen(command) as pipe:  # subprocess waits by sleeping, which is refused here
        assert pipe.read().split() == [flow.graph().hash for flow in SIXTEEN]


def test_code_hashes_do_not_depend_on_the_python_version() -> None:
    # written down once (with 3.11); every supported Python must find the same
    assert code_hash(p.rebut) == "eb104e7c8463"
    assert p.group_norm.hash == "6b7a635a5334"


def test_code_hashes_tell_functions_apart() -> None:
    def multiplied(by: int):
        return lambda x: x * by

    one, two = (lambda r: r + 1), (lambda r: r + 2)
    assert code_hash(one) != code_hash(two)
    assert code_hash(multiplied(1)) != code_hash(multiplied(2))
    assert code_hash(multiplied(3)) == code_hash(multiplied(3))

    def plain(x):
        return x + 1

    def documented(x: int) -> int:
        """Adds."""
        return x + 1  # one

    assert code_hash(plain) != code_hash(documented)  # the name is part of it
    documented_hash = code_hash(documented)

    def documented(x):  # type: ignore[no-untyped-def]
        return (x
                + 1)  # fmt: skip

    assert code_hash(documented) == documented_hash


def test_a_code_hash_takes_in_the_whole_function() -> None:
    # fmt: off
    def tricky(x):
        y = """
no indentation here"""
    # a comment that looks like the end
        z = [
    x,
        ]
        return y, z, 1

    first = code_hash(tricky)

    def tricky(x):  # type: ignore[no-untyped-def]
        y = """
no indentation here"""
    # a comment that looks like the end
        z = [
    x,
        ]
        return y, z, 2

    # fmt: on
    assert code_hash(tricky) != first


def test_only_what_differs_from_the_defaults_is_written_and_all_of_it_read() -> None:
    @fr.flow
    def other(prompts, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)), eps=1e-3)
        return fr.update(policy, rows, loss=p.ppo_clip(0.2, high=0.28))

    graph = other.graph()
    text = to_text(graph)
    assert "group_norm(eps=0.001)" in text and "ppo_clip(high=0.28)" in text
    assert dict(from_text(text)["update"]["loss"].config) == {"clip": 0.2, "high": 0.28}
    assert from_text(text) == graph
