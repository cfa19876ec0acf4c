"""`flowrl audit`: the table, what is found, and how it exits."""

import json
from pathlib import Path

import pytest

from .conftest import Cli

QWEN = ("--model", "Qwen/Qwen2.5-7B")


def test_a_whole_wrap(cli: Cli) -> None:
    result = cli("audit", *QWEN, "--layout", "f8")
    assert result.code == 0
    assert "predicted: 14.2 GiB of weights, gradients and optimizer state on a device" in result.out
    assert "model.layers.*.mlp" in result.out and "nothing found" in result.out


def test_only_layers_wrapped(cli: Cli) -> None:
    result = cli("audit", *QWEN, "--layout", "f8", "--wrap", "layers")
    assert result.code == 1
    assert "1 problem:\n  replicated: model.embed_tokens, model.norm, lm_head (3 tensors)" in result.out


def test_frozen_and_adapters(cli: Cli) -> None:
    assert cli("audit", *QWEN, "--layout", "d8", "--frozen").code == 1
    assert cli("audit", *QWEN, "--layout", "f8", "--frozen").code == 0
    told = cli("audit", *QWEN, "--layout", "f8", "--lora", "16", "--precision", "fp32", "--json")
    found = json.loads(told.out)
    assert told.code == 1 and [one["kind"] for one in found["findings"]] == ["frozen_fp32"]
    assert {part["name"].rsplit(".", 2)[1] for part in found["parts"] if part["is_trained"]} == {"lora_A", "lora_B"}


def test_a_config_of_ones_own(cli: Cli, tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 97, "tie_word_embeddings": False,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    result = cli("audit", "--model", str(path), "--layout", "f2", "--head", "value", "--offload", "sopt")
    assert result.code in (0, 1) and "uneven" in result.out and "on host" in result.out and "score" in result.out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--layout", "x8"), "a layout is letters"),
        (("--wrap", "layer"), "unknown --wrap 'layer'; did you mean 'layers'?"),
        (("--optimizer", "adam"), "there is no optimizer 'adam'; did you mean 'adam_"),
        (("--frozen", "--lora", "8"), "a frozen model has no adapters to train"),
        (("--model", "Qwen/Qwen2.5-8B"), "--model is given 2 times, and an audit is of one"),
        (("--lora", "8", "--lora=16"), "--lora is given 2 times, and an audit is of one"),
        (("--lora", "9999999"), "LoRA of rank 9,999,999 is above the smallest matrix that gets adapters"),
        (("--frozen", "--offload", "opt"), "a frozen model has no state of training that offload opt could move"),
        (("--precision", "fp32"), "precision fp32 is that of frozen weights, and these are trained, in"),
        (("--layout", "p29"), "layout p29 has 29 stages, and the model 28 layers"),
        (("--lora", "0"), "--lora takes the rank of adapters, at least 1; found 0"),
        (("--layout", "f2t3"), "tp 3 must divide 4 key-value heads"),
    ],
)
def test_wrong_usage(cli: Cli, more: tuple[str, ...], message: str) -> None:
    result = cli("audit", *QWEN, "--layout", "f8", *more)
    assert result.code == 2 and message in result.err


def test_a_model_that_nobody_knows(cli: Cli) -> None:
    result = cli("audit", "--model", "Qwen/Qwen2.5-8B", "--layout", "f8")
    assert result.code == 2 and "no shape is known for 'Qwen/Qwen2.5-8B'; did you mean Qwen/Qwen2.5" in result.err


def test_a_config_that_is_no_object(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    result = cli("audit", "--model", str(tmp_path), "--layout", "f8")
    assert result.code == 2 and "a model's config, is a JSON object with its model_type; found []" in result.err


def test_adapters_of_a_mixture_are_on_attention(cli: Cli) -> None:
    result = cli("audit", "--model", "Qwen/Qwen3-30B-A3B", "--layout", "f8", "--lora", "16")
    assert result.code == 0 and "model.layers.*.lora" in result.out and "nothing found" in result.out
