"""The view of a run: says what matters, escapes what a model wrote, and never ends the run it shows."""

import io
import itertools
import sys
from typing import Any

import pytest

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl.runtime.progress import LiveProgress, PlainProgress, open_progress, shown, sparkline

METRICS = {
    "reward/mean": 0.25, "reward/std": 0.5, "policy_update/loss": 1.0, "update/kl": float("nan"), "tokens_per_s": 900.0,
    "response_length/mean": 12.0, "time/rollout_s": 0.1, "time/update_s": 0.3, "time/step_s": 0.4, "update/clip_fraction": 0.1,
}  # fmt: skip


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads this")

    def isatty(self) -> bool:
        return True


def test_plain_is_a_line_per_step() -> None:
    file = io.StringIO()
    with open_progress("plain", name="grpo", steps=2, file=file) as progress:
        progress.phase("rollout")
        progress.step(0, METRICS)
        progress.step(1, {}, notes=["3 of 4 groups"])
    assert file.getvalue().splitlines() == [
        "grpo: 2 steps",
        "step 1/2  reward 0.250  ± 0.500  loss 1.0000  length 12.0  kl nan  clip 0.100  tok/s 900  s 0.40",
        "step 2/2",
        "  3 of 4 groups",
    ]


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_what_must_be_known_of_the_numbers_stands_with_the_name(mode: str) -> None:
    file = Screen()
    with open_progress(mode, name="grpo", steps=1, file=file, remark="all of it is made up") as progress:
        progress.step(0, METRICS)
    assert "all of it is made up" in file.getvalue()


