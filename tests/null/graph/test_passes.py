"""Passes leave out and merge work, say so in words, and change no answer."""

import pytest

import flowrl as fr
from flowrl.errors import FlowError
from flowrl.graph import passes
from flowrl.graph.passes import needed_columns, optimise
from tests.null.graph import pieces as p
from tests.null.graph.flows import SIXTEEN, dapo, grpo, ppo, tool_use

S, T = fr.SAMPLE, fr.TOKEN


def names(graph: fr.Graph) -> list[str]:
    return [node.name for node in graph]


def told(flow: fr.Flow, **config) -> tuple[fr.Graph, list[str]]:
    graph, notes = optimise(flow.graph(**config))
    assert graph.check() == ()
    assert fr.from_text(fr.to_text(graph)) == graph
    again, more = optimise(graph)
    assert again == graph and more == ()  # a fixpoint
    return graph, [str(note) for note in notes]


# --- prune -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flow", SIXTEEN, ids=lambda f: f.name)
def test_nothing_is_left_out_of_the_sixteen_flows(flow: fr.Flow) -> None:
    graph, notes = told(flow)
    assert graph == flow.graph() and notes == []


def test_without_its_term_the_reference_is_not_loaded() -> None:
    graph, notes = told(grpo, beta=0.0)
    assert names(graph) == ["prompts", "policy", "rollout", "math", "group_norm", "update"]
    assert graph["update"].source("rows") == "group_norm"
    assert notes == ["'ref_logprobs' is read by nobody: not computed", "'ref' is not loaded"]


def test_chains_of_idle_nodes_go_together() -> None:
    @fr.flow
    def chain(prompts, policy, critic):
        rows = fr.values(critic, fr.rollout(policy, prompts))
        rows = rows.with_columns(a=1.0, b=rows["values"] * 2)
        rows = rows.with_columns(c=rows["b"] + 1)
        rows = fr.reduce(rows, "mean", of="values", out="mean_value")
        rows = fr.broadcast(rows, "a", out="a_per_token")
        return fr.update(policy, rows, loss=p.sft())

    graph, notes = told(chain)
    assert names(graph) == ["prompts", "policy", "rollout", "update"]
    assert len(notes) == 6 and notes[-1] == "'critic' is not loaded"


def test_only_the_needed_expressions_of_a_node_stay() -> None:
    @fr.flow
    def some(prompts, policy, critic):
        rows = fr.values(critic, p.math(fr.rollout(policy, prompts)))
        rows = rows.with_columns(advantage=rows["reward"], unused=rows["values"])
        return fr.update(policy, rows, loss=p.reinforce())

    graph, notes = told(some)
    assert [name for name, _ in graph["advantage_unused"]["columns"]] == ["advantage"]
    assert notes == ["'values' is read by nobody: not computed", "'critic' is not loaded"]


def test_a_select_does_not_keep_a_column_alive() -> None:
    @fr.flow
    def selected(prompts, policy, ref):
        rows = fr.logprobs(ref, p.math(fr.rollout(policy, prompts)), out="ref_logprobs")
        rows = rows.select("prompt_ids", "response_ids", "loss_mask", "ref_logprobs", advantage="reward", copy="reward")
        return fr.update(policy, rows, loss=p.reinforce())

    graph, notes = told(selected)
    assert graph["select"]["columns"] == ("prompt_ids", "response_ids", "loss_mask")
    assert graph["select"]["renamed"] == (("advantage", "reward"),)
    assert notes[-1] == "'ref' is not loaded"


def test_filters_logs_evaluations_and_memories_stay() -> None:
    @fr.operator(writes={"target": S.f32}, locality="stateful")
    def moving(reward: S.f32, *, state: fr.State):
        return reward

    @fr.flow
    def kept(prompts, heldout, policy):
        rows = moving(p.math(fr.rollout(policy, prompts, n=4)))
        rows = p.group_has_signal(rows)
        rows = fr.filter(rows, rows["num_turns"] > 0)
        length = rows.with_columns(turns=rows["num_turns"] * 2)
        fr.log(length, "turns")
        fr.every(10, p.pass_rate(p.math(fr.rollout(policy, heldout, n=4)), k=4))
        return fr.update(policy, rows, loss=p.sft())

    graph, notes = told(kept)
    assert graph == kept.graph() and notes == []


