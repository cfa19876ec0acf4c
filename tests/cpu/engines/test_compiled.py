"""Compiled layers: they are what runs in scoring and training, and change no number."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flowrl as fr
from flowrl.engines import compiled
from flowrl.engines.host_torch import TorchEngine
from flowrl.engines.protocol import SamplingOptions
from flowrl.errors import ConfigError, EngineError
from flowrl.recipe.binding import unread
from flowrl.recipe.settings import Names, Settings, read_settings
from tests.distributed.mesh_cases import ADAPTED, CASES, Case, CountingBackend, model_of, train, uses_of

STEPS, LAYERS = 3, 2
HAS_COMPILER = shutil.which(os.environ.get("CXX", "g++")) is not None
HAS_PEFT = importlib.util.find_spec("peft") is not None


@pytest.fixture
def counted() -> Iterator[CountingBackend]:
    found = CountingBackend.registered()
    found.forget()
    yield found
    found.forget()


def trained(case: Case, **options: Any) -> dict[str, Any]:
    changed = replace(case, model={**case.model, **options})
    return train(TorchEngine().open("policy", model_of(changed), uses_of(changed), seed=0), changed, steps=STEPS)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, array in expected["state"]["weights"].items():
        np.testing.assert_allclose(found["state"]["weights"][name], array, atol=1e-5, rtol=0, err_msg=name)
    for key in ("before", "after"):
        np.testing.assert_allclose(found[key], expected[key], atol=1e-5, rtol=1e-5)
    assert np.abs(found["before"] - found["after"]).max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "gpt2", "checkpointing", "value", "prompts"])
def test_compiled_layers_run_and_change_no_number(counted: CountingBackend, name: str) -> None:
    expected = trained(CASES[name])
    assert counted.calls == 0
    found = trained(CASES[name], compile=counted.name)
    assert_equal(found, expected)
    assert counted.graphs >= 1
    assert counted.calls >= (STEPS + 2) * LAYERS  # each layer in each step, and to score before and after


def test_a_layer_compiled_serves_all(counted: CountingBackend) -> None:
    """However many layers, and whatever the number of tokens: as many graphs."""
    graphs = []
    for layers in (2, 12):
        counted.forget()
        case = CASES["prompts"]
        source = model_of(case).source
        model = replace(
            model_of(case), source=lambda n=layers, build=source: build(num_hidden_layers=n), compile="counted"
        )
        host = TorchEngine().open("policy", model, uses_of(case), seed=0)
        train(host, case, steps=STEPS)
        graphs.append(counted.graphs)
    assert graphs[0] == graphs[1]


def test_aot_eager_changes_no_number() -> None:
    assert_equal(trained(CASES["llama"], compile="aot_eager"), trained(CASES["llama"]))


@pytest.mark.skipif(not HAS_PEFT, reason="adapters come from peft, which is not installed")
def test_adapters(counted: CountingBackend) -> None:
    case = replace(ADAPTED, model={})
    assert_equal(trained(case, compile=counted.name), trained(case))
    assert counted.calls >= (STEPS + 2) * LAYERS


def test_parked_state_comes_back(counted: CountingBackend) -> None:
    assert_equal(trained(CASES["llama"], compile=counted.name, offload="park"), trained(CASES["llama"]))


def test_sampling_is_not_compiled(kit: Any, counted: CountingBackend) -> None:
    requests = kit.requests([[5, 6, 7], [4, 5]], n=3)
    answers = []
    for compile in (False, counted.name):
        host = kit.open(kit.families["llama"](), "generate", "update", "logprobs", compile=compile)
        answers.append([one.ids for one in host.generate(requests, SamplingOptions())])
    assert answers[0] == answers[1]
    assert counted.graphs == counted.calls == 0
    host.logprobs(kit.random_rows(3))
    calls = counted.calls
    assert calls > 0
    host.generate(requests, SamplingOptions())
    assert counted.calls == calls
    host.logprobs(kit.random_rows(3))
    assert counted.calls > calls  # sampling has not put compiled layers away


def test_a_copy_of_a_compiled_module_is_compiled_by_its_own_model_only(kit: Any, counted: CountingBackend) -> None:
    host = kit.open(kit.families["llama"](), "update", "logprobs", compile=counted.name)
    other = TorchEngine().open("ref", replace(host.model(), compile=False), frozenset({"logprobs"}), seed=0)
    other.logprobs(kit.random_rows(3))
    assert counted.calls == 0


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")
def test_inductor_changes_no_number() -> None:
    assert_equal(trained(CASES["llama"], compile=True), trained(CASES["llama"]))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, None, "", ["inductor"], 0.5])
def test_a_value_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"True, False or the name of a torch.compile backend.*found"):
        fr.Model("tiny", compile=value)


def test_an_unknown_backend_is_refused_when_the_model_opens(kit: Any) -> None:
    with pytest.raises(ConfigError, match=r"compile='inductr', and PyTorch has no such backend.*'inductor'"):
        kit.open(kit.families["llama"](), "logprobs", compile="inductr")


def test_a_model_without_layers_is_refused(kit: Any) -> None:
    with pytest.raises(ConfigError, match=r"it has no list of layers.*leave compile out"):
        kit.open(
            kit.bigram(torch.zeros(3, 3)), "logprobs", compile="eager",
            tokenizer=kit.letters(vocab_size=3, eos_ids=frozenset()),
        )  # fmt: skip


def test_without_a_compiler_it_says_so_before_it_runs(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EngineError, match=r"needs a C\+\+ compiler on a CPU, and 'no-such-compiler' is not installed"):
        kit.open(kit.families["llama"](), "logprobs", compile=True, device="cpu")


def test_a_limit_of_ones_own_is_kept(kit: Any) -> None:
    # not by monkeypatch, which would delete the setting afterwards, for all that come later
    with torch._dynamo.config.patch(recompile_limit=500):
        kit.open(kit.families["llama"](), "logprobs", compile="eager")
        assert torch._dynamo.config.recompile_limit == 500
    with torch._dynamo.config.patch(recompile_limit=8):
        kit.open(kit.families["llama"](), "logprobs", compile="eager")
        assert torch._dynamo.config.recompile_limit == compiled.VARIANTS


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("aot_eager", "aot_eager")])
def test_settings_have_it(tmp_path: Path, text: str, value: bool | str) -> None:
    names = Names("flow", {}, ("policy",))
    file = tmp_path / "run.toml"
    file.write_text(f"[models.policy]\ncompile = {text if isinstance(value, bool) else repr(text)}\n")
    assert read_settings(file, names).models["policy"] == {"compile": value}
    file.write_text("[models.policy]\ncompile = 1\n")
    with pytest.raises(ConfigError, match="true or false or a string"):
        read_settings(file, names)


def test_nothing_reads_it_of_a_model_that_only_samples() -> None:
    @fr.flow
    def sampled(prompts, policy):
        return fr.rollout(policy, prompts)

    settings = Settings(models={"policy": {"compile": True}})
    (found,) = unread(sampled.graph(), settings)
    assert found.startswith("[models.policy] compile: nothing trains or scores with 'policy' in this flow")
