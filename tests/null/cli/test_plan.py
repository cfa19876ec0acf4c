"""`flowrl plan`, `flowrl explain`, `flowrl diff`: what they print, and how they exit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.cli.plan import calibration, parse_schedule
from flowrl.errors import ConfigError
from flowrl.graph.schedule import Async, Sync
from flowrl.mesh import Cluster
from flowrl.mesh.devices import Efficiency
from flowrl.planner.steps import Plan
from flowrl.planner.workload import Lengths, Workload

from .conftest import Cli

SMALL = "Qwen/Qwen2.5-1.5B"
MODELS = ("--model", f"policy={SMALL}", f"ref={SMALL}", "--config", "beta=0.1")
WORK = ("--prompts", "8", "--prompt-tokens", "64", "--response-tokens", "lognormal:128:0.6:512")
ASKED = ("flow.py:grpo", "--cluster", "2xA100-80G", *MODELS, *WORK)

RECIPE = """
import flowrl as fr
from flow import grpo
from flowrl.recipe import Recipe
from flowrl.runtime.options import Options

def planned() -> Recipe:
    data = [{"prompt": str(i)} for i in range(8)]
    return Recipe(grpo, {"prompts": data, "policy": "Qwen/Qwen2.5-1.5B"}, options=Options(batch=6, schedule=fr.Async(1)))
