"""What notebooks show of graphs, flows, tables and runs."""

from __future__ import annotations

import html
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flowrl as fr
from examples.flows.grpo import grpo
from examples.rloo import rloo
from flowrl.schema.types import PROMPT, SAMPLE, TOKEN
from flowrl.shown import SHOWN
from flowrl.store.rows import RowBatch
from tests.null.viz.cases import large
from tests.null.viz.run_cases import SCRIPT
from tests.null.viz.test_page import read


def inside(shown: str) -> str:
    """The page in a frame, and nothing beside it."""
    found = re.fullmatch(
        r'<iframe srcdoc="([^"]*)" sandbox="allow-scripts" title="[^"]*" style="[^"]*"></iframe>', shown
    )
    assert found
    return html.unescape(found[1])


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_every_name_is_there(name: str) -> None:
    module, _, function = SHOWN[name].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("value", [large(), grpo.graph()], ids=["plan", "graph"])
def test_where_no_page_is_shown_it_is_text(value: Any) -> None:
    """IPython in a terminal, which else prints every field of every node."""
    said: list[str] = []
    value._repr_pretty_(SimpleNamespace(text=said.append), False)
    assert said == [str(value)] and len(said[0]) < len(repr(value)) / 2


def test_a_graph_is_drawn_with_what_is_left_out() -> None:
    page = inside(grpo.graph(beta=0)._repr_html_())
    read(page)
    for name in ("rollout", "group_norm", "update"):
        assert f">{name}</text>" in page
    assert "left out: " in page and 'class="edge data pruned"' in page, "the reference is not needed without its loss"
    assert "policy t → t+1" in page
    assert "predicted" not in page.split("<main>")[1].split("<details>")[0], "nothing was planned"


def test_a_flow_is_drawn_with_its_defaults_or_named() -> None:
    assert inside(rloo._repr_html_()) == inside(rloo.graph()._repr_html_())

    @fr.flow
    def needs(prompts, policy, *, size):
        return fr.rollout(policy, prompts, n=size)

    assert needs._repr_html_().startswith("<code>&lt;flow needs(prompts, policy; size=")


def test_a_graph_with_mistakes_is_its_text() -> None:
    @fr.flow
    def wrong(prompts, policy):
        rows = fr.rollout(policy, prompts, n=2)
        return fr.filter(rows, rows["rewrd"] > 0)

    shown = wrong.graph()._repr_html_()
    assert "rewrd" in shown


def rows() -> RowBatch:
    values = {
        "prompt_id": [SCRIPT] * 7,
        "reward": np.linspace(0, 1, 7, dtype=np.float32),
        "response_ids": [list(range(20))] * 7,
    }
    return RowBatch(values, {"prompt_id": PROMPT.str, "reward": SAMPLE.f32, "response_ids": TOKEN.i32})


def test_rows_are_a_table_of_the_first() -> None:
    shown = rows()._repr_html_()
    found = read(shown)
    assert [tag for tag, _ in found.tags].count("tr") == 2 + 5
    assert "7 rows of 3 columns" in shown and "SAMPLE.f32" in shown and "0.1667" in shown
    assert "[0, 1, 2, 3, 4, 5, … 20 in all]" in shown
    assert "img" not in {tag for tag, _ in found.tags} and html.escape(SCRIPT, quote=True) in shown


def test_an_experience_table_is_shown_by_its_rows() -> None:
    with fr.ExperienceTable(rows().schema) as table:
        assert "0 rows" in table._repr_html_()
        table.append(rows())
        assert "<table>" in table._repr_html_() and "7 rows" in table._repr_html_()
    assert "closed" in table._repr_html_()


def test_a_run_is_its_page_or_its_curves(tmp_path: Path) -> None:
    given = {
        "steps": 2,
        "engine": "null",
        "prompts": [{"prompt": "1+1=", "answer": "2"}],
        "policy": "null",
        "progress": "off",
    }
    written = fr.run_local(rloo, out=str(tmp_path), **given)
    assert f"Run {written.path.name}" in inside(written._repr_html_())
    kept = fr.run_local(rloo, out=None, **given)
    assert "reward/mean" in inside(kept._repr_html_())
    kept.metrics.clear()
    assert kept._repr_html_() == "<p>no steps yet</p>"
