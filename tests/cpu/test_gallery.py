"""Every algorithm of the gallery learns its tiny task: the reward rises, or the loss falls."""

from __future__ import annotations

import numpy as np
import pytest

from examples.gallery.runs import RUNS, TinyRun


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_it_learns(run: TinyRun) -> None:
    curve = run.curve(run.run())
    change = np.mean(curve[-5:]) - np.mean(curve[:5])
    assert change >= run.by if run.by > 0 else change <= run.by, np.round(curve[::4], 3)
