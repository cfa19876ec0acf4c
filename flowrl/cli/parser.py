"""The command line's grammar: every command, its options and its help."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from flowrl.errors import ConfigError
from flowrl.schema.columns import nearest

EXIT_CODES = """\
exit codes: 0 done, nothing wrong; 1 problems found, or the run failed; 2 wrong usage or settings; 130 interrupted"""

TARGET_HELP = "FILE.py:FLOW or module.sub:FLOW; FLOW may be left out where exactly one is defined"

TABLE_HELP = "folder or name of an experience table, an .arrow or a .parquet file"

OPERATOR_HELP = "PACK.OPERATOR; the name alone where no other has it"

ABOUT = """\
Check, draw and run flows: algorithms for RL post-training written as graphs.

A flow is named FILE.py:FLOW or module.sub:FLOW. Values are Python literals (0.1, (1, 8)), true, false, none, or plain text."""

EXAMPLES = {
    "": """\
examples:
  flowrl check examples/grpo.py                         all problems of a flow, before anything runs
  flowrl show examples/grpo.py --format mermaid         draw it
  flowrl run examples/grpo.py --engine null --data prompts=train.jsonl
  flowrl plan examples/grpo.py --cluster 8xA100-80G --workload work.toml --settings run.toml
  flowrl view runs/grpo-1                               what a run did, as a page
  flowrl ops list                                       operators of the installed packs
  flowrl new pack my-rewards                            a pack of your own, ready to install
  flowrl COMMAND --help                                 more on each""",
    "check": """\
examples:
  flowrl check examples/grpo.py
  flowrl check examples/grpo.py:grpo --config beta=0
  flowrl check examples/grpo.py --settings run.toml     also checks the settings, models and data it names
  flowrl check runs/grpo-1/graph.txt                    a graph in its text form""",
    "show": """\
examples:
  flowrl show examples/grpo.py
  flowrl show examples/grpo.py --config beta=0 --optimised
  flowrl show examples/grpo.py --until group_norm --format mermaid > grpo.mmd""",
    "run": """\
examples:
  flowrl run examples/grpo.py --engine null --data prompts=train.jsonl --steps 5
  flowrl run examples/grpo.py --data prompts=train.jsonl --model policy=org/name --model ref=org/name \\
      --config group_size=16 --set batch=64 --set max_tokens=512 --steps 200
  flowrl run examples/grpo.py --settings run.toml --seed 1
  flowrl run my_project/runs.py:small                   a function without arguments that returns a Recipe
  flowrl run my_project/runs.py:small --plan plan.json --nproc 4
  flowrl run my_project/runs.py:small --plan plan.json --launcher ray
  flowrl run my_project/runs.py:small --checkpoint-every 20     then, should it stop: flowrl resume runs/small-1
  torchrun --nproc-per-node 4 -m flowrl.cli run my_project/runs.py:small --plan plan.json
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
      -m flowrl.cli run my_project/runs.py:small --plan plan.json                          on each of two hosts

What is given here wins over the settings file, key by key. The null engine needs no models. A model is a Hugging Face
name, a path, or FILE.py:FUNCTION that builds a module.

settings (TOML; relative paths are relative to the file):
  [run]                      steps, seed, engine
  [config]                   configuration of the flow
  [models.NAME]              source, precision, device, sampler, ... (fields of fr.Model)
  [models.NAME.optimizer]    lr, weight_decay, schedule, ... (fields of fr.AdamW)
  [data.NAME]                path, batch, shuffle, columns
  [options]                  what --set takes""",
    "plan": """\
examples:
  flowrl plan examples/grpo.py --cluster 8xA100-80G --model policy=Qwen/Qwen2.5-7B ref=Qwen/Qwen2.5-7B \\
      --prompts 128 --prompt-tokens 512 --response-tokens lognormal:1024:0.6:4096 --out plan.json
  flowrl plan examples/grpo.py --cluster cluster.toml --settings run.toml --workload runs/grpo-1
  flowrl plan my_project/runs.py:small --cluster 16xH100 --workload work.toml --schedule async:1
  flowrl plan examples/grpo.py --cluster 8xA100-80G --settings run.toml --workload work.toml \\
      --placement 'gen:d2t2 | (policy:f4 + ref:...)' --lora policy=16

