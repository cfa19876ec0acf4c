"""Names of files that are none: folders, folders that are not there, null characters, names that are too long."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster
from flowrl.planner.shapes import shape_of
from flowrl.schema.files import check_writable, is_file, is_folder, is_there, read_json, read_toml, write_file

FLOW = "examples/flows/grpo.py:grpo"
ASKED = ("--model", "policy=Qwen/Qwen2.5-0.5B", "ref=Qwen/Qwen2.5-0.5B", "--cluster", "1xA100-80G", "--prompts", "4",
         "--prompt-tokens", "8", "--response-tokens", "fixed:8")  # fmt: skip
BAD = {"folder": ".", "missing": "nowhere/x.json", "null": "a\0b", "long": "x" * 5000}
NO_INPUT = {"missing": "nowhere.toml", "null": "a\0b", "long": "x" * 5000, "folder": "."}


@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
def test_a_file_that_could_not_be_written_is_told_before_the_work(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--out "):
        check_writable(name, "--out")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_file(name, "x")


@pytest.mark.parametrize("name", [BAD["null"], BAD["long"], BAD["missing"]], ids=["null", "long", "missing"])
def test_what_is_no_name_is_not_there(name: str) -> None:
    assert not is_file(name) and not is_folder(name) and not is_there(name)


@pytest.mark.parametrize("option", ["--out", "--html", "--svg", "--trace"])
@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
def test_plan_refuses_files_that_it_could_not_write(option: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", FLOW, *ASKED, option, name]) == 2
    assert capsys.readouterr().err.startswith(f"error: {option} ")


@pytest.mark.parametrize("option", ["--workload", "--settings", "--model", "--cluster"])
@pytest.mark.parametrize("name", NO_INPUT.values(), ids=NO_INPUT)
def test_plan_refuses_files_that_it_could_not_read(option: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"policy={name}", f"ref={name}"] if option == "--model" else [name]
    assert main(["plan", FLOW, *ASKED, option, *given]) in (1, 2)
    assert "--traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 5000 + ".py", "a\0b.py"], ids=["name", "file", "null"])
def test_a_target_that_is_no_name_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", name, *ASKED]) in (1, 2)
    assert "--traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--prompt-tokens", "--response-tokens"])
@pytest.mark.parametrize(
    "text", ["", "9" * 5000, "fixed:" + "9" * 5000, "fixed:1000000000000"], ids=["empty", "bare", "digits", "large"]
)
def test_lengths_that_are_none_are_refused(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", FLOW, *ASKED, option, text]) == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    "asked",
    [("--cluster", "16777216xA100-80G"), ("--cluster", "9" * 5000 + "xA100-80G"), ("--lora", "policy=" + "9" * 5000),
     ("--placement", "gen:d" + "9" * 5000), ("--placement", "gen:d99999999 | ...")],
    ids=["devices", "digits", "rank", "layout digits", "layout"],
)  # fmt: skip
def test_numbers_that_are_too_large_are_refused(asked: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", FLOW, *ASKED, *asked]) == 2
    assert "--traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["f8192", "f999999", "d100000", "f100000000", "t" + "9" * 5000])
def test_layouts_of_more_devices_than_there_are_anywhere_are_refused(
    layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "--model", "Qwen/Qwen2.5-0.5B", "--layout", layout]) == 2
    assert main(["reshard-explain", "Qwen/Qwen2.5-0.5B", "--from", layout, "--to", "d8"]) == 2
    assert "devices at most" in capsys.readouterr().err


def test_a_reshard_on_a_cluster_whose_file_is_missing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["reshard-explain", "Qwen/Qwen2.5-0.5B", "--from", "f8", "--to", "d8", "--cluster", "nowhere.toml"]
    assert main(asked) == 2
    assert "nowhere.toml cannot be read" in capsys.readouterr().err


def test_calibrate_says_that_it_cannot_write_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--quick", "--out", str(tmp_path)]) == 2
    assert "is a folder; name a file in it" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- contents


TOML = {"deep": "a = " + "[" * 50_000, "digits": "a = " + "9" * 5000, "nul": "\0", "open": "[device"}


@pytest.mark.parametrize("text", TOML.values(), ids=TOML)
def test_a_toml_file_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.toml (is|has) "):
        read_toml(tmp_path / "x.toml", "the file")
    with pytest.raises(ConfigError, match=r"x\.toml"):
        Cluster.from_toml(tmp_path / "x.toml")


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 200_000, '{"hidden_size": ' + "9" * 5000 + "}", "[]", "3"], ids=range(6)
)
def test_a_config_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="model 'policy'"):
        shape_of(tmp_path, "policy")


def test_json_keeps_what_it_has() -> None:
    assert read_json('{"a": [1, 2.5, null]}', "it") == {"a": [1, 2.5, None]}
