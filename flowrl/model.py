"""A model as a run is given it: where its weights come from, how it trains, what samples from it.

Nothing here loads anything; engines do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from flowrl.errors import ConfigError
from flowrl.schema.columns import nearest

PRECISIONS = ("fp32", "bf16")
HEADS = ("lm", "value", "reward")
SAMPLERS = ("transformers", "vllm")
OFFLOADS = ("none", "park", "opt", "sopt")
SCHEDULES = ("constant", "linear", "cosine")


@runtime_checkable
class Tokenizer(Protocol):
    """What the runtime needs of a tokenizer. Hugging Face tokenizers are adapted; a small class of your own will do."""

    vocab_size: int
    """Ids that may be sampled: 0 to vocab_size - 1, even when the embedding is padded beyond."""
    eos_ids: frozenset[int]
    """Every id that ends a response (models may have several)."""
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt as the model sees it: template and special tokens applied exactly once."""
        ...

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of text that follows other tokens (tool output): no template, no special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give equal ids for equal text."""
        ...


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW and its learning-rate schedule (Loshchilov and Hutter, arXiv 1711.05101).

    The rate of optimizer step i (from 0) is `lr * min(1, (i + 1) / warmup_steps)` while warming up, then constant, or
    falling linearly or as a cosine to `min_lr` at `total_steps`.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr: float = 0.0
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; None turns clipping off."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(_one_of("schedule", self.schedule, SCHEDULES))
        if self.schedule != "constant" and self.total_steps is None:
            raise ConfigError(f"schedule '{self.schedule}' needs total_steps, the optimizer step at which it ends")
        if isinstance(self.lr, int | float) and not self.lr > 0:
            raise ConfigError(f"AdamW needs lr > 0; found {self.lr!r}")
        for name in ("lr", "eps", "weight_decay", "min_lr"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ConfigError(f"AdamW needs a finite number of at least 0 for {name}; found {value!r}")
        betas: object = self.betas
        is_pair = isinstance(betas, tuple | list) and len(betas) == 2
        if not is_pair or not all(isinstance(b, int | float) and 0 <= b < 1 for b in self.betas):
            raise ConfigError(f"AdamW needs two betas from 0 to below 1; found {betas!r}")


@dataclass(frozen=True)
class Model:
    """A model of a run.

    Example:
        fr.Model("HuggingFaceTB/SmolLM2-135M-Instruct", optimizer=fr.AdamW(lr=1e-6))
        fr.Model(module, tokenizer=tokenizer)          # a torch module you built
    """

    source: Any
    """A Hugging Face name or path, or a function without arguments that builds a module, or a module (Transformers-like).
    With the null engine, anything."""
    tokenizer: Any = None
    """None takes the tokenizer that belongs to `source`."""
    head: str = "lm"
    """`lm` (language model), `value` (a value per token) or `reward` (a score per response)."""
    optimizer: AdamW = field(default_factory=AdamW)
    precision: str = "fp32"
    """`fp32`, or `bf16`: forward and backward in bfloat16, master weights and optimizer in fp32."""
    device: str | None = None
    """None takes a GPU if there is one."""
    sampler: str = "transformers"
    """What samples from it: `transformers` (always there) or `vllm`."""
    sampler_options: dict[str, Any] = field(default_factory=dict)
    """Passed to the sampler (for vLLM: `gpu_memory_utilization`, `max_model_len`, ...)."""
    micro_batch_tokens: int = 16384
    """Most tokens (prompt and response) in one forward with gradient."""
    sample_batch_tokens: int = 65536
    """Most tokens held at once while sampling or computing log-probabilities."""
    chat_template: bool | None = None
    """Wrap a text prompt as a user message; None does so when the tokenizer has a template."""
    max_context: int | None = None
    """Longest prompt plus response; None takes the model's own limit."""
    gradient_checkpointing: bool = False
    offload: str = "none"
    """Where training state lies: `none` (the device), `park` (host memory, except while an update runs), `sopt` (master weights
    and moments in host memory, through the device bucket by bucket in each optimizer step) or `opt` (there too, and the CPU
    computes the step, with its own rounding)."""
    compile: bool | str = False
    """Compile the layers with torch.compile, for scoring and training: True, or the name of a backend (`"inductor"`, which True
    means, `"aot_eager"`, ...). Sampling is not compiled. A prompt then runs once for each of its responses."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("precision", self.precision, PRECISIONS),
            ("head", self.head, HEADS),
            ("sampler", self.sampler, SAMPLERS),
            ("offload", self.offload, OFFLOADS),
        ):
            if value not in known:
                raise ConfigError(_one_of(f"Model {name}", value, known))
        compiles: object = self.compile
        if not isinstance(compiles, bool | str) or compiles == "":
            raise ConfigError(
                "Model needs True, False or the name of a torch.compile backend (as 'inductor') for compile; found "
                f"{compiles!r}"
            )
        optimizer: object = self.optimizer
        if not isinstance(optimizer, AdamW):
            raise ConfigError(f"Model needs fr.AdamW(...) as optimizer; found {optimizer!r}")
        if self.max_context is not None and self.max_context < 2:
            raise ConfigError(
                f"Model needs max_context of at least 2 (a prompt and a response); found {self.max_context!r}"
            )
        if self.micro_batch_tokens < 1 or self.sample_batch_tokens < 1:
            raise ConfigError("Model needs micro_batch_tokens and sample_batch_tokens of at least 1")


def _one_of(what: str, found: object, known: Sequence[str]) -> str:
    return f"{what} is one of {', '.join(known)}; found {found!r}; {nearest(str(found), known)}"
