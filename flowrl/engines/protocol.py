"""What the runtime asks of an engine: open a model, then sample, score and train with it.

    Engine.open(name, model, uses) -> Host          one per model of the flow
    Host.generate / forward / update / blend        the work of nodes
    Sampler.generate / load                         inside a host; two real ones shape it: Transformers and vLLM

Arrays cross this seam as NumPy and `Ragged`; torch stays behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from flowrl.graph.averages import Average
from flowrl.graph.losses import Loss
from flowrl.model import Model, Tokenizer
from flowrl.schema.ragged import Ragged

USES = ("generate", "logprobs", "top_logprobs", "values", "score", "update", "source")
"""What nodes do with a model. `source`: only its weights are read (assign, ema)."""


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Identity of one random stream: the same key gives the same tokens, in whatever batch or process it is sampled."""

    seed: int
    step: int
    stream: str
    """Name of the rollout node."""
    prompt_id: str
    index: int
    """Index among the prompt's responses."""
    turn: int = 0

    def number(self) -> int:
        """63 bits that seed a generator."""
        text = f"{self.seed}|{self.step}|{self.stream}|{self.prompt_id}|{self.index}|{self.turn}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How to sample; equal for all requests of a call."""

    temperature: float = 1.0
    """0: the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    """A response ends when its text contains one of these; the text keeps it, nothing is appended."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One response to sample."""

    prompt_ids: Sequence[int]
    max_tokens: int
    key: SampleKey


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled response.

    Example:
        Sampled(ids=[12, 9, 2], logprobs=[-0.2, -1.1, -0.01], finish_reason="stop")    # 2 ends a response, and was sampled
    """

    ids: list[int]
    """Exactly the sampled tokens, end token included when it was sampled; nothing is ever appended."""
    logprobs: list[float]
    """Nats, under the distribution sampled from (temperature, top_p, top_k applied; temperature 0: at temperature 1)."""
    finish_reason: str
    """`stop` (an end token or stop string) or `length`."""


class Sampler(Protocol):
    """Generates; holds its own copy (or a view) of the weights."""

    version: int
    """Version of the weights it holds."""

    def generate(self, requests: Sequence[SampleRequest], options: SamplingOptions) -> list[Sampled]:
        """One response per request, in order. Refuses with StaleWeightsError after a failed `load`."""
        ...

    def load(self, named: Iterable[tuple[str, Any]], version: int) -> None:
        """Overwrite the weights in place from (Hugging Face name, tensor) pairs and drop every cache made with the old
        ones. All parameters must come; a missing or unknown name is an error naming it and leaves the sampler stale."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Token columns of N rows."""

    prompt_ids: Ragged
    response_ids: Ragged
    temperature: np.ndarray
    """[N] float32, above 0."""

    def __len__(self) -> int:
        return len(self.response_ids)


@dataclass(frozen=True, slots=True)
class UpdateJob:
    """Everything an update needs besides weights and optimizer."""

    rows: TokenRows
    mask: Ragged
    """Bool, like response_ids: tokens that train."""
    columns: Mapping[str, np.ndarray | Ragged]
    """Stored columns some term reads."""
    loss: Loss
    average: Average = field(default_factory=Average)
    epochs: int = 1
    minibatches: int = 1
    split_by: np.ndarray | None = None
    """[N] keys; rows with equal key stay in one mini-batch."""
    group_by: np.ndarray | None = None
    """[N] keys; rows with equal key stay in one micro-batch (losses with locality group)."""
    is_whole: bool = False
    """All rows of an optimizer step stay in one micro-batch (losses with locality batch)."""
    prompts: np.ndarray | None = None
    """[N] ids of prompts, where the average asks for them."""
    shuffle: bool = True
    seed: int = 0
    """Seeds the order of rows."""


@dataclass(slots=True)
class Stat:
    """A mean kept as sum and count, so that it does not depend on how rows were split."""

    total: float = 0.0
    count: float = 0.0

    def add(self, total: float, count: float) -> None:
        self.total += total
        self.count += count

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else float("nan")


@dataclass(slots=True)
class UpdateReport:
    """What an update did."""

    metrics: dict[str, Stat] = field(default_factory=dict)
    """`loss`, `grad_norm`, `lr` and whatever the loss terms report (`clip_fraction`, `kl`)."""
    steps: int = 0
    """Optimizer steps taken."""
    skipped: int = 0
    """Optimizer steps skipped because the loss or a gradient was not finite."""
    tokens: int = 0
    """Tokens that trained, all epochs."""


class Host(Protocol):
    """One model of a run, opened by an engine."""

    name: str
    version: int
    """Times its weights have changed since the run began."""
    tokenizer: Tokenizer

    @property
    def max_context(self) -> int | None:
        """Longest prompt plus response; None for no limit."""
        ...

    @property
    def device(self) -> str:
        """Where its weights are: `cpu`, `cuda:0`; empty for an engine without a device."""
        ...

    def generate(self, requests: Sequence[SampleRequest], options: SamplingOptions) -> list[Sampled]: ...

    def publish(self) -> int:
        """Bring the newest weights to the sampler now, not at its next `generate`; bytes copied.

        0 where the sampler looks at these very weights, has them already, or is not open yet.
        """
        ...

    def logprobs(self, rows: TokenRows) -> Ragged:
        """[T] float32 nats of each response token, at each row's temperature."""
        ...

    def top_logprobs(self, rows: TokenRows, k: int) -> tuple[Ragged, Ragged]:
        """([T, k] int32 ids, [T, k] float32 nats), likeliest first."""
        ...

    def values(self, rows: TokenRows) -> Ragged:
        """[T] float32: value before each response token is emitted, i.e. read at the token before it."""
        ...

    def score(self, rows: TokenRows) -> np.ndarray:
        """[N] float32: the reward head at the last token."""
        ...

    def update(self, job: UpdateJob) -> UpdateReport: ...

    def blend(self, source: Host, decay: float) -> None:
        """weights = decay * weights + (1 - decay) * source's; 0 copies."""
        ...

    def state(self) -> dict[str, Any]:
        """Weights, optimizer, schedule, counters: enough for `restore` to go on as if never stopped."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def write_state(self, path: str, *, is_first: bool = True) -> None:
        """Write what `read_state` goes on from into a folder. Every rank that holds the model calls it, one of them as the first.

        Errors: EngineError with what the file system said.
        """
        ...

    def read_state(self, path: str) -> None:
        """Go on from what `write_state` has written. Errors: EngineError for another model, or a damaged folder."""
        ...

    def model(self) -> Model:
        """The model as it is now (its source the live module), to give to another run without going through a file."""
        ...

    def save(self, path: str) -> None:
        """Write the weights where Transformers can load them (the null engine: a JSON file)."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Parks(Protocol):
    """A host whose state can leave its device; what uses the model meanwhile gets an EngineError."""

    def offload(self, *, writes: bool = True) -> int:
        """To host memory; bytes copied. `writes=False` promises that nothing changed since it came in: no copy is needed."""
        ...

    def onload(self) -> int:
        """Back to the device; bytes copied, 0 when it is there."""
        ...


class Engine(Protocol):
    """Opens models."""

    name: str

    def open(self, name: str, model: Model, uses: frozenset[str], *, seed: int) -> Host:
        """Load a model for the given uses (of `USES`); the optimizer is made only with `update`, a sampler only with
        `generate`. Errors: EngineError naming what is missing (path, head, tokenizer, extra) and what to do."""
        ...


EngineFactory = Callable[[], Engine]
"""Engines are named by `module:function`; see `flowrl.engines.ENGINES`."""
