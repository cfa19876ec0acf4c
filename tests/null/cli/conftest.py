"""A folder with a small flow in it, and the command line called in this process."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flowrl.cli import main

FLOW = '''\
"""A flow, a broken one, and a recipe."""

import flowrl as fr
from flowrl.recipe import Recipe
from flowrl_operators import advantages, losses


@fr.reward
def length(response):
    return float(len(response))


@fr.flow
def grpo(prompts, policy, ref, *, group_size=4, beta=0.0, note="plain"):
    rows = fr.rollout(policy, prompts, n=group_size)
    rows = advantages.group_norm(length(rows))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2) + beta * losses.kl("k3"))


def small() -> Recipe:
    data = [{"prompt": f"{i}+{i}="} for i in range(8)]
    return Recipe(grpo, {"prompts": data, "policy": "null"}, steps=2, engine="null")


def needs_an_argument(size):
    return small()


ready = small().replace(steps=3)
'''

BROKEN = """\
import flowrl as fr
from flowrl_operators import advantages, losses


@fr.flow
def broken(prompts, policy):
    rows = advantages.group_norm(fr.rollout(policy, prompts, n=4))
    rows = fr.filter(rows, rows["rewrd"] > 0)
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2))
"""


@dataclass
class Result:
    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: `flow.py`, `broken.py`, `prompts.jsonl`. `mine.py` defines no flow of its own."""
    (tmp_path / "flow.py").write_text(FLOW)
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "mine.py").write_text("from flow import grpo\nnumber = 3\n")
    rows = [{"prompt": f"{i}+1="} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def imports() -> Iterator[None]:
    """What a test imports from its folder is forgotten, so that the next one may use the same names."""
    paths, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = paths
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if f"{os.sep}pytest-" in file:
            del sys.modules[name]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Call `flowrl` with arguments."""

    def call(*args: str) -> Result:
        capsys.readouterr()
        code = main(args)
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return call
