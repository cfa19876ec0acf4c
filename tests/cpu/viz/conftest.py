"""The browser of these tests; they are skipped where there is none."""

from collections.abc import Iterator

import pytest

from tests.cpu.viz import chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Chromium]:
    """One for each module, without a network until a test asks for one."""
    command = chromium.browser()
    if command is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium, or name one in FLOWRL_TEST_BROWSER)")
    try:
        started = chromium.Chromium(command, tmp_path_factory.mktemp("profile"))
    except (OSError, EOFError, TimeoutError) as error:  # a browser that is installed and cannot run here
        pytest.skip(f"{command} does not start: {error}")
    with started as one:
        yield one
