"""A pack made by `flowrl new pack`: it installs beside ours, is listed, is used by a flow, and passes its own tests."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

FLOW = """\
import flowrl as fr
from flowrl_their_rewards import advantages, losses
from flowrl_operators import losses as ours


@fr.reward
def length(response):
    return float(len(response))


@fr.flow
def flow(prompts, policy):
    rows = advantages.centred(length(fr.rollout(policy, prompts, n=4)), scale=2.0)
    return fr.update(policy, rows, loss=losses.clipped(0.1) + 0.01 * ours.entropy_bonus())
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pack's sources, and `site` where it is installed from a wheel built of them."""
    folder = tmp_path_factory.mktemp("place")
    run(folder, "-m", "flowrl.cli", "new", "pack", "their-rewards")
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", "site")
    run(folder, *pip, "./flowrl-their-rewards")
    return folder


def run(folder: Path, *arguments: str, code: int = 0) -> str:
    path = os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == code, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_it_installs_without_a_network(place: Path) -> None:
    """As its README says, into an environment that has what builds it."""
    command = "pip install --no-build-isolation --no-deps -e ."
    assert f"\n{command}\n" in (place / "flowrl-their-rewards" / "README.md").read_text()
    run(place, "-m", "venv", "env")
    (packages,) = (place / "env").glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))
    python = str(place / "env" / "bin" / "python")
    env = {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, "PIP_NO_INDEX": "1"}
    listed = (
        "import flowrl_their_rewards, importlib.metadata as m; print(m.entry_points(group='flowrl.operators').names)"
    )
    for arguments in (["-m", *command.split(), "--quiet"], ["-c", listed]):
        folder = place / "flowrl-their-rewards" if "-m" in arguments else place
        done = subprocess.run([python, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    assert "their-rewards" in done.stdout


def test_it_is_listed_beside_ours(place: Path) -> None:
    out = run(place, "-m", "flowrl.cli", "ops", "list", "--pack", "their-rewards")
    assert "their-rewards (flowrl-their-rewards 0.1.0, module flowrl_their_rewards)" in out
    assert "advantages.centred" in out and "losses.clipped" in out
    assert "\ntheir-rewards (" in run(place, "-m", "flowrl.cli", "ops", "list")
    assert "scale = 1.0" in run(place, "-m", "flowrl.cli", "ops", "show", "their-rewards.centred")


def test_a_flow_uses_it(place: Path) -> None:
    (place / "flow.py").write_text(FLOW)
    (place / "prompts.jsonl").write_text("".join(f'{{"prompt": "{i}+1="}}\n' for i in range(8)))
    assert run(place, "-m", "flowrl.cli", "check", "flow.py").endswith("no problems\n")
    out = run(
        place, "-m", "flowrl.cli", "run", "flow.py", "--engine", "null", "--data", "prompts=prompts.jsonl",
        "--steps", "2", "--set", "progress=off",
    )  # fmt: skip
    assert "flow: finished 2 steps" in out


def test_its_own_tests_pass(place: Path) -> None:
    out = run(place, "-m", "pytest", "-q", "-p", "no:cacheprovider", "flowrl-their-rewards")
    assert " passed" in out and "failed" not in out


def test_its_operators_pass_from_the_command_line(place: Path) -> None:
    out = run(place, "-m", "flowrl.cli", "ops", "test", "their-rewards")
    assert [line.split()[1] for line in out.splitlines()[2:]] == ["ok", "ok"]


def test_ruff_has_nothing_to_say(place: Path) -> None:
    run(place, "-m", "ruff", "check", "--no-cache", "flowrl-their-rewards")
    run(place, "-m", "ruff", "format", "--no-cache", "--check", "flowrl-their-rewards")


def test_the_wheel_has_the_pack_and_nothing_else(place: Path) -> None:
    files = {path.relative_to(place / "site").parts[0] for path in (place / "site").rglob("*") if path.is_file()}
    assert files == {"flowrl_their_rewards", "flowrl_their_rewards-0.1.0.dist-info"}
