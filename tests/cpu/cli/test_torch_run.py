"""A real model from a settings file: FILE.py:FUNCTION builds it, FILE.py:CLASS makes its tokenizer."""

import json
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.runtime.rundir import RunDir

FLOW = """\
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import flowrl as fr
from flowrl.engines.null import ByteTokenizer
from flowrl_operators import advantages, losses


def model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=64, pad_token_id=257, **sizes))


@fr.reward
def digits(response):
    return sum(c.isdigit() for c in response) / 8


@fr.flow
def tiny(prompts, policy):
    rows = advantages.group_norm(digits(fr.rollout(policy, prompts, n=4)))
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2))
"""

SETTINGS = """\
[run]
steps = 2

[models.policy]
source = "tiny_flow.py:model"
tokenizer = "tiny_flow.py:ByteTokenizer"

[models.policy.optimizer]
lr = 1e-3

[data.prompts]
path = "prompts.jsonl"
batch = 4

[options]
max_tokens = 8
progress = "off"
"""


def test_settings_bring_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny_flow.py").write_text(FLOW)
    (tmp_path / "run.toml").write_text(SETTINGS)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(8)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["check", "tiny_flow.py", "--settings", "run.toml"]) == 0
    assert main(["run", "tiny_flow.py", "--settings", "run.toml"]) == 0
    assert capsys.readouterr().out.endswith("tiny: finished 2 steps; results in runs/tiny-1\n")
    run = RunDir.open("runs/tiny-1")
    assert (run.status, run.info["engine"]) == ("finished", "torch")
    assert [row["update/lr"] for row in run.metrics()] == [1e-3, 1e-3]


def test_a_model_that_is_not_there_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny_flow.py").write_text(FLOW)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    common = ["run", "tiny_flow.py", "--data", "prompts=prompts.jsonl", "--model"]
    assert main([*common, "policy=./nowhere"]) == 2
    assert "--model policy: there is nothing at './nowhere'" in capsys.readouterr().err
    assert main([*common, "policy=tiny_flow.py:modle"]) == 2
    assert "tiny_flow.py has no 'modle'; did you mean 'model'?" in capsys.readouterr().err
