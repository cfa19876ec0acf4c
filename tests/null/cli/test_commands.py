"""The commands: what they print, and how they exit."""

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from flowrl import __version__
from flowrl.cli.parser import Parser, build_parser
from flowrl.graph.text import from_text
from flowrl.recipe import load
from flowrl.runtime.rundir import RunDir

from .conftest import Cli

DATA = ("--data", "prompts=prompts.jsonl")
QUIET = ("--set", "progress=off")


# --- the grammar ----------------------------------------------------------------------------------------------------------

OPTIONS = {
    "": ["--help", "--traceback", "--version"],
    "check": ["--config", "--help", "--settings", "--traceback", "TARGET"],
    "show": ["--config", "--format", "--help", "--optimised", "--traceback", "--until", "TARGET"],
    "run": [
        "--checkpoint-every", "--config", "--data", "--engine", "--help", "--launcher", "--model", "--nproc", "--plan", "--seed",
        "--set", "--settings",
        "--steps", "--timeout-s", "--traceback", "TARGET",
    ],
    "resume": ["--help", "--nproc", "--plan", "--steps", "--traceback", "RUN"],
    "plan": [
        "--cluster", "--config", "--headroom", "--help", "--html", "--json", "--lora", "--model", "--out", "--placement",
        "--prompt-tokens", "--prompts", "--response-tokens", "--schedule", "--settings", "--svg", "--tie", "--trace",
        "--traceback", "--workload",
        "TARGET",
    ],
    "view": ["--compare", "--help", "--most-mb", "--out", "--port", "--serve", "--tokenizer", "--traceback", "RUN"],
    "explain": [
        "--alt", "--cluster", "--config", "--headroom", "--help", "--json", "--lora", "--model", "--placement", "--prompt-tokens",
        "--prompts",
        "--response-tokens", "--schedule", "--settings", "--tie", "--traceback", "--workload", "TARGET",
    ],
    "diff": ["--help", "--json", "--traceback", "FIRST.json", "SECOND.json"],
    "audit": [
        "--frozen", "--head", "--help", "--json", "--layout", "--lora", "--model", "--offload", "--optimizer", "--precision",
        "--traceback", "--wrap",
    ],
    "reshard-explain": [
        "--apart", "--bucket-mib", "--cluster", "--from", "--help", "--json", "--source-dtype", "--to", "--traceback", "MODEL",
    ],
    "ops": ["--help", "--traceback"],
    "ops list": ["--help", "--json", "--pack", "--search", "--traceback"],
    "ops show": ["--help", "--json", "--traceback", "OPERATOR"],
    "ops test": ["--cases", "--config", "--help", "--traceback", "OPERATOR"],
    "ops compat": ["--help", "--traceback", "NEW", "OLD"],
    "new": ["--help", "--traceback"],
    "new pack": ["--help", "--into", "--traceback", "NAME"],
    "runs": ["--help", "--traceback"],
    "runs show": ["--help", "--traceback", "FOLDER"],
    "calibrate": ["--devices", "--help", "--out", "--quick", "--traceback"],
    "table": ["--help", "--traceback"],
    "table ls": ["--help", "--json", "--traceback", "PATH"],
    "table head": ["--columns", "--help", "--traceback", "-n", "PATH"],
    "table stats": ["--help", "--json", "--traceback", "PATH"],
    "table export": ["--columns", "--help", "--rows", "--traceback", "OUT", "PATH"],
    "table sql": ["--help", "--traceback", "PATH", "QUERY"],
}  # fmt: skip
"""Every option there is. An option that would belong to a model, to data or to a run goes into its dataclass, and reaches
the command line by `--set` and settings files: this list grows only for what concerns the command line itself."""


def parsers(parser: Parser, path: str = "") -> dict[str, Parser]:
    found = {path: parser}
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name, below in action.choices.items():
                found |= parsers(below, f"{path} {name}".strip())
    return found


def test_options_do_not_grow_by_accident() -> None:
    found = {}
    for path, parser in parsers(build_parser("0", "")).items():
        actions = [action for action in parser._actions if not isinstance(action.choices, dict)]
        found[path] = sorted(str(a.option_strings[-1] if a.option_strings else a.metavar) for a in actions)
    assert found == OPTIONS


def test_the_reference_names_every_option() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "cli.md").read_text()
    for name in {option for options in OPTIONS.values() for option in options} - {"--version"}:
        assert name in page


@pytest.mark.parametrize("path", OPTIONS)
def test_help_is_enough(cli: Cli, path: str) -> None:
    result = cli(*path.split(), "--help")
    assert result.code == 0
    assert "example" in result.out
    assert "exit codes: 0 done" in result.out
    for action in parsers(build_parser("0", ""))[path]._actions:
        assert action.help or isinstance(action.choices, dict) or action.metavar in result.out


