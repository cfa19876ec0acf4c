"""`flowrl ops test` and `flowrl ops compat`: what they say, and how they exit."""

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.cli.compat import Level, compare, level_of
from flowrl.cli.description import of_one
from flowrl.recipe import targets

from .conftest import Cli

MINE = """\
import flowrl as fr
import numpy as np


@fr.operator(writes={"advantage": fr.SAMPLE.f32})
def right(reward: fr.SAMPLE.f32, *, scale: float = 1.0):
    return np.where(np.isfinite(reward), reward, 0.0) * scale


@fr.operator(writes={"advantage": fr.SAMPLE.f32})
def wrong(reward: fr.SAMPLE.f32):
    return reward - reward.sum()


@fr.operator(writes={"advantage": fr.SAMPLE.f32})
def needs(reward: fr.SAMPLE.f32, *, factor: float):
    return np.where(np.isfinite(reward), reward, 0.0) * factor


CASES = {
    "wrong": {"skip": {"chunks": "sums over what it is given", "poison": "the same"}},
    "needs": {"config": [{"factor": 1.0}, {"factor": 2.0}]},
}
BAD = {"right": {"confg": {}}}
number = 3
"""


@pytest.fixture
def mine(folder: Path) -> Path:
    (folder / "ops.py").write_text(MINE)
    return folder


# --- ops test -------------------------------------------------------------------------------------------------------------


def test_an_operator_that_holds(mine: Path, cli: Cli) -> None:
    result = cli("ops", "test", "ops.py:right")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "ops.py:right"
    assert {line.split()[1] for line in lines[2:]} == {"ok"}
    assert cli("ops", "test", "ops.py:right", "--config", "scale=0.5").code == 0
    assert cli("ops", "test", "core.group_norm").code == 0


def test_an_operator_that_does_not(mine: Path, cli: Cli) -> None:
    result = cli("ops", "test", "ops.py:wrong")
    assert (result.code, result.err) == (1, "")
    lines = {line.split()[0]: line.split()[1] for line in result.out.splitlines()[2:12]}
    assert lines["chunks"] == "fails" and lines["repeatable"] == "ok"
    assert "depends on which rows are given together" in result.out
    assert "  input     reward = [" in result.out


def test_one_cause_is_told_once(mine: Path, cli: Cli) -> None:
    text = MINE.replace("reward - reward.sum()", "reward - reward[7]")
    (mine / "ops.py").write_text(text)
    out = cli("ops", "test", "ops.py:wrong").out
    assert out.count("out of bounds") == 1
    assert "\nchunks      fails  must give the same under any split" in out
    assert "\n  also breaks inputs, repeatable, chunks, " in out
    assert "used at" not in out


def test_what_operators_need_comes_from_a_dict(mine: Path, cli: Cli) -> None:
    skipped = cli("ops", "test", "ops.py:wrong", "--cases", "ops.py:CASES")
    assert skipped.code == 0
    assert "chunks      skipped  sums over what it is given" in skipped.out
    needs = cli("ops", "test", "ops.py:needs")
    assert needs.code == 2
    assert "'needs' needs a value for factor to be tried" in needs.err
    assert cli("ops", "test", "ops.py:needs", "--cases", "ops.py:CASES").code == 0
    assert cli("ops", "test", "ops.py:needs", "--config", "factor=2").code == 0


