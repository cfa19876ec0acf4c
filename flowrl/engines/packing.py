"""How rows become batches: padded token blocks, micro-batches of a token budget, mini-batches of an epoch.

Only NumPy. [Note: Rows are padded on the right and sorted by length]
With causal attention no token sees what stands to its right, so right padding needs no mask and no shifted positions, for
rotary and absolute positions alike, and keeps the fast attention kernels. Rows of a batch have similar lengths because
they are sorted first, so little is wasted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flowrl.engines.protocol import TokenRows
from flowrl.errors import DataError
from flowrl.schema.ragged import Ragged


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Prompt and response of N rows as one flat array."""

    tokens: np.ndarray
    """[S] int64, row after row, prompt before response."""
    offsets: np.ndarray
    """[N + 1] int64."""
    prompt_lengths: np.ndarray
    """[N] int64."""

    @classmethod
    def of(cls, rows: TokenRows, *, num_ids: int, max_length: int | None = None) -> Sequences:
        """Join prompts and responses. Errors: DataError for a row without prompt, with an id the model does not have, or
        longer than its context."""
        prompts, responses = rows.prompt_ids, rows.response_ids
        if len(prompts) != len(responses):
            raise DataError(
                f"prompt_ids has {len(prompts)} rows and response_ids {len(responses)}; they must be the same rows"
            )
        lengths = prompts.lengths + responses.lengths
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = np.empty(offsets[-1], np.int64)
        tokens[ranges(offsets[:-1], prompts.lengths)] = prompts.values
        tokens[ranges(offsets[:-1] + prompts.lengths, responses.lengths)] = responses.values
        _check(prompts, responses, tokens, offsets, num_ids, max_length)
        return cls(tokens, offsets, prompts.lengths)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def padded(self, rows: np.ndarray, lengths: np.ndarray, fill: int) -> np.ndarray:
        """[B, L] int64: the first `lengths` [B] tokens of each row, filled up on the right."""
        block = np.full((len(rows), int(lengths.max(initial=0))), fill, np.int64)
        inside = np.arange(block.shape[1]) < lengths[:, None]
        block[inside] = self.tokens[ranges(self.offsets[:-1][rows], lengths)]
        return block


def _check(
    prompts: Ragged, responses: Ragged, tokens: np.ndarray, offsets: np.ndarray, num_ids: int, max_length: int | None
) -> None:
    bare = np.flatnonzero((prompts.lengths == 0) & (responses.lengths > 0))
    if len(bare):
        raise DataError(
            f"row {bare[0]} has an empty prompt, so its first response token has nothing it could be predicted from; "
            "give every row at least one prompt token (a begin-of-sequence token will do)"
        )
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= num_ids):
        at = int(np.flatnonzero((tokens < 0) | (tokens >= num_ids))[0])
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        raise DataError(
            f"row {row} holds token id {tokens[at]}, and the model knows ids 0 to {num_ids - 1}; "
            "the tokens come from another tokenizer than the model's"
        )
    lengths = np.diff(offsets)
    if max_length is not None and lengths.max(initial=0) > max_length:
        row = int(lengths.argmax())
        raise DataError(
            f"row {row} has {prompts.lengths[row]} prompt and {responses.lengths[row]} response tokens; the model's context "
            f"holds {max_length}; drop or shorten such rows"
        )


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[sum(lengths)] int64: starts[0], starts[0] + 1, ... for lengths[0] numbers, then the next.

    Example:
        ranges(np.array([5, 0]), np.array([2, 3]))      # array([5, 6, 0, 1, 2])
    """
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some rows as a padded block, and the response tokens of interest in it.

    Shapes: B rows, L padded length, T tokens of interest.
    """

    rows: np.ndarray
    """[B] int64 into the table."""
    ids: np.ndarray
    """[B, L] int64, padded on the right."""
    row_T: np.ndarray
    """[T] int64: row of the block each token is in."""
    position_T: np.ndarray
    """[T] int64: place of the block's token that predicts it, i.e. the one before it."""
    flat_T: np.ndarray
    """[T] int64: its place in the flat response column."""
    target_T: np.ndarray
    """[T] int64: the token itself."""
    last_B: np.ndarray
    """[B] int64: place of each row's last token in the block."""
    prompt_B: np.ndarray
    """[B] int64: prompt tokens of each row."""
    length_B: np.ndarray
    """[B] int64: real tokens of each row in the block."""


def make_batch(
    sequences: Sequences,
    responses: Ragged,
    rows: np.ndarray,
    *,
    mask: np.ndarray | None,
    fill: int,
    whole: bool = False,
) -> Batch:
    """The block of `rows`, cut behind the last token that predicts one of interest (`whole`: not cut).

    Args:
        mask: [T of all rows] bool, tokens of interest; None for all.
    """
    lengths = responses.lengths[rows]
    flat = ranges(responses.offsets[:-1][rows], lengths)
    row_T = np.repeat(np.arange(len(rows)), lengths)
    inside = ranges(np.zeros(len(rows), np.int64), lengths)
    if mask is not None:
        keep = mask[flat]
        flat, row_T, inside = flat[keep], row_T[keep], inside[keep]
    prompt = sequences.prompt_lengths[rows]
    full = sequences.lengths[rows]
    needed = full if whole else predictor_lengths(prompt, row_T, inside)
    return Batch(
        rows=rows,
        ids=sequences.padded(rows, needed, fill),
        row_T=row_T,
        position_T=prompt[row_T] + inside - 1,
        flat_T=flat,
        target_T=responses.values[flat].astype(np.int64),
        last_B=full - 1,
        prompt_B=prompt,
        length_B=needed,
    )