"""


def test_a_plan(cli: Cli, folder: Path) -> None:
    result = cli("plan", *ASKED, "--out", "plan.json")
    assert result.code == 0 and result.err == ""
    first = result.out.splitlines()[0]
    assert first.startswith("fits: predicted ") and first.endswith(" per iteration on 2xA100-80G, sync")
    for said in (
        "throughput",
        "tokens/s",
        "bottleneck",
        "device memory",
        "host memory",
        "bound",
        "search",
        "placement",
    ):
        assert f"\n{said}" in result.out or said in result.out
    for line in ("memory of each step", "other plans, and why each lost (predicted)", "written to plan.json"):
        assert line in result.out
    assert "assumed efficiencies" in result.out
    plan = Plan.load("plan.json")
    assert plan.hash in result.out and {"rollout", "ref_logprobs", "update"} <= {step.node for step in plan.steps}
    assert plan.workload is not None and plan.workload.prompts == 8


def test_the_same_twice(cli: Cli, folder: Path) -> None:
    assert cli("plan", *ASKED).out == cli("plan", *ASKED).out
    assert cli("explain", *ASKED).out == cli("explain", *ASKED).out


def test_as_json(cli: Cli, folder: Path) -> None:
    found = json.loads(cli("plan", *ASKED, "--json").out)
    assert found["fits"] is True
    plan = Plan.from_json(json.dumps(found["plan"]))
    assert found["predicted"]["seconds"] == plan.predicted.seconds
    assert found["predicted"]["tokens_per_s"] == pytest.approx(found["predicted"]["tokens"] / plan.predicted.seconds)
    assert [phase["step"] for phase in found["phases"]] == [step.name for step in plan.steps]


def test_a_recipe_gives_its_defaults(cli: Cli, folder: Path) -> None:
    (folder / "recipes.py").write_text(RECIPE)
    lengths = WORK[2:]
    # beta is 0: the reference is pruned, and needs no model
    result = cli(
        "plan", "recipes.py:planned", "--cluster", "2xA100-80G", *lengths, "--schedule", "sync", "--out", "a.json"
    )
    assert result.code == 0, result.err
    plan = Plan.load("a.json")
    assert plan.workload is not None and plan.workload.prompts == 6 and plan.max_staleness == 0
    # its own schedule is asynchronous, which this loss does not tolerate
    refused = cli("plan", "recipes.py:planned", "--cluster", "2xA100-80G", *lengths)
    assert refused.code == 1 and "FR-V02" in refused.err


def test_settings_and_a_workload_from_files(cli: Cli, folder: Path) -> None:
    (folder / "run.toml").write_text(
        f'[config]\nbeta = 0.1\n[models.policy]\nsource = "{SMALL}"\n[models.ref]\nsource = "{SMALL}"\n'
    )
    (folder / "work.toml").write_text('prompts = 4\nprompt_tokens = 32\nresponse_tokens = "fixed:64"\n')
    Cluster.named("2xA100-80G").to_toml("cluster.toml")
    common = ("flow.py:grpo", "--settings", "run.toml", "--cluster", "cluster.toml", "--workload", "work.toml")
    assert cli("plan", *common, "--out", "a.json").code == 0
    assert cli("plan", *common, "--prompts", "8", "--out", "b.json").code == 0
    counts = [Plan.load(name).workload.prompts for name in ("a.json", "b.json")]  # type: ignore[union-attr]
    assert counts == [4, 8]


def test_a_workload_from_a_run(cli: Cli, folder: Path) -> None:
    """Lengths as the run sampled them, and as many prompts as it took; the command line wins."""
    ran = cli("run", "flow.py:small", "--set", "progress=off", "batch=4")
    assert ran.code == 0, ran.err
    run = next(Path("runs").iterdir())
    lengths = Workload.of_run(run)
    common = ("flow.py:grpo", "--cluster", "2xA100-80G", *MODELS, "--workload", str(run))
    assert cli("plan", *common, "--out", "a.json").code == 0
    assert Plan.load("a.json").workload == lengths
    result = cli("plan", *common, "--prompts", "8", "--response-tokens", "fixed:64", "--out", "b.json")
    assert result.code == 0, result.err
    workload = Plan.load("b.json").workload
    assert workload == replace(lengths, prompts=8, response_lengths=Lengths.fixed(64))


def test_nothing_fits(cli: Cli, folder: Path) -> None:
    large = ("--model", "policy=Qwen/Qwen2.5-32B", "ref=Qwen/Qwen2.5-32B", "--config", "beta=0.1")
    asked = ("flow.py:grpo", "--cluster", "1xA100-40G", *large, *WORK)
    result = cli("plan", *asked)
    assert result.code == 1 and result.err == ""
    assert result.out.startswith("FR-P01: no plan fits 1xA100-40G (40.0 GiB per device")
    assert "binding: " in result.out
    assert "would fit (each was planned; seconds are predicted)" in result.out
    assert " devices" in result.out and "per iteration" in result.out
    told = cli("plan", *asked, "--json")
    found = json.loads(told.out)
    assert told.code == 1 and found["fits"] is False and found["code"] == "FR-P01"
    assert found["binding"] and all(one["seconds"] > 0 for one in found["relaxations"])


def test_adapters_take_less(cli: Cli, folder: Path) -> None:
    asked = ("flow.py:grpo", "--cluster", "1xA100-80G", "--model", "policy=Qwen/Qwen2.5-7B", *WORK)
    whole, adapters = cli("plan", *asked, "--json"), cli("plan", *asked, "--lora", "policy=16", "--json")
    seconds = [json.loads(one.out)["predicted"]["seconds"] for one in (whole, adapters)]
    assert seconds[1] < seconds[0]


# --- what is missing or wrong ---------------------------------------------------------------------------------------------


def test_everything_that_is_missing_at_once(cli: Cli, folder: Path) -> None:
    result = cli("plan", "flow.py:grpo", "--config", "beta=0.1")
    assert result.code == 2
    for said in ("--model policy=NAME, --model ref=NAME", "--cluster: a name such as 8xA100-80G", "--prompts N"):
        assert said in result.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--response-tokens", "1024"), "a mean alone says little of sampling"),
        (("--schedule", "async-1"), "--schedule is sync, or async:K"),
        (("--cluster", "8xB100"), "no device is named 'B100'"),
        (("--cluster", "clusters.toml"), "there is no file 'clusters.toml'"),
        (("--placement", "gen:d2 + policy:f2"), "not placed: ['ref']"),
        (("--placement", "gen:f2 + policy:... + ref:..."), "'gen', which is sampled from, cannot be laid out as f2"),
        (("--placement", "gen:d2 |"), "expected the name of a role"),
        (
            ("--model", "policy=Qwen/Qwen2.5-1.6B"),
            "--model names 'policy' more than once: policy=Qwen/Qwen2.5-1.5B, policy=",
        ),
        (("--config", "beta=0.2"), "--config names 'beta' more than once: beta=0.1, beta=0.2; give it once"),
        (
            ("--lora", "policy=8", "policy=16"),
            "--lora names 'policy' more than once: policy=8, policy=16; give it once",
        ),
        (("--lora", "policy=257"), "LoRA of rank 257 is above the smallest matrix that gets adapters"),
        (("--lora", "=8"), "--lora takes MODEL=RANK, such as policy=16; found '=8'"),
        (("--lora", "policy=٨"), "--lora takes MODEL=RANK"),
        (("--workload", ""), "--workload needs a FILE.toml or the folder of a run; found ''"),
        (("--prompt-tokens", "٦٤"), "--prompt-tokens is fixed:N"),
        (("--out", "x.html", "--html", "./x.html"), "--out and --html name one file"),
        (("--out", ""), "--out needs the name of a file"),
        (("--model", "critic=x"), "flow 'grpo' has no input 'critic'"),
        (("--lora", "ref=16"), "--lora ref: the flow trains no such model"),
        (("--lora", "policy"), "--lora takes MODEL=RANK"),
        (("--workload", "nowhere.toml"), "there is no file 'nowhere.toml'"),
        (("--out", "nowhere/plan.json"), "there is no folder 'nowhere'"),
        (("--prompts", "0"), "a workload has at least one prompt"),
        (("--tie", "2"), "tie is the relative error between two plans"),
    ],
)
def test_wrong_usage(cli: Cli, folder: Path, more: tuple[str, ...], message: str) -> None:
    result = cli("plan", *ASKED, *more)
    assert result.code == 2, result.out
    assert message in result.err and result.out == ""


def test_a_model_that_nobody_knows(cli: Cli, folder: Path) -> None:
    result = cli("plan", "flow.py:grpo", "--cluster", "2xA100-80G", "--model", "policy=Qwen/Qwen2.5-1.6B", *WORK)
    assert result.code == 2 and "model 'policy': no shape is known for 'Qwen/Qwen2.5-1.6B'" in result.err


def test_more_responses_than_plans_are_made_for(cli: Cli, folder: Path) -> None:
    """The size of a group is the flow's here, so that the workload alone cannot tell."""
    result = cli("plan", "flow.py:grpo", "--cluster", "2xA100-80G", *MODELS, *WORK, "--config", "group_size=1000000000")
    assert result.code == 2 and "samples 8000000000 responses of one iteration" in result.err


