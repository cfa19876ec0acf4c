"""The torch engine: one module per model of a run, which scores, trains and (unless vLLM does) samples."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flowrl.cost.offload import Offload
from flowrl.engines import saved
from flowrl.engines.compiled import compile_layers, uncompiled
from flowrl.engines.forward import Forward
from flowrl.engines.loading import Loaded, load
from flowrl.engines.modules import context_length, embedding_rows, repeated_layers
from flowrl.engines.offload.home import Home
from flowrl.engines.offload.store import OptimizerStore, open_store
from flowrl.engines.packing import Batch, Sequences, make_batch, prompt_units, split_by_tokens
from flowrl.engines.protocol import (
    USES,
    Host,
    Sampled,
    Sampler,
    SampleRequest,
    SamplingOptions,
    TokenRows,
    UpdateJob,
    UpdateReport,
)
from flowrl.engines.sampler_transformers import TransformersSampler
from flowrl.engines.tokenizers import IdsOnly
from flowrl.engines.trainer_torch import Trainer, temperature_of
from flowrl.engines.vllm_groups import Team
from flowrl.engines.weights import Weights
from flowrl.errors import ConfigError, EngineError
from flowrl.graph.losses import is_live, reads_of
from flowrl.model import Model
from flowrl.schema.columns import nearest
from flowrl.schema.ragged import Ragged

VLLM_SAMPLER = "flowrl.engines.sampler_vllm:VllmSampler"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEAD_OF_USE = {"generate": "lm", "logprobs": "lm", "top_logprobs": "lm", "values": "value", "score": "reward"}


class TorchEngine:
    """Opens models with PyTorch and Transformers."""

    name = "torch"

    def open(self, name: str, model: Model, uses: frozenset[str], *, seed: int) -> Host:
        """Load a model for the given uses.

        Errors: EngineError naming what is missing (path, head, tokenizer) and what to do; ConfigError for a use not known.
        """
        check_uses(name, model, uses)
        loaded = load(name, model, seed=seed, trains="update" in uses)
        refuse_untrained(name, model, loaded, uses)
        return TorchHost(name, model, loaded, uses)


def check_uses(name: str, model: Model, uses: frozenset[str]) -> None:
    """Errors: ConfigError for a use not known; EngineError for one that the model's head does not serve."""
    for use in sorted(uses):
        if use not in USES:
            raise ConfigError(f"a model is used for {', '.join(USES)}; found {use!r}; {nearest(use, USES)}")
        needed = HEAD_OF_USE.get(use, model.head)
        if needed != model.head:
            raise EngineError(
                f"model '{name}' is used for '{use}', which needs head='{needed}'; it has head='{model.head}'; "
                f"write fr.Model(..., head='{needed}')"
            )


def refuse_untrained(name: str, model: Model, loaded: Loaded, uses: frozenset[str]) -> None:
    """Errors: EngineError when a head is new and nothing trains it."""
    if loaded.new_head and "update" not in uses and "source" not in uses:
        raise EngineError(
            f"model '{name}' has no trained {model.head} head in {model.source!r}, and nothing trains it here, so "
            "its numbers would mean nothing; give a model whose head is trained"
        )