Nothing is loaded and nothing runs; all seconds and bytes are predicted. A recipe gives its models, the batch of its data and its
schedule. Lengths are distributions, because a mean alone says little of sampling: fixed:N, lognormal:MEAN:SIGMA:CAP, or a
histogram N*WEIGHT,N*WEIGHT; a bare number is taken for prompts only. The exit code is 1 when no plan fits (FR-P01).

workload (TOML), whole or in part:
  prompts = 128                          prompts of one iteration
  prompt_tokens = 512
  response_tokens = "lognormal:1024:0.6:4096"    or { tokens = [512, 4096], weights = [9, 1] }
  group_size, rounds                     responses of a prompt, rounds of a refill; left out: as the flow says, 1""",
    "explain": """\
examples:
  flowrl explain plan.json
  flowrl explain examples/grpo.py --cluster 8xA100-80G --settings run.toml --workload work.toml
  flowrl explain examples/grpo.py --cluster 8xA100-80G --settings run.toml --workload work.toml \\
      --alt 'gen:d4 | (policy:f4 + ref:f4)'

For a flow, each choice is taken away in turn and the rest is planned anew. A file of a plan has less to say.""",
    "view": """\
examples:
  flowrl view runs/grpo-1                               curves, time, responses: one file, without a network
  flowrl view runs/grpo-1 --out grpo.html --most-mb 200
  flowrl view --serve runs/grpo-1                       while it goes on, in a browser of this machine
  flowrl view --compare runs/grpo-1 runs/grpo-2         curves over each other, settings that differ
  flowrl view plan.json

