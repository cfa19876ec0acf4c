"""The sixteen flows: each is written, checked and printed, and is as short as it should be."""

import ast
import importlib
import inspect
import textwrap

import pytest

import flowrl as fr

# flow: its module, and the most lines its body may have (blank lines apart)
FLOWS = {
    "grpo": ("grpo", 5),
    "ppo": ("ppo", 9),
    "dapo": ("dapo", 4),
    "remax": ("remax", 4),
    "online_dpo": ("online_dpo", 4),
    "raft": ("supervised", 2),
    "distill": ("supervised", 3),
    "reward_model": ("supervised", 1),
    "judged": ("judged", 4),
    "tool_use": ("tool_use", 3),
    "debate": ("debate", 4),
    "replayed": ("replayed", 3),
    "grpo_moving_ref": ("grpo", 3),
    "vine": ("vine", 4),
    "ppo_warm": ("ppo", 2),
    "sft": ("supervised", 1),
}
EXAMPLES = {"sft": 1, "grpo": 5, "rloo": 3, "ppo": 8, "dapo": 5, "reinforce_pp": 5}


def flow(name: str) -> fr.Flow:
    found = getattr(importlib.import_module(f"examples.flows.{FLOWS[name][0]}"), name)
    assert isinstance(found, fr.Flow)
    return found


def body_lines(function: object) -> int:
    """Lines of a function between its signature and its end, blank lines left out."""
    source = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    lines = source.splitlines()[definition.body[0].lineno - 1 : definition.end_lineno]
    return sum(1 for line in lines if line.strip())


def test_there_are_sixteen() -> None:
    assert len(FLOWS) == 16


@pytest.mark.parametrize("name", FLOWS)
def test_flow_has_no_problem(name: str) -> None:
    assert flow(name).check() == ()


@pytest.mark.parametrize("name", FLOWS)
def test_text_form_gives_the_flow_back(name: str) -> None:
    graph = flow(name).graph()
    text = fr.to_text(graph)
    again = fr.from_text(text)
    assert again == graph
    assert fr.to_text(again) == text
    assert again.hash == graph.hash


@pytest.mark.parametrize("name", FLOWS)
def test_flow_is_as_short_as_it_should_be(name: str) -> None:
    assert body_lines(flow(name).function) <= FLOWS[name][1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_flow_has_no_problem_and_is_short(name: str) -> None:
    found = getattr(importlib.import_module(f"examples.{name}"), name)
    assert found.check() == ()
    assert body_lines(found.function) <= EXAMPLES[name]


def test_a_reference_that_weighs_nothing_is_not_read() -> None:
    graph = flow("grpo").graph(beta=0.0)
    loss = graph[graph.outputs[0]]["loss"]
    assert "ref_logprobs" not in {read.column for term in loss.terms() for read in term.reads}


def test_a_buffer_without_correction_is_a_problem() -> None:
    from flowrl_operators import advantages, losses, rewards

    @fr.flow
    def careless(prompts, policy):  # type: ignore[no-untyped-def]
        rows = fr.buffer(advantages.rloo(rewards.exact(fr.rollout(policy, prompts, n=8))), capacity=64, draw=8)
        return fr.update(policy, rows, loss=losses.reinforce())

    assert "FR-V01" in {problem.code for problem in careless.check()}


def test_a_group_of_one_is_a_problem() -> None:
    from flowrl_operators import advantages, losses, rewards

    @fr.flow
    def lonely(prompts, policy):  # type: ignore[no-untyped-def]
        rows = advantages.group_norm(rewards.exact(fr.rollout(policy, prompts, n=1)))
        return fr.update(policy, rows, loss=losses.reinforce())

    assert [problem.code for problem in lonely.check()] == ["FR-G02"]


def test_gae_without_values_names_what_writes_them() -> None:
    from flowrl_operators import advantages, losses, rewards

    @fr.flow
    def no_critic(prompts, policy):  # type: ignore[no-untyped-def]
        rows = advantages.gae(rewards.exact(fr.rollout(policy, prompts)))
        return fr.update(policy, rows, loss=losses.ppo_clip(0.2))

    (problem,) = no_critic.check()
    assert problem.code == "FR-C01"
    assert "'values'" in problem.found
