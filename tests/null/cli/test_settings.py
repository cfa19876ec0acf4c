"""Settings files: nothing in them is ever ignored, and every refusal says what to write instead."""

import re
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError
from flowrl.graph.schedule import Async
from flowrl.model import AdamW, Model
from flowrl.recipe import Recipe, Settings, load, read_settings, settings_of_arguments
from flowrl.recipe.settings import lines_of
from flowrl.runtime.data import Data

FULL = """\
[run]
steps = 5
seed = 3
engine = "null"

[config]
group_size = 2
beta = 0.01

[models.policy]
source = "org/policy"
precision = "bf16"

[models.policy.optimizer]
lr = 1
betas = [0.9, 0.95]
max_grad_norm = "none"

[models.ref]
source = "org/ref"

[data.prompts]
path = "prompts.jsonl"
batch = 4
shuffle = false

[options]
max_tokens = 16
out = "results"
record = ["rollout"]
schedule = "async(2)"
"""


def configured(folder: Path, text: str) -> Recipe:
    (folder / "run.toml").write_text(text)
    recipe = load("flow.py:grpo")
    return recipe.configured(read_settings("run.toml", recipe.names))


def refused(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        configured(folder, text)
    return str(caught.value)


def test_every_section_arrives(folder: Path) -> None:
    recipe = configured(folder, FULL)
    assert (recipe.steps, recipe.seed, recipe.engine) == (5, 3, "null")
    assert recipe.graph == load("flow.py").flow.graph(group_size=2, beta=0.01)  # type: ignore[union-attr]
    optimizer = AdamW(lr=1.0, betas=(0.9, 0.95), max_grad_norm=None)
    assert recipe.inputs["policy"] == Model("org/policy", precision="bf16", optimizer=optimizer)
    assert recipe.inputs["ref"] == Model("org/ref")
    data = recipe.inputs["prompts"]
    assert isinstance(data, Data)
    assert (len(data), data.batch, data.shuffle, data.name) == (8, 4, False, "prompts")
    assert (recipe.options.max_tokens, recipe.options.record) == (16, ("rollout",))
    assert recipe.options.schedule == Async(2)


def test_paths_are_relative_to_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "weights").mkdir()
    (folder / "run.toml").write_text(FULL.replace("org/policy", "weights").replace("org/ref", "flow.py:small"))
    recipe = load("flow.py:grpo")
    (folder / "other").mkdir()
    monkeypatch.chdir(folder / "other")
    settings = read_settings("../run.toml", recipe.names)
    bound = recipe.configured(settings)
    assert Path(bound.inputs["policy"].source).resolve() == folder / "weights"
    assert bound.inputs["ref"].source.__name__ == "small"
    assert Path(str(bound.options.out)).resolve() == folder / "results"
    assert len(bound.inputs["prompts"]) == 8


# --- misspelt, at the wrong level, of the wrong type ----------------------------------------------------------------------

