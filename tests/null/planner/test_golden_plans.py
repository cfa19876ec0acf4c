"""Plans of published models on common clusters are as pinned, and so are the texts that explain them.

Where a change of the planner is meant, `python -m tests.null.planner.golden` writes the files anew.
"""

from __future__ import annotations

import re
from difflib import unified_diff
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.planner.steps import Plan
from tests.null.planner.golden.cases import CASES, rounded
from tests.null.planner.golden.files import DATA, contents

ANEW = "python -m tests.null.planner.golden writes them anew"
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", CASES)
def test_as_pinned(name: str) -> None:
    for path, text in contents(name, CASES[name]).items():
        assert path.exists(), f"there is no {path.name}; {ANEW}"
        pinned = path.read_text(encoding="utf-8")
        lines = "\n".join(unified_diff(pinned.splitlines(), text.splitlines(), "pinned", "now", lineterm="", n=0))
        assert pinned == text, f"{path.name} differs; {ANEW}\n{lines}"


def test_nothing_is_pinned_without_a_case() -> None:
    assert {path.stem for path in DATA.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.plan is not None])
def test_what_is_pinned_is_a_plan_that_fits(name: str) -> None:
    plan = CASES[name].plan
    assert plan is not None and Plan.from_json(plan.to_json()) == plan
    assert plan.predicted.device_bytes <= plan.cluster.device.memory_bytes
    assert plan.predicted.host_bytes <= plan.cluster.host.memory_bytes
    assert plan.searched is not None and plan.searched.bound_s <= plan.predicted.seconds * (1 + 1e-9)


def test_70b_on_one_node_needs_its_optimizer_elsewhere() -> None:
    """12 bytes of each parameter on the hosts, and the reference beside them unless gradients are bf16: a reference that stays on
    the devices takes tensor parallelism and a longer update."""
    fits, fits_not = CASES["grpo-70b-8xA100"], CASES["grpo-70b-8xA100-parked-only"]
    assert fits.plan is not None and fits_not.plan is None
    params = dict(fits.plan.models)["policy"].params()
    assert fits.plan.predicted.host_bytes == pytest.approx((12 + 2) * params, rel=1e-3)
    lean = CASES["grpo-70b-8xA100-bf16-gradients"].plan
    assert lean is not None and lean.predicted.host_bytes == pytest.approx(12 * params, rel=1e-3)
    resident = CASES["grpo-70b-8xA100-reference-resident"].plan
    assert resident is not None and resident.predicted.seconds > 1.1 * fits.plan.predicted.seconds


def test_consent_to_other_numerics_is_used_only_where_it_is_needed() -> None:
    asked, consented = CASES["grpo-70b-8xA100"].plan, CASES["grpo-70b-8xA100-bf16-gradients-too"].plan
    assert asked is not None and consented is not None and asked.hash == consented.hash


def test_the_command_line_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    given = "examples/flows/grpo.py:grpo --cluster 1xH100-80G --prompts 128 --prompt-tokens 512".split()
    model = "HuggingFaceTB/SmolLM2-135M"
    asked = [*given, "--model", f"policy={model}", f"ref={model}", "--response-tokens", "lognormal:1024:0.6:4096"]
    for command, part in (("plan", 0), ("explain", 1)):
        assert main([command, str(ROOT / asked[0]), *asked[1:]]) == 0
        pinned = CASES["grpo-135m-1xH100"].text().split("=" * 128)[part].strip()
        assert _without_hashes(capsys.readouterr().out) == _without_hashes(pinned)


def _without_hashes(text: str) -> str:
    return re.sub(r"graph \w+, plan \w+", "graph, plan", text.strip())


def test_digits() -> None:
    assert rounded(123456.0) == 123500.0 and rounded(0.00012344) == 0.0001234 and rounded(0) == 0.0