def test_what_leads_nowhere_is_not_run() -> None:
    @fr.flow
    def aside(prompts, other, policy, teacher):
        p.math(fr.rollout(teacher, other))
        return fr.update(policy, fr.rollout(policy, prompts), loss=p.sft())

    graph, notes = told(aside)
    assert names(graph) == ["prompts", "policy", "rollout_2", "update"]
    assert "'other' is not read" in notes and "'teacher' is not loaded" in notes
    assert "'rollout' leads to nothing that the flow returns: not run" in notes


def test_rows_that_are_returned_keep_every_column() -> None:
    @fr.flow
    def returned(prompts, policy, ref):
        return fr.logprobs(ref, fr.rollout(policy, prompts), out="ref_logprobs")

    graph, notes = told(returned)
    assert graph == returned.graph() and notes == []


def test_sub_graphs_are_pruned_too() -> None:
    @fr.flow
    def inside(prompts, policy, ref, judge):
        def attempt(new):
            rows = fr.rollout(policy, new, n=4)
            rows = fr.logprobs(ref, rows, out="ref_logprobs")
            rows = fr.score(judge, rows, out="grade")
            return p.math(rows)

        rows = fr.refill(attempt, prompts, keep=p.group_has_signal(), max_rounds=2)
        return fr.update(policy, rows, loss=p.kl() + p.sft())

    graph, notes = told(inside)
    body = graph["refill"].body
    assert body is not None and names(body) == ["prompts", "policy", "ref", "rollout", "ref_logprobs", "math"]
    assert graph["refill"].inputs == (("rows", "prompts"), ("model", "policy"), ("model", "ref"))
    assert "'judge' is not loaded" in notes and "judge" not in graph


def test_both_branches_of_a_sum_of_rewards_are_read() -> None:
    graph, notes = told(tool_use)
    assert notes == [] and graph["reward"].sources("rows") == ("exact", "format")


def test_a_graph_with_problems_passes_through() -> None:
    @fr.flow
    def broken(prompts, policy):
        rows = fr.rollout(policy, prompts)
        idle = rows.with_columns(x=rows["typo"])
        return fr.update(policy, idle.with_columns(advantage=rows["typo"]), loss=p.reinforce())

    graph, _ = optimise(broken.graph())
    assert [x.code for x in graph.check()] == ["FR-C01"]


def test_a_pass_that_breaks_a_graph_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_it(graph: fr.Graph):
        nodes = tuple(n.with_params(columns=()) if n.kind == "with_columns" else n for n in graph)
        return fr.Graph(graph.name, nodes, graph.outputs), ()

    @fr.flow
    def fine(prompts, policy):
        rows = fr.rollout(policy, prompts)
        return fr.update(policy, rows.with_columns(advantage=1.0), loss=p.reinforce())

    monkeypatch.setattr(passes, "PASSES", (break_it,))
    with pytest.raises(FlowError, match="pass 'break_it' broke flow 'fine'.*\n.*FR-C01"):
        optimise(fine.graph())


# --- merge -------------------------------------------------------------------------------------------------------------


def test_equal_forwards_become_one_and_a_copy() -> None:
    @fr.flow
    def twice(prompts, policy, ref):
        rows = p.group_norm(p.math(fr.rollout(policy, prompts, n=4)))
        rows = fr.logprobs(policy, rows, out="old_logprobs")
        rows = fr.logprobs(ref, rows, out="ref_logprobs")
        rows = fr.logprobs(policy, rows, out="before")
        fr.log(rows, "before")
        return fr.update(policy, fr.repeat(rows, minibatches=2), loss=p.ppo_clip() + p.kl())

    graph, notes = told(twice)
    assert graph["before"].kind == "copy" and graph["before"]["columns"] == (("before", "old_logprobs"),)
    assert graph["before"].source("rows") == "ref_logprobs"
    assert notes == ["'before' equals 'old_logprobs': copied, not computed again"]


