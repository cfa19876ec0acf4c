"""What a pass did, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Note:
    """One thing a pass changed, for a person to read before the run.

    Example:
        Note("prune", "ref_logprobs", "'ref_logprobs' is read by nobody: not computed")
    """

    by: str
    """Name of the pass."""
    node: str
    text: str

    def __str__(self) -> str:
        return self.text
