"""The rows that the comparison moves: what GRPO on a language model makes, from real text and a model of its log-probs.

512 prompts x 8 responses. A prompt has 128 to 512 tokens, a response log-normally 32 to 2048. Ids are those of a byte-level
BPE trained on the text it encodes (files of this Python and its packages), so they repeat as ids of text do. Log-probs come
from top-64 logits with a sharpness that wanders along the response, rounded as bfloat16 rounds them; the reference's are the
same logits with noise; values wander with a full mantissa. W1 has no logits; W2 has the 64 largest, as float16.

Only the ids are real. What is said about the compression of the other columns holds for this model of them.
"""

from __future__ import annotations

import itertools
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SEED = 20
TOP = 64
RESPONSE_COLUMNS = ("response_ids", "rollout_logprobs", "ref_logprobs", "values", "loss_mask")
W1 = ("prompt_ids", *RESPONSE_COLUMNS)
"""The ragged training columns."""
LOGITS = "teacher_logits"
W2 = (*W1, LOGITS)
GROUP = 8
MAX_PROMPT, MAX_RESPONSE = 512, 2048
DTYPES: dict[str, Any] = {
    "prompt_ids": np.int32,
    "response_ids": np.int32,
    "rollout_logprobs": np.float32,
    "ref_logprobs": np.float32,
    "values": np.float32,
    "loss_mask": np.bool_,
    LOGITS: np.float16,
}
FORMAT = 6
"""Of the cache; grows when the rows it holds change."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is made."""

    prompts: int = 512
    logit_rows: int = 1024
    """Rows that have logits: the first ones."""
    vocabulary: int = 32_768
    corpus_bytes: int = 16_000_000

    @property
    def rows(self) -> int:
        return self.prompts * GROUP


FULL = Size()
QUICK = Size(prompts=32, logit_rows=64, vocabulary=4096, corpus_bytes=1_500_000)


@dataclass(frozen=True, slots=True)
class Workload:
    """Columns end to end, and where their rows begin."""

    size: Size
    values: dict[str, np.ndarray]
    prompt_offsets: np.ndarray
    """int64 [N + 1]; each response has its prompt, so a prompt lies here eight times."""
    response_offsets: np.ndarray
    texts: list[str]
    """Of the responses."""
    rewards: np.ndarray
    about: dict[str, float]
    """What was reached while it was made."""

    def offsets(self, name: str) -> np.ndarray:
        return self.prompt_offsets if name == "prompt_ids" else self.response_offsets

    def lengths(self, name: str) -> np.ndarray:
        return np.diff(self.offsets(name))

    def one(self, name: str, row: int) -> np.ndarray:
        bounds = self.offsets(name)
        return self.values[name][bounds[row] : bounds[row + 1]]

    def rows(self, names: tuple[str, ...], first: int, stop: int) -> list[dict[str, Any]]:
        """Rows as a sampler gives them: a dict each, with arrays of their own."""
        return [
            {
                **{name: self.one(name, row).copy() for name in names},
                "reward": float(self.rewards[row]),
                "sample_index": row % GROUP,
            }
            for row in range(first, stop)
        ]

    def payload(self, names: tuple[str, ...], rows: np.ndarray) -> int:
        """Bytes of the values of these rows."""
        return sum(int(self.lengths(name)[rows].sum()) * self.width(name) for name in names)

    def width(self, name: str) -> int:
        """Bytes of one token's value."""
        values = self.values[name]
        return values.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))


def load(size: Size, *, fresh: bool = False) -> Workload:
    """The workload, made on the first call (a minute for the full one) and then read from the temporary folder."""
    name = f"flowrl-bench-tables-{FORMAT}-{size.prompts}-{size.logit_rows}-{size.vocabulary}-{os.getuid()}"
    folder = Path(tempfile.gettempdir()) / name
    if fresh or not (folder / "about.json").exists():
        _save(make(size), folder)
    about = json.loads((folder / "about.json").read_text())
    arrays = {path.stem: np.load(path) for path in folder.glob("*.npy")}
    texts, ends = arrays.pop("texts").tobytes(), arrays.pop("text_ends").tolist()
    return Workload(
        size,
        prompt_offsets=arrays.pop("prompt_offsets"),
        response_offsets=arrays.pop("response_offsets"),
        rewards=arrays.pop("rewards"),
        texts=[texts[a:b].decode() for a, b in zip([0, *ends[:-1]], ends, strict=True)],
        about=about,
        values=arrays,
    )


