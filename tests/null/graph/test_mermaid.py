"""The Mermaid drawing of a graph."""

import re

import pytest

import flowrl as fr
from flowrl.viz.mermaid import STYLES, to_mermaid
from tests.null.graph.flows import SIXTEEN, dapo, grpo, ppo_warm


def identifiers(text: str) -> set[str]:
    """Names of the nodes that a drawing declares."""
    return set(re.findall(r"^ +(\w+)[\[({]", text, re.MULTILINE))


@pytest.mark.parametrize("flow", SIXTEEN, ids=lambda f: f.name)
def test_every_edge_joins_two_declared_nodes(flow: fr.Flow) -> None:
    text = to_mermaid(flow.graph())
    known = identifiers(text)
    edges = re.findall(r"^ +(\w+) (?:--|-\.) \"[^\"]*\" (?:-->|\.->) (\w+)$", text, re.MULTILINE)
    assert {name for edge in edges for name in edge} <= known
    assert len(edges) >= sum(len(node.inputs) for node in flow.graph())
    assert text.count("subgraph") == len(re.findall(r"^ +end$", text, re.MULTILINE))
    styled = {name for names in re.findall(r"^ +class ([\w,]+) \w+$", text, re.MULTILINE) for name in names.split(",")}
    assert styled == known


def test_models_tables_and_versions() -> None:
    text = to_mermaid(grpo.graph())
    assert text.startswith("flowchart LR\n")
    assert '    n_policy[("policy")]' in text and '    n_prompts[["prompts"]]' in text
    assert 'n_policy -. "policy@t" .-> n_rollout' in text
    assert 'n_update -. "policy@t+1" .-> out0' in text
    assert 'n_rollout -- "rows x8" --> n_math' in text and 'n_math -- "+ reward" --> n_group_5f_norm' in text
    assert "class n_policy,n_ref model" in text and "class n_prompts table" in text
    assert all(f"classDef {name} " in text for name in STYLES)
    assert "update<br/>ppo_clip + kl<br/>average=token_mean" in text


def test_two_outputs_and_a_sub_graph() -> None:
    assert "out1" in to_mermaid(ppo_warm.graph())
    text = to_mermaid(dapo.graph())
    assert 'subgraph n_refill_2f_body["refill: repeats attempt"]' in text
    assert 'n_prompts -- "rows" --> n_refill_2f_prompts' in text


def test_labels_are_escaped() -> None:
    graph = grpo.graph().rename({"rollout": 'r"]; <b>x</b> #1|end'})
    label = re.search(r'\["(r[^"]*)<br/>rollout', to_mermaid(graph))
    assert label and label.group(1) == "r#34;#93;#59; #60;b#62;x#60;/b#62; #35;1#124;end"


def test_names_that_differ_have_identifiers_that_differ() -> None:
    graph = grpo.graph().rename({"rollout": "a_b", "math": "a.b", "group_norm": "a/b", "ref_logprobs": "a_5f_b"})
    assert len(identifiers(to_mermaid(graph))) == len(graph) + 1


def test_weights_alone() -> None:
    @fr.flow
    def weights_only(policy, ref):
        return fr.ema(ref, policy, 0.9)

    assert "ema" in to_mermaid(weights_only.graph())
