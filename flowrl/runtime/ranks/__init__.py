"""A plan on several ranks: every process computes its own steps. Rows cross in shared memory, and hosts by Arrow Flight."""

from flowrl.runtime.ranks.run import check_ranks, run_ranks

__all__ = ["check_ranks", "run_ranks"]
