"""Several short rows in one line of a block, instead of padding.

[Note: Positions that start again separate rows]
Transformers reads `position_ids` that restart at 0 as the start of another sequence of the same line, and attention does not
look past it. So a block of rows of different lengths becomes fewer, fuller lines of the length of its longest row; every
token keeps its position and sees its own row only. Lines are never longer than the longest row, so attention never costs more.

    padded                packed
    a a a a a a           a a a a a a
    b b b b . .           b b b b c c
    c c . . . .
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.engines.prefix import distance, rounding_of

LEAST_SAVING = 0.15
"""Share of the lines that must be saved for packing to be worth a mask."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A block of B rows in R lines of length L."""

    ids: np.ndarray
    """[R, L] int64."""
    positions: np.ndarray
    """[R, L] int64: restart at 0 with every row."""
    line_B: np.ndarray
    """[B] int64: the row's line."""
    start_B: np.ndarray
    """[B] int64: where the row starts in its line."""


def pack_block(ids: np.ndarray, lengths: np.ndarray, fill: int) -> Packed | None:
    """The rows of a padded block [B, L] in fewer lines, or None when that saves too little."""
    width = ids.shape[1]
    order = np.argsort(-lengths, kind="stable").tolist()
    line_B, start_B = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    first, last, line = 0, len(order) - 1, 0
    while first <= last:  # the longest row left opens a line, the shortest ones fill it up
        row, used = order[first], 0
        first += 1
        while True:
            line_B[row], start_B[row] = line, used
            used += int(lengths[row])
            if first > last or used + int(lengths[order[last]]) > width:
                break
            row, last = order[last], last - 1
        line += 1
    if line > (1 - LEAST_SAVING) * len(ids):
        return None
    packed = np.full((line, width), fill, np.int64)
    positions = np.zeros((line, width), np.int64)  # padding is many rows of one token each
    for row, (at, start) in enumerate(zip(line_B.tolist(), start_B.tolist(), strict=True)):
        end = start + int(lengths[row])
        packed[at, start:end] = ids[row, : end - start]
        positions[at, start:end] = np.arange(end - start)
    return Packed(packed, positions, line_B, start_B)


def run_packed(base: Any, packed: Packed, device: torch.device) -> Tensor:
    """[R, L, H] hidden states."""
    ids, positions = torch.from_numpy(packed.ids).to(device), torch.from_numpy(packed.positions).to(device)
    states: Tensor = base(input_ids=ids, position_ids=positions, use_cache=False)[0]
    return states


@torch.no_grad()
def can_pack(base: Any, num_ids: int, device: torch.device) -> bool:
    """Whether the architecture keeps rows of one line apart: tried on a few made-up rows.

    Rows must come out as they do alone, and must not change in any bit when their neighbour in the line does.
    """
    draw = np.random.default_rng(0)
    lengths = np.asarray([7, 4, 3])
    ids = np.zeros((3, 7), np.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = draw.integers(0, num_ids, length)
    packed = pack_block(ids, lengths, 0)
    if packed is None or packed.line_B[1] != packed.line_B[2]:
        return False
    ahead, behind = (1, 2) if packed.start_B[1] < packed.start_B[2] else (2, 1)
    changed = ids.copy()
    changed[ahead, : lengths[ahead]] = (ids[ahead, : lengths[ahead]] + 1) % num_ids
    neighbour = pack_block(changed, lengths, 0)
    assert neighbour is not None
    try:
        whole = base(input_ids=torch.from_numpy(ids).to(device), use_cache=False)[0]
        states, moved = run_packed(base, packed, device), run_packed(base, neighbour, device)
        tolerance = rounding_of(base, whole, ids, lengths, device)
    except (TypeError, ValueError, AttributeError, RuntimeError, NotImplementedError, IndexError):
        return False  # an architecture that takes no positions pads
    for row, length in enumerate(lengths.tolist()):
        line, start = int(packed.line_B[row]), int(packed.start_B[row])
        if not distance(whole[row, :length], states[line, start : start + length]) <= tolerance:
            return False
    line, start = int(packed.line_B[behind]), int(packed.start_B[behind])
    span = slice(start, start + int(lengths[behind]))
    return bool(torch.equal(states[line, span], moved[line, span]))
