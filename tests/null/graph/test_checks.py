"""Every code: a flow that has the problem, reported at its line with a fix, and one beside it that does not."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import flowrl as fr
from flowrl.errors import CheckError, ConfigError, Problem
from flowrl.graph.checks import find_problems
from flowrl.model import Model
from tests.null.graph import pieces as p
from tests.null.graph.flows import SIXTEEN, grpo, ppo

T, S = fr.TOKEN, fr.SAMPLE
SOURCE = Path(__file__).read_text().splitlines()


def line(mark: str) -> int:
    """Number of the line of this file that ends with the comment `# <mark>`."""
    found = [number for number, text in enumerate(SOURCE, 1) if text.endswith(f"# {mark}")]
    assert len(found) == 1, f"{mark} is on lines {found}"
    return found[0]


def only(flow: fr.Flow, code: str, mark: str, **options) -> Problem:
    """The one problem of a flow; it has this code and was written on the marked line."""
    config = options.pop("config", {})
    problems = find_problems(flow.graph(**config), **options)
    assert [x.code for x in problems] == [code], "\n".join(map(str, problems))
    file, _, number = problems[0].where.rpartition(":")
    assert Path(file).name == "test_checks.py" and int(number) == line(mark), problems[0].where
    assert problems[0].source == SOURCE[line(mark) - 1].strip()
    assert str(problems[0]).startswith(f"{code} at {problems[0].where}, node '{problems[0].node}'\n    | ")
    assert problems[0].found and problems[0].fix
    return problems[0]


def codes(flow: fr.Flow, **options) -> list[str]:
    return [x.code for x in find_problems(flow.graph(), **options)]


@pytest.mark.parametrize("flow", SIXTEEN, ids=lambda f: f.name)
def test_the_sixteen_flows_have_no_problems(flow: fr.Flow) -> None:
    assert find_problems(flow.graph()) == ()
    assert fr.check(flow) == flow.graph()


# --- FR-C01 ------------------------------------------------------------------------------------------------------------


def test_c01_names_the_nearest_column() -> None:
    @fr.operator(writes={"advantage": S.f32})
    def centred(rewards: S.f32):
        return rewards

    @fr.flow
    def typo(prompts, policy):
        rows = p.math(fr.rollout(policy, prompts, n=4))
        rows = centred(rows)  # c01
        return fr.update(policy, rows, loss=p.ppo_clip())

    found = only(typo, "FR-C01", "c01")
    assert "'rewards'" in found.found and "did you mean 'reward'" in found.fix


def test_c01_names_what_the_model_computes_in_a_loss_only() -> None:
    @fr.loss
    def policy_gradient(logprob, advantage):
        return -advantage * logprob

    @fr.operator(writes={"x": S.f32})
    def reads_logprob(logprob: T.f32):
        return logprob.mean()

    @fr.flow
    def in_a_loss(prompts, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        return fr.update(policy, rows, loss=policy_gradient())  # c01-live

    @fr.flow
    def in_an_operator(prompts, policy):
        return reads_logprob(fr.rollout(policy, prompts, n=4))  # c01-stored

    assert only(in_a_loss, "FR-C01", "c01-live").fix.startswith("did you mean 'logprobs'")
    assert only(in_an_operator, "FR-C01", "c01-stored").fix == "did you mean 'rollout_logprobs'?"


def test_c01_names_the_node_on_another_branch() -> None:
    @fr.flow
    def forgotten(prompts, policy):
        rows = fr.rollout(policy, prompts, n=4)
        p.math(rows)
        rows = p.group_norm(rows)  # c01-branch
        return fr.update(policy, rows, loss=p.ppo_clip())

    assert "'math' writes it" in only(forgotten, "FR-C01", "c01-branch").fix


def test_c01_names_an_installed_operator_that_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.graph.packs.all_writers", lambda: {"advantage": ("core.advantages.rloo",)})

    @fr.flow
    def no_advantage(prompts, policy):
        rows = p.math(fr.rollout(policy, prompts, n=4))
        return fr.update(policy, rows, loss=p.ppo_clip())  # c01-pack

    found = only(no_advantage, "FR-C01", "c01-pack")
    assert "'advantages' (or 'advantage')" in found.found
    assert "advantages.rloo(rows)" in found.fix and "core.advantages.rloo" in found.fix


def test_packs_are_left_alone_when_no_column_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("packs were imported")

    monkeypatch.setattr("flowrl.graph.packs.all_writers", fail)
    assert find_problems(ppo.graph()) == ()


def test_c01_names_the_columns_of_the_data_set() -> None:
    graph = grpo.graph()
    problems = find_problems(graph, data={"prompts": ["prompt_id", "prompt", "answers"]})
    assert [x.code for x in problems] == ["FR-C01"]
    assert problems[0].node == "math" and "'answer'" in problems[0].found
    assert "given for 'prompts' has 'prompt_id', 'prompt', 'answers'" in problems[0].fix
    assert 'prompts=fr.Data(rows, columns={"answer": "answers", ...})' in problems[0].fix
    assert find_problems(graph, data={"prompts": ["prompt_id", "prompt", "answer"]}) == ()


def test_c01_reaches_the_data_set_through_a_sub_graph() -> None:
    from tests.null.graph.flows import dapo

    problems = find_problems(dapo.graph(), data={"prompts": ["prompt_id", "prompt"]})
    assert [(x.code, x.node) for x in problems] == [("FR-C01", "math")]
    assert "given for 'prompts'" in problems[0].fix


def test_text_of_a_data_set_stands_for_its_tokens() -> None:
    from tests.null.graph.flows import sft

    assert find_problems(sft.graph(), data={"examples": ["prompt_id", "prompt", "response"]}) == ()
    problems = find_problems(sft.graph(), data={"examples": ["prompt_id", "prompt"]})
    assert [x.code for x in problems] == ["FR-C01"] and "response_ids" in problems[0].found


def test_c01_of_a_column_only_the_data_set_has() -> None:
    @fr.operator(filter=True)
    def hard(difficulty: fr.PROMPT.f32):
        return difficulty > 0.5

    @fr.flow
    def undeclared(prompts, policy):
        return fr.update(policy, hard(prompts), loss=p.sft())  # c01-data

    assert '@fr.flow(columns={"prompts": {"difficulty"' in only(undeclared, "FR-C01", "c01-data").fix

    @fr.flow(columns={"prompts": {"difficulty": fr.PROMPT.f32}})
    def declared(prompts, policy):
        return fr.update(policy, hard(prompts), loss=p.sft())

    assert codes(declared) == []


def test_one_typo_is_one_problem() -> None:
    @fr.operator(writes={"b": S.f32})
    def second(typo: S.f32):
        return typo

    @fr.operator(writes={"c": S.f32})
    def third(typo: S.f32, b: S.f32):
        return typo

    @fr.flow
    def twice(prompts, policy):
        rows = fr.rollout(policy, prompts)
        return third(second(rows))

    assert codes(twice) == ["FR-C01"]


# --- FR-C02 ------------------------------------------------------------------------------------------------------------


def test_c02_granularity() -> None:
    @fr.operator(writes={"b": T.f32})
    def per_token(reward: T.f32):
        return reward

    @fr.flow
    def coarse(prompts, policy):
        rows = p.math(fr.rollout(policy, prompts))
        return per_token(rows)  # c02

    found = only(coarse, "FR-C02", "c02")
    assert "reads 'reward' as TOKEN.f32; 'math' writes it as SAMPLE.f32" in found.found
    assert "fr.broadcast(rows, 'reward', to=fr.TOKEN)" in found.fix

    @fr.flow
    def converted(prompts, policy):
        rows = p.math(fr.rollout(policy, prompts))
        return per_token(fr.broadcast(rows, "reward"))

    assert codes(converted) == []


def test_c02_a_response_is_no_prompt() -> None:
    @fr.operator(writes={"b": fr.PROMPT.f32})
    def per_prompt(reward: fr.PROMPT.f32):
        return reward

    @fr.flow
    def fine(prompts, policy):
        return per_prompt(p.math(fr.rollout(policy, prompts)))  # c02-prompt

    assert "by='prompt_id'" in only(fine, "FR-C02", "c02-prompt").fix


def test_c02_tokens_of_other_responses_do_not_line_up() -> None:
    @fr.flow
    def joined(prompts, policy):
        rows = fr.rollout(policy, prompts)
        other = fr.rollout(policy, prompts, temperature=0.0).select(greedy_logprobs="rollout_logprobs")
        return fr.join(rows, other, on="prompt_id")  # c02-join

    assert "of='greedy_logprobs'" in only(joined, "FR-C02", "c02-join").fix


# --- FR-C03 ------------------------------------------------------------------------------------------------------------


def test_c03_a_column_is_written_twice() -> None:
    @fr.flow
    def again(prompts, policy):
        rows = p.math(fr.rollout(policy, prompts))
        return p.format(rows)  # c03

    found = only(again, "FR-C03", "c03")
    assert "node 'math' has already written" in found.found and "format(rows, replace=True)" in found.fix

    @fr.flow
    def said(prompts, policy):
        return p.format(p.math(fr.rollout(policy, prompts)), replace=True)

    @fr.flow
    def added(prompts, policy):
        rows = fr.rollout(policy, prompts)
        return (p.math(rows) + 0.5 * p.format(rows)).rows()

    assert codes(said) == codes(added) == []


def test_c03_of_a_forward_names_out() -> None:
    @fr.flow
    def twice(prompts, policy, ref, other):
        rows = fr.logprobs(ref, fr.rollout(policy, prompts), out="ref_logprobs")
        return fr.logprobs(other, rows, out="ref_logprobs")  # c03-out

    assert 'out="ref_logprobs_2"' in only(twice, "FR-C03", "c03-out").fix


# --- FR-V01 ------------------------------------------------------------------------------------------------------------


def test_v01_steps_need_old_logprobs() -> None:
    @fr.flow
    def moving(prompts, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        rows = fr.repeat(rows, epochs=2, minibatches=2)
        return fr.update(policy, rows, loss=p.ppo_clip(0.2))  # v01-steps

    found = only(moving, "FR-V01", "v01-steps")
    assert "takes 4 steps" in found.found and "'old_logprobs'" in found.found
    assert 'rows = fr.logprobs(policy, rows, out="old_logprobs") before fr.repeat' in found.fix

    @fr.flow
    def held(prompts, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        rows = fr.logprobs(policy, rows, out="old_logprobs")
        return fr.update(policy, fr.repeat(rows, epochs=2, minibatches=2), loss=p.ppo_clip(0.2))

    @fr.flow
    def one_step(prompts, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        return fr.update(policy, fr.repeat(rows), loss=p.ppo_clip(0.2))

    assert codes(held) == codes(one_step) == []


def test_v01_a_second_update_needs_old_logprobs() -> None:
    @fr.flow
    def chained(prompts, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        policy = fr.update(policy, rows, loss=p.ppo_clip(0.2))
        return fr.update(policy, rows, loss=p.ppo_clip(0.2))  # v01-chain

    assert "before 'update' updates 'policy'" in only(chained, "FR-V01", "v01-chain").fix

    @fr.flow
    def with_old(prompts, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        rows = fr.logprobs(policy, rows, out="old_logprobs")
        policy = fr.update(policy, rows, loss=p.ppo_clip(0.2))
        return fr.update(policy, rows, loss=p.ppo_clip(0.2))

    assert codes(with_old) == []


def test_v01_a_buffer_needs_a_correction() -> None:
    @fr.flow
    def replayed(prompts, policy, *, corrected):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        rows = fr.buffer(rows, capacity=100, draw=10)
        loss = p.ppo_clip(0.2) * p.truncated_importance(2.0) if corrected else p.ppo_clip(0.2)
        return fr.update(policy, rows, loss=loss)  # v01-buffer

    found = only(replayed, "FR-V01", "v01-buffer", config={"corrected": False})
    assert "mix versions of 'policy' ('buffer'" in found.found
    assert "losses.ppo_clip() * losses.truncated_importance(2.0)" in found.fix
    assert find_problems(replayed.graph(corrected=True)) == ()


def test_v01_and_v02_a_schedule_with_stale_rows() -> None:
    graph = grpo.graph(beta=0.0)
    assert find_problems(graph, schedule=fr.Async(max_staleness=0)) == ()
    problems = find_problems(graph, schedule=fr.Async(max_staleness=2))
    assert [x.code for x in problems] == ["FR-V01", "FR-V02"]
    assert "up to 2 versions old" in problems[0].found and "truncated_importance" in problems[0].fix
    assert "'ppo_clip' tolerates 0" in problems[1].found and "fr.Sync()" in problems[1].fix


def test_v01_a_correction_needs_what_it_corrects_from() -> None:
    @fr.flow
    def dropped(prompts, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        rows = rows.select("prompt_ids", "response_ids", "loss_mask", "advantage")
        return fr.update(policy, rows, loss=p.ppo_clip(0.2) * p.truncated_importance(2.0))  # v01-dropped

    found = only(dropped, "FR-V01", "v01-dropped")
    assert "'rollout_logprobs'" in found.found and "rows.select('rollout_logprobs', ...)" in found.fix


# --- FR-V02 ------------------------------------------------------------------------------------------------------------


def test_v02_more_staleness_than_the_correction_tolerates() -> None:
    @fr.flow
    def corrected(prompts, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        return fr.update(policy, rows, loss=p.ppo_clip(0.2) * p.truncated_importance(2.0))  # v02

    found = only(corrected, "FR-V02", "v02", schedule=fr.Async(max_staleness=5))
    assert "5 versions old" in found.found and "fr.Async(max_staleness=4)" in found.fix
    assert codes(corrected, schedule=fr.Async(max_staleness=4)) == []


def test_a_schedule_does_not_concern_data_sets_and_critics() -> None:
    from tests.null.graph.flows import reward_model, sft

    @fr.flow
    def critic_only(prompts, policy, critic):
        rows = fr.values(critic, p.math(fr.rollout(policy, prompts)))
        rows = rows.with_columns(returns=rows["values"])
        return fr.update(critic, rows, loss=p.value_clip())

    for flow in (sft, reward_model, critic_only):
        assert codes(flow, schedule=fr.Async(max_staleness=3)) == []


# --- FR-V03 ------------------------------------------------------------------------------------------------------------


def test_v03_of_another_model() -> None:
    @fr.flow
    def wrong_model(prompts, policy, ref):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        rows = fr.logprobs(ref, rows, out="old_logprobs")
        return fr.update(policy, rows, loss=p.ppo_clip(0.2))  # v03-model

    found = only(wrong_model, "FR-V03", "v03-model")
    assert "of 'ref'" in found.found and "fr.logprobs(policy, rows" in found.fix


def test_v03_of_another_version() -> None:
    @fr.flow
    def wrong_version(prompts, policy):
        first = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        policy_1 = fr.update(policy, first, loss=p.reinforce())
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        rows = fr.logprobs(policy_1, rows, out="old_logprobs")
        policy_2 = fr.update(policy_1, first, loss=p.reinforce())
        return fr.update(policy_2, rows, loss=p.ppo_clip(0.2))  # v03-version

    problems = [x for x in find_problems(wrong_version.graph()) if x.code == "FR-V03"]
    assert len(problems) == 1 and problems[0].where.endswith(f":{line('v03-version')}")
    assert "of policy@t+1" in problems[0].found and "starts from policy@t+2" in problems[0].found


def test_v03_recomputed_after_repeat() -> None:
    @fr.flow
    def refreshed(prompts, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        rows = fr.repeat(rows, minibatches=2)  # repeated-here
        rows = fr.logprobs(policy, rows, out="old_logprobs")
        return fr.update(policy, rows, loss=p.ppo_clip(0.2))  # v03-repeat

    found = only(refreshed, "FR-V03", "v03-repeat")
    assert "compare the policy with itself" in found.found and "before fr.repeat at" in found.fix
    assert f"test_checks.py:{line('repeated-here')}" in found.fix


def test_v03_mixed_by_a_buffer() -> None:
    @fr.flow
    def buffered(prompts, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        rows = fr.logprobs(policy, rows, out="old_logprobs")
        rows = fr.buffer(rows, capacity=100, draw=10)
        return fr.update(policy, rows, loss=p.ppo_clip(0.2) * p.truncated_importance(2.0))  # v03-buffer

    assert "after fr.buffer" in only(buffered, "FR-V03", "v03-buffer").fix

    @fr.flow
    def after(prompts, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        rows = fr.buffer(rows, capacity=100, draw=10)
        rows = fr.logprobs(policy, rows, out="old_logprobs")
        return fr.update(policy, rows, loss=p.ppo_clip(0.2) * p.truncated_importance(2.0))

    assert codes(after) == []


# --- FR-G01, FR-G02 ----------------------------------------------------------------------------------------------------


def test_g01_a_group_operator_after_a_split() -> None:
    @fr.flow
    def split(prompts, policy, *, by):
        rows = p.math(fr.rollout(policy, prompts, n=4))
        rows = fr.buffer(rows, capacity=100, draw=10, by=by)
        rows = p.group_norm(rows)  # g01
        return fr.update(policy, rows, loss=p.ppo_clip() * p.truncated_importance())

    found = only(split, "FR-G01", "g01", config={"by": None})
    assert "'group_norm' needs all rows of equal 'prompt_id'" in found.found and 'by="prompt_id"' in found.fix
    assert "FR-G01" in [x.code for x in find_problems(split.graph(by="sample_id"))]
    assert find_problems(split.graph(by="prompt_id")) == ()


def test_g01_a_loss_of_pairs_after_a_split() -> None:
    @fr.flow
    def pairs(examples, policy, ref, *, by):
        rows = fr.logprobs(ref, examples, out="ref_logprobs")
        return fr.update(policy, fr.repeat(rows, minibatches=4, by=by), loss=p.dpo())  # g01-loss

    found = only(pairs, "FR-G01", "g01-loss", config={"by": None})
    assert "'dpo'" in found.found and 'fr.repeat(rows, ..., by="pair_id")' in found.fix
    for key in ("pair_id", "prompt_id"):  # a prompt's rows hold its pairs
        assert find_problems(pairs.graph(by=key)) == ()


def test_g02_a_group_of_one() -> None:
    @fr.flow
    def alone(prompts, policy, *, n):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=n)))  # g02
        return fr.update(policy, rows, loss=p.ppo_clip())

    found = only(alone, "FR-G02", "g02", config={"n": 1})
    assert "at least 2 responses of a prompt; there is 1" in found.found
    assert "fr.rollout(policy, prompts, n=2)" in found.fix
    assert find_problems(alone.graph(n=2)) == ()


def test_g02_inside_refill() -> None:
    @fr.operator(filter=True, locality=fr.group("prompt_id"), min_group=2)
    def spread(reward: S.f32):
        return reward.std() > 0

    @fr.flow
    def dynamic(prompts, policy, *, n):
        def attempt(new):
            return p.math(fr.rollout(policy, new, n=n))

        rows = fr.refill(attempt, prompts, keep=spread(), max_rounds=2)  # g02-refill
        return fr.update(policy, rows.with_columns(advantage=rows["reward"]), loss=p.ppo_clip())

    only(dynamic, "FR-G02", "g02-refill", config={"n": 1})
    assert find_problems(dynamic.graph(n=2)) == ()


# --- FR-M01 ------------------------------------------------------------------------------------------------------------


def test_m01_rows_of_another_model() -> None:
    @fr.flow
    def borrowed(prompts, policy, teacher):
        rows = p.group_norm(p.math(fr.rollout(teacher, prompts, n=4)))
        return fr.update(policy, rows, loss=p.ppo_clip())  # m01-model

    found = only(borrowed, "FR-M01", "m01-model")
    assert "'teacher' sampled these rows" in found.found and "fr.rollout(policy, prompts" in found.fix

    @fr.flow
    def imitated(prompts, policy, teacher):
        return fr.update(policy, fr.rollout(teacher, prompts), loss=p.sft())

    assert codes(imitated) == []


def test_m01_rows_of_a_data_set() -> None:
    @fr.flow
    def given(examples, policy):
        rows = examples.with_columns(advantage=1.0)
        return fr.update(policy, rows, loss=p.reinforce())  # m01-data

    assert "data set 'examples'" in only(given, "FR-M01", "m01-data").found


def test_m01_tokens_of_tools() -> None:
    @fr.flow
    def tools(prompts, policy, *, mask):
        rows = fr.rollout(policy, prompts, n=4, environment=p.Tools([p.search]), max_turns=3)
        rows = p.group_norm(p.math(rows))
        rows = rows.with_columns(narrow=rows["loss_mask"] & (rows["reward"] > 0))
        rows = rows.with_columns(
            other=rows["response_mask"] & rows["loss_mask"], wide=rows["loss_mask"] | rows["response_mask"]
        )
        rows = rows.with_columns(chosen=fr.where(rows["reward"] > 0, rows["narrow"], False))
        return fr.update(policy, rows, loss=p.ppo_clip(), mask=mask)  # m01-mask

    for mask in ("response_mask", "wide"):
        found = only(tools, "FR-M01", "m01-mask", config={"mask": mask})
        assert f"where '{mask}' is true" in found.found and 'mask="loss_mask"' in found.fix
    for mask in ("loss_mask", "narrow", "other", "chosen"):
        assert find_problems(tools.graph(mask=mask)) == ()


def test_m01_a_replaced_loss_mask() -> None:
    @fr.flow
    def widened(prompts, policy):
        rows = fr.rollout(policy, prompts, n=4, environment=p.Tools([p.search]), max_turns=3)
        rows = p.group_norm(p.math(rows)).with_columns(loss_mask=rows["response_mask"])
        return fr.update(policy, rows, loss=p.ppo_clip())  # m01-replaced

    only(widened, "FR-M01", "m01-replaced")

    @fr.flow
    def without_tools(prompts, policy):
        rows = fr.rollout(policy, prompts, n=4)
        rows = p.group_norm(p.math(rows)).with_columns(loss_mask=rows["response_mask"])
        return fr.update(policy, rows, loss=p.ppo_clip())

    assert codes(without_tools) == []


# --- FR-W01, FR-W02, FR-W03 --------------------------------------------------------------------------------------------


def test_w01_read_after_write() -> None:
    @fr.flow
    def late(prompts, heldout, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        new = fr.update(policy, rows, loss=p.ppo_clip())  # written-here
        test = p.math(fr.rollout(policy, heldout))  # w01-read
        fr.log(test, "reward")
        return new

    found = only(late, "FR-W01", "w01-read")
    assert "as it was before 'update'" in found.found and f"test_checks.py:{line('written-here')}" in found.found

    @fr.flow
    def in_order(prompts, heldout, policy):
        fr.log(p.math(fr.rollout(policy, heldout)), "reward")
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        return fr.update(policy, rows, loss=p.ppo_clip())

    assert codes(in_order) == []


def test_w01_two_updates_of_one_version() -> None:
    @fr.flow
    def forked(prompts, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        one = fr.update(policy, rows, loss=p.ppo_clip())
        two = fr.update(policy, rows, loss=p.reinforce())  # w01-fork
        return one, two

    assert "second next version of 'policy'" in only(forked, "FR-W01", "w01-fork").found

    @fr.flow
    def alternatives(prompts, policy):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        early = fr.update(policy, rows, loss=p.sft())
        return fr.after(100, fr.update(policy, rows, loss=p.ppo_clip()), otherwise=early)

    assert codes(alternatives) == []


def test_w01_after_mixes_two_models() -> None:
    @fr.flow
    def mixed(prompts, policy, ref):
        return fr.after(10, policy, otherwise=ref)  # w01-after

    assert "fr.assign" in only(mixed, "FR-W01", "w01-after").fix


def test_w02_tokenizers_differ() -> None:
    @fr.flow
    def scored(prompts, policy, judge):
        rows = fr.score(judge, fr.rollout(policy, prompts, n=4), out="reward")  # w02
        return fr.update(policy, p.group_norm(rows), loss=p.ppo_clip())

    found = only(scored, "FR-W02", "w02", models={"policy": "a", "judge": "b"})
    assert "token ids of 'policy'" in found.found and "fr.prompts_from(rows, your_prompt)" in found.fix
    assert codes(scored, models={"policy": "a", "judge": "a"}) == []
    assert codes(scored, models={"policy": "a"}) == codes(scored) == []  # nothing is known of the other

    models = {
        "policy": Model("x", tokenizer=SimpleNamespace(fingerprint="a")),
        "judge": Model("y", tokenizer=SimpleNamespace(fingerprint="b")),
    }
    only(scored, "FR-W02", "w02", models=models)
    assert codes(scored, models={"policy": Model("x"), "judge": Model("y")}) == []


def test_w02_text_is_fine() -> None:
    from tests.null.graph.flows import judged

    assert find_problems(judged.graph(), models={"policy": "a", "judge": "b"}) == ()


def test_w02_a_data_set_is_encoded_by_the_first_model_on_the_way() -> None:
    @fr.flow
    def shared(examples, policy, ref):
        rows = fr.logprobs(ref, examples, out="ref_logprobs")
        return fr.update(policy, rows, loss=p.dpo())  # w02-data

    assert "token ids of 'ref'" in only(shared, "FR-W02", "w02-data", models={"policy": "a", "ref": "b"}).found

    @fr.flow
    def apart(examples, policy, judge):
        return fr.update(judge, examples, loss=p.bradley_terry()), fr.update(policy, examples, loss=p.sft())

    assert codes(apart, models={"policy": "a", "judge": "b"}) == []


def test_w03_a_lost_update() -> None:
    @fr.flow
    def lost(prompts, policy, critic):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        fr.update(critic, rows.with_columns(returns=0.0, values=0.0), loss=p.sft())  # w03
        return fr.update(policy, rows, loss=p.ppo_clip())

    found = only(lost, "FR-W03", "w03")
    assert "new version of 'critic'" in found.found and "return critic_next" in found.fix

    @fr.flow
    def used(prompts, policy, ref):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        return fr.assign(ref, fr.update(policy, rows, loss=p.ppo_clip()))

    assert codes(used) == []


# --- all at once -------------------------------------------------------------------------------------------------------


def test_all_problems_come_at_once_in_the_order_of_lines() -> None:
    @fr.flow
    def bad(prompts, policy, teacher):
        rows = fr.rollout(teacher, prompts, n=1)
        rows = p.group_norm(p.math(rows))  # first
        rows = p.format(rows)  # second
        return fr.update(policy, rows, loss=p.ppo_clip() + p.kl())  # third

    with pytest.raises(CheckError) as caught:
        fr.check(bad)
    problems = caught.value.problems
    assert [x.code for x in problems] == ["FR-G02", "FR-C03", "FR-C01", "FR-M01"]
    numbers = [int(x.where.rpartition(":")[2]) for x in problems]
    assert numbers == [line("first"), line("second"), line("third"), line("third")]
    text = str(caught.value)
    assert text.startswith("flow 'bad' has 4 problems:\n") and text.count("fix: ") == 4
    assert all(re.search(rf"{x.code} at .*test_checks.py:\d+, node '{x.node}'", text) for x in problems)


def test_check_takes_configuration_and_refuses_what_is_unknown() -> None:
    assert fr.check(grpo, group_size=4) == grpo.graph(group_size=4)
    with pytest.raises(CheckError, match="FR-G02"):
        fr.check(grpo, group_size=1)
    with pytest.raises(ConfigError, match="did you mean 'group_size'"):
        fr.check(grpo, groupsize=4)
    with pytest.raises(ConfigError, match="no configuration any more"):
        fr.check(grpo.graph(), group_size=4)
    with pytest.raises(ConfigError, match="found str"):
        fr.check("grpo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="data names 'prompt'.*did you mean 'prompts'"):
        find_problems(grpo.graph(), data={"prompt": ["prompt"]})
    with pytest.raises(ConfigError, match="models names 'polic'"):
        find_problems(grpo.graph(), models={"polic": "a"})


def test_problems_of_a_graph_from_text_point_into_the_text() -> None:
    graph = fr.from_text(fr.to_text(grpo.graph(group_size=1)), file="plan.flow")
    problems = find_problems(graph)
    assert [x.code for x in problems] == ["FR-G02"]
    assert problems[0].where == "plan.flow:7" and problems[0].source.startswith("group_norm = apply(math;")
