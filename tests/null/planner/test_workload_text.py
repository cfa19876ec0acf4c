"""Workloads as people write them."""

import pytest

from flowrl.errors import ConfigError
from flowrl.planner.workload import Lengths, Workload
from flowrl.planner.workload_text import Parts, parse_lengths, read_parts

WHAT = "--response-tokens"


def test_forms_of_lengths():
    assert parse_lengths("fixed:1024", WHAT) == Lengths.fixed(1024)
    assert parse_lengths("lognormal:1024:0.6:4096", WHAT) == Lengths.lognormal(1024, 0.6, cap=4096)
    assert parse_lengths("1024*1,512*3", WHAT) == Lengths((512, 1024), (3.0, 1.0))
    assert parse_lengths(" 512 ", "--prompt-tokens", is_fixed=True) == Lengths.fixed(512)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1024", "a mean alone says little of sampling: fixed:1024 .* lognormal:1024:0.6:4096"),
        ("mean:1024", "found 'mean:1024'; there are 'fixed', 'lognormal'"),
        ("lognorml:9:1:20", "did you mean 'lognormal'"),
        ("fixed:many", "found 'fixed:many'"),
        ("lognormal:1024", "lognormal:MEAN:SIGMA:CAP"),
        ("lognormal:1024:0.6:512", "--response-tokens lognormal:1024:0.6:512: lognormal needs 1 <= mean <= cap"),
        ("512*0", "512.0: Lengths needs finite weights"),
        ("", "found ''"),
    ],
)
def test_what_is_no_distribution(text, message):
    with pytest.raises(
        ConfigError, match=message.replace("*0", r"\*0").replace("512.0", r"512\*0").replace("(", r"\(")
    ):
        parse_lengths(text, WHAT)


def test_a_file(tmp_path):
    path = tmp_path / "work.toml"
    path.write_text(
        "prompts = 128\ngroup_size = 8\nprompt_tokens = 512\nrounds = 2\n"
        "response_tokens = { tokens = [512, 4096], weights = [9, 1] }\n"
    )
    expected = Workload(128, Lengths.fixed(512), Lengths((512, 4096), (9.0, 1.0)), group_size=8, rounds=2.0)
    assert read_parts(path).whole() == expected
    assert Parts.of(expected).whole() == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt = 3", "work.toml: a workload has no 'prompt'; did you mean 'prompts'"),
        ("prompts = 'x'", "work.toml: 'prompts' is a whole number; found 'x'"),
        ("prompts = 1.5", "'prompts' is a whole number; found 1.5"),
        ("rounds = true", "'rounds' is a number; found True"),
        ("response_tokens = 1024", "work.toml: 'response_tokens' takes a distribution"),
        ("response_tokens = { mean = 4 }", "'response_tokens' is .* a table with tokens and weights"),
        ("response_tokens = { tokens = [4, 2], weights = [1, 1] }", "'response_tokens': Lengths needs rising"),
        ("prompts =", "work.toml is not a TOML file"),
    ],
)
def test_a_wrong_file(tmp_path, text, message):
    path = tmp_path / "work.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_parts(path)


def test_parts_make_a_whole():
    base = Parts(prompts=64, prompt_lengths=Lengths.fixed(512), rounds=2.0)
    said = Parts(prompts=128, response_lengths=Lengths.fixed(1024))
    assert said.over(base).whole() == Workload(128, Lengths.fixed(512), Lengths.fixed(1024), None, 2.0)
    with pytest.raises(ConfigError, match=r"--response-tokens lognormal:MEAN:SIGMA:CAP \(or fixed:N\); or --workload"):
        base.whole()
    with pytest.raises(ConfigError, match="--prompts N .*--prompt-tokens .*--response-tokens"):
        Parts().whole()
