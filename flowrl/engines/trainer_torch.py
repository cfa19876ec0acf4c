"""Training on one device: optimizer steps of micro-batches whose split changes nothing.

    update        epochs x mini-batches -> one optimizer step each
    step          global counts -> weights; micro-batches: forward, loss, backward; then clip, check, AdamW

[Note: Averages come from counts of the whole step]
Every trained token (or row) gets its weight from sums over the mini-batch before any forward runs. Micro-batches add
gradients of weighted sums and never divide, so the gradient is the same for every split, a masked micro-batch adds nothing,
and a row without a trained token counts nowhere.

Dropout stays off in training as in sampling: with it, the policy that is trained would not be the one that sampled, and
ratios between the two would differ from 1 before any step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from flowrl.engines.averages import weights
from flowrl.engines.forward import Forward
from flowrl.engines.loss_terms import Scope, evaluate
from flowrl.engines.offload.store import OptimizerStore, ResidentAdamW
from flowrl.engines.packing import (
    Batch,
    Sequences,
    joined_units,
    make_batch,
    minibatches,
    needed_lengths,
    prompt_units,
    split_by_tokens,
)
from flowrl.engines.protocol import Stat, UpdateJob, UpdateReport
from flowrl.engines.segments import Segments
from flowrl.engines.weights import Weights
from flowrl.errors import DataError, EngineError, OperatorError
from flowrl.graph.losses import is_live, reads_of
from flowrl.model import AdamW
from flowrl.schema.columns import nearest
from flowrl.schema.ragged import Ragged

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
T = TypeVar("T")


def learning_rate(options: AdamW, step: int) -> float:
    """Rate of optimizer step `step` (from 0); see `AdamW`."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    if options.schedule == "constant" or options.total_steps is None:
        return options.lr
    length = max(options.total_steps - options.warmup_steps, 1)
    done = min((step - options.warmup_steps) / length, 1.0)
    left = 1.0 - done if options.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return options.min_lr + (options.lr - options.min_lr) * left


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """An update job made ready: checked, joined and counted once."""

    job: UpdateJob
    sequences: Sequences
    mask: np.ndarray
    """[T of all rows] bool."""
    counts: np.ndarray
    """[N] int64: trained tokens of each row."""
    lengths: np.ndarray
    """[N] int64: tokens of each row that the forward needs."""
    groups: np.ndarray | None
    """[N] int: rows with equal number stay in one micro-batch."""
    live: frozenset[str]
    columns: Mapping[str, np.ndarray | Ragged]


@dataclass(slots=True)
class Step:
    """What the micro-batches of one optimizer step added up to."""

    loss: Tensor
    metrics: dict[str, tuple[Tensor, int]]
    is_live: bool
    """Whether any of it depends on the model."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A whole optimizer step in numbers."""

    loss: float
    grad_norm: float
    metrics: Mapping[str, tuple[float, float]]
    """name -> (sum, count)."""
    is_live: bool