def predictor_lengths(prompt: np.ndarray, row_T: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """[B]: tokens of each row up to the last one that predicts a token of interest; 0 without any."""
    needed = np.zeros(len(prompt), np.int64)
    np.maximum.at(needed, row_T, prompt[row_T] + inside)
    return needed


def needed_lengths(sequences: Sequences, responses: Ragged, mask: np.ndarray) -> np.ndarray:
    """[N]: as `predictor_lengths`, for all rows and a mask over the flat response column."""
    row_T = responses.row_index[mask]
    inside = np.flatnonzero(mask) - responses.offsets[:-1][row_T]
    return predictor_lengths(sequences.prompt_lengths, row_T, inside)


def split_by_tokens(
    lengths: np.ndarray, budget: int, *, groups: np.ndarray | None = None, most_rows: int | None = None
) -> Iterator[np.ndarray]:
    """Split rows 0 to N-1 into blocks of at most `budget` padded tokens, longest rows first.

    Rows of one group (`groups` [N] int) stay in one block. A row or group above the budget gets a block of its own.
    """
    if len(lengths) == 0:
        return
    units = np.arange(len(lengths)) if groups is None else groups
    unit_length = np.zeros(units.max() + 1, np.int64)
    np.maximum.at(unit_length, units, lengths)
    unit_rows = np.bincount(units)
    order = np.argsort(-unit_length, kind="stable")
    by_unit = np.argsort(units, kind="stable")
    starts = np.cumsum(unit_rows) - unit_rows
    taken: list[int] = []
    rows = longest = 0
    for unit in order.tolist():
        count = int(unit_rows[unit])
        if count == 0:
            continue
        too_many = most_rows is not None and rows + count > most_rows
        if taken and ((rows + count) * max(longest, 1) > budget or too_many):
            yield by_unit[ranges(starts[taken], unit_rows[taken])]
            taken, rows, longest = [], 0, 0
        longest = longest or int(unit_length[unit])
        taken.append(unit)
        rows += count
    if taken:
        yield by_unit[ranges(starts[taken], unit_rows[taken])]


def prompt_units(sequences: Sequences, rows: np.ndarray, lengths: np.ndarray, budget: int) -> np.ndarray | None:
    """[N] int: rows with equal prompt have equal numbers, so that they share a block and their prompt; None when every
    prompt stands alone, or when the rows of one would not fit the budget together.

    Args:
        rows: [N] into `sequences`.
        lengths: [N] tokens of each that count.
    """
    seen: dict[bytes, int] = {}
    units = np.empty(len(rows), np.int64)
    starts, ends = sequences.offsets[:-1][rows], sequences.offsets[:-1][rows] + sequences.prompt_lengths[rows]
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        units[index] = seen.setdefault(sequences.tokens[start:end].tobytes(), len(seen))
    if not len(rows) or len(seen) == len(rows):
        return None
    longest = np.zeros(len(seen), np.int64)
    np.maximum.at(longest, units, lengths)
    return units if int((longest * np.bincount(units)).max()) <= budget else None


def joined_units(num_rows: int, *keys: np.ndarray | None) -> np.ndarray:
    """[N] int: number of the unit each row is in; rows that share a value of any key are one unit.

    Units are numbered in the order of their first row.
    """
    unit = np.arange(num_rows)
    codes = [
        np.unique(np.asarray(key).astype(str) if np.asarray(key).dtype == object else key, return_inverse=True)[
            1
        ].reshape(-1)
        for key in keys
        if key is not None
    ]
    for code in codes:
        if len(code) != num_rows:
            raise DataError(f"keys that hold rows together need one value per row ({num_rows}); found {len(code)}")
    settled = not codes
    while not settled:  # each pass gives every row the least unit among the rows it shares a key with
        before = unit
        for code in codes:
            least = np.full(code.max(initial=-1) + 1, num_rows)
            np.minimum.at(least, code, unit)
            unit = least[code]
        settled = len(codes) == 1 or bool(np.array_equal(before, unit))
    return np.unique(unit, return_inverse=True)[1].reshape(-1)


def minibatches(units: np.ndarray, count: int, *, shuffle: bool, seed: int, epoch: int) -> list[np.ndarray]:
    """`count` row arrays of an epoch that hold all rows once; the numbers of units in them differ by at most one.

    Errors: DataError when there are fewer units than mini-batches.
    """
    num_units = int(units.max(initial=-1)) + 1
    if count > num_units:
        raise DataError(
            f"{count} mini-batches need at least as many rows (or groups that stay together); found {num_units}; "
            "ask for fewer mini-batches or raise the batch"
        )
    order = (
        np.random.default_rng([seed & (2**63 - 1), epoch]).permutation(num_units) if shuffle else np.arange(num_units)
    )
    place = np.empty(num_units, np.int64)
    place[order] = np.arange(num_units)
    by_place = np.argsort(place[units], kind="stable")
    ends = np.cumsum(np.bincount(place[units], minlength=num_units))
    return np.split(by_place, [int(ends[len_ - 1]) for len_ in _even_ends(num_units, count)[:-1]])


def _even_ends(total: int, parts: int) -> list[int]:
    base, more = divmod(total, parts)
    return [base * (i + 1) + min(i + 1, more) for i in range(parts)]
