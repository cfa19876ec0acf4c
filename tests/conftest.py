"""For all tests: what hypothesis tries is the same in every run, so that a failure repeats."""

import contextlib

with contextlib.suppress(ImportError):  # the tests on a GPU run where it is not installed
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")
