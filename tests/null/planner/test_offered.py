"""Placements that are asked for: those that cannot be are refused, and those that the planner would not offer are planned."""

from dataclasses import replace

import pytest

from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.mesh import Layout, Placement
from flowrl.planner.offered import check_placement
from flowrl.planner.search import search
from tests.null.planner.search_cases import CASES, GROUPS, WORK, cluster, group_roles

EIGHT = replace(CASES["plenty"], cluster=cluster("8xA100-80G", 80))


def asking(text):
    return replace(EIGHT, placement=Placement.parse(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "gen:f4 | ...",
            "'gen', which is sampled from, cannot be laid out as f4: an engine .* has no shards .f.; there are d4, d2t2, t4",
        ),
        (
            "policy:f2p2 | ...",
            "'policy', which is trained, cannot be laid out as f2p2: only engines have stages .p.; there are f4, d2f2",
        ),
        ("gen:d16 | ...", "'gen:d16' needs 16 devices in one slice; nodes have 8 devices"),
        ("gen:d9 | ...", "needs 9 devices in one slice"),
        ("gen:d8 | (policy:f8 + ref:f8)", "needs 16 devices; no 8 are left"),
        ("gen:d8 | ...", "gives 8 of 8 devices to groups with a size, and leaves none for policy, ref"),
        ("gen:d4 | policy:f4 | ref:...", "leaves none for ref:..."),
    ],
)
def test_what_cannot_be(text, message):
    with pytest.raises(ConfigError, match=message.replace("|", r"\|").replace("(", r"\(")):
        check_placement(asking(text))


def test_why_a_layout_cannot_be():
    """28 heads do not divide by 8; what is accepted when it is asked for is listed too."""
    shape = ModelShape.of("Qwen/Qwen2.5-7B")
    problem = replace(EIGHT, roles=group_roles(shape, shape))
    for name, rest in (("gen", "policy + ref"), ("policy", "gen + ref")):
        with pytest.raises(ConfigError, match="as t8: 28 attention heads do not divide by 8; there are") as error:
            check_placement(replace(problem, placement=Placement.parse(f"({rest} + {name}:t8)")))
        for layout in str(error.value).partition("there are ")[2].split(", "):
            check_placement(replace(problem, placement=Placement.parse(f"({rest} + {name}:{layout})")))
    with pytest.raises(ConfigError, match="inside a node, and one has 2 devices"):
        machine = replace(EIGHT.cluster, nodes=4, devices_per_node=2)
        check_placement(replace(EIGHT, cluster=machine, placement=Placement.parse("(gen + ref + policy:f2t4)")))


@pytest.mark.parametrize(
    "text", ["gen:d3 | ...", "gen:d8 + ref:... + policy:...", "gen:d4 | ...", "policy:d2f2 | ...", "policy:t2 | ..."]
)
def test_what_can_be(text):
    check_placement(asking(text))
    check_placement(EIGHT)


@pytest.mark.parametrize("text", ["d4", "d2f2"])
def test_a_layout_that_is_not_offered_by_itself_is_planned(text):
    """Copies of shards inside a node gain nothing; who asks for them gets them."""
    best = search(asking(f"policy:{text} | ...")).best
    assert best is not None and best.option("policy").layout == Layout.parse(text)
    assert search(replace(asking("policy:f4 | ..."), roles=GROUPS, workload=WORK)).best is not None


def test_the_order_of_ranks_is_the_planners():
    """As plans print it; which order moves least is found when the moves are known."""
    best = search(asking("gen:d2t2@div | ...")).best
    assert best is not None and best.option("gen").layout == Layout.parse("d2t2")