def test_a_link_that_leads_to_itself_is_no_file_to_write(cli: Cli, folder: Path) -> None:
    (folder / "loop").symlink_to(folder / "loop")
    for name in ("loop", "loop/plan.json"):
        result = cli("plan", *ASKED, "--out", name)
        assert result.code == 2 and "'loop' is a symbolic link that leads back to itself" in result.err


def test_names_in_files_and_arguments_are_shown_escaped(cli: Cli, folder: Path) -> None:
    assert cli("plan", *ASKED, "--out", "plan.json").code == 0
    values = json.loads((folder / "plan.json").read_text())
    values["name"] = "\x1b[2J\u202eevil"
    (folder / "evil.json").write_text(json.dumps(values))
    assert r"name: grpo -> \x1b[2J\u202eevil" in cli("diff", "plan.json", "evil.json").out
    values["steps"][0]["colour\x1b[31m"] = 1
    (folder / "evil.json").write_text(json.dumps(values))
    result = cli("explain", "evil.json")
    assert result.code == 2 and r"has no key 'colour\x1b[31m'" in result.err


def test_sequences_that_are_too_long_for_a_model_are_said(cli: Cli, folder: Path) -> None:
    work = ("--prompts", "8", "--prompt-tokens", "512", "--response-tokens", "fixed:600")
    gpt2 = ("--model", "policy=gpt2", "ref=gpt2", "--config", "beta=0.1")
    result = cli("plan", "flow.py:grpo", "--cluster", "2xA100-80G", *gpt2, *work)
    assert result.code == 0
    assert "note: sequences of up to 1,112 tokens" in result.out and "max_position_embeddings is 1,024" in result.out


def test_a_flow_with_problems_is_not_planned(cli: Cli, folder: Path) -> None:
    result = cli("plan", "broken.py", "--cluster", "2xA100-80G", "--model", f"policy={SMALL}", *WORK)
    assert result.code == 1 and "FR-C01" in result.err


def test_schedules() -> None:
    assert parse_schedule("sync") == Sync()
    assert parse_schedule("async") == parse_schedule("async:1") == Async(1)
    assert parse_schedule("async:3") == Async(3)
    for text in ("asynch", "async:", "async:x", "sync:1"):
        with pytest.raises(ConfigError, match="--schedule is sync"):
            parse_schedule(text)


def test_where_the_numbers_come_from() -> None:
    named = Cluster.named("8xA100-80G")
    assert "assumed efficiencies" in calibration(named)
    assert "as given" in calibration(replace(named, efficiency=Efficiency(train=0.5)))
    measured = replace(named, calibrated_at="2026-01-31", notes=("nic: one node",))
    assert calibration(measured) == "measured on 2026-01-31; not measured: nic: one node"


# --- explain --------------------------------------------------------------------------------------------------------------


def test_why_a_plan_is_so(cli: Cli, folder: Path) -> None:
    result = cli("explain", *ASKED)
    assert result.code == 0
    for said in (
        "what binds (predicted)",
        "why each choice (predicted",
        "next best",
        "  gen\n",
        "  policy\n",
        "  ref\n",
    ):
        assert said in result.out
    found = json.loads(cli("explain", *ASKED, "--json").out)
    assert {reason["role"] for reason in found["reasons"]} == {"gen", "policy", "ref"}


