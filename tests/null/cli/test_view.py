"""`flowrl view`, the pictures of `flowrl plan`, and what `flowrl runs show` says of a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flowrl as fr
from examples.rloo import rloo
from flowrl.cli import view
from flowrl.runtime.rundir import RunDir
from tests.null.cli.conftest import Cli
from tests.null.runtime.plans import calls, compute, plan_of

SUMS = [{"prompt": "1+1=", "answer": "2"}]


def run(folder: Path, **options: object) -> Path:
    given = {
        "steps": 2,
        "engine": "null",
        "prompts": SUMS,
        "policy": "null",
        "out": str(folder / "runs"),
        "progress": "off",
    }
    path = fr.run_local(rloo, **(given | options)).path
    assert path is not None
    return path


@pytest.fixture
def plan_file(folder: Path) -> Path:
    plan = plan_of(rloo, [compute(name) for name in calls(rloo.graph())])
    plan.to_json(folder / "plan.json")
    return folder / "plan.json"


def test_a_run_is_written_into_its_folder(cli: Cli, folder: Path) -> None:
    path = run(folder, record=("*",))
    found = cli("view", str(path))
    assert found.code == 0 and found.out.startswith(f"written to {path / 'view.html'}")
    page = (path / "view.html").read_text(encoding="utf-8")
    assert f"<h1>Run {path.name}</h1>" in page and 'id="block-tokens-0"' in page
    assert not list(path.glob(".*")), "nothing is left aside"


def test_another_file_and_less_of_it(cli: Cli, folder: Path) -> None:
    path = run(folder, record=("*",), steps=8)
    assert cli("view", str(path), "--out", "out.html", "--most-mb", "0.001").code == 0
    assert "8 steps were recorded" in (folder / "out.html").read_text(encoding="utf-8")


def test_a_plan(cli: Cli, folder: Path, plan_file: Path) -> None:
    found = cli("view", str(plan_file))
    assert found.code == 0
    page = (folder / "plan.html").read_text(encoding="utf-8")
    assert "Plan rloo" in page
    assert "flowrl plan FILE --html PAGE" in page, "what this command cannot draw, another one can"


def test_runs_over_each_other(cli: Cli, folder: Path) -> None:
    one, other = run(folder), run(folder, seed=1)
    found = cli("view", "--compare", str(one), str(other))
    assert found.code == 0 and "compare.html" in found.out
    assert "rloo-1 · rloo-2" in (folder / "compare.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "takes the folder of a run"),
        (("nowhere",), "not the folder of a run"),
        (("RUN", "--compare", "RUN", "RUN"), "--compare takes the runs itself"),
        (("--compare", "RUN"), "at least two"),
        (("--compare", "RUN", "RUN"), "twice"),
        (("RUN", "--most-mb", "0"), "above 0"),
        (("RUN", "--out", "nowhere/x.html"), "there is no folder"),
        (("RUN", "--serve", "--out", "x.html"), "writes no file"),
        (("PLAN", "--serve"), "does not change"),
        (("--compare", "RUN", "RUN", "--serve"), "writes a page"),
        (("RUN", "--sreve"), "did you mean '--serve'"),
        (("PLAN", "--tokenizer", "x"), "--tokenizer is for the tokens of a run"),
    ],
)
def test_wrong_usage_is_said(cli: Cli, folder: Path, plan_file: Path, args: tuple[str, ...], said: str) -> None:
    path = run(folder)
    found = cli("view", *({"RUN": str(path), "PLAN": str(plan_file)}.get(arg, arg) for arg in args))
    assert found.code != 0 and said in found.err
    assert sorted(one.name for one in folder.glob("*.html")) == []


def test_serving_ends_with_an_interrupt(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrl.viz.run import serve

    made = []

    class Fake:
        url = "http://127.0.0.1:1/token/"

        def __init__(self, of: RunDir, pieces: object, *, port: int) -> None:
            made.append((of.path, port))

        def __enter__(self) -> Fake:
            return self

        def __exit__(self, *_: object) -> None:
            made.append("closed")

        def serve(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(serve, "LiveView", Fake)
    path = run(folder)
    found = cli("view", "--serve", str(path), "--port", "8123")
    assert found.code == 0 and Fake.url in found.out
    assert made == [(path, 8123), "closed"]


def test_a_run_of_the_null_engine_has_bytes_for_tokens(folder: Path) -> None:
    pieces = view.pieces_of(RunDir.open(run(folder)))
    assert pieces is not None and pieces([72, 256, -1]) == [b"H", None, None]


def test_pictures_of_a_plan_are_written(cli: Cli, folder: Path) -> None:
    args = ("plan", "flow.py", "--cluster", "8xA100-80G", "--model", "policy=Qwen/Qwen2.5-0.5B", "--prompts", "16",
            "--prompt-tokens", "64", "--response-tokens", "fixed:64")  # fmt: skip
    found = cli(*args, "--html", "p.html", "--trace", "p.json", "--svg", "p.svg")
    assert found.code == 0, found.err
    assert "written to p.html, p.json, p.svg" in found.out
    assert (folder / "p.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads((folder / "p.json").read_text(encoding="utf-8"))["traceEvents"]
    assert (folder / "p.svg").read_text(encoding="utf-8").startswith("<svg")
    assert cli(*args, "--html", "nowhere/p.html").code == 2


def test_runs_show_has_the_bars_of_the_plan(cli: Cli, folder: Path) -> None:
    plan = plan_of(rloo, [compute(name) for name in calls(rloo.graph())])
    path = run(folder, plan=plan, steps=3)
    out = cli("runs", "show", str(path)).out
    assert "reward/mean" in out and "predicted" in out and "device 0" in out
    assert "device 0" not in cli("runs", "show", str(run(folder))).out