OPTIMIZER = "[models.policy.optimizer]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"{OPTIMIZER}\nlearning_rte = 1e-5",
            f"run.toml:2: unknown key 'learning_rte' in {OPTIMIZER}; did you mean 'lr'?",
        ),
        (
            f"{OPTIMIZER}\nweight_dcay = 0.1",
            f"run.toml:2: unknown key 'weight_dcay' in {OPTIMIZER}; did you mean 'weight_decay'?",
        ),
        (
            f"{OPTIMIZER}\nweight-decay = 0.1",
            f"run.toml:2: unknown key 'weight-decay' in {OPTIMIZER}; write 'weight_decay', with an underscore",
        ),
        (
            "lr = 1e-5\n[models.policy]\nsource = 'x'",
            f"run.toml:1: key 'lr' is at the top level, where nothing reads it; it belongs in {OPTIMIZER}",
        ),
        ("learning-rate = 1", "'lr' belongs in [models.NAME.optimizer]"),
        ("steps = 3", "key 'steps' is at the top level, where nothing reads it; it belongs in [run]"),
        ("max-tokens = 3", "'max_tokens' belongs in [options]"),
        ("group_size = 3", "key 'group_size' is at the top level, where nothing reads it; it belongs in [config]"),
        ("zzz = 3", "every key is in a section: [run], [config], [models.NAME], [data.NAME], [options]"),
        ("[run]\nlr = 1e-5", "run.toml:2: unknown key 'lr' in [run]; it belongs in [models.NAME.optimizer]"),
        ("[run]\nbatch = 4", "unknown key 'batch' in [run]; it belongs in [options] or [data.NAME]"),
        ("[run]\nstep = 4", "unknown key 'step' in [run]; did you mean 'steps'?"),
        ("[options]\nsteps = 4", "unknown key 'steps' in [options]; it belongs in [run]"),
        ("[options]\nmax_new_tokens = 4", "unknown key 'max_new_tokens' in [options]; did you mean 'max_tokens'?"),
        ("[models.policy]\nlr = 1e-5", f"unknown key 'lr' in [models.policy]; it belongs in {OPTIMIZER}"),
        ("[models]\nsource = 'x'", "[models] holds a section for each model; it belongs in [models.NAME]"),
        ("[models]\npolicy = 'x'", "[models] holds a section for each model; found policy = 'x'"),
        ("[data.prompts]\nfile = 'x'", "unknown key 'file' in [data.prompts]; did you mean 'path'?"),
        (
            "[models.polcy]\nsource = 'x'",
            "[models.polcy]: flow 'grpo' has no input 'polcy', so nothing reads it; did you mean 'policy'?",
        ),
        ("[model.policy]\nsource = 'x'", "unknown section [model]; did you mean [models]?"),
        ("[policy]\nsource = 'x'", "unknown section [policy]; did you mean [models.policy]?"),
        ("[prompts]\npath = 'x'", "unknown section [prompts]; did you mean [data.prompts]?"),
        (
            "[optimizer]\nlr = 1",
            "unknown section [optimizer]; an optimizer belongs to a model: [models.NAME.optimizer]",
        ),
        (
            "[config]\ngroup-size = 2",
            "unknown key 'group-size' in [config]: flow 'grpo' has no such configuration; write 'group_size', with an underscore",
        ),
        ("[config]\ngroup = 2", "flow 'grpo' has no such configuration; did you mean 'group_size'?"),
        ("[config]\nlr = 2", "flow 'grpo' has no such configuration; it belongs in [models.NAME.optimizer]"),
        ("[config]\npolicy = 'x'", "it is an input: [models.policy] or [data.policy]"),
        ("run = 3", "'run' is a section; write [run]; found run = 3"),
        ("[models.policy]\noptimizer = 'adam'", f"'optimizer' in [models.policy] is a section: {OPTIMIZER}"),
        ("[run]\nsteps = 'many'", "run.toml:2: 'steps' in [run] is a whole number; found 'many'"),
        ("[run]\nsteps = 1.5", "'steps' in [run] is a whole number; found 1.5"),
        (f"{OPTIMIZER}\nlr = '1e-5'", f"'lr' in {OPTIMIZER} is a number; found '1e-5'"),
        (f"{OPTIMIZER}\nbetas = [0.9]", f"'betas' in {OPTIMIZER} is a list of 2 numbers; found [0.9]"),
        ("[options]\nrecord = 'rollout'", "'record' in [options] is a list of strings; found 'rollout'"),
        ("[options]\nschedule = 'later'", '\'schedule\' in [options] is "sync", "async" or "async(K)"'),
        ("[config]\ngroup_size = 'two'", "'group_size' in [config] is a number, as its default 4; found 'two'"),
        ("[config]\nnote = 3", "'note' in [config] is a string, as its default 'plain'; found 3"),
    ],
)
def test_what_is_wrong_and_where_it_belongs(folder: Path, text: str, message: str) -> None:
    assert message in refused(folder, text)


def test_every_problem_is_reported_at_once(folder: Path) -> None:
    found = refused(folder, "lr = 1\n[run]\nstep = 2\n[models.policy]\nsource = 3\n[options]\nbatches = 3\n")
    assert found.startswith("3 problems in the settings:\n- ")
    for part in ("run.toml:1: key 'lr'", "run.toml:3: unknown key 'step'", "run.toml:7: unknown key 'batches'"):
        assert part in found


