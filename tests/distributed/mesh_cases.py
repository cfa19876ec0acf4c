"""The work that tests of the mesh give to one device and to ranks alike: tiny models, jobs, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import flowrl as fr
from flowrl.engines.host_torch import TorchHost
from flowrl.engines.protocol import TokenRows, UpdateJob
from flowrl.graph.averages import Average
from flowrl.model import AdamW, Model
from flowrl.schema.ragged import Ragged

VOCAB = 22
STEPS = 5


@fr.loss
def clipped(
    logprobs,
    entropy,
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
):
    ratio = (logprobs - old_logprobs).exp()
    held = ratio.clamp(0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, held * advantages) - 0.05 * entropy
    return loss, {"ratio": ratio, "entropy": entropy}


@fr.loss(per="sample", locality=fr.group("prompt_id"))
def against_the_group(logprobs, advantage: fr.SAMPLE.f32, segments):
    """Depends on which rows are there: a group torn apart gives another number."""
    total = segments.mean(logprobs)
    return (total - total.mean()).square() * (1 + advantage)


@fr.loss
def squared(values, returns: fr.TOKEN.f32):
    return (values - returns).square()


@fr.loss
def hostile(logprobs, advantage: fr.SAMPLE.f32, segments):
    return logprobs * segments.spread(torch.where(advantage > 1e8, torch.inf, advantage))


@fr.loss
def detached(logprobs):
    return logprobs.detach()


@fr.loss(on_policy=False)
def stored_only(returns: fr.TOKEN.f32):
    return returns


LOSSES = {loss.__name__: loss for loss in (clipped, against_the_group, squared, hostile, detached, stored_only)}

ROTARY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Letters:
    """A tokenizer of your own: id i is the i-th letter."""

    vocab_size = VOCAB
    eos_ids = frozenset({2})
    pad_id = 0
    fingerprint = "letters"

    def encode(self, text: str) -> list[int]:
        return [1, *self.encode_continuation(text)]

    def encode_continuation(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids if i not in self.eos_ids)


def seeded(build: Callable[[], Any], seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = build()
        for name, parameter in module.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)  # ones and zeros would hide a mistake
        return module.eval()


def llama(**more: Any) -> Any:
    return seeded(lambda: LlamaForCausalLM(LlamaConfig(**{**ROTARY, "tie_word_embeddings": False, **more})), 0)


def smollm(**more: Any) -> Any:
    return llama(tie_word_embeddings=True, **more)


def qwen2(**more: Any) -> Any:
    return seeded(lambda: Qwen2ForCausalLM(Qwen2Config(**{**ROTARY, "vocab_size": VOCAB + 1, **more})), 1)


def qwen3(**more: Any) -> Any:
    return seeded(
        lambda: Qwen3ForCausalLM(Qwen3Config(**{**ROTARY, "head_dim": 8, "tie_word_embeddings": True, **more})), 2
    )


def gpt2(**more: Any) -> Any:
    options = {
        "vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.15,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return seeded(lambda: GPT2LMHeadModel(GPT2Config(**{**options, **more})), 3)


def adapted(**more: Any) -> Any:
    """Adapters on q and v, and everything else frozen."""
    from peft import LoraConfig, inject_adapter_in_model

    def build() -> Any:
        options = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return inject_adapter_in_model(options, llama(**more))

    return seeded(build, 4)


FAMILIES = {"adapted": adapted, "llama": llama, "smollm": smollm, "qwen2": qwen2, "qwen3": qwen3, "gpt2": gpt2}


@dataclass(frozen=True)
class Case:
    """One training run: `STEPS` optimizer steps, log-probabilities before and after."""

    family: str = "llama"
    num_rows: int = 7
    budget: int = 24
    model: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    loss: str = "clipped"
    masked: tuple[int, ...] = ()
    """Rows without a trained token."""
    max_grad_norm: float | None = 0.5
    num_prompts: int | None = None
    """Different prompts, long ones, that rows share; None: each row has a short one of its own."""


CASES: dict[str, Case] = {
    "llama": Case("llama", masked=(2,)),
    "smollm": Case("smollm"),
    "qwen2": Case("qwen2"),
    "qwen3": Case("qwen3"),
    "gpt2": Case("gpt2"),
    "minibatches": Case("llama", job={"minibatches": 2, "epochs": 2, "average": Average("sequence_mean")}),
    "few": Case("llama", num_rows=1, max_grad_norm=None),
    "one_rank_trains": Case("smollm", num_rows=5, masked=(0, 1, 2, 4)),
    "groups": Case("llama", num_rows=9, budget=4, loss="against_the_group", job={"group_by": "prompt_id"}),
    "prompts": Case("llama", num_rows=10, num_prompts=3, budget=120),
    "few_prompts": Case("qwen2", num_rows=3, num_prompts=2, budget=40),
    "whole": Case("qwen3", loss="against_the_group", job={"is_whole": True}),
    "value": Case("qwen2", model={"head": "value"}, loss="squared"),
    "checkpointing": Case("llama", masked=(2,), model={"gradient_checkpointing": True}),
    "decay": Case("gpt2", model={"optimizer": AdamW(lr=1e-2, weight_decay=0.1, warmup_steps=3, eps=1e-3)}),
}
ADAPTED = Case("adapted", model={"precision": "bf16"})
BF16 = Case("llama", model={"precision": "bf16"})


def model_of(case: Case) -> Model:
    # a large eps: with a small one a first step moves a weight by its gradient's sign, whose rounding is then all there is
    options = {"optimizer": AdamW(lr=1e-2, eps=1e-3, max_grad_norm=case.max_grad_norm), **case.model}
    return Model(
        FAMILIES[case.family],
        device="cpu",
        micro_batch_tokens=case.budget,
        sample_batch_tokens=2 * case.budget,
        **options,
    )


class CountingBackend:
    """A backend of torch.compile that changes nothing, and counts."""

    name = "counted"
    graphs = calls = 0
    _one: ClassVar[CountingBackend | None] = None

    @classmethod
    def registered(cls) -> CountingBackend:
        """The one of this process."""
        if cls._one is None:
            cls._one = cls()
            torch._dynamo.register_backend(cls._one, name=cls.name)
        return cls._one

    def forget(self) -> None:
        """Forget what was compiled, and counted."""
        torch._dynamo.reset()
        self.graphs = self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*inputs: Any) -> Any:
            self.calls += 1
            return graph(*inputs)

        return run


def uses_of(case: Case) -> frozenset[str]:
    return frozenset({"update", "values" if case.model.get("head") == "value" else "logprobs"})


def rows_of(case: Case, seed: int) -> TokenRows:
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(3, VOCAB, draw.integers(1, 6)).tolist() for _ in range(case.num_rows)]
    if case.num_prompts is not None:
        kinds = [draw.integers(3, VOCAB, draw.integers(12, 20)).tolist() for _ in range(case.num_prompts)]
        prompts = [kinds[row % case.num_prompts] for row in range(case.num_rows)]
    responses = [draw.integers(3, VOCAB, draw.integers(1, 9)).tolist() for _ in range(case.num_rows)]
    temperature = draw.choice([0.7, 1.0, 1.3], case.num_rows).astype(np.float32)
    return TokenRows(Ragged.of(prompts, np.int32), Ragged.of(responses, np.int32), temperature)


def job_of(case: Case, seed: int) -> UpdateJob:
    rows = rows_of(case, seed)
    draw = np.random.default_rng(100 + seed)
    mask = draw.random(len(rows.response_ids.values)) < 0.8
    mask[0 if 0 not in case.masked else -1] = True
    row = rows.response_ids.row_index
    mask[np.isin(row, case.masked)] = False
    if case.masked:
        first = next(i for i in range(case.num_rows) if i not in case.masked)
        mask[np.flatnonzero(row == first)[0]] = True
    columns: dict[str, Any] = {
        "advantage": draw.normal(size=case.num_rows).astype(np.float32),
        "returns": Ragged.like(draw.normal(size=len(mask)).astype(np.float32), rows.response_ids),
        "prompt_id": np.array([f"p{i // 3}" for i in range(case.num_rows)]),
    }
    options = dict(case.job)
    if "group_by" in options:
        options["group_by"] = columns[options["group_by"]]
    loss = LOSSES[case.loss]()
    options.setdefault("average", Average("token_mean"))
    return UpdateJob(rows, Ragged.like(mask, rows.response_ids), columns, loss, seed=seed, **options)


def scored(host: TorchHost, case: Case) -> np.ndarray:
    rows = rows_of(case, 50)
    found = host.values(rows) if case.model.get("head") == "value" else host.logprobs(rows)
    return found.values.copy()


def metrics_of(report: Any) -> dict[str, float]:
    """Means and counts of everything that was reported."""
    found = {"steps": report.steps, "skipped": report.skipped, "tokens": report.tokens}
    for name, stat in report.metrics.items():
        found |= {name: stat.mean, f"{name} count": stat.count}
    return found


def train(host: TorchHost, case: Case, *, steps: int = STEPS, start: int = 0) -> dict[str, Any]:
    """What comes of a case: numbers of every step, and what the model gives before and after."""
    before = scored(host, case)
    reports = [metrics_of(host.update(job_of(case, seed))) for seed in range(start, start + steps)]
    return {"before": before, "reports": reports, "after": scored(host, case), "state": host.state()}