A run that was given a plan shows it, predicted beside measured. Responses with their tokens, log-probs and advantages are those
of record=; else a few samples of each step. A page holds as many as --most-mb allows, whole steps spread evenly over the run;
--serve reads them from the run's folder, so there all are to be seen.""",
    "diff": """\
examples:
  flowrl diff before.json after.json
  flowrl diff before.json after.json --json

The exit code is 0 when the plans are equal, and 1 when they differ.""",
    "audit": """\
examples:
  flowrl audit --model Qwen/Qwen2.5-7B --layout f8
  flowrl audit --model Qwen/Qwen2.5-7B --layout f8 --wrap layers       embedding and head left out of fully_shard
  flowrl audit --model Qwen/Qwen2.5-7B --layout d8 --frozen
  flowrl audit --model models/mine/config.json --layout f4t2 --lora 16

Bytes are predicted. What a module that is there takes: flowrl.engines.audit.audit_module(model, optimizer). The exit code is 1
when something is found that wastes more than a hundredth of the device's bytes.""",
    "reshard-explain": """\
examples:
  flowrl reshard-explain Qwen/Qwen2.5-7B --from f2 --to t2 --cluster 2xH200
  flowrl reshard-explain meta-llama/Llama-2-70b-hf --from f8 --to d4t2@div --cluster 8xH100-80G
  flowrl reshard-explain models/mine/config.json --from f4 --to t4 --apart --source-dtype float32

Bytes are those that a run moves; seconds are predicted. Weights arrive in bfloat16. The bound is what devices need and do not
hold.""",
    "ops": """\
examples:
  flowrl ops list
  flowrl ops list --search icepop
  flowrl ops show core.group_norm
  flowrl ops test my_flow.py:my_advantage
  flowrl ops compat before.json my-pack""",
    "ops list": """\
examples:
  flowrl ops list                                       `ops show` has columns, options and the whole docstring
  flowrl ops list --search icepop                       what it is called here; also: --search 'leave one out'
  flowrl ops list --pack core
  flowrl ops list --pack core --json > core-0.1.json    for a later `ops compat`""",
    "ops show": """\
examples:
  flowrl ops show core.group_norm
  flowrl ops show my_flow.py:my_advantage
  flowrl ops show my_flow.py:my_advantage --json > before.json""",
    "ops test": """\
examples:
  flowrl ops test core.group_norm
  flowrl ops test my_flow.py:my_advantage --config scale=0.5
  flowrl ops test my-pack --cases tests/test_conformance.py:CASES

Tries what `flowrl.testing.check_operator` and `check_loss` try. The dict that --cases names has, for each operator that needs
some, their keyword arguments: {"losses.clipped": {"stop_gradient": "the ratio weighs"}}.""",
    "ops compat": """\
examples:
  flowrl ops compat core-0.1.json core
  flowrl ops compat old.py:my_advantage new.py:my_advantage

Says major, minor or patch, with the reasons, and exits with 1 when it is major:
  major   a read is added that must be there; a write, an operator or a configuration value is gone, a type, the locality, the
          granularity or a default is another one
  minor   an optional read, a write, an operator or a configuration value with a default is added
  patch   the code differs and nothing that is declared: numbers may differ""",
    "new": """\
example:
  flowrl new pack my-rewards""",
    "new pack": """\
examples:
  flowrl new pack my-rewards
  flowrl new pack my-rewards --into ~/projects

Writes the folder flowrl-my-rewards: an operator, a loss, their tests, a workflow that runs them, a README. Then
  pip install -e 'flowrl-my-rewards[dev]' && pytest flowrl-my-rewards && flowrl ops list""",
    "resume": """\
examples:
  flowrl resume runs/grpo-1
  flowrl resume runs/grpo-1 --steps 400                         after it has ended: more of it
  flowrl resume runs/grpo-1/checkpoints/step_000100             from an older one
  flowrl resume runs/grpo-1 --plan plan-of-4.json --nproc 4     on other devices

The command that started the run is given again (run.json has it), in this folder. Needs a run with --checkpoint-every.""",
    "runs": """\
example:
  flowrl runs show runs/grpo-1""",
    "runs show": """\
example:
  flowrl runs show runs/grpo-1""",
    "calibrate": """\
examples:
  flowrl calibrate                                      about a minute; writes cluster.toml
  flowrl calibrate --quick --out /tmp/cluster.toml
  flowrl calibrate --devices 2                          of the GPUs of this machine, the first two

Measures products, layers, memory, links between devices, copies to the host and Adam on its CPUs. What cannot be measured keeps
its published figure, with a note in the file. Nothing else should run on the machine meanwhile.""",
    "table": """\
examples:
  flowrl table ls runs/grpo-1
  flowrl table head rows.parquet --columns prompt_id,reward
  flowrl table sql tables/replay 'select prompt_id, avg(reward) from rows group by prompt_id'""",
    "table ls": """\
examples:
  flowrl table ls runs/grpo-1                           the edges a run has recorded
  flowrl table ls tables                                tables and files in a folder
  flowrl table ls                                       tables in shared memory""",
    "table head": """\
examples:
  flowrl table head runs/grpo-1/edges/step_000000/rollout.arrow
  flowrl table head rows.parquet -n 20 --columns prompt_id,reward""",
    "table stats": """\
examples:
  flowrl table stats tables/replay
  flowrl table stats rows.parquet --json""",
    "table export": """\
examples:
  flowrl table export tables/replay replay.parquet
  flowrl table export runs/grpo-1/edges/step_000000/rollout.arrow first.jsonl --rows 0:100 --columns prompt,response
  flowrl table export rows.parquet rewards.csv --columns prompt_id,reward

The name says the kind of file: .parquet, .arrow (an IPC stream), .jsonl, or .csv where there are no lists.""",
    "table sql": """\
examples:
  flowrl table sql rows.parquet "select prompt_id, avg(reward) as mean from rows group by prompt_id order by mean"
  flowrl table sql rows.parquet "select len(response_ids) as tokens, response from rows order by tokens desc limit 3"

The table is called `rows`. The language is DuckDB's; it needs flowrl[sql].""",
}


class UsageError(ConfigError):
    """The command line itself does not parse."""


class Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process, and names the nearest of what there is."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{_nearest_choice(message)}\n{self.format_usage().strip()}\n(more: {self.prog} --help)")

    @property
    def options(self) -> tuple[str, ...]:
        """Option strings of this command."""
        return tuple(name for action in self._actions for name in action.option_strings)

    @property
    def commands(self) -> tuple[Parser, ...]:
        """The commands below this one, and those below them."""
        found: list[Parser] = []
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for one in action.choices.values():
                    found += [one, *one.commands]
        return tuple(found)


def _nearest_choice(message: str) -> str:
    if message.endswith("required: TARGET"):
        return f"{message}; write it before options that take several values"
    found = re.search(r"^argument ([^:]+): invalid choice: '(.*)' \(choose from (.*)\)$", message)
    if found is None:
        return message
    what, given, choices = found.groups()
    what = "command" if "command" in what.lower() else what
    return f"unknown {what} '{given}'; {nearest(given, re.findall(r'[a-z][a-z-]*', choices))}"


def build_parser(version: str, options_help: str) -> Parser:
    """The whole grammar.

    Args:
        version: printed by `--version`.
        options_help: names of the run options that `--set` takes.
    """
    parser = _parser(Parser(prog="flowrl", add_help=False), "", ABOUT)
    parser.add_argument("--version", action="version", version=f"flowrl {version}", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)

    check = _command(commands, "check", "list every problem of a flow before anything runs")
    check.add_argument("target", metavar="TARGET", help=f"{TARGET_HELP}; or a graph's text, FILE.txt")
    _configuration(check, with_settings=True)

    show = _command(commands, "show", "print a flow's graph as text or as a Mermaid diagram")
    show.add_argument("target", metavar="TARGET", help=f"{TARGET_HELP}; or a graph's text, FILE.txt")
    show.add_argument("--format", choices=("text", "mermaid"), default="text", help="default: text")
    show.add_argument("--optimised", action="store_true", help="after pruning and merging, as it would run")
    show.add_argument(
        "--until", metavar="NODE", help="only what computes this node (or the last writer of this column)"
    )
    _configuration(show, with_settings=False)

    _run_command(commands, options_help)
    _view_command(commands)
    _planning_commands(commands)

    ops = _command(commands, "ops", "operators of the installed packs")
    ops_commands = ops.add_subparsers(dest="ops_command", metavar="COMMAND", required=True, parser_class=Parser)
    listed = _command(ops_commands, "ops list", "operators and losses of every pack, with what they write and are")
    listed.add_argument("--pack", metavar="PACK", help="only this pack")
    _pairs(listed, "--search", "WORD", "only what has all these words in its name, docstring, options or columns")
    listed.add_argument("--json", action="store_true", help="one pack as JSON, for `ops compat`")
    shown = _command(ops_commands, "ops show", "one operator in full: columns, locality, configuration, hash, place")
    shown.add_argument("operator", metavar="OPERATOR", help=f"{OPERATOR_HELP}, or FILE.py:NAME for one of yours")
    shown.add_argument("--json", action="store_true", help="as JSON, for `ops compat`")
    tested = _command(ops_commands, "ops test", "try an operator, a loss or a whole pack with the conformance kit")
    tested.add_argument("operator", metavar="OPERATOR", help=f"{OPERATOR_HELP}, PACK, or FILE.py:NAME for one of yours")
    _pairs(tested, "--config", "KEY=VALUE", "configuration to try one operator with; default: its defaults")
    tested.add_argument("--cases", metavar="FILE.py:NAME", help="a dict with what operators need to be tried")
    compared = _command(ops_commands, "ops compat", "what the change from one version to another means for users")
    for name in ("old", "new"):
        compared.add_argument(
            name, metavar=name.upper(), help="PACK, PACK.OPERATOR, FILE.py:NAME, or a FILE.json written by --json"
        )

    made = _command(commands, "new", "write something to begin with")
    made_commands = made.add_subparsers(dest="new_command", metavar="COMMAND", required=True, parser_class=Parser)
    pack = _command(made_commands, "new pack", "a pack of operators with tests, ready to install")
    pack.add_argument("name", metavar="NAME", help="of the pack: my-rewards gives flowrl-my-rewards, flowrl_my_rewards")
    pack.add_argument("--into", metavar="DIR", default=".", help="folder it is written into; default: here")

    _resume_command(commands)

    runs = _command(commands, "runs", "look at runs that were written")
    runs_commands = runs.add_subparsers(dest="runs_command", metavar="COMMAND", required=True, parser_class=Parser)
    of_run = _command(runs_commands, "runs show", "status and last metrics of a run")
    of_run.add_argument("path", metavar="FOLDER", help="folder of the run, such as runs/grpo-1")
    measured = _command(commands, "calibrate", "measure this machine and write it as a cluster, for plans")
    measured.add_argument("--out", metavar="FILE.toml", default="cluster.toml", help="default: cluster.toml")
    measured.add_argument("--devices", type=int, metavar="N", help="the first N GPUs; default: all")
    measured.add_argument("--quick", action="store_true", help="fewer and smaller sizes; rougher")
    _table_commands(_command(commands, "table", "look at rows that were recorded, kept or exported"))
    return parser


