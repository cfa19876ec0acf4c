"""Slices and renamed graphs."""

import pytest

import flowrl as fr
from flowrl.errors import ConfigError
from tests.null.graph import pieces as p
from tests.null.graph.flows import dapo, grpo, grpo_moving_ref, ppo


def names(graph: fr.Graph) -> list[str]:
    return [node.name for node in graph]


def test_slice_until_a_node() -> None:
    graph = ppo.graph().slice(until="score")
    assert names(graph) == ["prompts", "policy", "judge", "rollout", "score"]
    assert graph.outputs == ("score",) and graph.check() == ()


def test_slice_until_a_column_takes_its_last_writer() -> None:
    @fr.flow
    def replaced(prompts, policy):
        rows = p.overlong(p.math(fr.rollout(policy, prompts, n=4)), soft=10, replace=True)
        return fr.update(policy, p.group_norm(rows), loss=p.ppo_clip())

    assert replaced.graph().slice(until="reward").outputs == ("overlong",)
    assert grpo.graph().slice(until="advantage").outputs == ("group_norm",)
    assert grpo.graph().slice(until="response_ids").outputs == ("rollout",)


def test_slice_keeps_the_effects_inside_it() -> None:
    @fr.flow
    def logged(prompts, policy):
        rows = p.math(fr.rollout(policy, prompts, n=4))
        fr.log(rows, "reward")
        rows = p.group_norm(rows)
        fr.log(rows, "advantage")
        return fr.update(policy, rows, loss=p.ppo_clip())

    assert logged.graph().slice(until="math").effects == ("log",)
    assert logged.graph().slice(until="update").effects == ("log", "log_2")
    assert grpo_moving_ref.graph().slice(until="group_norm").effects == ()


def test_slice_until_something_unknown() -> None:
    with pytest.raises(ConfigError, match="flow 'grpo' has no node and no column 'advantag'; did you mean 'advantage'"):
        grpo.graph().slice(until="advantag")
    with pytest.raises(ConfigError, match="did you mean 'rollout'"):
        grpo.graph().slice(until="rolout")


def test_rename_follows_every_edge() -> None:
    graph = grpo.graph()
    renamed = graph.rename({"policy": "actor", "rollout": "sampled", "update": "new_actor"})
    assert renamed["sampled"].source("model") == "actor" and renamed["math"].source("rows") == "sampled"
    assert renamed.outputs == ("new_actor",) and "policy" not in renamed
    assert renamed.check() == () and renamed.hash != graph.hash
    assert renamed.rename({"actor": "policy", "sampled": "rollout", "new_actor": "update"}) == graph
    assert names(graph)[:3] == ["prompts", "policy", "ref"]  # the first one is as it was


def test_rename_swaps_names() -> None:
    graph = grpo.graph().rename({"policy": "ref", "ref": "policy"})
    assert graph["rollout"].source("model") == "ref" and graph["ref_logprobs"].source("model") == "policy"


def test_rename_reaches_into_sub_graphs() -> None:
    graph = dapo.graph().rename({"policy": "actor", "prompts": "questions"})
    refill = graph["refill"]
    assert refill.inputs == (("rows", "questions"), ("model", "actor"))
    assert refill.body is not None and names(refill.body)[:2] == ["prompts", "actor"]
    assert refill.body["rollout"].source("model") == "actor"
    assert graph.check() == () and fr.from_text(fr.to_text(graph)) == graph
    with pytest.raises(ConfigError, match="the sub-graph 'attempt' has a node of that name"):
        dapo.graph().rename({"policy": "math"})


def test_rename_refuses_unknown_names_and_collisions() -> None:
    graph = grpo.graph()
    with pytest.raises(ConfigError, match="no node 'polcy' to rename; did you mean 'policy'"):
        graph.rename({"polcy": "actor"})
    with pytest.raises(ConfigError, match="nodes 'policy' and 'ref' would both be called 'ref'"):
        graph.rename({"policy": "ref"})
    with pytest.raises(ConfigError, match="empty name"):
        graph.rename({"policy": ""})


def test_namespace() -> None:
    graph = grpo.graph().namespace("first", keep=("policy", "prompts"))
    assert names(graph)[:4] == ["prompts", "policy", "first.ref", "first.rollout"]
    assert fr.from_text(fr.to_text(graph)) == graph
