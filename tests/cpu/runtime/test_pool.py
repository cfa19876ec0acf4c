"""Rows in worker processes: whatever a row does to its process, the others get their answers and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import ConfigError, OperatorError
from flowrl.runtime import pool as pools
from flowrl.runtime.operators import Applied, run_operator
from flowrl.runtime.options import Options
from flowrl.store.rows import RowBatch
from tests.cpu.runtime.pool_rewards import obey, plain

ROOT = Path(__file__).parents[3]


def rows(*texts: str) -> RowBatch:
    return RowBatch({"response": np.asarray(texts, dtype=object)}, {"response": fr.SAMPLE.str})


def run(*texts: str, workers: int | None = 2) -> Applied:
    return run_operator(obey.bind(), rows(*texts), workers=workers)


def errors(done: Applied) -> list[str]:
    return list(done.rows["row_error"])


def is_there(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_answers_come_in_the_order_of_the_rows_from_other_processes() -> None:
    done = run(*(f"value {i}" for i in range(200)))
    assert done.rows["reward"].tolist() == list(range(200))
    assert done.failed == 0
    here = set(run("pid", "pid", "pid", workers=0).rows["reward"])
    there = set(run("pid", "pid", "pid").rows["reward"])
    assert here == {os.getpid()} and os.getpid() not in there


def test_workers_stay_warm_from_call_to_call() -> None:
    run("value 1", "value 2")
    before = pools.shared().pids
    assert run("value 3").rows["reward"].tolist() == [3.0]
    assert pools.shared().pids == before


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("raise oh", "ValueError: oh"),
        ("unsendable", "Unsendable: odd"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt"),
        ("vanish", "WorkerDied: its worker process ended with exit status 7"),
        ("abort", "WorkerDied: its worker process was ended by SIGSEGV"),
        ("killed", "WorkerDied: its worker process was ended by SIGKILL (out of memory?)"),
        ("crash", "WorkerDied: its worker process was ended by SIGSEGV"),
        ("closefds", "WorkerDied"),
        ("fd", "WorkerDied: its worker process sent nonsense"),
        ("lambda", "Can't pickle"),
        ("takes", "WorkerDied: its worker process ended with exit status 7"),
        ("huge", "at most 67108864 come back"),
        ("text", "'reward' is a number; found str 'no number'"),
        ("none", "'reward' is a number; found NoneType"),
        ("sleep 60", "took longer than 2 s"),
        ("spin", "took longer than 2 s"),
    ],
)
def test_a_bad_row_is_flagged_and_the_others_are_answered(bad: str, said: str) -> None:
    done = run("value 1", bad, "value 2", "value 3")
    assert [done.rows["reward"][i] for i in (0, 2, 3)] == [1.0, 2.0, 3.0]
    assert np.isnan(done.rows["reward"][1])
    assert said in errors(done)[1]
    assert done.failed == 1


def test_every_row_may_be_bad() -> None:
    done = run(*["vanish"] * 5)
    assert done.failed == 5 and all("exit status 7" in error for error in errors(done))


def test_a_worker_has_nothing_on_standard_input() -> None:
    assert run("stdin").rows["reward"].tolist() == [0.0]


def test_what_a_row_started_ends_with_its_worker(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    assert "took longer" in errors(run(f"child {file}"))[0]
    assert wait_for(lambda: not is_there(int(file.read_text())))


def test_on_error_raise_ends_the_run_with_the_functions_place() -> None:
    call = replace(obey.bind(), on_error="raise")
    with pytest.raises(OperatorError, match=r"pool_rewards.py:\d+.*row 1: ValueError: oh"):
        run_operator(call, rows("value 1", "raise oh"), workers=2)


def test_rewards_that_ask_for_nothing_run_here_unless_the_run_says_otherwise() -> None:
    assert run_operator(plain.bind(), rows("x")).rows["reward"].tolist() == [os.getpid()]
    assert run_operator(plain.bind(), rows("x"), workers=1).rows["reward"].tolist() != [os.getpid()]


def test_a_reward_without_an_importable_name_runs_here_and_says_so() -> None:
    @fr.reward
    def local(response: str) -> float:
        return float(os.getpid())

    with pytest.warns(RuntimeWarning, match="'local' runs in this process .* inside a function"):
        assert run_operator(local.bind(), rows("x"), workers=2).rows["reward"].tolist() == [os.getpid()]
    with warnings.catch_warnings():  # nobody asked for workers
        warnings.simplefilter("error")
        run_operator(local.bind(), rows("x"))


def test_a_function_that_was_changed_since_runs_here_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "function", lambda response: -1.0)
    with pytest.warns(RuntimeWarning, match="its source has changed"):
        assert run_operator(plain.bind(), rows("x"), workers=1).rows["reward"].tolist() == [-1.0]


def test_under_a_debugger_all_runs_here() -> None:
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        found = run("pid").rows["reward"].tolist()
    finally:
        sys.settrace(before)
    assert found == [os.getpid()]


def test_close_leaves_no_process() -> None:
    own = pools.WorkerPool()
    outcomes = own.run(obey.bind(), [("value 1",), ("value 2",)], workers=2, timeout_s=30.0)
    assert [outcome.value for outcome in outcomes] == [1.0, 2.0]
    pids = own.pids
    assert len(pids) == 2
    own.close()
    assert own.pids == [] and not any(map(is_there, pids))
    assert own.run(obey.bind(), [("value 3",)], workers=2, timeout_s=30.0)[0].value == 3.0  # and it starts again
    own.close()


def test_where_no_process_can_be_started_rows_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    pools.shared().close()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.warns(RuntimeWarning, match="no worker process can be started"):
        assert run_operator(plain.bind(), rows("x"), workers=1).rows["reward"].tolist() == [os.getpid()]


def test_rows_side_by_side_in_threads() -> None:
    barrier = threading.Barrier(3, timeout=20)

    @fr.reward(threads=3, timeout_s=20.0)
    def meet(response: str) -> float:
        if response == "bad":
            raise ValueError("no")
        barrier.wait()
        return float(response)

    done = run_operator(meet.bind(), rows("0", "bad", "2", "3"))
    np.testing.assert_array_equal(done.rows["reward"], [0.0, np.nan, 2.0, 3.0])
    assert errors(done) == ["", "ValueError: no", "", ""]


def test_a_reward_runs_in_processes_or_in_threads() -> None:
    with pytest.raises(ConfigError, match="declares processes and threads"):
        fr.reward(processes=True, threads=2)(lambda response: 0.0)
    with pytest.raises(ConfigError, match="each_row=True"):
        fr.operator(writes={"x": fr.SAMPLE.f32}, processes=True)(lambda reward: reward)


def test_the_option_is_checked() -> None:
    with pytest.raises(ConfigError, match="'reward_workers' is a whole number of at least 0, or None; found -1"):
        Options(reward_workers=-1)


# --- whole scripts -----------------------------------------------------------------------------------------------------------

SCRIPT = """\
import flowrl as fr
from tests.cpu.runtime.pool_rewards import {reward} as reward

