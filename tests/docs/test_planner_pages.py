"""The pages about plans name what there is: every key of a cluster, every setting of a step, every assumed constant."""

import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

import flowrl as fr
from flowrl.cost.offload import Offload
from flowrl.mesh import DEVICES, Cluster, Device, Efficiency, Host, Measured, Overheads
from flowrl.planner.tasks import Lane, StepKind
from tests.docs.pages import ROOT

PLANNER = ROOT / "docs" / "planner"
LLAMA = "meta-llama/Llama-2-70b-hf"


def coded(page: str) -> set[str]:
    """What stands between backticks on a page, outside of its blocks."""
    text = re.sub(r"```.*?```", "", (PLANNER / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", text))


@pytest.mark.parametrize("kind", [Device, Host, Efficiency, Overheads, Measured, Cluster], ids=lambda one: one.__name__)
def test_every_key_of_a_cluster_is_explained(kind: type) -> None:
    tables = {"device", "host", "efficiency", "overheads", "measured"}
    keys = {one.name for one in fields(kind)} - tables
    assert keys and not keys - coded("describe-a-cluster.md")


def test_every_kind_lane_and_class_of_offload_is_explained() -> None:
    named = coded("read-a-plan.md")
    assert {str(kind) for kind in StepKind} | {str(lane) for lane in Lane} <= named
    assert {one.value for one in Offload} <= named


def planned(model: str, cluster: str, flow: fr.Flow, **options: object) -> fr.Plan:
    workload = fr.Workload(32, fr.Lengths.fixed(512), fr.Lengths.lognormal(512, 0.5, cap=1536))
    models = {node.name: model for node in flow.graph().inputs if node["kind"] == "weights"}
    return fr.plan(flow, models=models, cluster=cluster, workload=workload, **options)


def test_every_setting_of_a_step_is_explained() -> None:
    from examples.grpo import grpo

    plans = (
        planned(LLAMA, "8xA100-80G", grpo),
        planned(LLAMA, "16xA100-80G", grpo, placement="(gen:d4t4 + policy:f8t2 + ref:f16)"),
        planned("Qwen/Qwen2.5-7B", "128xA100-80G", grpo, placement="(gen:d32t4 + policy:f128 + ref:f128)"),
    )
    settings = {name for plan in plans for step in plan.steps for name, _ in step.settings}
    assert {"offload", "writes", "sequence_parallel", "bytes"} <= settings  # what is rare is among them
    assert not settings - coded("read-a-plan.md")


def test_every_device_has_a_name_on_the_page() -> None:
    page = (PLANNER / "describe-a-cluster.md").read_text(encoding="utf-8")
    assert not [name for name in DEVICES if f"'{name}'" not in page]


def test_links_work_in_a_checkout() -> None:
    """Not only in a build of the site, which makes pages of its own."""
    kept = subprocess.run(
        ["git", "ls-files", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    pages = sorted(PLANNER.glob("*.md"))
    missing = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8"))
        if str(Path((page.parent / target).resolve()).relative_to(ROOT)) not in kept
    ]
    assert len(pages) == 6 and not missing