def test_a_plan_in_a_file_says_what_it_knows(cli: Cli, folder: Path) -> None:
    cli("plan", *ASKED, "--out", "plan.json")
    result = cli("explain", "plan.json")
    assert result.code == 0
    assert "what binds (predicted)" in result.out and "offload none" in result.out
    refused = cli("explain", "plan.json", "--alt", "gen:d2 | ...")
    assert refused.code == 2 and "needs the flow" in refused.err


def test_another_placement(cli: Cli, folder: Path) -> None:
    result = cli("explain", *ASKED, "--alt", "gen:d1 | (policy:d1 + ref:d1)")
    assert result.code == 0
    best, other = result.out.splitlines()[:2]
    assert best.startswith("best   ") and other.startswith("--alt  gen:d1 | (policy:d1 + ref:d1): predicted ")
    assert other.endswith("slower") and "layout: " in result.out
    found = json.loads(cli("explain", *ASKED, "--alt", "gen:d1 | (policy:d1 + ref:d1)", "--json").out)
    assert found["alt"]["predicted"]["seconds"] > found["best"]["predicted"]["seconds"]


def test_another_placement_that_does_not_fit(cli: Cli, folder: Path) -> None:
    large = ("--model", "policy=Qwen/Qwen2.5-32B", "ref=Qwen/Qwen2.5-32B", "--config", "beta=0.1")
    asked = ("flow.py:grpo", "--cluster", "8xA100-40G", *large, *WORK)
    result = cli("explain", *asked, "--alt", "gen:d1 | ...")
    assert result.code == 1
    assert result.out.startswith("best   ") and "FR-P01: no plan fits" in result.out
    assert "placement gen:d1 | ..." in result.out
    wrong = cli("explain", *asked, "--alt", "gen:f2 | ...")
    assert wrong.code == 2 and "cannot be laid out as f2" in wrong.err


# --- diff -----------------------------------------------------------------------------------------------------------------


def test_two_plans(cli: Cli, folder: Path) -> None:
    cli("plan", *ASKED, "--out", "a.json")
    cli("plan", *ASKED, "--prompts", "16", "--out", "b.json")
    equal = cli("diff", "a.json", "a.json")
    assert (equal.code, equal.out) == (0, "the plans are equal\n")
    other = cli("diff", "a.json", "b.json")
    assert other.code == 1 and "workload.prompts: 8 -> 16" in other.out and "seconds per iteration" in other.out
    found = cli("diff", "a.json", "b.json", "--json")
    assert found.code == 1 and json.loads(found.out)["is_equal"] is False


def test_what_is_no_plan(cli: Cli, folder: Path) -> None:
    (folder / "a.json").write_text("{}")
    assert "a.json: a plan is a JSON object" in cli("diff", "a.json", "a.json").err
    missing = cli("diff", "b.json", "a.json")
    assert missing.code == 2 and "there is no file 'b.json'; there are 'a.json'" in missing.err.replace(
        "did you mean", "there are"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "plan.json"), "plan.json is no flow; a plan in a file is read by: flowrl explain plan.json"),
        (("plan", *ASKED, "--alt", "gen:d2"), "unknown option '--alt'; it belongs to `flowrl explain`"),
        (
            ("plan", "flow.py:grpo", "--cluster", "2xH100", "--model", f"policy={SMALL},ref={SMALL}", *WORK),
            f"with spaces between them: --model policy={SMALL} ref={SMALL}",
        ),
        (
            ("plan", "flow.py:grpo", "--cluster", "4090.toml", "--model", f"policy={SMALL}", *WORK),
            "there is no file '4090.toml'",
        ),
        (
            ("plan", "flow.py:grpo", "--cluster", "2xh100", "--model", "policy=.", *WORK),
            "the folder '.' has no config.json",
        ),
    ],
)
def test_wrong_turns_say_the_way(cli: Cli, folder: Path, arguments: tuple[str, ...], said: str) -> None:
    result = cli(*arguments)
    assert result.code == 2 and said in result.err


def test_names_in_any_case_and_of_variants(cli: Cli, folder: Path) -> None:
    models = ("--model", f"policy={SMALL}-Instruct", f"ref={SMALL.lower()}", "--config", "beta=0.1")
    asked = cli("plan", *ASKED)
    assert cli("plan", "flow.py:grpo", "--cluster", "2xa100-80g", *models, *WORK).out == asked.out


def test_a_cluster_of_ones_own_is_not_called_published(cli: Cli, folder: Path) -> None:
    named = Cluster.named("2xA100-80G")
    assert calibration(named).startswith("published peaks, assumed efficiencies")
    own = replace(named, device=replace(named.device, name="ACME"))
    assert calibration(own).startswith("peaks and links as given, assumed efficiencies")
    assert "as given, efficiencies as given" in calibration(replace(own, efficiency=Efficiency(train=0.3)))
