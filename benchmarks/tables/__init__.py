"""The experience table against other stores, on one machine in one run, and against what it promises.

    python -m benchmarks.tables --prepare        an environment with the other stores, in .venv-anchors (minutes)
    python -m benchmarks.tables                  everything; about ten minutes on two cores
    python -m benchmarks.tables --quick          fewer rows and rounds, without the other stores; under a minute
    python -m benchmarks.tables --full           the kill test 1000 times

Both sides hold equal rows (`workload.py`), give equal padded batches (checked, byte by byte, before anything is timed), and
take turns in one process. Figures are medians over rounds; ratios are medians of the ratios within a round.
"""

from benchmarks.tables.comparison import main

__all__ = ["main"]