def test_the_page_on_settings_is_true(folder: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "settings.md").read_text()
    example = page.partition("```toml\n")[2].partition("```")[0]
    recipe = configured(folder, example.replace("train.jsonl", "prompts.jsonl"))
    assert (recipe.steps, recipe.inputs["policy"].optimizer.warmup_steps, recipe.inputs["prompts"].batch) == (
        200,
        10,
        64,
    )
    shown = page.partition("error: 3 problems in the settings:")[2].partition("```")[0]
    text = "lr = 1\n\n[models.policy]\n[models.policy.optimizer]\nweight-decay = 0.1\nlearning_rte = 1e-5\n"
    assert refused(folder, text) == f"3 problems in the settings:{shown}".rstrip()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[run]\nsteps = = 3\n", "line 2, column 9"),
        ("[run\n", "line 1, column 5"),
        ('a = "x', "line 1, column 7"),
        ("a = 1\na = 2\n", "line 2, column 6"),
    ],
)
def test_a_syntax_error_has_line_and_column(folder: Path, text: str, place: str) -> None:
    found = refused(folder, text)
    assert found.startswith("run.toml: not valid TOML: ")
    assert place in found


def test_a_missing_file(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no settings file 'rn\.toml'"):
        read_settings("rn.toml", load("flow.py").names)


# --- what nothing reads -----------------------------------------------------------------------------------------------------


def test_a_model_that_is_pruned_may_not_be_set(folder: Path) -> None:
    text = FULL.replace("beta = 0.01", "beta = 0.0")
    found = refused(folder, text)
    assert re.search(r"run\.toml:\d+: \[models\.ref\]: nothing reads 'ref' in flow 'grpo' as it is configured", found)
    assert "leave this out, or configure the flow so that it uses it" in found
    assert configured(folder, FULL).inputs["ref"]


def test_an_optimizer_of_a_model_that_never_trains(folder: Path) -> None:
    found = refused(folder, FULL + "\n[models.ref.optimizer]\nlr = 1e-5\n")
    assert "[models.ref.optimizer]: nothing trains 'ref' in this flow, so nothing reads 'optimizer'" in found


def test_a_sampler_of_a_model_that_never_samples(folder: Path) -> None:
    found = refused(folder, FULL.replace('source = "org/ref"', 'source = "org/ref"\nsampler = "vllm"'))
    assert "[models.ref] sampler: nothing samples from 'ref'" in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[models.prompts]\nsource = 'x'",
            "'prompts' is a table in flow 'grpo'; give it as [data.prompts] or --data prompts=FILE",
        ),
        (
            "[data.policy]\npath = 'prompts.jsonl'",
            "'policy' is a model in flow 'grpo'; give it as [models.policy] or --model policy=NAME",
        ),
        ("[data.prompts]\nbatch = 4", "[data.prompts] needs path: a JSONL or Parquet file"),
        ("[data.prompts]\npath = 'prompt.jsonl'", "[data.prompts]: there is no file 'prompt.jsonl'"),
        (
            "[data.prompts]\npath = 'prompts.jsonl'\nbatch = 0",
            "[data.prompts]: batch is a number of rows, at least 1, or 'all'; found 0",
        ),
        ("[models.policy]\nprecision = 'bf16'", "[models.policy] needs source"),
        ("[models.policy]\nsource = './nowhere'", "[models.policy]: there is nothing at '/"),
        (
            "[models.policy]\nsource = 'x'\nprecision = 'fp8'",
            "[models.policy]: Model precision is one of fp32, bf16; found 'fp8'",
        ),
        (
            "[models.policy]\nsource = 'x'\n[models.policy.optimizer]\nlr = -1.0",
            "[models.policy]: AdamW needs lr > 0; found -1.0",
        ),
    ],
)
def test_values_that_make_no_sense_name_their_section(folder: Path, text: str, message: str) -> None:
    assert message in refused(folder, text)


def test_a_graph_takes_no_configuration(folder: Path) -> None:
    (folder / "graph.txt").write_text(str(load("flow.py").graph))
    (folder / "run.toml").write_text("[config]\ngroup_size = 2\n")
    with pytest.raises(ConfigError, match=r"'group_size' in \[config\]: flow 'grpo' is already configured"):
        read_settings("run.toml", load("graph.txt").names)


# --- the command line over the file ---------------------------------------------------------------------------------------


def arguments(**said: Any) -> Settings:
    return settings_of_arguments(load("flow.py").names, **said)


