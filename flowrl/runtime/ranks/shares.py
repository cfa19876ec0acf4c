"""Which rows each rank of a mesh works on: neighbouring ones, so that the parts in the order of ranks are the rows in theirs.

[Note: Shares change nothing] A rank's share depends on the rows and on the mesh, never on who is quicker. Random streams are
keyed by prompt and sample, and operators see rows or whole groups, so that no number depends on the shares.
"""

from __future__ import annotations

import numpy as np

Bounds = tuple[tuple[int, int], ...]
"""First row and end of each part, in the order of rows."""


def cut(weights: np.ndarray, parts: int, *, firsts: np.ndarray | None = None) -> Bounds:
    """Cut rows into parts of about equal weight, each of neighbouring rows; where there are too few, some parts are empty.

    Example:
        cut(np.array([4, 1, 1, 1, 1]), 2)            # ((0, 1), (1, 5))

    Args:
        weights: [N] work of each row, at least 0: its tokens.
        firsts: rows at which a part may begin, rising from 0; None: all of them.
    """
    count = len(weights)
    places = np.append(np.arange(count) if firsts is None else np.asarray(firsts, np.int64), count)
    before = np.concatenate(
        [np.zeros(1), np.cumsum(np.asarray(weights, np.float64) + 1e-9)]
    )  # rows of no weight count a little
    marks = before[places]
    edges = [0]
    for part in range(1, parts):
        goal = before[-1] * part / parts
        nearest = int(np.searchsorted(marks, goal))
        if nearest > 0 and goal - marks[nearest - 1] <= marks[nearest] - goal:
            nearest -= 1
        edges.append(max(int(places[nearest]), edges[-1]))
    return tuple(zip(edges, [*edges[1:], count], strict=True))


def neighbours(groups: list[np.ndarray]) -> np.ndarray | None:
    """The first row of each group, where the rows of every group stand together and groups follow each other; else None."""
    firsts = np.asarray([int(rows[0]) for rows in groups], np.int64)
    stops = np.asarray([int(rows[-1]) + 1 for rows in groups], np.int64)
    counts = np.asarray([len(rows) for rows in groups], np.int64)
    is_whole = bool((stops - firsts == counts).all()) and np.array_equal(firsts[1:], stops[:-1])
    return firsts if is_whole else None
