"""For all tests: what hypothesis tries is the same in every run, so that a failure repeats; what was skipped is said, and why."""

import contextlib
from collections import Counter

import pytest

with contextlib.suppress(ImportError):  # the tests on a GPU run where it is not installed
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each reason: who lacks a browser or a package should see that, without asking for it."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]) for report in reports if isinstance(report.longrepr, tuple))
    if reasons:
        terminalreporter.section("not run on this machine")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} test{'s' if count > 1 else ''}: {reason.removeprefix('Skipped: ')}")