def test_examples_of_the_help_are_commands_that_parse(cli: Cli) -> None:
    parser = build_parser("0", "")
    lines = {
        line.strip().split("   ")[0]
        for below in parsers(parser).values()
        for line in (below.epilog or "").replace("\\\n", "").splitlines()
        if line.strip().startswith("flowrl ") and "COMMAND" not in line
    }
    assert len(lines) > 10
    for line in lines:
        parser.parse_args(shlex.split(line.partition(" > ")[0])[1:])


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"flowrl {__version__}\n"
    assert __version__ == metadata.version("flowrl")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (
            ["check", "--config", "beta=0.1", "flow.py"],
            "required: TARGET; write it before options that take several values",
        ),
        (["chek", "flow.py"], "unknown command 'chek'; did you mean 'check'?"),
        (["ops", "lst"], "unknown command 'lst'; did you mean 'list'?"),
        (["check", "flow.py", "--setings", "x"], "unknown option '--setings'; did you mean '--settings'?"),
        (["run", "flow.py", "--step=3"], "unknown option '--step'; did you mean '--steps' or"),
        (["run", "flow.py", "--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["check", "flow.py", "more"], "unknown argument 'more'; no further arguments are taken"),
        (["show", "flow.py", "--format", "mermade"], "unknown --format 'mermade'; did you mean 'mermaid'?"),
        (["run", "flow.py", "--engine", "nul"], "there is no engine 'nul'; did you mean 'null'?"),
        (["check", "flow.py:gpro"], "flow.py has no 'gpro'; did you mean 'grpo'?"),
        (["check", "flow.py", "--config", "group_sze=4"], "did you mean 'group_size'?"),
        (["check", "flow.py", "--settings", "none.toml"], "there is no settings file 'none.toml'"),
        (["run", "flow.py", *DATA], "flow 'grpo' needs --model policy=SOURCE ([models.policy] in a settings file)"),
        (
            ["run", "flow.py", "--engine", "null"],
            "flow 'grpo' needs --data prompts=FILE ([data.prompts] in a settings file)",
        ),
        (
            ["run", "flow.py", "--engine", "null", *DATA, "--set", "record=lenght"],
            "option 'record' names 'lenght', which is no node of flow 'grpo' as it runs; did you mean 'length'?",
        ),
        (["ops", "show", "core.group_nrm"], "pack 'core' has no 'group_nrm'; did you mean 'group_norm'"),
        (
            ["ops", "show", "flow.length"],
            "no pack 'flow' is installed; there are 'core'; what a file defines is named flow.py:NAME",
        ),
        (["ops", "show", "flow.py"], "name the operator or loss of the file: flow.py:NAME"),
        (["ops", "show", "flow.py:grpo"], "'flow.py:grpo' is a Flow; it should be an operator or a loss"),
        (["ops", "show", "flow.py:lenght"], "flow.py has no 'lenght'; did you mean 'length'?"),
        (["ops", "list", "--pack", "cor"], "no pack 'cor' is installed; did you mean 'core'?"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_message(folder: Path, cli: Cli, args: list[str], message: str) -> None:
    result = cli(*args)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err
    assert not (folder / "runs").exists()


# --- check and show -------------------------------------------------------------------------------------------------------


def test_check_prints_the_graph_and_what_is_pruned(folder: Path, cli: Cli) -> None:
    result = cli("check", "flow.py")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("flow grpo\n")
    assert "pruned and merged:\n" in result.out
    assert "'ref' is not loaded" in result.out
    assert result.out.endswith("no problems\n")
    assert "nothing to prune or merge" in cli("check", "flow.py", "--config", "beta=0.1").out


def test_check_prints_all_problems_and_exits_with_1(folder: Path, cli: Cli) -> None:
    result = cli("check", "broken.py")
    assert result.code == 1
    assert "\n2 problems:\n" in result.out
    assert "FR-C01 at broken.py:7, node 'group_norm'\n    | rows = advantages.group_norm(" in result.out
    assert "FR-C01 at broken.py:8, node 'filter'" in result.out
    assert result.out.count("    fix: ") == 2


def test_check_looks_at_data_and_models_of_the_settings(folder: Path, cli: Cli) -> None:
    text = (folder / "flow.py").read_text().replace("def length(response):", "def length(response, answer):")
    (folder / "answers.py").write_text(text)
    (folder / "run.toml").write_text("[data.prompts]\npath = 'prompts.jsonl'\n")
    assert cli("check", "answers.py").code == 0  # data sets may bring answers
    result = cli("check", "answers.py", "--settings", "run.toml")
    assert result.code == 1
    assert "'answer'" in result.out
    (folder / "run.toml").write_text("[options]\nschedule = 'async(4)'\n")
    assert "FR-V" in cli("check", "flow.py", "--settings", "run.toml").out


def test_check_of_a_flow_that_cannot_be_traced(folder: Path, cli: Cli) -> None:
    (folder / "bad.py").write_text(
        "import flowrl as fr\n\n\n@fr.flow\ndef bad(prompts, policy):\n    return undefined\n"
    )
    result = cli("check", "bad.py")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: NameError: name 'undefined' is not defined, at bad.py:6\n")
    assert "Traceback" not in result.err
    shown = cli("check", "bad.py", "--traceback")
    assert "Traceback" in shown.err
    assert "in bad" in shown.err


def test_check_and_show_of_a_text_graph(folder: Path, cli: Cli) -> None:
    shown = cli("show", "flow.py")
    graph = load("flow.py").graph
    assert from_text(shown.out) == graph
    (folder / "graph.txt").write_text(shown.out)
    assert cli("show", "graph.txt").out == shown.out
    assert cli("check", "graph.txt").code == 0
    (folder / "graph.txt").write_text(shown.out.replace("input(", "inptu(", 1))
    assert cli("check", "graph.txt").code == 1


def test_show_slices_and_optimises(folder: Path, cli: Cli) -> None:
    assert "ref" in cli("show", "flow.py").out
    assert "ref" not in cli("show", "flow.py", "--optimised").out.partition("\noperator")[0]
    until = from_text(cli("show", "flow.py", "--until", "length").out)
    assert until.outputs == ("length",)
    result = cli("show", "flow.py", "--until", "lenght")
    assert result.code == 2
    assert "did you mean 'length'" in result.err


def test_show_draws(folder: Path, cli: Cli) -> None:
    result = cli("show", "flow.py", "--format", "mermaid")
    assert result.code == 0
    assert result.out.startswith(("flowchart", "graph", "%%", "---"))
    assert "group_norm" in result.out


def test_check_of_a_recipe(folder: Path, cli: Cli) -> None:
    assert cli("check", "flow.py:small").out.endswith("no problems\n")


# --- run ------------------------------------------------------------------------------------------------------------------


def info(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "run.json").read_text()))


def test_run_says_where_the_results_are(folder: Path, cli: Cli) -> None:
    result = cli(
        "run", "flow.py", "--engine", "null", *DATA, "--steps", "2", "--seed", "5", "--config", "group_size=2", *QUIET
    )
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("grpo: finished 2 steps; results in runs/grpo-1\n")
    run = RunDir.open("runs/grpo-1")
    assert (run.status, len(run.metrics())) == ("finished", 2)
    assert (run.info["seed"], run.info["engine"]) == (5, "null")
    assert "n=2" in run.graph_text()


def test_runs_with_equal_seeds_are_equal(folder: Path, cli: Cli) -> None:
    for seed in ("1", "1", "2"):
        assert cli("run", "flow.py", "--engine", "null", *DATA, "--seed", seed, *QUIET).code == 0
    samples = [RunDir.open(f"runs/grpo-{n}").samples() for n in (1, 2, 3)]
    assert samples[0] == samples[1] != samples[2]


def test_run_options_and_settings(folder: Path, cli: Cli) -> None:
    (folder / "run.toml").write_text(
        "[run]\nsteps = 3\nengine = 'null'\n[data.prompts]\npath = 'prompts.jsonl'\n"
        "[models.policy]\nsource = 'x'\n[models.policy.optimizer]\nlr = 0.5\n[options]\nname = 'mine'\nprogress = 'off'\n"
    )
    result = cli("run", "flow.py", "--settings", "run.toml", "--set", "batch=2", "log_samples=1", "--set", "out=other")
    assert (result.code, result.err) == (0, "")
    assert "mine: finished 3 steps; results in other/mine-1" in result.out
    run = RunDir.open("other/mine-1")
    assert run.info["options"]["batch"] == 2
    assert run.metrics()[-1]["update/lr"] == 0.5
    assert len(run.samples()) == 3
    assert "nothing was written" in cli("run", "flow.py", "--settings", "run.toml", "--set", "out=none").out


def test_run_of_a_recipe(folder: Path, cli: Cli) -> None:
    result = cli("run", "flow.py:small", *QUIET, "--config", "group_size=2")
    assert (result.code, result.err) == (0, "")
    assert "grpo: finished 2 steps" in result.out
    assert "grpo: finished 5 steps" in cli("run", "flow.py:ready", "--steps", "5", *QUIET).out


def test_run_of_a_broken_flow_lists_its_problems(folder: Path, cli: Cli) -> None:
    result = cli("run", "broken.py", "--engine", "null", *DATA, *QUIET)
    assert result.code == 1
    assert "error: flow 'broken' has 2 problems:\nFR-C01 at broken.py:7" in result.err
    assert not (folder / "runs").exists()


def replaced(folder: Path, body: str) -> None:
    text = (folder / "flow.py").read_text().replace("@fr.reward", '@fr.reward(on_error="raise")')
    (folder / "flow.py").write_text(text.replace("return float(len(response))", body))


def test_interrupted_run_is_readable_and_exits_with_130(folder: Path, cli: Cli) -> None:
    replaced(folder, "CALLS.append(1)\n    if len(CALLS) > 70:\n        raise KeyboardInterrupt\n    return 1.0")
    (folder / "flow.py").write_text((folder / "flow.py").read_text() + "\n\nCALLS: list[int] = []\n")
    result = cli("run", "flow.py", "--engine", "null", *DATA, "--steps", "9", "--set", "batch=8", *QUIET)
    assert result.code == 130
    assert result.out == "grpo: interrupted after 2 steps; results in runs/grpo-1\n"
    assert result.err == "interrupted\n"
    run = RunDir.open("runs/grpo-1")
    assert (run.status, len(run.metrics())) == ("interrupted", 2)


def test_failed_run_says_where_and_what(folder: Path, cli: Cli) -> None:
    replaced(folder, "raise ValueError('no such thing')")
    result = cli("run", "flow.py", "--engine", "null", *DATA, *QUIET)
    assert result.code == 1
    assert "grpo: failed after 0 steps; results in runs/grpo-1" in result.out
    assert "no such thing" in result.err
    assert "Traceback" not in result.err
    assert "Traceback" in cli("run", "flow.py", "--engine", "null", *DATA, *QUIET, "--traceback").err


def test_an_older_run_is_not_taken_for_this_one(folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("run", "flow.py:small", *QUIET).code == 0

    def interrupt(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flowrl.engines.null.NullEngine.open", interrupt)
    result = cli("run", "flow.py:small", *QUIET)
    assert (result.code, result.out, result.err) == (130, "", "interrupted\n")


def test_runs_show(folder: Path, cli: Cli) -> None:
    assert cli("run", "flow.py:ready", "--steps", "9", *QUIET).code == 0
    result = cli("runs", "show", "runs/grpo-1")
    lines = result.out.splitlines()
    assert result.code == 0
    made_up = "(null engine: no model ran, and its numbers, the loss too, are made up)"
    assert lines[0] == f"runs/grpo-1: finished, 9 steps {made_up}"
    assert lines[1].split() == ["step", "0", "2", "3", "5", "6", "8"]
    assert any(line.startswith("reward/mean ") for line in lines)
    missing = cli("runs", "show", "runs/grpo-2")
    assert missing.code == 1
    assert "did you mean 'grpo-1'?" in missing.err


# --- operators of packs ---------------------------------------------------------------------------------------------------


def test_ops_list(cli: Cli) -> None:
    result = cli("ops", "list")
    assert result.code == 0
    line = next(line for line in result.out.splitlines() if "advantages.group_norm" in line)
    assert "advantage " in line
    assert "GRPO: A_i = " in line
    assert "losses.ppo_clip" in result.out
    assert cli("ops", "list", "--pack", "core").out == result.out


def test_ops_show(cli: Cli) -> None:
    out = cli("ops", "show", "core.group_norm").out
    for part in (
        "flowrl_operators.advantages:group_norm (",
        "advantages/_responses.py:",
        "reward: SAMPLE.f32",
        "eps = 1e-06",
        "GRPO: ",
    ):
        assert part in out
    loss = cli("ops", "show", "core.losses.ppo_clip").out
    assert "kind      loss" in loss
    assert "clip = 0.2" in loss
    required = cli("ops", "show", "core.overlong").out
    assert "(required)" in required


def test_ops_show_takes_what_a_file_defines(folder: Path, cli: Cli) -> None:
    result = cli("ops", "show", "flow.py:length")
    assert result.code == 0
    assert result.out.startswith("flow.py:length\n")
    assert "response: SAMPLE.str" in result.out and "reward: SAMPLE.f32" in result.out


class Entry:
    """An entry point of a distribution that is not installed."""

    class dist:
        name, version = "flowrl-theirs", "1.0"

    name, value = "theirs", "no_such_pack_here"


def test_a_pack_that_fails_to_import_is_listed_with_the_reason(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [*real(group=group), Entry])
    result = cli("ops", "list")
    assert result.code == 1
    assert "theirs (flowrl-theirs 1.0, module no_such_pack_here)" in result.out
    assert "cannot import no_such_pack_here: ModuleNotFoundError: No module named 'no_such_pack_here'" in result.out
    assert "advantages.group_norm" in result.out
