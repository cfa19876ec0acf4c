"""Limits on a user's function, without sleeping: what is too long here works for as long."""

import bdb
import signal
import sys
import threading
import time

import pytest

from flowrl.errors import WaitTimeout
from flowrl.runtime.guard import call_with_timeout, time_limit

SHORT_S = 0.02


def work_for(seconds: float) -> str:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return "done"


def test_a_short_call_gives_its_answer():
    assert call_with_timeout(lambda: 7, 10.0, "seven") == 7
    assert call_with_timeout(lambda: 7, None, "seven") == 7


def test_a_long_call_is_named():
    with pytest.raises(WaitTimeout, match=r"the slow one took longer than 0\.02 s"):
        call_with_timeout(lambda: work_for(10.0), SHORT_S, "the slow one")


def test_calls_go_on_after_one_that_was_too_long():
    with time_limit(SHORT_S) as call:
        with pytest.raises(WaitTimeout):
            call(lambda: work_for(10.0), "first")
        assert call(lambda: "fine", "second") == "fine"
        with pytest.raises(WaitTimeout, match="third"):
            call(lambda: work_for(10.0), "third")


def test_each_call_has_the_whole_time():
    with time_limit(0.5) as call:
        for _ in range(4):
            assert call(lambda: work_for(0.2), "a part") == "done"


def test_a_function_that_takes_the_alarm_for_itself_does_not_end_the_limit():
    def rude() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(0)

    with time_limit(SHORT_S) as call:
        call(rude, "rude")
        with pytest.raises(WaitTimeout, match="next"):
            call(lambda: work_for(1.0), "next")


def test_the_handler_that_was_there_is_there_again():
    def mine(number, frame):
        raise AssertionError("rang")

    before = signal.signal(signal.SIGALRM, mine)
    theirs, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        for seconds in (0.0, 1000.0):  # an alarm of somebody else goes on as well
            signal.setitimer(signal.ITIMER_REAL, seconds)
            with pytest.raises(ValueError, match="broken"), time_limit(5.0) as call:
                call(lambda: int("broken"), "broken")
            assert signal.getsignal(signal.SIGALRM) is mine
            left, _ = signal.getitimer(signal.ITIMER_REAL)
            assert seconds - 5.0 < left <= seconds if seconds else left == 0.0
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, theirs)


def test_a_limit_inside_a_limit_leaves_the_outer_one_on():
    def inner(seconds):
        with time_limit(seconds) as call:
            call(lambda: None, "inner")
        work_for(5.0)

    def slow_inside():
        with time_limit(60.0) as call:
            call(lambda: work_for(5.0), "inner")

    with time_limit(SHORT_S) as call:
        for function in (lambda: inner(60.0), lambda: inner(SHORT_S / 2), slow_inside):
            with pytest.raises(WaitTimeout, match="outer"):
                call(function, "outer")


def test_a_users_except_does_not_swallow_the_limit():
    def stubborn() -> str:
        try:
            return work_for(10.0)
        except Exception:
            return "swallowed"

    with pytest.raises(WaitTimeout):
        call_with_timeout(stubborn, SHORT_S, "stubborn")


def test_under_a_debugger_there_is_no_limit():
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        assert call_with_timeout(lambda: work_for(0.1), SHORT_S, "debugged") == "done"
    finally:
        sys.settrace(before)


def test_a_breakpoint_inside_the_function_lifts_the_limit():
    def stops() -> str:
        sys.settrace(lambda *_: None)
        try:
            return work_for(0.1)
        finally:
            sys.settrace(None)

    assert call_with_timeout(stops, SHORT_S, "stops") == "done"


def test_outside_of_the_main_thread_the_call_is_left_behind():
    found: list[object] = []

    def run() -> None:
        try:
            call_with_timeout(lambda: work_for(0.2), SHORT_S, "elsewhere")
        except WaitTimeout as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10.0)
    assert "elsewhere took longer" in str(found[0]) and "left behind" in str(found[0])


@pytest.mark.parametrize("seconds", [None, 10.0])
@pytest.mark.parametrize("raised", [bdb.BdbQuit(), pytest.exit.Exception("Quitting debugger")], ids=["pdb", "pytest"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_leaving_a_debugger_is_an_interrupt(seconds, raised, in_thread):
    def stops():
        raise raised

    seen = []

    def call():
        try:
            call_with_timeout(stops, seconds, "stops")
        except BaseException as error:
            seen.append(error)

    if in_thread:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(10.0)
    else:
        call()
    assert isinstance(seen[0], KeyboardInterrupt) and seen[0].__cause__ is raised