class TorchHost:
    """One model on one device. See `flowrl.engines.protocol.Host`."""

    FORWARD: ClassVar[type[Forward]] = Forward

    def __init__(self, name: str, model: Model, loaded: Loaded, uses: frozenset[str]) -> None:
        self.name = name
        self.spec = model
        self.version = 0
        self.tokenizer = loaded.tokenizer
        self.module = loaded.module
        self._hf_tokenizer = loaded.hf_tokenizer
        self._context = context_length(name, self.module, model.max_context)
        trains = "update" in uses
        if not trains:
            self.module.requires_grad_(False)
        self.weights = self._make_weights()
        self.forward = self._make_forward()
        if model.compile:
            # after the first passes above, which need no compiler
            compile_layers(name, model, self._layers(), self.forward.device)
            self.forward.shares_prompts = False
        self.num_ids = embedding_rows(name, self.module)
        self._checkpointed: list[torch.nn.Module] = []
        self.trainer: Trainer | None = None
        self._store: OptimizerStore | None = None
        if trains:
            self._store = open_store(self.weights, model.optimizer, PRECISIONS[model.precision], Offload(model.offload))
            if self._store is None:
                self.weights.make_masters(PRECISIONS[model.precision])
            if model.gradient_checkpointing:
                # recomputation runs without a cache, which sharing needs
                self.forward.shares_prompts = False
                self._checkpointed = _checkpointed_layers(name, self.module)
            self.trainer = self._make_trainer()
        self._home = Home(name, self.weights, self._moments, self.forward.device)
        self._is_changed = True
        """Since it was parked last."""
        self._sampler: Sampler | None = None
        self.team: Team | None = None
        """Ranks that vLLM is opened on together; None: this process."""
        self._only_samples = uses == {"generate"}
        if "generate" in uses and model.sampler == "transformers":
            self._sampler = TransformersSampler(
                self.module, self.tokenizer, model, name=name, max_context=self._context, shared=True
            )
        self._start_sum = ""

    def _make_weights(self) -> Weights:
        return Weights(self.name, self.module)

    def _make_forward(self) -> Forward:
        return self.FORWARD(self.name, self.module, head=self.spec.head, vocab_size=self.tokenizer.vocab_size)

    def _layers(self) -> Sequence[torch.nn.Module]:
        return [layer for _, layer in repeated_layers(self.module)]

    def _moments(self) -> Iterator[Tensor]:
        return iter(()) if self.trainer is None else self.trainer.store.tensors()

    def _make_trainer(self) -> Trainer:
        return Trainer(
            self.forward,
            self.weights,
            self.spec.optimizer,
            micro_batch_tokens=self.spec.micro_batch_tokens,
            max_context=self._context,
            store=self._store,
        )

    @property
    def max_context(self) -> int | None:
        """Longest prompt plus response in tokens; None for no limit."""
        return self._context

    @property
    def device(self) -> str:
        """Of the module, also while it is parked."""
        return str(self._home.device)

    # --- where its state lies ----------------------------------------------------------------------------------------

    def offload(self, *, writes: bool = True) -> int:
        """Move its state to host memory; bytes copied, 0 where the copy there is good.

        A sampler that looks at the module itself keeps that on the device: then only what training needs leaves. A model that
        only samples leaves whole.

        Args:
            writes: False promises that nothing changed since it came in. What this host has changed itself is copied anyway.
        """
        shares = isinstance(self._sampler, TransformersSampler) and self._sampler.shared
        copied = self._home.offload(writes=writes or self._is_changed, keep_model=shares and not self._only_samples)
        self._is_changed = False
        if self.spec.sampler == "vllm" and self._home.device.type == "cuda":
            torch.cuda.empty_cache()  # an engine in another allocator, or process, is to have it
        return copied

    def onload(self) -> int:
        """Bring it back; bytes copied, 0 when it is here."""
        return self._home.onload()

    @property
    def is_parked(self) -> bool:
        """Whether a part of its state is in host memory, where nobody can use it."""
        return not self._home.is_here

    @property
    def host_bytes(self) -> int:
        """Host memory that its state takes, parked or kept there; of a model that is on the CPU, beside the model itself."""
        return self._home.memory.held_bytes + (0 if self.trainer is None else self.trainer.store.host_bytes)

    @contextmanager
    def brought(self, *, writes: bool) -> Iterator[None]:
        """Its newest weights on the device inside, for others that read or write them; then again where they were."""
        self._is_changed |= writes
        own = {id(parameter) for parameter in self.weights.parameters.values()}
        leads = any(id(master) not in own for master in self.weights.masters.values()) and not self.weights.leads
        with self._home.brought(writes=writes, training=leads):
            yield

    # --- sampling ----------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[SampleRequest], options: SamplingOptions) -> list[Sampled]:
        """One response per request, in order, with the newest weights."""
        self._home.require("sampling")
        if self._sampler is None:
            self._sampler = self._open_sampler()
        self.publish()
        with uncompiled(self.spec):
            return self._sampler.generate(requests, options)

    def publish(self) -> int:
        """Bring the newest weights to the sampler; bytes copied, 0 where it has them or shares the module."""
        sampler = self._sampler
        if sampler is None or sampler.version == self.version:
            return 0
        if isinstance(sampler, TransformersSampler) and sampler.shared:
            if self._home.model.is_here:  # else it is told before it samples, which needs the model here
                sampler.load(self.weights.named(), self.version)
            return 0
        with self._home.brought(writes=False, training=False):
            sampler.load(self.weights.named(), self.version)
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.weights.named())

    def _open_sampler(self) -> Sampler:
        if self.spec.sampler != "vllm":
            raise EngineError(f"model '{self.name}' was not opened for 'generate'; it has no sampler")
        module, _, attribute = VLLM_SAMPLER.partition(":")
        sampler: Sampler = getattr(importlib.import_module(module), attribute)(
            self.module, self.tokenizer, self.spec, self.team
        )
        return sampler

    # --- forward passes ----------------------------------------------------------------------------------------------

    def logprobs(self, rows: TokenRows) -> Ragged:
        """[T] float32 nats of each response token, at each row's temperature."""
        self.forward.require(("logprobs",))
        out = np.zeros(len(rows.response_ids.values), np.float32)
        for batch in self._batches(rows):
            found, _ = self._run(self._stats, batch, rows)
            out[batch.flat_T] = found.cpu().numpy()
        return Ragged.like(self._joined(out), rows.response_ids)

    def top_logprobs(self, rows: TokenRows, k: int) -> tuple[Ragged, Ragged]:
        """([T, k] int32 ids, [T, k] float32 nats), likeliest first."""
        self.forward.require(("logprobs",))
        if not 1 <= k <= self.forward.vocab_size:
            raise ConfigError(
                f"top_logprobs of model '{self.name}' takes k from 1 to {self.forward.vocab_size}; found {k}"
            )
        total = len(rows.response_ids.values)
        ids, nats = np.zeros((total, k), np.int32), np.zeros((total, k), np.float32)
        for batch in self._batches(rows):
            for start, top_ids, top_nats in self._run(self._top, batch, rows, k):
                flat = batch.flat_T[start : start + len(top_ids)]
                ids[flat], nats[flat] = top_ids.cpu().numpy(), top_nats.cpu().numpy()
        ids, nats = self._joined(ids), self._joined(nats)
        return Ragged.like(ids, rows.response_ids), Ragged.like(nats, rows.response_ids)

    def values(self, rows: TokenRows) -> Ragged:
        """[T] float32: the value read at the token before each response token."""
        self.forward.require(("values",))
        out = np.zeros(len(rows.response_ids.values), np.float32)
        for batch in self._batches(rows):
            out[batch.flat_T] = self._run(lambda one: self.forward.scalars(self._hidden(one)[0]), batch).cpu().numpy()
        return Ragged.like(self._joined(out), rows.response_ids)

    def score(self, rows: TokenRows) -> np.ndarray:
        """[N] float32: the reward head at the last token."""
        self.forward.require(("scores",))
        out = np.zeros(len(rows), np.float32)
        for batch in self._batches(rows, whole=True):
            out[batch.rows] = self._run(self._scores, batch, rows).cpu().numpy()
        return self._joined(out)

    def _joined(self, found: np.ndarray) -> np.ndarray:
        """What was found, with what other processes found of the same rows; places that are not theirs hold 0."""
        return found

    def _batches(self, rows: TokenRows, *, whole: bool = False) -> list[Batch]:
        self._home.require("a forward pass")
        sequences = Sequences.of(rows, num_ids=self.num_ids, max_length=self._context)
        # the last token predicts nothing, but a score is read at it
        lengths = sequences.lengths if whole else np.where(rows.response_ids.lengths > 0, sequences.lengths - 1, 0)
        if whole and len(lengths) and lengths.min() == 0:
            raise EngineError(
                f"model '{self.name}' cannot score row {int(lengths.argmin())}, which has no tokens at all"
            )
        busy = np.flatnonzero(lengths > 0)
        budget = self.spec.sample_batch_tokens
        shares = self.forward.shares_prompts and not whole
        units = prompt_units(sequences, busy, lengths[busy], budget) if shares else None
        blocks = self._blocks(lengths[busy], budget, units)
        return [make_batch(sequences, rows.response_ids, busy[b], mask=None, fill=0, whole=whole) for b in blocks]

    def _blocks(self, lengths: np.ndarray, budget: int, units: np.ndarray | None) -> Iterable[np.ndarray]:
        """Places of the rows of each forward pass; see `split_by_tokens`."""
        return split_by_tokens(lengths, budget, groups=units)

    @torch.no_grad()
    def _run(self, function: Any, *args: Any) -> Any:
        return function(*args)

    def _hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.forward.hidden_of(batch), torch.from_numpy(batch.row_T).to(self.forward.device)

    def _stats(self, batch: Batch, rows: TokenRows) -> tuple[Tensor, Tensor | None]:
        hidden, row_T = self._hidden(batch)
        targets = torch.from_numpy(batch.target_T).to(hidden.device)
        return self.forward.stats(
            hidden, targets, temperature_of(rows.temperature[batch.rows], row_T), with_entropy=False
        )

    def _top(self, batch: Batch, rows: TokenRows, k: int) -> list[tuple[int, Tensor, Tensor]]:
        hidden, row_T = self._hidden(batch)
        scale = temperature_of(rows.temperature[batch.rows], row_T)
        found = []
        for start, cut in self.forward.slices(len(hidden)):
            found.append((start, *self.forward.top(hidden[cut], None if scale is None else scale[cut], k)))
        return found

    def _scores(self, batch: Batch, rows: TokenRows) -> Tensor:
        device = self.forward.device
        last = torch.from_numpy(batch.last_B).to(device)
        hidden = self.forward.hidden(
            torch.from_numpy(batch.ids).to(device), torch.arange(len(last), device=device), last
        )
        return self.forward.scalars(hidden)

    # --- changing weights --------------------------------------------------------------------------------------------

    def update(self, job: UpdateJob) -> UpdateReport:
        """Take the job's optimizer steps; the version rises by one when any was taken."""
        if self.trainer is None:
            raise EngineError(f"model '{self.name}' was not opened for 'update'; it has no optimizer")
        parks = Offload(self.spec.offload) is Offload.PARK
        if parks:
            self.onload()
        self._home.require("training", training=True)
        job = self._with_old_logprobs(job)
        self._is_changed = True
        with _recomputing(self._checkpointed):
            report = self.trainer.update(job, self.num_ids)
        if report.steps:
            self.version += 1
        if parks:
            self._home.offload(keep_model=True)
        return report

    def _with_old_logprobs(self, job: UpdateJob) -> UpdateJob:
        """[Note: Old means before the first step] A term may read the live log-probabilities, detached, for lack of a stored
        column. In the first optimizer step those are the same; in later ones they would follow the policy and every ratio
        would be 1. So with more than one step they are computed once, before."""
        if job.epochs * job.minibatches == 1 or len(job.rows) == 0:
            return job
        missing = {
            r.column
            for r in reads_of(job.loss)
            if r.live == "logprobs"
            and not is_live(r)
            and r.column not in job.columns
            and r.broadcast not in job.columns
        }
        if not missing:
            return job
        frozen = self.logprobs(job.rows)
        return replace(job, columns={**job.columns, **dict.fromkeys(sorted(missing), frozen)})

    def blend(self, source: Host, decay: float) -> None:
        """weights = decay * weights + (1 - decay) * source's; 0 copies. Errors: EngineError when names or shapes differ."""
        if not isinstance(source, TorchHost):
            raise EngineError(
                f"model '{self.name}' takes weights from models of the torch engine only; '{source.name}' is of another"
            )
        self._is_changed = True
        with source._home.brought(writes=False), self._home.brought(writes=True):
            self.weights.blend(source.weights, decay)
        self.version += 1

    # --- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """NumPy arrays by parameter name: weights, optimizer, schedule; and the version.

        A model whose weights have not changed since it was opened gives a checksum instead of its weights.
        """
        with self._home.brought(writes=False):
            return self._state()

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"version": self.version}
        if self.version == 0 and self.trainer is None:
            self._start_sum = self._start_sum or self.weights.checksum()
            return {**state, "unchanged": self._start_sum}
        state["weights"] = self.weights.export()
        state["has_masters"] = self.weights.has_masters
        if self.trainer is not None:
            state.update(self.trainer.state())
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave. Leave out "optimizer" for fresh moments, "schedule" to keep the schedule where it is.

        Errors: EngineError naming what does not fit.
        """
        self.onload()
        self._is_changed = True
        if "weights" in state:
            if state.get("has_masters"):  # an average in bf16 goes on from its fp32 masters
                self.weights.make_masters(self.weights.dtype)
            self.weights.load(state["weights"])
        elif "unchanged" in state and state["unchanged"] != self.weights.checksum():
            raise EngineError(
                f"model '{self.name}' had never been changed when its state was saved, and its source holds other weights now; "
                "resume with the model the run was started with"
            )
        if self.trainer is not None:
            self.trainer.restore(state)
        self.version = int(state.get("version", self.version))

    def write_state(self, path: str, *, is_first: bool = True) -> None:
        """Write what `read_state` goes on from, in tensors that any layout can read. Errors: EngineError, as of a full disk."""
        if is_first:
            with self._home.brought(writes=False):
                saved.write(self, Path(path), group=None, is_first=True)

    def read_state(self, path: str) -> None:
        """Go on from what `write_state` has written. Errors: EngineError for another model, or a damaged folder."""
        self.onload()
        self._is_changed = True
        saved.read(self, Path(path), group=None)

    def model(self) -> Model:
        """The model as it is now, its source the live module (copied by whatever opens it)."""
        self.onload()
        tokenizer = self.tokenizer if self._hf_tokenizer is None else self._hf_tokenizer
        return replace(self.spec, source=self.module, tokenizer=None if isinstance(tokenizer, IdsOnly) else tokenizer)

    def save(self, path: str) -> None:
        """Write weights and tokenizer where Transformers loads them; a module without `save_pretrained` as `model.pt`."""
        with self._home.brought(writes=False):
            self._save(Path(path))

    def _save(self, folder: Path) -> None:
        self._write(folder)

    def _write(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """`tensors` by the names of the module's state dict; None: the module's own."""
        folder.mkdir(parents=True, exist_ok=True)
        save = getattr(self.module, "save_pretrained", None)
        if callable(save):
            save(str(folder), **({} if tensors is None else {"state_dict": dict(tensors)}))
        else:
            torch.save(self.module.state_dict() if tensors is None else dict(tensors), folder / "model.pt")
        if self._hf_tokenizer is not None:
            self._hf_tokenizer.save_pretrained(str(folder))

    def close(self) -> None:
        """Give back the sampler and the optimizer's memory."""
        if self._sampler is not None:
            self._sampler.close()
        self._sampler = None
        self.trainer = self._store = None
        self._home.close()


def _checkpointed_layers(name: str, module: Any) -> list[torch.nn.Module]:
    """The layers whose activations are to be recomputed in the backward pass."""
    enable = getattr(module, "gradient_checkpointing_enable", None)
    if not callable(enable):
        raise EngineError(f"model '{name}': {type(module).__name__} has no gradient checkpointing; leave it off")
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return [layer for layer in module.modules() if getattr(layer, "gradient_checkpointing", False)]


@contextmanager
def _recomputing(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let layers recompute: they do so in training mode only, in which they would also refuse the sampler's cache. Their own
    flag is set and not their children's, so dropout stays off."""
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
