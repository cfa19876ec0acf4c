"""`flowrl new pack`: what it writes, and what it refuses."""

import tomllib
from pathlib import Path

import pytest

from .conftest import Cli


def test_a_pack_is_written(folder: Path, cli: Cli) -> None:
    result = cli("new", "pack", "their-rewards")
    assert (result.code, result.err) == (0, "")
    made = folder / "flowrl-their-rewards"
    assert "pip install -e 'flowrl-their-rewards[dev]'" in result.out
    files = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
    assert files == [
        ".github/workflows/test.yml", ".gitignore", "README.md", "flowrl_their_rewards/__init__.py",
        "flowrl_their_rewards/advantages.py", "flowrl_their_rewards/losses.py", "pyproject.toml",
        "tests/test_conformance.py", "tests/test_flow.py",
    ]  # fmt: skip
    project = tomllib.loads((made / "pyproject.toml").read_text())["project"]
    assert project["name"] == "flowrl-their-rewards" and project["dependencies"] == ["flowrl"]
    assert project["entry-points"]["flowrl.operators"] == {"their-rewards": "flowrl_their_rewards"}
    for path in made.rglob("*"):
        if path.is_file():
            assert "@name@" not in path.read_text() and "@module@" not in path.read_text()
    assert "# your choice" in (made / "pyproject.toml").read_text()


def test_it_goes_where_it_is_told(folder: Path, cli: Cli) -> None:
    (folder / "packs").mkdir()
    assert cli("new", "pack", "mine", "--into", "packs").code == 0
    assert (folder / "packs" / "flowrl-mine" / "flowrl_mine" / "losses.py").is_file()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["My_Rewards"], "found 'My_Rewards'; 'my-rewards' would do"),
        (
            ["9lives"],
            "lower-case letters, digits and single hyphens, such as my-rewards; found '9lives'; 'lives' would do",
        ),
        (["a--b"], "found 'a--b'; 'a-b' would do"),
        (["-"], "error:"),
        (["flowrl-mine"], "a pack is named without 'flowrl-', which its distribution begins with: mine"),
        (["core"], "the name 'core' is taken by an installed pack: core (flowrl-operators "),
        (["operators"], "the name 'operators' is taken: the distribution flowrl-operators "),
        (["mine", "--into", "nowhere"], "there is no folder 'nowhere' to write a pack into"),
    ],
)
def test_what_is_refused(folder: Path, cli: Cli, args: list[str], message: str) -> None:
    result = cli("new", "pack", *args)
    assert result.code == 2
    assert message in result.err
    assert not list(folder.glob("flowrl-*"))


def test_nothing_is_written_over(folder: Path, cli: Cli) -> None:
    (folder / "flowrl-mine").mkdir()
    result = cli("new", "pack", "mine")
    assert result.code == 2
    assert "'flowrl-mine' exists already" in result.err
    assert list((folder / "flowrl-mine").iterdir()) == []


def test_a_module_that_is_there_is_not_shadowed(folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "flowrl_mine.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    assert "the module flowrl_mine is installed already" in cli("new", "pack", "mine").err