def test_both_columns_of_top_logprobs_are_copied() -> None:
    @fr.flow
    def two(prompts, policy, teacher, *, k=8, logged=("second_ids", "second_logprobs")):
        rows = fr.top_logprobs(teacher, fr.rollout(policy, prompts), k=8)
        rows = fr.top_logprobs(teacher, rows, k=k, out="second")
        fr.log(rows, *logged)
        return fr.update(policy, rows, loss=p.reverse_kl())

    graph, _ = told(two)
    assert graph["second_top"]["columns"] == (("second_ids", "teacher_ids"), ("second_logprobs", "teacher_logprobs"))
    graph, _ = told(two, logged=("second_logprobs",))
    assert graph["second_top"]["columns"] == (("second_logprobs", "teacher_logprobs"),)
    graph, notes = told(two, k=4)
    assert graph["second_top"].kind == "top_logprobs" and notes == []


def test_other_weights_rows_or_temperatures_are_not_equal() -> None:
    @fr.flow
    def different(prompts, policy, ref):
        rows = p.math(fr.rollout(policy, prompts, n=4))
        rows = fr.logprobs(policy, rows, out="a")
        new = fr.update(policy, rows, loss=p.sft())
        rows = fr.logprobs(new, rows, out="b")  # other version
        rows = fr.logprobs(ref, rows, out="c")  # other model
        hot = rows.with_columns(temperature=2.0)
        hot = fr.logprobs(ref, hot, out="d")  # other temperature
        fewer = fr.logprobs(ref, fr.filter(hot, hot["reward"] > 0), out="e")  # other rows
        return new, fewer

    graph, notes = told(different)
    assert graph == different.graph() and notes == []


def test_the_same_node_twice_is_one() -> None:
    @fr.flow
    def branches(prompts, policy, judge):
        rows = fr.rollout(policy, prompts, n=4)
        one, two = fr.score(judge, rows, out="reward"), fr.score(judge, rows, out="reward")
        kept = fr.filter(one, one["reward"] > 0), fr.filter(two, two["reward"] > 0)
        both = fr.concat(*kept)
        return fr.update(policy, both, loss=p.sft())

    graph, notes = told(branches)
    assert names(graph) == ["prompts", "policy", "judge", "rollout", "score", "filter", "concat", "update"]
    assert graph["concat"].sources("rows") == ("filter", "filter")
    assert notes == [
        "'score_2' is the same as 'score': computed once",
        "'filter_2' is the same as 'filter': computed once",
    ]


def test_two_rollouts_are_never_one() -> None:
    @fr.flow
    def twice(prompts, policy):
        rows = fr.concat(fr.rollout(policy, prompts), fr.rollout(policy, prompts))
        return fr.update(policy, rows, loss=p.sft())

    graph, notes = told(twice)
    assert len([n for n in graph if n.kind == "rollout"]) == 2 and notes == []


# --- needed columns ----------------------------------------------------------------------------------------------------


def test_an_edge_carries_what_is_read_after_it() -> None:
    needed = needed_columns(ppo.graph())
    always = {"prompt_id", "sample_id", "prompt_ids", "response_ids", "temperature", "loss_mask"}
    versions = {"min_policy_version", "max_policy_version"}
    assert needed["repeat"] == always | versions | {"old_logprobs", "advantages", "values", "returns"}
    assert needed["kl_shaped"] == always | versions | {"old_logprobs", "values", "token_rewards"}
    assert "reward" in needed["score"] and "reward" not in needed["kl_shaped"]
    assert needed["prompts"] == {"prompt_id", "sample_id", "prompt", "prompt_ids"}
    assert "policy" not in needed and "update" not in needed


def test_a_sub_graph_carries_what_is_read_after_it() -> None:
    needed = needed_columns(dapo.graph())
    assert "answer" in needed["refill/prompts"] and "answer" in needed["prompts"]
    assert "response" in needed["refill/rollout"] and "response" not in needed["refill/math"]
    assert "reward" in needed["refill"] and "rollout_logprobs" not in needed["refill/rollout"]


def test_an_environment_sees_the_whole_prompt() -> None:
    needed = needed_columns(tool_use.graph())
    assert {"prompt", "answer", "prompt_id"} <= needed["prompts"]


def test_a_replaced_column_is_not_needed_before() -> None:
    @fr.flow
    def replaced(prompts, policy):
        rows = p.math(fr.rollout(policy, prompts))
        rows = rows.with_columns(reward=1.0)
        return fr.update(policy, rows.with_columns(advantage=rows["reward"]), loss=p.reinforce())

    graph, notes = told(replaced)
    assert "math" not in graph and notes == ["what 'math' writes is read by nobody: not computed"]
