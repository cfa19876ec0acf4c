"""A plan on several ranks of one host: every process computes its own steps, and rows cross in shared memory."""

from flowrl.runtime.ranks.run import check_ranks, run_ranks

__all__ = ["check_ranks", "run_ranks"]