@pytest.mark.parametrize(("engine", "is_said"), [("null", True), ("torch", False)])
def test_a_run_says_that_the_null_engine_makes_its_numbers_up(
    engine: str, is_said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flowrl.engines import null
    from tests.null.graph.flows import grpo

    monkeypatch.setattr("flowrl.runtime.local.open_engine", lambda name: null.NullEngine())
    prompts = [{"prompt": "1+1=", "answer": "2"}] * 4
    fr.run_local(
        grpo, steps=1, batch=2, engine=engine, out=None, progress="plain", prompts=prompts, policy="null", ref="null"
    )
    head = capsys.readouterr().out.splitlines()[0]
    assert ("(null engine: no model ran, and its numbers, the loss too, are made up)" in head) is is_said


def test_auto_is_live_only_in_a_terminal_and_not_under_a_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(open_progress("auto", name="x", steps=1, file=io.StringIO())) is PlainProgress
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    assert type(open_progress(True, name="x", steps=1, file=Screen())) is LiveProgress
    monkeypatch.setattr(sys, "gettrace", lambda: print)
    assert type(open_progress("auto", name="x", steps=1, file=Screen())) is PlainProgress
    file = Screen()
    with open_progress(False, name="x", steps=1, file=file) as progress:
        progress.step(0, METRICS)
    assert file.getvalue() == ""
    with pytest.raises(ConfigError, match="did you mean 'plain'"):
        open_progress("plan", name="x", steps=1)


def test_the_panel_shows_the_step_and_what_a_model_wrote_as_it_is() -> None:
    file = Screen()
    sample = {"prompt": "1+1=[bold]", "response": "[/red] two\x1b[31m", "reward": 1.0, "answer": "2"}
    with open_progress("live", name="grpo [x]", steps=2, file=file) as progress:
        progress.step(0, METRICS, sample=sample)
        progress.step(1, {**METRICS, "reward/mean": 0.75}, sample=sample, notes=["short batch"])
    last = file.getvalue().rpartition("╭")[2]
    for text in ("grpo [x]", "step 2/2", "0.750", "900", "1+1=[bold]", "[/red] two", "short batch", "answer: 2", "▁█"):
        assert text in last
    assert "\x1b[31m" not in last  # a response does not colour the terminal
    assert file.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back
    assert progress._failure == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_terminal_is_left_as_it_was_however_the_run_ends(error: type[BaseException]) -> None:
    file = Screen()
    before = (sys.stdout, sys.stderr)
    with pytest.raises(error):
        with open_progress("live", name="x", steps=2, file=file) as progress:
            progress.step(0, METRICS)
            raise error
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") >= 1
    assert (sys.stdout, sys.stderr) == before
    progress.close()  # twice does no harm


def ticking(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let time pass by each look at the clock, outside of any debugger."""
    clock = itertools.count()
    monkeypatch.setattr("flowrl.runtime.progress.time.perf_counter", lambda: next(clock) * seconds)
    monkeypatch.setattr(sys, "gettrace", lambda: None)


def test_drawing_is_bounded_however_quick_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    progress = LiveProgress("x", 5000, None, Screen())
    monkeypatch.setattr(progress, "_panel", lambda: drawn.append(1) or "")
    ticking(monkeypatch, 0.001)
    with progress:
        for step in range(1000):  # a millisecond each
            progress.step(step, METRICS)
    assert 5 <= len(drawn) <= 8


def test_what_an_operator_prints_stands_above_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Screen()
    monkeypatch.setattr(sys, "stdout", file)
    ticking(monkeypatch, 1.0)
    with open_progress("live", name="x", steps=3, file=file) as progress:
        progress.step(0, METRICS)
        print("from an operator", end="")
        before = file.getvalue()
        assert before.endswith("from an operator")
        up, erase = "\x1b[1A", "\x1b[2K"  # the panel was taken away first
        assert before.removesuffix("from an operator").endswith(up + erase)
        assert sys.stdout.isatty()
        progress.step(1, METRICS)
        assert file.getvalue()[len(before) :].startswith("\n")  # a torn line is not drawn over
        sys.stdout.writelines(["one\n", "two\n"])
    assert sys.stdout is file
    assert "one\ntwo\n" in file.getvalue()
    assert "step 2/3" in file.getvalue().rpartition("╭")[2]


def test_a_debugger_has_the_terminal_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Screen()
    monkeypatch.setattr(sys, "stdout", file)
    ticking(monkeypatch, 1.0)
    with open_progress("live", name="x", steps=3, file=file) as progress:
        progress.step(0, METRICS)
        monkeypatch.setattr(sys, "gettrace", lambda: print)
        print("(Pdb) ", end="")
        progress.step(1, METRICS)
        assert file.getvalue().endswith("(Pdb) ")
        monkeypatch.setattr(sys, "gettrace", lambda: None)
        progress.step(2, METRICS)
        assert "step 3/3" in file.getvalue().rpartition("(Pdb) ")[2]


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_a_closed_terminal_does_not_end_the_run(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = (sys.stdout, sys.stderr)
    with open_progress(mode, name="x", steps=2, file=Broken()) as progress:
        progress.step(0, METRICS)
        progress.step(1, METRICS)
    assert (sys.stdout, sys.stderr) == before
    assert "progress was turned off: BrokenPipeError" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["live", "plain"])
@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"reward/mean": float("nan")},
        {"reward/mean": "text"},
        {"reward/mean": None, "time/x_s": 1},
        {"reward/mean": float("inf")},
    ],
)
def test_strange_metrics_do_not_end_the_run(mode: str, metrics: dict[str, Any]) -> None:
    with open_progress(mode, name="x", steps=0, file=Screen()) as progress:
        for step in range(3):
            progress.step(step, metrics, sample={"response": None, "reward": [1]})


def test_narrow_encodings_are_no_error() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    with open_progress("plain", name="x", steps=1, file=file) as progress:
        progress.step(0, METRICS)
    assert b"reward 0.250  ? 0.500" in raw.getvalue()
    assert progress._failure == ""


def test_sparkline_and_missing_numbers() -> None:
    assert sparkline([0, 1, 0.5]) == "▁█▅"
    assert sparkline([1, 1]) == "▁▁"
    assert sparkline([float("nan"), 1, 2]) == " ▁█"
    assert sparkline([]) == sparkline([float("nan")]) == ""
    assert shown({"x": 1.0}) == []
