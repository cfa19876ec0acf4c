"""Run a prompt once for all responses that share it, in training and scoring too.

[Note: A prompt is a prefix]
Responses of one prompt repeat it in every row of a batch. With causal attention a prompt's keys and values do not depend on
what follows, so a block can run in two parts: the prompts once each, then the responses on top of the prompts' keys and
values, repeated by row. Gradients flow back through the repeated keys and values and add up, so values and gradients
are those of whole rows up to rounding. With P prompts of length p and G responses of length r the model sees
P p + P G r tokens instead of P G (p + r).

    whole rows            shared prefix
    p p p p r r           p p p p
    p p p p r r r                 r r
    p p p p r                     r r r        (each r attends to the prompt's keys and values, and to itself)
                                  r

The prompt's last token belongs to the response part: it predicts the first response token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEAST_SAVING = 0.15
"""Share of the tokens that must be saved for two passes to be worth it."""


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A block of B rows as P different prompts and B responses.

    Shapes: Lp longest prompt part, Lr longest response part.
    """

    prompt_ids: np.ndarray
    """[P, Lp] int64, padded on the left."""
    prompt_mask: np.ndarray
    """[P, Lp] bool."""
    response_ids: np.ndarray
    """[B, Lr] int64, padded on the right; starts with the prompt's last token."""
    prompt_B: np.ndarray
    """[B] int64: the row's prompt."""
    start_B: np.ndarray
    """[B] int64: place of the first token of the response part in the whole row."""


def split_block(ids: np.ndarray, prompt_lengths: np.ndarray, lengths: np.ndarray, fill: int) -> Split | None:
    """The block in two parts, or None when that saves too little.

    Args:
        ids: [B, L] whole rows, padded on the right.
        prompt_lengths: [B] at least 1.
        lengths: [B] real tokens of each row.
    """
    if ids.size == 0 or int(prompt_lengths.min()) < 2:
        return None
    start_B = prompt_lengths - 1
    seen: dict[bytes, int] = {}
    prompt_B = np.empty(len(ids), np.int64)
    firsts: list[int] = []
    for row, start in enumerate(start_B.tolist()):
        key = ids[row, :start].tobytes()
        number = seen.get(key)
        if number is None:
            number = seen[key] = len(firsts)
            firsts.append(row)
        prompt_B[row] = number
    longest_prompt = int(start_B.max())
    longest_response = int(np.maximum(lengths - start_B, 1).max())
    if len(firsts) * longest_prompt + len(ids) * longest_response > (1 - LEAST_SAVING) * ids.size:
        return None
    prompt_ids = np.full((len(firsts), longest_prompt), fill, np.int64)
    prompt_mask = np.zeros((len(firsts), longest_prompt), bool)
    for number, row in enumerate(firsts):
        length = int(start_B[row])
        prompt_ids[number, longest_prompt - length :] = ids[row, :length]
        prompt_mask[number, longest_prompt - length :] = True
    places = np.minimum(start_B[:, None] + np.arange(longest_response), ids.shape[1] - 1)
    response_ids = np.take_along_axis(ids, places, axis=1)
    return Split(prompt_ids, prompt_mask, response_ids, prompt_B, start_B)


def run_split(base: Any, split: Split, device: torch.device, loose_ends: list[Tensor] | None = None) -> Tensor:
    """[B, Lr, H] hidden states of the response part of every row.

    Args:
        loose_ends: gets the hidden states of the prompts, which nothing here reads.
    """
    prompt_mask = torch.from_numpy(split.prompt_mask).to(device)
    positions = (prompt_mask.cumsum(-1) - 1).clamp(min=0)
    first = base(
        input_ids=torch.from_numpy(split.prompt_ids).to(device),
        attention_mask=prompt_mask.long(),
        position_ids=positions,
        use_cache=True,
    )
    if loose_ends is not None:
        loose_ends.append(first[0])
    rows = torch.from_numpy(split.prompt_B).to(device)
    cache = first.past_key_values
    cache.batch_select_indices(rows)
    response_ids = torch.from_numpy(split.response_ids).to(device)
    own = torch.ones(response_ids.shape, dtype=torch.long, device=device)
    start = torch.from_numpy(split.start_B).to(device)
    second = base(
        input_ids=response_ids,
        attention_mask=torch.cat([prompt_mask.long()[rows], own], dim=1),
        position_ids=start[:, None] + torch.arange(response_ids.shape[1], device=device),
        past_key_values=cache,
        use_cache=True,
    )
    states: Tensor = second[0]
    return states


@torch.no_grad()
def can_split(base: Any, num_ids: int, device: torch.device) -> bool:
    """Whether the architecture gives the same hidden states in two parts as in one: tried on a few made-up rows."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, num_ids, length) for length in (5, 3)]
    ids = np.zeros((4, 9), np.int64)
    prompt_lengths = np.asarray([5, 5, 3, 3])
    for row in range(4):
        prompt = prompts[row // 2]
        ids[row, : len(prompt)] = prompt
        ids[row, len(prompt) : len(prompt) + 4] = generator.integers(0, num_ids, 4)
    lengths = prompt_lengths + 4
    split = split_block(ids, prompt_lengths, lengths, 0)
    if split is None:
        return False
    try:
        whole = base(input_ids=torch.from_numpy(ids).to(device), use_cache=False)[0]
        tolerance = rounding_of(base, whole, ids, lengths, device)
        parts = run_split(base, split, device)
    except (TypeError, ValueError, AttributeError, RuntimeError, NotImplementedError):
        return False  # an architecture without a cache of this kind runs whole rows
    for row, end in enumerate(lengths.tolist()):
        start = int(split.start_B[row])
        if not distance(whole[row, start:end], parts[row, : end - start]) <= tolerance:
            return False
    return True


def rounding_of(base: Any, whole: Tensor, ids: np.ndarray, lengths: np.ndarray, device: torch.device) -> float:
    """How far apart rounding alone may put hidden states: attention with a mask runs another kernel, so that is measured."""
    real = torch.arange(ids.shape[1], device=device) < torch.from_numpy(lengths).to(device)[:, None]
    masked = base(input_ids=torch.from_numpy(ids).to(device), attention_mask=real.long(), use_cache=False)[0]
    seen = max(distance(whole[row, :end], masked[row, :end]) for row, end in enumerate(lengths.tolist()))
    return (1e-3 if whole.dtype == torch.float32 else 2e-2) + 4 * seen


def distance(mine: Tensor, theirs: Tensor) -> float:
    """Distance relative to size; a wrong mask or position gives about 0.1 to 1."""
    return float((mine.float() - theirs.float()).norm() / mine.float().norm())
