"""Packs on the path: found without being imported, read on demand, never fatal when broken."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flowrl as fr
from flowrl.errors import PackError
from flowrl.graph import packs
from flowrl.graph.checks import find_problems
from tests.null.graph import pieces as p

Make = Callable[..., Path]

ADVANTAGES = """
import flowrl as fr
from flowrl.graph.operators import operator as _operator

@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality=fr.group("prompt_id"))
def centred(reward: fr.SAMPLE.f32):
    return reward - reward.mean()

@fr.operator(writes={"bonus": fr.SAMPLE.f32})
def length(response_ids: fr.TOKEN.i32):
    return response_ids.lengths

@fr.operator(writes={"hidden": fr.SAMPLE.f32})
def _private(reward: fr.SAMPLE.f32):
    return reward
"""

REWARDS = """
import flowrl as fr
from {module}.advantages import centred

@fr.reward
def length(response):
    return len(response)
"""

LOSSES = """
import torch
import flowrl as fr
"""

LIGHT_LOSSES = """
import flowrl as fr

@fr.loss
def plain(logprobs):
    return -logprobs
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Writes distributions with a pack, as pip would install them, and puts them on the path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)

    def make_pack(distribution: str, pack: str, module: str, files: dict[str, str], version: str = "1.2") -> Path:
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[flowrl.operators]\n{pack} = {module}\n")
        (site / module).mkdir(exist_ok=True)
        for name, text in {"__init__.py": "", **files}.items():
            path = site / module / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("{module}", module))
        return site / module

    yield make_pack
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]


def test_packs_are_listed_without_being_imported(make: Make) -> None:
    make("flowrl-fake", "fake", "fake_listed", {"__init__.py": "raise SystemExit('imported')"})
    listed = {pack.name: pack for pack in packs.packs()}
    assert listed["fake"] == packs.Pack("fake", "fake_listed", "flowrl-fake", "1.2")
    assert str(listed["fake"]) == "fake (flowrl-fake 1.2, module fake_listed)"
    assert "fake_listed" not in sys.modules
    assert [pack.name for pack in packs.packs()] == sorted(listed)


def test_a_name_claimed_twice_names_both(make: Make) -> None:
    make("flowrl-one", "same", "fake_one", {})
    make("flowrl-two", "same", "fake_two", {})
    with pytest.raises(
        PackError, match="call their pack 'same': flowrl-(one|two) 1.2 and flowrl-(one|two) 1.2; uninstall"
    ):
        packs.packs()
    with pytest.raises(PackError, match="'same'"):
        packs.find("same.x")


def test_contents(make: Make) -> None:
    make(
        "flowrl-fake",
        "fake",
        "fake_contents",
        {
            "advantages.py": ADVANTAGES,
            "rewards.py": REWARDS,
            "losses.py": LIGHT_LOSSES,
            "_hidden.py": "raise ValueError",
        },
    )
    found = packs.contents("fake")
    assert sorted(found.operators) == ["advantages.centred", "advantages.length", "rewards.length"]
    assert sorted(found.losses) == ["losses.plain"] and found.failures == {}
    assert isinstance(found.operators["advantages.centred"], fr.Operator)


def test_sub_packages_are_read(make: Make) -> None:
    make("flowrl-fake", "fake", "fake_deep", {"extra/__init__.py": "", "extra/more.py": ADVANTAGES})
    assert sorted(packs.contents("fake").operators) == ["extra.more.centred", "extra.more.length"]
    assert packs.find("fake.centred") is packs.find("fake.extra.more.centred")


