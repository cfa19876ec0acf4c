"""Recorded responses in blocks that a page unpacks when it needs them: a few hundred rows each, texts apart from tokens.

    found = Responses(folder, pieces)
    for chunk in found.chunks(step):
        chunk.index        what filters look at, small: rewards, lengths, ends
        chunk.text         prompts, responses, scores: JSON, deflated
        chunk.tokens       ids and numbers per token: a header and arrays, deflated

    held = hold(found, most_bytes=48 * 2**20)      as much of a run as goes into one file, spread over its steps

A script may not read files beside a page that was opened from a file: browsers refuse it, and the page's policy would. So a page
carries its blocks in itself, as texts that run nothing, and a browser's own DecompressionStream unpacks one at a time.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.errors import FlowError
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import PROMPT, SAMPLE, TOKEN, ColumnType
from flowrl.store.rows import RowBatch
from flowrl.viz.run.source import RunFolder

MOST_ROWS = 256
MOST_TOKENS = 400_000
"""A chunk ends with the group in which it has this many rows or tokens."""
LEVEL = 6
TEXT_PART = 0.6
"""Part of a page's blocks that texts may take before tokens are thought of."""
TEXTS = frozenset({"response", "finish_reason", "row_error", "prompt"})
SAMPLES = "samples.jsonl"

INDEXED = ("prompt_id", "reward", "advantage", "response_ids", "finish_reason", "row_error")
"""Columns of the index."""

Pieces = Callable[[Sequence[int]], list[bytes | None]]
"""Token ids to the bytes of text each stands for; None for one that stands for no text, such as an end token. The bytes of one
character may lie in two tokens."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring rows of one step and node."""

    index: dict[str, Any]
    text: bytes
    """Deflated JSON (see `_text`)."""
    tokens: bytes | None
    """Deflated (see `_tokens`); None where no tokens were recorded."""


class Responses:
    """The responses that a run has recorded: all of the rows of `record=`, else its few samples."""

    def __init__(self, folder: RunFolder, pieces: Pieces | None = None) -> None:
        self.folder = folder
        self.pieces = pieces
        edges = folder.edges()
        self._samples: dict[int, list[dict[str, Any]]] = {}
        if not edges:
            for sample in folder.samples():
                self._samples.setdefault(int(sample["step"]), []).append(sample)
        self._edges = edges

    @property
    def is_recorded(self) -> bool:
        """Whether whole rows were recorded, and not samples alone."""
        return bool(self._edges)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(self._edges or self._samples))

    def tables(self, step: int) -> list[tuple[str, RowBatch]]:
        """(node, rows): each response once, from the node that knows most of it."""
        found = []
        for node in self._edges.get(step, ()):
            try:
                rows = self.folder.edge(step, node)
            except (
                FlowError,
                OSError,
            ):  # cut off by a kill, or taken away meanwhile: the others are still worth seeing
                continue
            if "response" in rows or "response_ids" in rows:
                found.append((node, rows))
        found.sort(key=lambda one: (-len(one[1].names), -len(one[1])))
        kept: list[tuple[str, RowBatch]] = []
        seen: set[str] = set()
        for node, rows in found:
            names = _identities(rows)
            new = [index for index, name in enumerate(names) if name not in seen]
            seen.update(names)
            if new:
                kept.append((node, rows if len(new) == len(rows) else rows.take(np.array(new))))
        return kept

    def chunks(self, step: int, *, with_tokens: bool = True) -> Iterator[Chunk]:
        """All chunks of a step; none for a step of which nothing is there."""
        if self._samples:
            yield _of_samples(step, self._samples.get(step, []))
            return
        for node, rows in self.tables(step):
            newest = _newest(rows)
            for indices in _split(rows):
                pieces = self.pieces if with_tokens else None
                yield _chunk(step, node, rows.take(indices), newest, pieces, with_tokens)

    def indices(self, step: int) -> Iterator[dict[str, Any]]:
        """The index of each chunk, without making its blocks."""
        if self._samples:
            yield {**_of_samples(step, self._samples.get(step, [])).index, "has_tokens": False}
            return
        for node, rows in self.tables(step):
            small, newest = rows.select([name for name in INDEXED if name in rows]), _newest(rows)
            for indices in _split(rows):
                yield {**_index(step, node, small.take(indices), newest), "has_tokens": "response_ids" in rows}

    def mismatch(self, step: int) -> dict[str, float]:
        """How far the sampler's log-probs are from the trainer's, over the tokens that train, where both were recorded."""
        apart = []
        for _, rows in self.tables(step):
            if "rollout_logprobs" in rows and "old_logprobs" in rows:
                values = rows["rollout_logprobs"].values - rows["old_logprobs"].values
                values = values[rows["loss_mask"].values.astype(bool)] if "loss_mask" in rows else values
                apart.append(values[np.isfinite(values)])
        together = np.concatenate(apart) if apart else np.zeros(0)
        if not len(together):
            return {}
        return {
            "recorded/mismatch_mean": float(together.mean()),
            "recorded/mismatch_mean_abs": float(np.abs(together).mean()),
            "recorded/mismatch_max_abs": float(np.abs(together).max()),
        }