def _table_commands(table: Parser) -> None:
    commands = table.add_subparsers(dest="table_command", metavar="COMMAND", required=True, parser_class=Parser)
    listed = _command(commands, "table ls", "a line for each table at a path")
    listed.add_argument(
        "path", metavar="PATH", nargs="?", help=f"{TABLE_HELP}; a run, a folder; default: shared memory"
    )
    listed.add_argument("--json", action="store_true", help="as JSON")
    first = _command(commands, "table head", "the first rows")
    first.add_argument("path", metavar="PATH", help=TABLE_HELP)
    first.add_argument("-n", type=int, metavar="N", default=5, help="how many; default: 5")
    counted = _command(commands, "table stats", "rows, columns, bytes, codecs and tiers of a table")
    counted.add_argument("path", metavar="PATH", help=TABLE_HELP)
    counted.add_argument("--json", action="store_true", help="as JSON")
    written = _command(commands, "table export", "write rows to a file")
    written.add_argument("path", metavar="PATH", help=TABLE_HELP)
    written.add_argument("out", metavar="OUT", help="file to write: .parquet, .arrow, .jsonl or .csv")
    written.add_argument("--rows", metavar="FIRST:STOP", help="some of the rows, such as 0:100, 100: or -10:")
    for one in (first, written):
        one.add_argument("--columns", metavar="A,B", help="these columns, in this order; default: all")
    asked = _command(commands, "table sql", "the answer to a query over a table")
    asked.add_argument("path", metavar="PATH", help=TABLE_HELP)
    asked.add_argument("query", metavar="QUERY", help="a SELECT from the table `rows`")


def _run_command(commands: argparse._SubParsersAction[Parser], options_help: str) -> None:
    run = _command(commands, "run", "run a flow, or a recipe, in this process or in several")
    run.add_argument("target", metavar="TARGET", help=f"{TARGET_HELP}; or FILE.py:RECIPE; or a graph's text, FILE.txt")
    run.add_argument(
        "--steps", type=int, metavar="N", help="iterations; default: the settings' or the recipe's, else 1"
    )
    run.add_argument("--seed", type=int, metavar="S", help="equal seeds give equal runs; default: 0")
    run.add_argument("--engine", metavar="NAME", help="torch (default), or null: no models, a dry run in milliseconds")
    run.add_argument("--plan", metavar="PLAN.json", help="do it as a plan says: step by step, each on its devices")
    run.add_argument(
        "--nproc", type=int, metavar="N", help="start N processes on this host, one for each device of the plan"
    )
    run.add_argument(
        "--launcher",
        choices=("processes", "ray"),
        help="what starts them: processes of this host (default), or ray: on the Ray cluster at $RAY_ADDRESS, of this host, or "
        "started for the run, each node of the plan on a node of it",
    )
    run.add_argument(
        "--timeout-s",
        type=float,
        metavar="S",
        default=1800.0,
        help="longest wait of a process for another one; default: 1800",
    )
    run.add_argument(
        "--checkpoint-every", type=int, metavar="N", help="keep what is needed to resume the run, every N steps"
    )
    _pairs(run, "--model", "NAME=SOURCE", "models: a Hugging Face name, a path, or FILE.py:FUNCTION")
    _pairs(run, "--data", "NAME=FILE", "data sets: JSONL or Parquet files")
    _pairs(run, "--set", "OPTION=VALUE", f"run options: {options_help}")
    _configuration(run, with_settings=True)