def _save(made: Workload, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    encoded = [text.encode() for text in made.texts]
    arrays = {
        **made.values,
        "prompt_offsets": made.prompt_offsets,
        "response_offsets": made.response_offsets,
        "rewards": made.rewards,
        "texts": np.frombuffer(b"".join(encoded), np.uint8),
        "text_ends": np.cumsum([len(text) for text in encoded]),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "about.json").write_text(json.dumps(made.about))  # last: its presence says that all is there


def make(size: Size) -> Workload:
    random = np.random.default_rng(SEED)
    per_prompt = random.integers(128, MAX_PROMPT + 1, size.prompts)
    lengths = np.exp(random.normal(np.log(457.0), 0.78, size.rows)).clip(32, MAX_RESPONSE).astype(np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    ids, prompts, texts = _text(size, per_prompt, lengths, random)
    drawn = _Drawn.of(lengths, size, random)
    repeated = [prompt for prompt in prompts for _ in range(GROUP)]
    mask = np.ones(len(ids), np.bool_)
    for start, stop in itertools.pairwise(bounds.tolist()):  # what a tool wrote does not train
        at = int(random.integers(start, stop))
        mask[at : min(at + 16, stop)] = False
    return Workload(
        size,
        values={
            "prompt_ids": np.concatenate(repeated),
            "response_ids": ids,
            "rollout_logprobs": drawn.logprobs,
            "ref_logprobs": drawn.ref_logprobs,
            "values": _wander(lengths, 0.98, random)[0] * np.float32(0.3),
            "loss_mask": mask,
            LOGITS: drawn.logits,
        },
        prompt_offsets=np.concatenate([[0], np.cumsum([len(prompt) for prompt in repeated])]),
        response_offsets=bounds,
        texts=texts,
        rewards=(random.random(size.rows) < 0.4).astype(np.float32),
        about=drawn.about,
    )


# ------------------------------------------------------------------------------------------------------------------ text


def _files() -> Iterator[Path]:
    paths = sysconfig.get_paths()
    for root in dict.fromkeys((paths["stdlib"], paths["purelib"])):
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(f for f in folders if not f.startswith(("__pycache__", ".")) and f != "site-packages")
            yield from (Path(folder, name) for name in sorted(names) if name.endswith((".py", ".rst", ".md", ".txt")))


def _corpus(num_bytes: int, random: np.random.Generator) -> list[str]:
    """Text of files of this Python, in a random order."""
    found = [path for path in _files() if 2_000 <= path.stat().st_size <= 60_000]
    texts: list[str] = []
    size = 0
    for number in random.permutation(len(found)):
        if size >= num_bytes:
            break
        try:
            text = found[number].read_text("utf-8")
        except UnicodeDecodeError:
            continue
        texts.append(text)
        size += len(text)
    return texts


def _text(
    size: Size, per_prompt: np.ndarray, lengths: np.ndarray, random: np.random.Generator
) -> tuple[np.ndarray, list[np.ndarray], list[str]]:
    """(ids of all responses end to end, ids of each prompt, text of each response)"""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = _corpus(size.corpus_bytes, random)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size.vocabulary, special_tokens=["<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    encoded = [np.array(one.ids, np.int32) for one in tokenizer.encode_batch(texts)]
    stream = np.concatenate(encoded)
    needed = int(per_prompt.sum() + lengths.sum())
    stream = np.tile(stream, -(-needed // len(stream)))[:needed]  # a short corpus is read again
    prompts = np.split(stream[: per_prompt.sum()], np.cumsum(per_prompt)[:-1])
    ids = stream[per_prompt.sum() :]
    responses = tokenizer.decode_batch([part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])])
    return ids, prompts, responses


# --------------------------------------------------------------------------------------------------------- the log-probs


def _wander(lengths: np.ndarray, keep: float, random: np.random.Generator, count: int = 1) -> np.ndarray:
    """AR(1) of variance 1 along each row, float32 [count, T], rows end to end."""
    longest = int(lengths.max())
    made = random.standard_normal((count, longest, len(lengths)), np.float32)
    for step in range(1, longest):
        made[:, step] *= np.float32(np.sqrt(1 - keep * keep))
        made[:, step] += np.float32(keep) * made[:, step - 1]
    inside = np.arange(longest) < lengths[:, None]
    return np.stack([one.T[inside] for one in made])


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


@dataclass(frozen=True, slots=True)
class _Drawn:
    logprobs: np.ndarray
    ref_logprobs: np.ndarray
    logits: np.ndarray
    about: dict[str, float]

    @classmethod
    def of(cls, lengths: np.ndarray, size: Size, random: np.random.Generator) -> _Drawn:
        """Sharpness is exp(AR(1)); gaps of the sorted logits are those of exponential order statistics, times it."""
        wander, height = _wander(lengths, 0.7, random, count=2)
        total = int(lengths.sum())
        with_logits = int(lengths[: size.logit_rows].sum())
        logprobs, ref_logprobs = np.empty(total, np.float32), np.empty(total, np.float32)
        kept = np.empty((with_logits, TOP), np.float16)
        tops, entropies = np.empty(total, np.float32), np.empty(total, np.float32)
        for first in range(0, total, 1 << 15):
            part = slice(first, min(first + (1 << 15), total))
            logits = _sorted_logits(wander[part], height[part], random)
            noisy = _bfloat16(logits + random.standard_normal(logits.shape, np.float32) * np.float32(0.15))
            mine, probabilities = _log_softmax(logits)
            ref, _ = _log_softmax(noisy)
            cumulative = probabilities.cumsum(axis=1)
            picked = (cumulative < random.random((len(logits), 1), np.float32) * cumulative[:, -1:]).sum(axis=1)
            rows = np.arange(len(logits))
            logprobs[part], ref_logprobs[part] = mine[rows, picked], ref[rows, picked]
            tops[part] = probabilities[:, 0]
            entropies[part] = -(probabilities * mine).sum(axis=1)
            if first < with_logits:
                kept[part] = logits[: with_logits - first].astype(np.float16)
        return cls(
            logprobs,
            ref_logprobs,
            kept,
            {
                "median p(max)": float(np.median(tops)),
                "mean entropy": float(entropies.mean()),
                "p > .99": float((tops > 0.99).mean()),
                "log-probs exactly 0": float((logprobs == 0).mean()),
            },
        )


SHARPNESS, SPREAD = 2.2, 1.15
"""Of exp(AR(1)): log of the median, and the deviation of the log."""
HEIGHT, HEIGHT_SPREAD = 36.0, 4.0
"""Of the largest logit: it decides how coarse bfloat16 is."""


def _sorted_logits(wander: np.ndarray, height: np.ndarray, random: np.random.Generator) -> np.ndarray:
    sharp = np.exp(np.float32(SHARPNESS) + np.float32(SPREAD) * wander)
    gaps = random.standard_exponential((len(sharp), TOP - 1), np.float32) / np.arange(1, TOP, dtype=np.float32)
    steps = np.concatenate([np.zeros((len(sharp), 1), np.float32), gaps.cumsum(axis=1)], axis=1)
    return _bfloat16(np.float32(HEIGHT) + np.float32(HEIGHT_SPREAD) * height[:, None] - steps * sharp[:, None])


def _log_softmax(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    powers = np.exp(shifted)
    total = powers.sum(axis=1, keepdims=True)
    return shifted - np.log(total), powers / total


# ------------------------------------------------------------------------------------------------------------ statistics


def lz4_bytes(part: bytes) -> int:
    """Of one LZ4 block."""
    import lz4.block  # here, so that machines without it can make the rows

    return len(lz4.block.compress(part, store_size=False))


def lz4_ratio(workload: Workload, name: str, page: int) -> float:
    """Logical over compressed bytes, `page` rows at a time."""
    bounds = workload.offsets(name)
    rows = workload.size.logit_rows if name == LOGITS else workload.size.rows
    raw = stored = 0
    for first in range(0, rows, page):
        part = workload.values[name][bounds[first] : bounds[min(first + page, rows)]].tobytes()
        raw += len(part)
        stored += lz4_bytes(part)
    return raw / stored


def statistics(workload: Workload) -> dict[str, float]:
    """What the rows are like; the numbers that a reader needs to judge the ratios."""
    lengths = workload.lengths("response_ids")
    everything = np.arange(workload.size.rows)
    logit_rows = np.arange(workload.size.logit_rows)
    found = {
        "rows": float(workload.size.rows),
        "response tokens": float(lengths.sum()),
        "mean length": float(lengths.mean()),
        "median length": float(np.median(lengths)),
        "W1 bytes a row": workload.payload(W1, everything) / len(everything),
        "W2 bytes a row": workload.payload(W2, logit_rows) / len(logit_rows),
        "text bytes a row": sum(len(text.encode()) for text in workload.texts) / len(everything),
        **workload.about,
    }
    for name in W2:
        found[f"LZ4 {name}"] = lz4_ratio(workload, name, 64 if name == LOGITS else 256)
    text = "".join(workload.texts).encode()
    found["LZ4 text"] = len(text) / lz4_bytes(text)
    return found