@pytest.fixture
def pack(mine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file as an installed pack."""
    info = mine / "flowrl_mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flowrl-mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowrl.operators]\nmine = ops\n")
    monkeypatch.syspath_prepend(str(mine))
    return mine


def test_a_pack_is_a_line_for_each_operator(pack: Path, cli: Cli) -> None:
    result = cli("ops", "test", "mine")
    assert result.code == 1
    rows = {line.split()[0]: line.split()[1:] for line in result.out.splitlines()[2:5]}
    assert rows["right"][0] == "ok" and rows["wrong"][0] == "fails" and rows["needs"] == ["not", "tried"]
    assert "needs is not tried: 'needs' needs a value for factor" in result.out
    better = cli("ops", "test", "mine", "--cases", "ops.py:CASES")
    assert better.code == 0
    assert "skipped: chunks, poison" in better.out
    assert cli("ops", "test", "mine.wrong", "--cases", "ops.py:CASES").code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing"], "no pack 'nothing' is installed"),
        (["core.nothing"], "pack 'core' has no 'nothing'"),
        (["ops.py:nothing"], "ops.py has no 'nothing'"),
        (["ops.py:right", "--config", "scle=1"], "'right' has no configuration 'scle'; did you mean 'scale'"),
        (["ops.py:right", "--config", "scale"], "--config takes KEY=VALUE; found 'scale'"),
        (["mine", "--config", "scale=1"], "--config is for one operator; 'mine' names 3"),
        (["ops.py:right", "--cases", "ops.py:number"], "--cases names a dict of operators' names"),
        (["ops.py:right", "--cases", "ops.py:BAD"], "the settings of 'ops.py:right' do not fit: .*'confg'"),
    ],
)
def test_wrong_usage(pack: Path, cli: Cli, args: list[str], message: str) -> None:
    import re

    result = cli("ops", "test", *args)
    assert result.code == 2
    assert message in result.err or re.search(message, result.err)


# --- ops compat -----------------------------------------------------------------------------------------------------------

HEAD = "import flowrl as fr\n\n\n"
OPERATOR = HEAD + (
    '@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality=fr.group("prompt_id"), min_group=2)\n'
    "def op(reward: fr.SAMPLE.f32, *, eps: float = 1e-6):\n    return reward / eps\n"
)
LOSS = HEAD + (
    "@fr.loss\ndef op(logprobs: fr.TOKEN.f32, old_logprobs: fr.TOKEN.f32, *, clip: float = 0.2):\n    return -logprobs * clip\n"
)


def described(folder: Path, text: str, name: str) -> Any:
    (folder / f"{name}.py").write_text(text)
    return of_one("op", targets.find(f"{name}.py:op"))


CHANGES = [
    (OPERATOR, ("reward / eps", "reward * eps"), Level.PATCH, "its code differs"),
    (OPERATOR, ("reward / eps", "reward / eps  # a comment"), Level.SAME, ""),
    (OPERATOR, ("f32, *", "f32, values: fr.TOKEN.f32 = None, *"), Level.MINOR, "reads 'values', optionally"),
    (OPERATOR, ("f32, *", "f32, values: fr.TOKEN.f32, *"), Level.MAJOR, "reads 'values' too"),
    (OPERATOR, ("(reward", "(values: fr.TOKEN.f32, reward"), Level.MAJOR, "a new column comes before old ones"),
    (OPERATOR, ("reward: fr.SAMPLE.f32, *", "reward: fr.SAMPLE.f32 = None, *"), Level.MINOR, "does without 'reward'"),
    (OPERATOR, ("reward: fr.SAMPLE.f32", "reward: fr.SAMPLE.i32"), Level.MAJOR, "reads 'reward' as SAMPLE.i32, was SAMPLE.f32"),
    (OPERATOR, ("reward: fr.SAMPLE.f32", "reward: fr.TOKEN.f32"), Level.MAJOR, "reads 'reward' as TOKEN.f32"),
    (OPERATOR, ('{"advantage"', '{"baseline": fr.SAMPLE.f32, "advantage"'), Level.MINOR, "writes 'baseline' too"),
    (OPERATOR, ('"advantage"', '"advantages"'), Level.MAJOR, "does not write 'advantage' any more"),
    (OPERATOR, ('"advantage": fr.SAMPLE.f32', '"advantage": fr.SAMPLE.f64'), Level.MAJOR, "writes 'advantage' as SAMPLE.f64"),
    (OPERATOR, ('"advantage": fr.SAMPLE', '"advantage": fr.TOKEN'), Level.MAJOR, "writes 'advantage' as TOKEN.f32"),
    (OPERATOR, ('fr.group("prompt_id")', '"batch"'), Level.MAJOR, "its locality is batch, was group(prompt_id)"),
    (OPERATOR, ("1e-6", "1e-5"), Level.MAJOR, "'eps' is 1e-05 by default, was 1e-06: numbers change"),
    (OPERATOR, ("1e-6", "1e-6, by: int = 1"), Level.MINOR, "has a configuration 'by' (default 1)"),
    (OPERATOR, ("*, eps", "*, by: int = 1, eps"), Level.MAJOR, "its configuration values have other places"),
    (OPERATOR, ("1e-6", "1e-6, by: int"), Level.MAJOR, "needs a value for 'by'"),
    (OPERATOR, (" = 1e-6", ""), Level.MAJOR, "needs a value for 'eps', which had a default"),
    (OPERATOR, ("eps", "epsilon"), Level.MAJOR, "has no configuration 'eps' any more"),
    (OPERATOR, ("min_group=2", "min_group=3"), Level.MAJOR, "declares min_group=3, was 2"),
    (OPERATOR, ("min_group=2", "min_group=1"), Level.MINOR, "declares min_group=1, was 2"),
    (OPERATOR, ("min_group=2", "filter=True"), Level.MAJOR, "was an operator, is a filter"),
    (LOSS, ("old_logprobs: fr.TOKEN.f32", 'old_logprobs: fr.TOKEN.f32.or_live("logprobs")'), Level.MINOR, "takes 'logprobs' "),
    (LOSS, ("@fr.loss", "@fr.loss(max_staleness=2)"), Level.MINOR, "declares max_staleness=2, was 0"),
    (LOSS, ("@fr.loss", "@fr.loss(on_policy=False)"), Level.MINOR, "declares on_policy=False, was True"),
    (LOSS, ("@fr.loss", '@fr.loss(per="sample")'), Level.MAJOR, "declares per='sample', was 'token'"),
    (LOSS, ("logprobs * clip", "logprobs + clip"), Level.PATCH, "its code differs"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "change", "level", "says"), CHANGES, ids=[f"{c[1][1][:28]}" for c in CHANGES])
def test_levels(folder: Path, text: str, change: tuple[str, str], level: Level, says: str) -> None:
    assert text.replace(*change) != text
    before, after = described(folder, text, "before"), described(folder, text.replace(*change), "after")
    found = compare(before, after)
    assert level_of(found) is level
    assert says in "; ".join(f"{c.text}" for c in found if c.level is level)
    assert level_of(compare(before, before)) is Level.SAME


BACK = {Level.MINOR: Level.MAJOR, Level.PATCH: Level.PATCH, Level.SAME: Level.SAME}


@pytest.mark.parametrize(
    ("text", "change", "level"),
    [(t, c, lv) for t, c, lv, says in CHANGES if lv in BACK and "writes" not in says and "reads" not in says],
)  # fmt: skip
def test_what_is_minor_is_major_on_the_way_back(folder: Path, text: str, change: tuple[str, str], level: Level) -> None:
    before, after = described(folder, text, "before"), described(folder, text.replace(*change), "after")
    assert level_of(compare(after, before)) is BACK[level]


def test_a_helper_of_an_operator_counts(folder: Path) -> None:
    text = (
        HEAD
        + "def helper(x):\n    return x\n\n\n"
        + OPERATOR.removeprefix(HEAD).replace("reward / eps", "helper(reward)")
    )
    changed = text.replace("return x\n", "return -x\n")
    (change,) = compare(described(folder, text, "before"), described(folder, changed, "after"))
    assert change.level is Level.PATCH


def test_the_command_says_the_level_and_exits(folder: Path, cli: Cli) -> None:
    (folder / "before.py").write_text(OPERATOR)
    (folder / "after.py").write_text(OPERATOR.replace("1e-6", "1e-6, by: int = 1"))
    minor = cli("ops", "compat", "before.py:op", "after.py:op")
    assert (minor.code, minor.out.splitlines()[0]) == (0, "minor: before.py:op to after.py:op")
    assert "minor  before.py:op  has a configuration 'by' (default 1)" in minor.out
    major = cli("ops", "compat", "after.py:op", "before.py:op")
    assert (major.code, major.out.splitlines()[0]) == (1, "major: after.py:op to before.py:op")
    same = cli("ops", "compat", "before.py:op", "before.py:op")
    assert (same.code, same.out) == (0, "no change: before.py:op to before.py:op\n")
    (folder / "before.json").write_text(cli("ops", "show", "before.py:op", "--json").out)
    assert cli("ops", "compat", "before.json", "after.py:op").out.startswith("minor: before.json to after.py:op\n")


def test_packs_are_compared_name_by_name(pack: Path, cli: Cli) -> None:
    listed = cli("ops", "list", "--pack", "mine", "--json")
    assert listed.code == 0
    (pack / "old.json").write_text(listed.out)
    assert cli("ops", "compat", "old.json", "mine").out == "no change: old.json to mine\n"
    old = json.loads(listed.out)
    assert old["pack"] == "mine" and set(old["operators"]) == {"right", "wrong", "needs"}
    less = {**old, "operators": {n: o for n, o in old["operators"].items() if n != "wrong"}}
    (pack / "less.json").write_text(json.dumps(less))
    gone = cli("ops", "compat", "mine", "less.json")
    assert gone.code == 1 and "major  wrong  is gone" in gone.out
    new = cli("ops", "compat", "less.json", "mine")
    assert new.code == 0 and "minor  wrong  is new (operator)" in new.out


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot be read"), ("{", "cannot be read"), ("[]", "is no description"), ('{"format": 9}', "of format 1")],
)
def test_a_file_that_is_no_description(folder: Path, cli: Cli, text: str | None, message: str) -> None:
    if text is not None:
        (folder / "old.json").write_text(text)
    result = cli("ops", "compat", "old.json", "core.group_norm")
    assert result.code == 2 and message in result.err
