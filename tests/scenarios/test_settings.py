"""Settings that nothing would read end the command before anything runs."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl.cli import main

FLOW = """\
import flowrl as fr


@fr.reward
def length(response):
    return float(len(response))


@fr.loss
def plain(logprobs, reward):
    return -logprobs * reward


@fr.flow
def small(prompts, policy, *, group_size=2):
    return fr.update(policy, length(fr.rollout(policy, prompts, n=group_size)), loss=plain())
"""

RIGHT = """\
[run]
steps = 1
engine = "null"

[models.policy]
source = "null"

[models.policy.optimizer]
lr = 1e-5

[data.prompts]
path = "prompts.jsonl"

[options]
max_tokens = 4
progress = "off"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "flow.py").write_text(FLOW)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(4)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def imports() -> Iterator[None]:
    """`flow.py` of this test's folder is forgotten after it."""
    paths, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = paths
    if "flow" not in modules:
        sys.modules.pop("flow", None)


def command(folder: Path, text: str) -> int:
    (folder / "run.toml").write_text(text)
    return main(["run", "flow.py:small", "--settings", "run.toml"])


def test_the_settings_these_are_made_from_run(folder: Path) -> None:
    assert command(folder, RIGHT) == 0
    assert len(list((folder / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (RIGHT.replace("lr =", "learning_rte ="), ["learning_rte", "[models.policy.optimizer]", "did you mean 'lr'"]),
        ("lr = 1e-5\n" + RIGHT, ["key 'lr' is at the top level", "it belongs in [models.policy.optimizer]"]),
        (RIGHT.replace("max_tokens", "max-tokens"), ["'max-tokens' in [options]", "write 'max_tokens', with an underscore"]),
        (RIGHT + "\n[config]\ngroup-size = 2\n", ["'group-size' in [config]", "write 'group_size', with an underscore"]),
        (RIGHT.replace("steps = 1", "steps = = 1"), ["not valid TOML", "line 2, column 9"]),
        (RIGHT.replace("[run]\n", "[run\n"), ["not valid TOML", "line 1"]),
    ],
)  # fmt: skip
def test_a_key_that_nothing_reads_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, says: list[str]
) -> None:
    assert command(folder, text) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ")
    for part in says:
        assert part in err
    assert not (folder / "runs").exists()