def _identities(rows: RowBatch) -> list[str]:
    if "sample_id" in rows:
        return [str(one) for one in rows["sample_id"]]
    key = rows.get("prompt_id")
    return [f"{index}/{'' if key is None else key[index]}" for index in range(len(rows))]


def _newest(rows: RowBatch) -> int | None:
    """The newest version of the weights that sampled any of the rows; with it, how stale each of them is."""
    return int(rows["max_policy_version"].max()) if "max_policy_version" in rows and len(rows) else None


def _split(rows: RowBatch) -> Iterator[np.ndarray]:
    """Rows group by group, in chunks."""
    key = rows["prompt_id"] if "prompt_id" in rows else np.arange(len(rows))
    groups: dict[Any, list[int]] = {}
    for index, name in enumerate(key):
        groups.setdefault(name, []).append(index)
    lengths = rows["response_ids"].lengths if "response_ids" in rows else np.zeros(len(rows), np.int64)
    taken: list[int] = []
    tokens = 0
    for members in groups.values():
        for index in members:
            taken.append(index)
            tokens += int(lengths[index])
        if len(taken) >= MOST_ROWS or tokens >= MOST_TOKENS:
            yield np.array(taken)
            taken, tokens = [], 0
    if taken:
        yield np.array(taken)


def _chunk(step: int, node: str, rows: RowBatch, newest: int | None, pieces: Pieces | None, with_tokens: bool) -> Chunk:
    types = rows.types
    key = _key(rows)
    names = list(dict.fromkeys(key))
    first = [key.index(name) for name in names]
    scores = {name: _numbers(rows[name]) for name, kind in types.items() if _is_score(kind)}
    words = {name: [str(one) for one in rows[name]] for name, kind in types.items() if _is_text(kind, SAMPLE)}
    given = {
        name: [str(rows[name][place]) for place in first] for name, kind in types.items() if _is_text(kind, PROMPT)
    }
    text = {"groups": names, "given": given, "words": words, "scores": scores}
    has_tokens = with_tokens and "response_ids" in rows
    return Chunk(_index(step, node, rows, newest), packed_json(text), _tokens(rows, pieces) if has_tokens else None)


def _key(rows: RowBatch) -> list[str]:
    """What the responses of a group share."""
    return [str(one) for one in rows["prompt_id"]] if "prompt_id" in rows else [str(i) for i in range(len(rows))]


def _index(step: int, node: str, rows: RowBatch, newest: int | None) -> dict[str, Any]:
    key = _key(rows)
    number = {name: place for place, name in enumerate(dict.fromkeys(key))}
    scores = {
        name: _numbers(rows[name]) for name in ("reward", "advantage") if name in rows and _is_score(rows.types[name])
    }
    return {
        "step": step, "node": node, "group": [number[name] for name in key], "scores": scores,
        "length": rows["response_ids"].lengths.tolist() if "response_ids" in rows else None,
        "end": [str(one) for one in rows["finish_reason"]] if "finish_reason" in rows else None,
        "failed": [int(bool(one)) for one in rows["row_error"]] if "row_error" in rows else [], "newest": newest,
    }  # fmt: skip


def _of_samples(step: int, samples: Sequence[dict[str, Any]]) -> Chunk:
    key = [str(one.get("prompt_id", place)) for place, one in enumerate(samples)]
    names = list(dict.fromkeys(key))
    first = [key.index(name) for name in names]
    texts = [name for name in ("prompt", "answer") if any(name in one for one in samples)]
    given = {name: [str(samples[place].get(name, "")) for place in first] for name in texts}
    words = {name: [str(one.get(name, "")) for one in samples] for name in ("response", "finish_reason", "row_error")}
    rewards = [one.get("reward") for one in samples]
    scores = {"reward": [r if isinstance(r, int | float) else None for r in rewards]}
    index = {"step": step, "node": SAMPLES, "group": [names.index(name) for name in key], "scores": scores, "length": None,
             "end": words["finish_reason"], "failed": [int(bool(one)) for one in words["row_error"]], "newest": None}  # fmt: skip
    return Chunk(index, packed_json({"groups": names, "given": given, "words": words, "scores": scores}), None)


def _is_score(kind: ColumnType) -> bool:
    return kind.granularity in (SAMPLE, PROMPT) and not kind.inner and kind.dtype not in ("str", "bytes", "json")


def _is_text(kind: ColumnType, where: Any) -> bool:
    return kind.granularity is where and not kind.inner and kind.dtype == "str"


def _numbers(values: np.ndarray) -> list[float | int | None]:
    """With six digits, as a page shows no more; what is not finite becomes None."""
    if values.dtype.kind in "iub":
        return [int(one) for one in values]
    return [float(f"{one:.6g}") if np.isfinite(one) else None for one in np.asarray(values, np.float64)]


