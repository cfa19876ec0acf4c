"""The command as its own process: what it imports, its exit codes, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FLOW = """\
import flowrl as fr
from flowrl_operators import advantages, losses


@fr.reward(on_error="raise")
def length(response):
    return float(len(response))


@fr.flow
def tiny(prompts, policy):
    rows = advantages.group_norm(length(fr.rollout(policy, prompts, n=4)))
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2))
"""

HEAVY = ("torch", "transformers", "vllm", "ray")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "flow.py").write_text(FLOW)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(8)))
    return tmp_path


def python(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_importing_the_command_line_is_light(folder: Path) -> None:
    light = (*HEAVY, "pyarrow", "rich")
    done = python(folder, "-c", f"import sys, flowrl.cli; print([m for m in {light} if m in sys.modules])")
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "flow.py"],
        ["show", "flow.py", "--format", "mermaid"],
        ["run", "flow.py", "--engine", "null", "--data", "prompts=prompts.jsonl", "--set", "progress=off"],
        ["ops", "list"],
    ],
)
def test_no_command_needs_torch(folder: Path, arguments: list[str]) -> None:
    code = (
        "import sys; from flowrl.cli import main\n"
        f"code = main({arguments})\n"
        f"print([m for m in {HEAVY} if m in sys.modules]); sys.exit(code)"
    )
    done = python(folder, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n[]\n")


def test_exit_codes_leave_the_process(folder: Path) -> None:
    assert python(folder, "-m", "flowrl.cli", "check", "flow.py").returncode == 0
    assert python(folder, "-m", "flowrl.cli", "check", "flow.py:tny").returncode == 2
    (folder / "flow.py").write_text(FLOW.replace("length(fr", "(fr"))
    assert python(folder, "-m", "flowrl.cli", "check", "flow.py").returncode == 1


def test_a_reader_that_leaves_is_no_error(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl.cli", "check", "flow.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=120) == 0


def test_ctrl_c_ends_with_130_and_a_readable_run(folder: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable, "-m", "flowrl.cli", "run", "flow.py", "--engine", "null", "--data", "prompts=prompts.jsonl",
            "--steps", "1000000", "--set", "progress=plain",
        ],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # whoever runs the tests in the background has SIGINT ignored, and a child would inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3/"):
                break
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, out
    assert "Traceback" not in out
    assert "results in runs/tiny-1" in out
    shown = python(folder, "-m", "flowrl.cli", "runs", "show", "runs/tiny-1")
    assert shown.returncode == 0
    assert shown.stdout.startswith("runs/tiny-1: interrupted, ")
    assert "reward/mean" in shown.stdout
