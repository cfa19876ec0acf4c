"""The null engine: no torch, no weights worth the name, seeded. Every flow runs on it in milliseconds.

A null model is a unigram: one logit per token id plus a small trainable vector, `logits[v] = base[v] + w[v % 8]`. Samples,
log-probabilities and top-k come from that one distribution, so they agree with each other as a real model's do. An
update moves `w` by numbers drawn from a digest of everything it was given: any change of rows, columns or order shows.

`Model(source={"prompt text": ["an answer", "another"]})` makes it answer from a table instead, picked by the random stream.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.engines.protocol import (
    Host,
    Sampled,
    SampleRequest,
    SamplingOptions,
    Stat,
    TokenRows,
    UpdateJob,
    UpdateReport,
)
from flowrl.errors import DataError, EngineError
from flowrl.graph.losses import is_live, reads_of
from flowrl.model import Model, Tokenizer
from flowrl.schema.ragged import Ragged

WIDTH = 8
MEAN_LENGTH = 6


class ByteTokenizer:
    """Text as UTF-8 bytes; id 256 ends a response, 257 pads."""

    vocab_size = 257
    eos_ids = frozenset({256})
    pad_id = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_continuation(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    @property
    def fingerprint(self) -> str:
        return "bytes"


class NullEngine:
    """Opens null models."""

    name = "null"

    def open(self, name: str, model: Model, uses: frozenset[str], *, seed: int) -> Host:
        return NullHost(name, model, seed=seed)


class NullHost:
    """A null model of a run."""

    def __init__(self, name: str, model: Model, *, seed: int) -> None:
        self.name = name
        self.spec = model
        self.version = 0
        self.tokenizer: Tokenizer = model.tokenizer if model.tokenizer is not None else ByteTokenizer()
        self.answers: Mapping[str, Sequence[str]] = model.source if isinstance(model.source, Mapping) else {}
        vocab = self.tokenizer.vocab_size
        generator = np.random.default_rng(_digest(f"{seed}|null"))
        self.base = np.full(vocab, -30.0)
        likely = [i for i in b"0123456789 +-=abcxyz" if i < vocab] or list(range(vocab))
        self.base[likely] = generator.normal(0.0, 0.3, len(likely))
        for end in self.tokenizer.eos_ids:
            self.base[end] = np.log(np.exp(self.base[likely]).sum() / MEAN_LENGTH)
        self.weights = np.zeros(WIDTH)

    @property
    def max_context(self) -> int | None:
        return self.spec.max_context

    @property
    def device(self) -> str:
        return ""

    def publish(self) -> int:
        return 0  # it samples from the weights that an update moves

    def log_distribution(self, temperature: float) -> np.ndarray:
        """[V] nats."""
        logits = self.base + self.weights[np.arange(len(self.base)) % WIDTH]
        scaled = logits / temperature
        return scaled - (scaled.max() + np.log(np.exp(scaled - scaled.max()).sum()))

    def generate(self, requests: Sequence[SampleRequest], options: SamplingOptions) -> list[Sampled]:
        logp = self.log_distribution(options.temperature or 1.0)
        return [self._sample(request, options, logp) for request in requests]

    def _sample(self, request: SampleRequest, options: SamplingOptions, logp: np.ndarray) -> Sampled:
        if not len(request.prompt_ids):
            raise EngineError(
                f"prompt '{request.key.prompt_id}' is empty; a model needs at least one token to go on from"
            )
        if min(request.prompt_ids) < 0:
            raise DataError(
                f"prompt '{request.key.prompt_id}' holds token id {min(request.prompt_ids)}; ids begin at 0"
            )
        generator = np.random.default_rng(request.key.number())
        known = self.answers.get(self.tokenizer.decode(list(request.prompt_ids)))
        if known:
            pick = 0 if options.temperature == 0 else int(generator.integers(len(known)))
            ids = [*self.tokenizer.encode_continuation(known[pick]), *sorted(self.tokenizer.eos_ids)[:1]]
        elif options.temperature == 0:
            ids = [int(np.argmax(logp))] * min(3, request.max_tokens) + sorted(self.tokenizer.eos_ids)[:1]
        else:
            ids = generator.choice(len(logp), size=request.max_tokens, p=np.exp(logp)).tolist()
        ids, reason = self._cut(ids[: request.max_tokens], options.stop)
        return Sampled(ids, logp[ids].tolist(), reason)

    def _cut(self, ids: list[int], stop: tuple[str, ...]) -> tuple[list[int], str]:
        for index, token in enumerate(ids):
            text = self.tokenizer.decode(ids[: index + 1]) if stop else ""
            if token in self.tokenizer.eos_ids or any(s in text for s in stop):
                return ids[: index + 1], "stop"
        return ids, "length"

    def logprobs(self, rows: TokenRows) -> Ragged:
        tables = {t: self.log_distribution(float(t)) for t in np.unique(rows.temperature)}
        parts = [tables[t][ids] for t, ids in zip(rows.temperature, rows.response_ids, strict=True)]
        return Ragged.of(parts, np.float32)

    def top_logprobs(self, rows: TokenRows, k: int) -> tuple[Ragged, Ragged]:
        logp = self.log_distribution(1.0)
        best = np.argsort(-logp, kind="stable")[:k]
        count = len(rows.response_ids.values)
        ids = np.broadcast_to(best.astype(np.int32), (count, k))
        values = np.broadcast_to(logp[best].astype(np.float32), (count, k))
        return Ragged.like(ids, rows.response_ids), Ragged.like(values, rows.response_ids)

    def values(self, rows: TokenRows) -> Ragged:
        ids = rows.response_ids
        return Ragged.like((self.weights[ids.values % WIDTH] + np.cos(ids.values) * 0.1).astype(np.float32), ids)

    def score(self, rows: TokenRows) -> np.ndarray:
        return np.asarray(
            [np.cos(_digest(ids.tobytes()) % 1000) + self.weights.sum() for ids in rows.response_ids], np.float32
        )

    def update(self, job: UpdateJob) -> UpdateReport:
        tokens = int(job.mask.values.sum())
        for read in reads_of(job.loss):
            names = {read.column, read.broadcast}
            if not (is_live(read) or read.live or read.is_optional or names & set(job.columns)):
                raise EngineError(f"the loss reads '{read.column}', which the update was not given")
        if tokens == 0:
            return UpdateReport(steps=0)
        units = len(job.rows) if job.split_by is None else len(set(job.split_by.tolist()))
        if units < job.minibatches:
            raise DataError(
                f"{job.minibatches} mini-batches need at least as many rows (or groups that stay together); found {units}; "
                "ask for fewer mini-batches or raise the batch"
            )
        steps = job.epochs * job.minibatches
        drawn = np.random.default_rng(_digest(self._seen(job)))
        self.weights = self.weights + self.spec.optimizer.lr * steps * drawn.normal(size=WIDTH)
        self.version += 1
        loss = Stat(float(drawn.normal()) * tokens, tokens)
        return UpdateReport({"loss": loss, "lr": Stat(self.spec.optimizer.lr, 1)}, steps, 0, tokens * job.epochs)

    def _seen(self, job: UpdateJob) -> bytes:
        digest = hashlib.blake2b()
        flat = {"mask": job.mask, "prompt": job.rows.prompt_ids, "response": job.rows.response_ids, **job.columns}
        for name in sorted(flat):
            column = flat[name]
            array = column.values if isinstance(column, Ragged) else np.asarray(column)
            digest.update(name.encode())
            digest.update(
                repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).tobytes()
            )
        digest.update(repr((job.loss, job.average, job.epochs, job.minibatches)).encode())
        return digest.digest()

    def blend(self, source: Host, decay: float) -> None:
        if not isinstance(source, NullHost):
            raise EngineError(f"a null model takes weights from a null model; found {type(source).__name__}")
        self.weights = decay * self.weights + (1 - decay) * source.weights
        self.base = decay * self.base + (1 - decay) * source.base
        self.version += 1

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights.tolist(), "base": self.base.tolist(), "version": self.version}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.weights = np.asarray(state["weights"], float)
        self.base = np.asarray(state.get("base", self.base), float)
        self.version = int(state["version"])

    def write_state(self, path: str, *, is_first: bool = True) -> None:
        if is_first:
            self.save(path)

    def read_state(self, path: str) -> None:
        try:
            state = json.loads((Path(path) / "null.json").read_text())
        except (OSError, ValueError) as error:
            raise EngineError(f"the state of model '{self.name}' cannot be read from '{path}': {error}") from error
        if len(state["base"]) != len(self.base):
            raise EngineError(
                f"the checkpoint in '{path}' is of a model '{self.name}' with {len(state['base'])} tokens, and this one has "
                f"{len(self.base)}; resume with the models that the run was started with"
            )
        self.restore(state)

    def model(self) -> Model:
        return replace(self.spec, tokenizer=self.tokenizer)

    def save(self, path: str) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "null.json").write_text(json.dumps(self.state()))

    def close(self) -> None:
        pass


def _digest(text: str | bytes) -> int:
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
