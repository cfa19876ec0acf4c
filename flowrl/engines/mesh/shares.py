"""How rows are shared over the ranks that see different rows, in as many passes on each of them. Only NumPy.

[Note: All ranks make equally many passes]
A forward pass gathers weights from all ranks and a backward pass adds gradients over them, so a rank that stopped earlier
would leave the others waiting. Every rank knows all rows of a step, so each works out the shares of all, and the ranks with
fewer blocks end with passes of nothing: one token, of which nothing is read.

    rank 0    [long rows]  [rows]  [short rows]
    rank 1    [long rows]  [rows]  [nothing]
"""

from __future__ import annotations

import heapq

import numpy as np

from flowrl.engines.packing import Batch, split_by_tokens

NOTHING = np.zeros(0, np.int64)


def shares(lengths: np.ndarray, ranks: int, *, groups: np.ndarray | None = None) -> list[np.ndarray]:
    """Rows of each rank, rising, so that the tokens of the fullest are few: the largest first, each to the emptiest rank.

    Example:
        shares(np.array([5, 1, 4, 2]), 2)       # [array([0, 1]), array([2, 3])]

    Args:
        lengths: [N] tokens of each row.
        groups: [N] int: rows with equal number go to one rank.
    """
    units = np.arange(len(lengths)) if groups is None else groups
    if len(units) == 0:
        return [NOTHING for _ in range(ranks)]
    tokens = np.bincount(units, weights=lengths).astype(np.int64)
    load = [(0, rank) for rank in range(ranks)]  # equal loads go to the lower rank, so that all ranks agree
    owner = np.zeros(len(tokens), np.int64)
    for unit in np.argsort(-tokens, kind="stable").tolist():
        held, rank = heapq.heappop(load)
        owner[unit] = rank
        heapq.heappush(load, (held + int(tokens[unit]), rank))
    return [np.flatnonzero(owner[units] == rank) for rank in range(ranks)]


def shared_blocks(
    lengths: np.ndarray, budget: int, ranks: int, rank: int, *, groups: np.ndarray | None = None
) -> list[np.ndarray]:
    """The blocks of one rank (see `split_by_tokens`), as many as every other rank has; the last ones may be empty."""
    blocks = [
        [
            own[block]
            for block in split_by_tokens(
                lengths[own], budget, groups=None if groups is None else _numbered(groups[own])
            )
        ]
        for own in shares(lengths, ranks, groups=groups)
    ]
    most = max(len(each) for each in blocks)
    return blocks[rank] + [NOTHING] * (most - len(blocks[rank]))


def _numbered(groups: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.unique(groups, return_inverse=True)[1].reshape(-1)
    return found


def nothing() -> Batch:
    """A block of one token of no row, of which nothing is read."""
    one, token = np.ones(1, np.int64), np.zeros((1, 1), np.int64)
    return Batch(
        rows=NOTHING,
        ids=token,
        row_T=NOTHING,
        position_T=NOTHING,
        flat_T=NOTHING,
        target_T=NOTHING,
        last_B=NOTHING,
        prompt_B=one,
        length_B=one,
    )