def _tokens(rows: RowBatch, pieces: Pieces | None) -> bytes:
    """A header as JSON (its length before it, in 4 bytes) and arrays: ids as uint32, numbers as float16, masks as bytes.

    float16 keeps three digits, which is what colours and tips show, in half of the bytes.
    """
    ids: Ragged = rows["response_ids"]
    numbers: list[tuple[str, np.ndarray]] = []
    masks: list[tuple[str, np.ndarray]] = []
    for name, kind in rows.types.items():
        if kind.granularity is not TOKEN or kind.inner or name == "response_ids":
            continue
        if kind.dtype == "bool":
            masks.append((name, rows[name].values.astype(np.uint8)))
        elif rows[name].values.dtype.kind in "fiu":
            with np.errstate(over="ignore"):  # beyond 65504 it is shown as infinite
                numbers.append((name, rows[name].values.astype("<f2")))
    header: dict[str, Any] = {
        "lengths": ids.lengths.tolist(),
        "numbers": [n for n, _ in numbers],
        "masks": [n for n, _ in masks],
    }
    if pieces is not None:
        wanted = np.unique(ids.values).tolist()
        words = [None if one is None else base64.b64encode(one).decode("ascii") for one in pieces(wanted)]
        header["words"] = dict(zip(map(str, wanted), words, strict=True))
    said = json.dumps(header, separators=(",", ":")).encode("ascii")
    said += b" " * (-len(said) % 4)  # arrays begin where their numbers can be read in place
    arrays = [ids.values.astype("<u4"), *(array for _, array in numbers), *(array for _, array in masks)]
    return zlib.compress(b"".join([struct.pack("<I", len(said)), said, *(array.tobytes() for array in arrays)]), LEVEL)


def packed_json(values: Any) -> bytes:
    """Deflated JSON of ASCII letters: what is no character of its own, such as half of a surrogate pair, stays escaped."""
    return zlib.compress(json.dumps(values, separators=(",", ":"), allow_nan=False).encode("ascii"), LEVEL)


# --------------------------------------------------------------------------------------------------- as much as fits


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks of the steps that a page has room for."""

    index: tuple[dict[str, Any], ...] = ()
    """Of each chunk, by step; `has_tokens` says whether its tokens are there."""
    blocks: dict[str, bytes] = field(default_factory=dict)
    """`text-4`, `tokens-4` -> deflated bytes, by place in the index."""
    steps: tuple[int, ...] = ()
    recorded_steps: int = 0
    """Of the run."""
    metrics: tuple[dict[str, Any], ...] = ()
    """Of the rows that are held: how far sampler and trainer are apart."""

    @property
    def num_rows(self) -> int:
        return sum(len(one["group"]) for one in self.index)

    @property
    def steps_with_tokens(self) -> int:
        return len({one["step"] for one in self.index if one["has_tokens"]})


def hold(found: Responses, most_bytes: int) -> Held:
    """Blocks of at most about `most_bytes`: whole steps, the last and the first of them first, then evenly between.

    Texts of as many steps as fit come before tokens of any.
    """
    steps = found.steps
    order = [steps[place] for place in spread_order(len(steps))]
    texts: dict[int, list[Chunk]] = {}
    metrics: dict[int, dict[str, Any]] = {}
    size = 0
    text_bytes = most_bytes * (TEXT_PART if found.is_recorded else 1.0)
    for step in order:
        made = list(found.chunks(step, with_tokens=False))
        more = sum(len(one.text) for one in made)
        if texts and size + more > text_bytes:
            break
        texts[step], size = made, size + more
        if numbers := found.mismatch(step):
            metrics[step] = {"step": step, **numbers}
    tokens: dict[int, list[Chunk]] = {}
    for step in (step for step in order if step in texts and found.is_recorded):
        made = list(found.chunks(step))
        more = sum(len(one.tokens or b"") for one in made)
        if size + more > most_bytes:
            break
        tokens[step], size = made, size + more
    return _held(found, texts, tokens, metrics)


def _held(
    found: Responses, texts: dict[int, list[Chunk]], tokens: dict[int, list[Chunk]], metrics: dict[int, dict[str, Any]]
) -> Held:
    index: list[dict[str, Any]] = []
    blocks: dict[str, bytes] = {}
    for step in sorted(texts):
        for chunk in tokens.get(step, texts[step]):
            blocks[f"text-{len(index)}"] = chunk.text
            if chunk.tokens is not None:
                blocks[f"tokens-{len(index)}"] = chunk.tokens
            index.append({**chunk.index, "has_tokens": chunk.tokens is not None})
    return Held(
        tuple(index), blocks, tuple(sorted(texts)), len(found.steps), tuple(metrics[s] for s in sorted(metrics))
    )


def spread_order(count: int) -> Iterator[int]:
    """The last, the first, then what lies in the middle between those that came: any beginning is spread over all."""
    seen: set[int] = set()
    for one in (count - 1, 0):
        if 0 <= one < count and one not in seen:
            seen.add(one)
            yield one
    spans = [(0, count - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low < 2:
            continue
        middle = (low + high) // 2
        if middle not in seen:
            seen.add(middle)
            yield middle
        spans += [(low, middle), (middle, high)]