def _resume_command(commands: argparse._SubParsersAction[Parser]) -> None:
    resume = _command(commands, "resume", "go on with a run from its newest checkpoint")
    resume.add_argument(
        "path", metavar="RUN", help="folder of the run, such as runs/grpo-1, or of one of its checkpoints"
    )
    resume.add_argument(
        "--steps", type=int, metavar="N", help="iterations of the whole run; default: as it was given then"
    )
    resume.add_argument("--plan", metavar="PLAN.json", help="on other devices than then")
    resume.add_argument("--nproc", type=int, metavar="N", help="processes of this host, where the plan is another one")


def _view_command(commands: argparse._SubParsersAction[Parser]) -> None:
    view = _command(commands, "view", "a run or a plan as a page that opens from a file")
    view.add_argument("target", metavar="RUN", nargs="?", help="folder of a run, such as runs/grpo-1; or PLAN.json")
    view.add_argument("--out", metavar="FILE.html", help="default: view.html in the run; PLAN.html; compare.html")
    view.add_argument(
        "--most-mb", type=float, metavar="N", default=48.0, help="of compressed responses in the page; default: 48"
    )
    view.add_argument(
        "--tokenizer", metavar="SOURCE", help="for token ids: a folder, or a name; default: the models' own"
    )
    view.add_argument("--compare", metavar="RUN", nargs="+", help="two or more runs over each other")
    view.add_argument("--serve", action="store_true", help="follow a run; on this machine only, until Ctrl-C")
    view.add_argument("--port", type=int, metavar="N", default=0, help="for --serve; default: one that is free")


def _planning_commands(commands: argparse._SubParsersAction[Parser]) -> None:
    plan = _command(commands, "plan", "plan a flow on a cluster: what runs where, how long, how much memory")
    plan.add_argument("target", metavar="TARGET", help=f"{TARGET_HELP}; or FILE.py:RECIPE; or a graph's text, FILE.txt")
    plan.add_argument("--out", metavar="PLAN.json", help="write the plan to a file")
    plan.add_argument("--html", metavar="FILE.html", help="write its page: time, devices, memory, dataflow, why")
    plan.add_argument("--trace", metavar="FILE.json", help="write its timeline for Perfetto and chrome://tracing")
    plan.add_argument("--svg", metavar="FILE.svg", help="write its timeline as a picture")
    explain = _command(commands, "explain", "why a plan is as it is, and what the next best choices would cost")
    explain.add_argument("target", metavar="TARGET", help="PLAN.json; or a flow or recipe, with the options of `plan`")
    explain.add_argument("--alt", metavar="PLACEMENT", help="compare with the best plan of this placement")
    for one in (plan, explain):
        one.add_argument("--cluster", metavar="CLUSTER", help="8xA100-80G and the like, or FILE.toml")
        _pairs(one, "--model", "NAME=SOURCE", "models: a published name, a folder with a config.json, or that file")
        _pairs(one, "--lora", "NAME=RANK", "train adapters of this rank instead of the whole model")
        one.add_argument("--workload", metavar="PATH", help="FILE.toml, or the folder of a run to take lengths from")
        one.add_argument(
            "--prompts", type=int, metavar="N", help="of one iteration; default: the batch of a recipe's data"
        )
        one.add_argument("--prompt-tokens", metavar="LENGTHS", help="N for all, or a distribution")
        one.add_argument("--response-tokens", metavar="LENGTHS", help="lognormal:MEAN:SIGMA:CAP, fixed:N, N*WEIGHT,...")
        one.add_argument("--schedule", metavar="SCHEDULE", help="sync, or async:K; default: the recipe's, else sync")
        one.add_argument("--placement", metavar="PLACEMENT", help="what goes where, whole or in part: 'gen:d4t2 | ...'")
        one.add_argument(
            "--tie", type=float, metavar="PART", help="plans this close are equal, and the simplest wins; default: 0.02"
        )
        one.add_argument(
            "--headroom", type=float, metavar="PART", help="of each device's memory, left free by the plan; default: 0"
        )
        one.add_argument("--json", action="store_true", help="as JSON")
        _configuration(one, with_settings=True)
    diff = _command(commands, "diff", "what differs between two plans: inputs, steps, predicted seconds and bytes")
    for name in ("first", "second"):
        diff.add_argument(name, metavar=f"{name.upper()}.json", help="a plan in a file")
    diff.add_argument("--json", action="store_true", help="as JSON")
    _audit_command(commands)
    _reshard_command(commands)