def test_the_command_line_wins_key_by_key(folder: Path) -> None:
    recipe = load("flow.py:grpo")
    (folder / "run.toml").write_text(FULL)
    said = arguments(
        run={"steps": 9, "seed": None},
        config=["group_size=8"],
        models=["policy=org/other"],
        options=["max_tokens=99", "record=*"],
    )
    bound = recipe.configured(said.over(read_settings("run.toml", recipe.names)))
    assert (bound.steps, bound.seed) == (9, 3)
    assert bound.graph["rollout"]["n"] == 8
    assert bound.inputs["policy"].source == "org/other"
    assert bound.inputs["policy"].optimizer.lr == 1.0  # the file's
    assert bound.inputs["policy"].precision == "bf16"
    assert (bound.options.max_tokens, bound.options.record) == (99, ("*",))
    assert bound.inputs["prompts"].batch == 4


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"config": ["group_sze=4"]},
            "unknown key 'group_sze' of --config: flow 'grpo' has no such configuration; did you mean 'group_size'?",
        ),
        ({"config": ["group_size"]}, "--config takes NAME=VALUE; found 'group_size'"),
        ({"config": ["=3"]}, "--config takes NAME=VALUE; found '=3'"),
        ({"config": ["group_size=two"]}, "'group_size' of --config is a number, as its default 4; found 'two'"),
        ({"options": ["batches=3"]}, "--set batches: there is no option 'batches'; did you mean 'batch'?"),
        ({"options": ["steps=3"]}, "--set steps: there is no option 'steps'; --steps is an option of its own"),
        ({"options": ["batch=few"]}, "--set batch is a whole number; found 'few'"),
        ({"models": ["polcy=x"]}, "--model polcy: flow 'grpo' has no input 'polcy'; did you mean 'policy'?"),
        ({"data": ["prompt=x"]}, "--data prompt: flow 'grpo' has no input 'prompt'; did you mean 'prompts'?"),
    ],
)
def test_arguments_are_checked_like_a_file(folder: Path, said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arguments(**said)
    assert str(caught.value) == message


def test_arguments_of_an_input_that_nothing_reads(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--model ref: nothing reads 'ref' in flow 'grpo'"):
        load("flow.py").configured(arguments(models=["ref=x"], config=["beta=0"]))
    with pytest.raises(ConfigError, match="--data prompts: there is no file 'nowhere.jsonl'"):
        load("flow.py").configured(arguments(data=["prompts=nowhere.jsonl"]))


def test_a_string_configuration_is_taken_as_typed(folder: Path) -> None:
    assert arguments(config=["note=12"]).config == {"note": "12"}
    assert arguments(config=["note='12'"]).config == {"note": "12"}
    assert arguments(config=["group_size=12", "beta=1e-2"]).config == {"group_size": 12, "beta": 0.01}


# --- recipes ----------------------------------------------------------------------------------------------------------------


def test_settings_over_a_recipe_keep_what_they_do_not_say(folder: Path) -> None:
    recipe = load("flow.py:small")
    recipe = recipe.replace(inputs={**recipe.inputs, "policy": Model("own", optimizer=AdamW(lr=0.5, eps=1e-3))})
    said = read_settings_text(folder, recipe, "[models.policy.optimizer]\nlr = 0.1\n[data.prompts]\nbatch = 2\n")
    bound = recipe.configured(said)
    assert bound.inputs["policy"] == Model("own", optimizer=AdamW(lr=0.1, eps=1e-3))
    assert (bound.inputs["prompts"].batch, len(bound.inputs["prompts"])) == (2, 8)
    assert bound.steps == 2


def read_settings_text(folder: Path, recipe: Recipe, text: str) -> Settings:
    (folder / "over.toml").write_text(text)
    return read_settings(folder / "over.toml", recipe.names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": -1}, "whole number as steps; found -1"),
        ({"steps": True}, "whole number as steps; found True"),
        ({"seed": 0.5}, "whole number as seed; found 0.5"),
        ({"flow": len}, "needs a flow .* or a graph; found builtin_function_or_method"),
        ({"options": {}}, "a Recipe's options are an Options; found dict"),
    ],
)
def test_a_recipe_refuses_what_makes_no_sense(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("flow.py:small").replace(**changes)


def test_a_recipe_does_not_change_with_the_dict_it_was_given(folder: Path) -> None:
    given: dict[str, Any] = {"policy": "null"}
    recipe = Recipe(load("flow.py").flow, given)
    given["ref"] = "null"
    assert recipe.inputs == {"policy": "null"}


def test_lines_of_keys_and_sections() -> None:
    text = "a = 1\n\n[b.c] # note\nd-e = 2\nf.g = 3\n[[h]]\n"
    assert lines_of(text) == {
        ("a",): 1,
        ("b",): 3,
        ("b", "c"): 3,
        ("b", "c", "d-e"): 4,
        ("b", "c", "f"): 5,
        ("b", "c", "f", "g"): 5,
    }
