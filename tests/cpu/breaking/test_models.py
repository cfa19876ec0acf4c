"""Models that are none: one error that names the model and what to do."""

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaModel

import flowrl as fr
from examples.tiny import CharTokenizer, tiny_llama
from flowrl.engines import open_engine
from flowrl.errors import ConfigError, EngineError


def opened(source, **options):
    model = fr.Model(source, tokenizer=CharTokenizer(), **{"device": "cpu", **options})
    return open_engine("torch").open("policy", model, frozenset({"generate"}), seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_llama(0).save_pretrained(path)
    return path


@pytest.mark.parametrize("cut", ["header", "half"])
def test_weights_that_are_broken_or_cut_off(folder, tmp_path, cut):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(b"\xff" * 100 + data[100:] if cut == "header" else data[: len(data) // 2])
    with pytest.raises(EngineError, match="model 'policy' could not be loaded from"):
        opened(str(tmp_path))


def test_a_backbone_has_no_language_model_head(tmp_path):
    config = tiny_llama(0).config
    with pytest.raises(EngineError, match="a LlamaModel has no language-model head"):
        opened(LlamaModel(config))
    config.tie_word_embeddings = False  # tied, the head is the embedding and nothing is missing
    LlamaModel(config).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"no values for 1 parameters of a LlamaForCausalLM \(lm_head\.weight\)"):
        opened(str(tmp_path))
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    opened(str(tmp_path)).close()


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(EngineError, match=f"model 'policy' cannot be put on device '{device}'"):
        opened(tiny_llama(0), device=device)


def test_a_function_that_fails():
    with pytest.raises(EngineError, match="model 'policy': its function failed: ZeroDivisionError"):
        opened(lambda: 1 / 0)


@pytest.mark.parametrize(
    "values",
    [{"lr": "1e-3"}, {"lr": float("inf")}, {"betas": (2, 3)}, {"betas": 0.9}, {"eps": -1.0}, {"weight_decay": None}],
)
def test_optimizers(values):
    with pytest.raises(ConfigError, match="AdamW needs"):
        fr.AdamW(**values)


@pytest.mark.parametrize("values", [{"optimizer": "adam"}, {"max_context": 1}])
def test_settings_of_a_model(values):
    with pytest.raises(ConfigError, match=f"Model needs .*{next(iter(values))}"):
        fr.Model(torch.nn.Linear(2, 2), **values)