@fr.flow
def graded(prompts, policy):
    return reward(fr.rollout(policy, prompts, n=2))

print("started", flush=True)
prompts = [{{"prompt": "1+1="}}] * 2
fr.run_local(graded, engine="null", prompts=prompts, policy="null", out=None, progress="off", reward_workers=2)
from flowrl.runtime.pool import shared
print(*shared().pids, flush=True)
{end}
"""


def script(tmp_path: Path, reward: str, end: str = "") -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(reward=reward, end=end))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


def test_a_script_without_a_main_guard_starts_once_and_leaves_nothing(tmp_path: Path) -> None:
    process = script(tmp_path, "plain")
    said, _ = process.communicate(timeout=120)
    started, pids = said.splitlines()
    assert process.returncode == 0 and started == "started"
    assert pids and wait_for(lambda: not any(is_there(int(pid)) for pid in pids.split()))


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    process = script(tmp_path, "plain", "import time; time.sleep(100)")
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert pids and all(map(is_there, pids))
    process.kill()
    process.communicate()
    assert wait_for(lambda: not any(map(is_there, pids)))


def workers_of(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_busy_worker_ends_with_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    process = script(tmp_path, "endless")
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    assert wait_for(lambda: len(workers_of(process.pid)) == 2)
    pids = workers_of(process.pid)
    time.sleep(1.0)  # well inside the function by now; a shorter wait only tests less
    began = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert wait_for(lambda: not any(map(is_there, pids)))
