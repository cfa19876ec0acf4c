"""Trackers: they are told every step, and nothing that goes wrong in them reaches the run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

import flowrl as fr
from examples.rloo import rloo
from flowrl.errors import ConfigError
from flowrl.runtime.options import Options
from flowrl.runtime.rundir import RunDir
from flowrl.runtime.trackers import TRACKERS, Session, plain
from flowrl.runtime.trackers.following import Follower, Trackers

HERE = __name__
SUMS = [{"prompt": "1+1=", "answer": "2"}]


class Kept:
    """Keeps what it is told."""

    opened: ClassVar[list[Kept]] = []

    def __init__(self, session: Session) -> None:
        self.session = session
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.status = ""
        Kept.opened.append(self)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append((step, dict(metrics)))

    def close(self, status: str) -> None:
        self.status = status


class Broken(Kept):
    """Fails from the second step on, and at its end."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step:
            raise ConnectionError("the server has gone")
        super().log(step, metrics)

    def close(self, status: str) -> None:
        super().close(status)
        raise ConnectionError("it is still gone")


def open_kept(session: Session) -> Kept:
    return Kept(session)


def open_broken(session: Session) -> Broken:
    return Broken(session)


def open_never(session: Session) -> Kept:
    raise TimeoutError("nobody answers")


def open_unfit(session: Session) -> Kept:
    raise ConfigError("it needs a folder")


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This file under a name that can be imported, whatever the test runner calls it."""
    import sys

    monkeypatch.setitem(sys.modules, "tracking_of_ours", sys.modules[HERE])
    Kept.opened.clear()
    yield


def run(tmp_path: Path, *trackers: str, steps: int = 3) -> fr.Run:
    names = tuple(f"tracking_of_ours:{name}" for name in trackers)
    return fr.run_local(rloo, steps=steps, trackers=names, engine="null", prompts=SUMS, policy="null",
                        out=str(tmp_path), progress="off")  # fmt: skip


def test_it_is_told_every_step_and_the_end(tmp_path: Path) -> None:
    done = run(tmp_path, "open_kept")
    (kept,) = Kept.opened
    assert [step for step, _ in kept.steps] == [0, 1, 2]
    assert [numbers for _, numbers in kept.steps] == done.metrics
    assert kept.status == "finished"
    assert (kept.session.name, kept.session.flow, kept.session.path) == (done.path.name, "rloo", done.path)
    assert kept.session.info["options"]["trackers"] == ("tracking_of_ours:open_kept",)


def test_one_that_fails_is_noted_once_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(tmp_path, "open_broken", "open_kept", steps=4)
    broken, kept = Kept.opened
    assert done.status == "finished" and len(done.metrics) == 4
    assert len(broken.steps) == 1 and broken.status == "finished", "it is closed all the same"
    assert len(kept.steps) == 4
    notes = [note for _, note in RunDir.open(done.path).notes()]
    assert len(notes) == 1
    assert "open_broken" in notes[0] and "ConnectionError: the server has gone" in notes[0]
    said = capsys.readouterr()
    assert (said.out + said.err).count("the server has gone") <= 1


def test_one_that_does_not_start_is_noted(tmp_path: Path) -> None:
    done = run(tmp_path, "open_never")
    assert done.status == "finished"
    ((step, note),) = RunDir.open(done.path).notes()
    assert step == 0 and "does not start: TimeoutError: nobody answers" in note


def test_one_that_says_what_it_needs_is_heeded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it needs a folder"):
        run(tmp_path, "open_unfit")


def test_what_cannot_be_imported_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        run(tmp_path, "nothing_of_this_name")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_is_told_so(tmp_path: Path) -> None:
    @fr.operator(writes={"reward": fr.SAMPLE.f32})
    def broken(response):
        raise ZeroDivisionError("on purpose")

    @fr.flow
    def fails(prompts, policy):
        return broken(fr.rollout(policy, prompts, n=2))

    with pytest.raises(fr.FlowError, match="on purpose"):
        fr.run_local(fails, trackers=("tracking_of_ours:open_kept",), engine="null", prompts=SUMS, policy="null",
                     out=str(tmp_path), progress="off")  # fmt: skip
    assert [kept.status for kept in Kept.opened] == ["failed"]


def test_one_that_hangs_does_not_hold_the_run() -> None:
    release = threading.Event()

    class Hanging(Kept):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            release.wait(60)

    follower = Follower("slow", Hanging(Session("a", "a", None)), most_waiting=2)
    for step in range(5):
        follower.put(step, {"x": 1.0})
    follower.end("finished")
    follower.join(0.01)
    notes = follower.take_notes()
    release.set()
    assert [note.split("'")[1] for note in notes] == ["slow", "slow"]
    assert "2 steps behind" in notes[0] and "more than 0.01 s to end" in notes[1]
    assert follower.take_notes() == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tensorboard", r"write \('tensorboard',\)"),
        (("tensorbord",), "did you mean 'tensorboard'"),
        ((3,), "tuple of names"),
    ],
)
def test_wrong_names_are_refused(given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Options(trackers=given)


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_package_that_is_not_there_is_named_with_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"pip install 'flowrl\[{name}\]'"):
        Trackers.open((name,), Session("a", "a", None))


def test_settings_by_dotted_name() -> None:
    assert plain({"a": {"b": 1, "c": None}, "d": [1]}) == {"a.b": 1, "a.c": "None", "d": "[1]"}