def _reshard_command(commands: argparse._SubParsersAction[Parser]) -> None:
    edge = _command(commands, "reshard-explain", "what moves when weights go from one layout to another, and how long")
    edge.add_argument("model", metavar="MODEL", help="a published name, a folder, or a config.json")
    edge.add_argument("--from", dest="source", metavar="LAYOUT", required=True, help="of the trainer: f8, f4t2, d2f4")
    edge.add_argument("--to", dest="target", metavar="LAYOUT", required=True, help="of the engine: d4t2, t8, t2p2")
    edge.add_argument("--apart", action="store_true", help="the engine has devices of its own; default: the trainer's")
    edge.add_argument(
        "--cluster", metavar="CLUSTER", help="8xH100-80G and the like, or FILE.toml; for seconds and nodes"
    )
    edge.add_argument(
        "--source-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the shards; default: bfloat16"
    )
    edge.add_argument("--bucket-mib", type=int, metavar="N", default=128, help="MiB of a bucket; default: 128")
    edge.add_argument("--json", action="store_true", help="as JSON")


def _audit_command(commands: argparse._SubParsersAction[Parser]) -> None:
    audit = _command(commands, "audit", "what a layout makes of a model's weights, and what is not really sharded")
    audit.add_argument("--model", metavar="SOURCE", required=True, help="a published name, a folder, or a config.json")
    audit.add_argument(
        "--layout", metavar="LAYOUT", required=True, help="f8, d2f4, f4t2: copies d, shards f, tensor parallel t"
    )
    audit.add_argument("--wrap", choices=("all", "layers"), default="all", help="what fully_shard wraps; default: all")
    audit.add_argument("--frozen", action="store_true", help="never trained: no gradients and no optimizer")
    audit.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank; the rest is frozen")
    audit.add_argument("--head", choices=("lm", "value", "reward"), default="lm", help="default: lm")
    audit.add_argument("--precision", choices=("fp32", "bf16"), help="of frozen weights; default: bf16")
    audit.add_argument("--optimizer", metavar="NAME", default="adam_fp32", help="and its precision; default: adam_fp32")
    audit.add_argument(
        "--offload",
        choices=("none", "park", "all", "opt", "sopt"),
        default="none",
        help="where state lies; default: none",
    )
    audit.add_argument("--json", action="store_true", help="as JSON")


def _pairs(parser: Parser, option: str, metavar: str, help_text: str) -> None:
    parser.add_argument(option, action="extend", default=[], nargs="+", metavar=metavar, help=help_text)


def _configuration(parser: Parser, *, with_settings: bool) -> None:
    _pairs(parser, "--config", "KEY=VALUE", "the flow's configuration")
    if with_settings:
        parser.add_argument("--settings", metavar="FILE.toml", help="settings; a key that nothing reads is an error")


def _command(commands: argparse._SubParsersAction[Parser], path: str, help_text: str) -> Parser:
    made = commands.add_parser(path.rpartition(" ")[2], help=help_text, add_help=False)
    made.set_defaults(parser=made)
    return _parser(made, path, f"{help_text[0].upper()}{help_text[1:]}.")


def _parser(parser: Parser, path: str, description: str) -> Parser:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    parser.description = description
    parser.epilog = f"{EXAMPLES[path]}\n\n{EXIT_CODES}"
    parser.add_argument("-h", "--help", action="help", help="show this and exit")
    parser.add_argument(
        "--traceback", action="store_true", default=argparse.SUPPRESS, help="show where in the code an error came from"
    )
    return parser