class Trainer:
    """AdamW over the trainable parameters of one module."""

    def __init__(
        self,
        forward: Forward,
        weights: Weights,
        options: AdamW,
        *,
        micro_batch_tokens: int,
        max_context: int | None,
        store: OptimizerStore | None = None,
    ) -> None:
        self.forward = forward
        self.weights = weights
        self.options = options
        self.micro_batch_tokens = micro_batch_tokens
        self.max_context = max_context
        self.steps = 0
        """Optimizer steps taken so far: the place in the learning-rate schedule."""
        self.trained = weights.trained()
        if not self.trained:
            raise EngineError(
                f"model '{forward.name}' is updated, and all its parameters are frozen (requires_grad=False)"
            )
        self.store: OptimizerStore = store or ResidentAdamW(weights, options)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of PyTorch. Errors: EngineError when the state is not on the device."""
        if isinstance(self.store, ResidentAdamW):
            return self.store.optimizer
        raise EngineError(
            f"model '{self.forward.name}' keeps the state of its optimizer in host memory ({type(self.store).__name__}), so "
            "there is no torch optimizer to look into; use state(), or open it with offload='none'"
        )

    # --- update ------------------------------------------------------------------------------------------------------

    def update(self, job: UpdateJob, num_ids: int) -> UpdateReport:
        """Run all epochs and mini-batches of a job."""
        work = self._prepare(job, num_ids)
        report = UpdateReport()
        if len(job.rows) == 0:
            return report
        units = joined_units(len(job.rows), job.split_by, job.group_by)
        for epoch in range(job.epochs):
            for rows in minibatches(units, job.minibatches, shuffle=job.shuffle, seed=job.seed, epoch=epoch):
                self._optimize(work, rows, report)
        return report

    def _prepare(self, job: UpdateJob, num_ids: int) -> Work:
        responses = job.rows.response_ids
        if not np.array_equal(job.mask.offsets, responses.offsets):
            raise DataError(
                "the mask of an update needs one value per response token; its rows have other lengths than the responses"
            )
        sequences = Sequences.of(job.rows, num_ids=num_ids, max_length=self.max_context)
        reads = reads_of(job.loss)
        stored = job.columns
        fallbacks = {
            r.live for r in reads if r.live and not is_live(r) and r.column not in stored and r.broadcast not in stored
        }
        live = job.loss.live() | fallbacks
        self.forward.require(live)
        mask = np.ascontiguousarray(job.mask.values, dtype=bool)
        lengths = sequences.lengths if "scores" in live else needed_lengths(sequences, responses, mask)
        groups = None if job.group_by is None else joined_units(len(job.rows), job.group_by)
        return Work(
            job=job,
            sequences=sequences,
            mask=mask,
            counts=Ragged.like(mask.astype(np.int64), responses).sum(),
            lengths=lengths,
            groups=groups,
            live=live,
            columns=stored,
        )

    def _optimize(self, work: Work, rows: np.ndarray, report: UpdateReport) -> None:
        """One optimizer step on a mini-batch; nothing when no token of it trains."""
        tokens = int(work.counts[rows].sum())
        if tokens == 0:
            report.metrics.setdefault("empty_steps", Stat(count=1)).total += 1
            return
        step = self._accumulate(work, rows)
        grads = self._gradients()
        numbers = self._numbers(step, grads)
        if not numbers.is_live:
            raise _learns_nothing(work.job)
        loss_value, norm_value = numbers.loss, numbers.grad_norm
        rate = learning_rate(self.options, self.steps)
        limit = self.options.max_grad_norm
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            self.weights.drop_gradients()
            report.skipped += 1
            return
        if limit is not None and norm_value > limit:
            torch._foreach_mul_(list(grads.values()), limit / norm_value)
        self.store.step(rate)
        self.weights.drop_gradients()
        self.steps += 1
        report.steps += 1
        report.tokens += tokens
        _add(report, "loss", loss_value)
        _add(report, "grad_norm", norm_value)
        _add(report, "lr", rate)
        if limit is not None:
            _add(report, "grad_clipped", float(norm_value > limit))
        for name, (total, count) in numbers.metrics.items():
            report.metrics.setdefault(name, Stat()).add(total, count)

    def _gradients(self) -> dict[str, Tensor]:
        """What this process holds of the gradients, by parameter; parameters without one are left out."""
        return self.weights.gradients()

    def _numbers(self, step: Step, grads: Mapping[str, Tensor]) -> Numbers:
        """The step in numbers, read from the device."""
        norm = torch.nn.utils.get_total_norm(list(grads.values())) if grads else step.loss.new_zeros(())
        loss, grad_norm = torch.stack([step.loss.double(), norm.double()]).tolist()
        return Numbers(loss, grad_norm, sums_of(step), step.is_live)

    def _blocks(self, work: Work, rows: np.ndarray) -> Iterable[np.ndarray]:
        """The rows of each micro-batch."""
        groups = self._groups(work, rows)
        return (rows[block] for block in split_by_tokens(work.lengths[rows], self.micro_batch_tokens, groups=groups))

    def _run(self, function: Callable[..., T], *args: Any) -> T:
        """Call what runs the module. A place for what must be around it."""
        return function(*args)

    def _groups(self, work: Work, rows: np.ndarray) -> np.ndarray | None:
        """[N] int: rows that must, or that had better, share a micro-batch."""
        if work.job.is_whole:
            return np.zeros(len(rows), np.int64)
        if work.groups is not None:
            found: np.ndarray = np.unique(work.groups[rows], return_inverse=True)[1].reshape(-1)
            return found
        if not self.forward.shares_prompts:
            return None
        return prompt_units(work.sequences, rows, work.lengths[rows], self.micro_batch_tokens)

    def _accumulate(self, work: Work, rows: np.ndarray) -> Step:
        """Gradients of the step's loss, added up over micro-batches."""
        token_weight, row_weight = step_weights(work.job, work.counts, rows)
        rows = _with_work(work, rows)
        loss = torch.zeros((), device=self.forward.device)
        metrics: dict[str, tuple[Tensor, int]] = {}
        is_live = False
        for block in self._blocks(work, rows):
            part, found = self._run(self._micro_batch, work, block, token_weight, row_weight)
            if part.requires_grad:
                is_live = True
                part.backward()
            loss += part.detach()
            for name, (total, count) in found.items():
                before = metrics.get(name)
                metrics[name] = (total, count) if before is None else (before[0] + total, before[1] + count)
        return Step(loss, metrics, is_live)

    def _micro_batch(
        self, work: Work, rows: np.ndarray, token_weight: np.ndarray, row_weight: np.ndarray
    ) -> tuple[Tensor, dict[str, tuple[Tensor, int]]]:
        """Weighted sum of the loss over some rows, and their metrics."""
        job, device = work.job, self.forward.device
        fill = 0
        batch = make_batch(
            work.sequences, job.rows.response_ids, rows, mask=work.mask, fill=fill, whole="scores" in work.live
        )
        row_T = torch.from_numpy(batch.row_T).to(device)
        live = self.live_columns(batch, row_T, job.rows.temperature[rows], work.live)
        scope = Scope(
            live=live,
            columns=work.columns,
            rows=rows,
            flat_T=batch.flat_T,
            token_offsets=job.rows.response_ids.offsets,
            segments=Segments.of(row_T, len(rows)),
            device=device,
        )
        packed = evaluate(job.loss, scope)
        total = torch.zeros((), device=device)
        if packed.token is not None:
            weights = torch.from_numpy(token_weight[rows]).to(device)
            total = total + (packed.token.float() * weights[row_T]).sum()
        if packed.sample is not None:
            total = total + (packed.sample.float() * torch.from_numpy(row_weight[rows]).to(device)).sum()
        return total, scope.logged.sums

    def live_columns(
        self, batch: Batch, row_T: Tensor, temperature: np.ndarray, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        """The live columns asked for and no others, of the tokens of a batch, with gradient."""
        if not wanted:
            return {}
        device = self.forward.device
        if "scores" in wanted:
            ids, last = torch.from_numpy(batch.ids).to(device), torch.from_numpy(batch.last_B).to(device)
            hidden = self.forward.hidden(ids, torch.arange(len(last), device=device), last)
            return {"scores": self.forward.scalars(hidden)}
        hidden = self.forward.hidden_of(batch)
        if "values" in wanted:
            return {"values": self.forward.scalars(hidden)}
        scale = temperature_of(temperature, row_T)
        targets = torch.from_numpy(batch.target_T).to(device)
        with_entropy = "entropy" in wanted
        if "logits" in wanted:
            logits = self.forward.logits(hidden, scale)
            entropy = logits.softmax(-1).mul(logits.log_softmax(-1)).sum(-1).neg() if with_entropy else None
            logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0] if "logprobs" in wanted else None
            found = {"logits": logits, "entropy": entropy, "logprobs": logprobs}
        else:
            logprobs, entropy = self.forward.stats(hidden, targets, scale, with_entropy=with_entropy)
            found = {"logprobs": logprobs, "entropy": entropy}
        return {name: column for name, column in found.items() if column is not None}

    # --- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Optimizer state by parameter name, and the place in the schedule."""
        adam = {
            name: {"step": entry["step"], **{k: self.weights.array(entry[k]) for k in ADAM_STATE[1:]}}
            for name, entry in self.store.entries().items()
        }
        return {"optimizer": adam, "schedule": {"steps": self.steps}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave. Without "optimizer" the moments start anew, without "schedule" the schedule does not move.

        Errors: EngineError for a parameter unknown here, or one with a part of its state only. Parameters without any state
        (frozen, or never reached by a gradient) are fine.
        """
        adam: Mapping[str, Mapping[str, Any]] = state.get("optimizer", {})
        for name, entry in adam.items():
            if name not in self.trained:
                raise EngineError(
                    f"the saved optimizer state names parameter '{name}', which model '{self.forward.name}' does not train; "
                    f"{nearest(name, self.trained)}"
                )
            missing = [key for key in ADAM_STATE if key not in entry]
            if missing:
                raise EngineError(
                    f"the saved optimizer state of parameter '{name}' lacks {', '.join(missing)}; it is damaged"
                )
            if np.shape(entry["exp_avg"]) != tuple(self.trained[name].shape):
                raise EngineError(
                    f"the saved optimizer state of parameter '{name}' has shape {np.shape(entry['exp_avg'])} and the parameter "
                    f"{tuple(self.trained[name].shape)}"
                )
        if "optimizer" in state:
            self.store.load(
                {
                    name: {
                        "step": float(entry["step"]),
                        **{k: self.weights.placed(entry[k], self.trained[name]) for k in ADAM_STATE[1:]},
                    }
                    for name, entry in adam.items()
                }
            )
        if "schedule" in state:
            self.steps = int(state["schedule"]["steps"])


def temperature_of(temperature: np.ndarray, row_T: Tensor) -> Tensor | None:
    """[T] temperature of each token; None when all are 1."""
    if len(temperature) and float(temperature.min()) <= 0:
        raise DataError(f"log-probabilities need temperatures above 0; found {float(temperature.min())}")
    if bool((temperature == 1).all()):
        return None
    return torch.from_numpy(np.asarray(temperature, np.float32)).to(row_T.device)[row_T]


def step_weights(job: UpdateJob, counts: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([N] float32 weight of each token of a row, [N] float32 weight of each row), from the counts of one optimizer step."""
    prompts = None if job.prompts is None else job.prompts[rows].tolist()
    found = weights(job.average, counts[rows], prompts=prompts)
    token, row = np.zeros((2, len(counts)), np.float32)
    token[rows], row[rows] = found
    return token, row


def sums_of(step: Step) -> dict[str, tuple[float, float]]:
    """(sum, count) of each metric, read from the device at once."""
    if not step.metrics:
        return {}
    sums: Sequence[float] = torch.stack([total for total, _ in step.metrics.values()]).tolist()
    return {name: (total, step.metrics[name][1]) for name, total in zip(step.metrics, sums, strict=True)}


def _learns_nothing(job: UpdateJob) -> OperatorError:
    terms = ", ".join(repr(term.short_name) for term in job.loss.terms())
    return OperatorError(
        f"the loss {terms} does not depend on the model, so nothing would be learned: it reads no live column "
        "(logprobs, entropy, values, scores, logits), or cuts the gradient (.detach(), a comparison, NumPy)"
    )


def _with_work(work: Work, rows: np.ndarray) -> np.ndarray:
    """Rows that matter: those with a trained token, and the others of their groups."""
    if work.groups is None:
        return rows[work.counts[rows] > 0]
    busy = np.zeros(work.groups.max() + 1, bool)
    busy[work.groups[rows[work.counts[rows] > 0]]] = True
    return rows[busy[work.groups[rows]]]


def _add(report: UpdateReport, name: str, value: float) -> None:
    report.metrics.setdefault(name, Stat()).add(value, 1)