def test_a_module_that_fails_is_listed_with_the_reason(make: Make) -> None:
    make("flowrl-fake", "fake", "fake_broken", {"advantages.py": ADVANTAGES, "bad.py": "1 / 0"})
    found = packs.contents("fake")
    assert sorted(found.operators) == ["advantages.centred", "advantages.length"]
    assert found.failures == {"fake_broken.bad": "ZeroDivisionError: division by zero"}
    assert packs.find("fake.centred").name == "fake_broken.advantages:centred"
    with pytest.raises(
        PackError, match="no 'centered'; did you mean 'centred'.*'fake_broken.bad' cannot be imported: Zero"
    ):
        packs.find("fake.centered")


def test_a_pack_that_fails_is_listed_with_the_reason(make: Make) -> None:
    make("flowrl-fake", "fake", "fake_dead", {"__init__.py": "import no_such_module_anywhere"})
    assert "fake" in [pack.name for pack in packs.packs()]
    assert list(packs.contents("fake").failures) == ["fake_dead"]
    with pytest.raises(
        PackError, match="pack fake .* cannot be imported: ModuleNotFoundError: No module named 'no_such"
    ):
        packs.load("fake")


def test_find(make: Make) -> None:
    make(
        "flowrl-fake",
        "fake",
        "fake_find",
        {"advantages.py": ADVANTAGES, "rewards.py": REWARDS, "losses.py": LIGHT_LOSSES},
    )
    assert packs.find("fake.centred").__name__ == "centred"
    assert packs.find("fake.plain").name == "fake_find.losses:plain"
    assert packs.load("fake").__name__ == "fake_find"
    with pytest.raises(PackError, match="'fake.length' may be fake.advantages.length or fake.rewards.length"):
        packs.find("fake.length")
    assert packs.find("fake.rewards.length").name == "fake_find.rewards:length"
    with pytest.raises(PackError, match="no pack 'fak' is installed; did you mean 'fake'"):
        packs.find("fak.centred")
    with pytest.raises(PackError, match="a name in a pack is 'pack.operator'"):
        packs.find("centred")


def test_writers_never_import_losses(make: Make) -> None:
    make("flowrl-fake", "fake", "fake_writers", {"advantages.py": ADVANTAGES, "losses.py": LOSSES})
    assert "fake.advantages.centred" in packs.writers("advantage")
    assert packs.writers("bonus") == ("fake.advantages.length",)
    assert packs.writers("hidden") == () == packs.writers("no_such_column")
    assert "fake_writers.losses" not in sys.modules
    # torch is refused in this folder: the reason is listed and the operators are there
    assert "fake_writers.losses" in packs.contents("fake").failures


def test_a_missing_column_names_the_operator_of_a_pack(make: Make) -> None:
    make("flowrl-fake", "fake", "fake_hint", {"advantages.py": ADVANTAGES})

    @fr.operator(writes={"total": fr.SAMPLE.f32})
    def total(bonus: fr.SAMPLE.f32):
        return bonus

    @fr.flow
    def flow(prompts, policy):
        return total(fr.rollout(policy, prompts))

    (problem,) = find_problems(flow.graph())
    assert problem.code == "FR-C01" and "advantages.length(rows) (of fake.advantages.length)" in problem.fix


def test_a_hint_does_without_packs_that_clash(make: Make) -> None:
    make("flowrl-one", "same", "fake_clash_one", {})
    make("flowrl-two", "same", "fake_clash_two", {})

    @fr.flow
    def flow(prompts, policy):
        return p.group_norm(fr.rollout(policy, prompts, n=4))

    assert [x.code for x in find_problems(flow.graph())] == ["FR-C01"]


def test_the_first_pack_is_found() -> None:
    assert packs.pack_named("core").module == "flowrl_operators"
    assert "core.advantages.group_norm" in packs.writers("advantage")
    assert packs.find("core.group_norm").__name__ == "group_norm"


def test_a_pack_says_how_it_is_tried() -> None:
    own = packs.own_cases("flowrl_operators")
    assert "losses.dppo" in own
    assert packs.own_cases("flowrl_operators.filters") == {}  # a module, no package
    assert not any(name.startswith("conformance") for name in packs.contents("core").everything)
