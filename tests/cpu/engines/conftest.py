"""Tiny models and the small pieces every engine test needs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from flowrl.engines.host_torch import TorchEngine, TorchHost
from flowrl.engines.protocol import SampleKey, SampleRequest, TokenRows, UpdateJob
from flowrl.graph.averages import Average
from flowrl.model import AdamW, Model
from flowrl.schema.ragged import Ragged
from tests.bigram import Bigram

VOCAB = 20


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Letters:
    """A tokenizer of your own: id i is the i-th letter; the last ids end a response."""

    vocab_size: int = VOCAB
    eos_ids: frozenset[int] = frozenset({2})
    pad_id: int = 0
    fingerprint: str = "letters"

    def encode(self, text: str) -> list[int]:
        return [1, *self.encode_continuation(text)]

    def encode_continuation(self, text: str) -> list[int]:
        return [ord(c) - ord("a") for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids if i not in self.eos_ids)


def _chain(*links: str, size: int = VOCAB) -> Bigram:
    """After the first letter of a link comes its second, almost surely."""
    table = torch.zeros(size, size)
    for first, second in links:
        table[ord(first) - ord("a"), ord(second) - ord("a")] = 50.0
    return Bigram(table)


def _seeded(build: Callable[[], Any], seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().eval()


def _llama(seed: int = 0, **more: Any) -> LlamaForCausalLM:
    options = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return _seeded(lambda: LlamaForCausalLM(LlamaConfig(**{**options, **more})), seed)


def _gpt2(seed: int = 0, **more: Any) -> GPT2LMHeadModel:
    options = {
        "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return _seeded(lambda: GPT2LMHeadModel(GPT2Config(**{**options, **more})), seed)


def _gemma2(seed: int = 0) -> Gemma2ForCausalLM:
    """Scales its embeddings, caps its logits, and slides a window of 4 in every other layer."""
    config = Gemma2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=4, final_logit_softcapping=2.0, max_position_embeddings=64,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2, attn_implementation="eager",
    )  # fmt: skip
    return _seeded(lambda: Gemma2ForCausalLM(config), seed)


FAMILIES = {"llama": _llama, "gpt2": _gpt2, "gemma2": _gemma2}


@dataclass
class Kit:
    """What tests share."""

    letters: type = Letters
    bigram: type = Bigram
    chain: Callable[..., Bigram] = _chain
    families: dict[str, Callable[..., Any]] = field(default_factory=lambda: dict(FAMILIES))

    def open(self, source: Any, *uses: str, seed: int = 0, name: str = "policy", **options: Any) -> TorchHost:
        options.setdefault("tokenizer", Letters())
        options.setdefault("optimizer", AdamW(lr=1e-2, max_grad_norm=None))
        return TorchEngine().open(name, Model(source, **options), frozenset(uses), seed=seed)

    def requests(
        self, prompts: Sequence[Sequence[int]], n: int = 1, max_tokens: int = 8, seed: int = 0, step: int = 0
    ) -> list[SampleRequest]:
        return [
            SampleRequest(list(p), max_tokens, SampleKey(seed, step, "rollout", str(i), j))
            for i, p in enumerate(prompts)
            for j in range(n)
        ]

    def rows(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        temperature: float | Sequence[float] = 1.0,
    ) -> TokenRows:
        full = np.broadcast_to(np.asarray(temperature, np.float32), len(responses)).copy()
        return TokenRows(Ragged.of(prompts, np.int32), Ragged.of(responses, np.int32), full)

    def random_rows(self, count: int, seed: int = 0, *, longest: int = 9) -> TokenRows:
        generator = np.random.default_rng(seed)
        prompts = [generator.integers(3, VOCAB, generator.integers(1, 6)).tolist() for _ in range(count)]
        responses = [generator.integers(3, VOCAB, generator.integers(1, longest + 1)).tolist() for _ in range(count)]
        return self.rows(prompts, responses, generator.choice([0.5, 1.0, 1.3], count))

    def job(self, rows: TokenRows, loss: Any, mask: Any = None, **options: Any) -> UpdateJob:
        ids = rows.response_ids
        full = Ragged.like(np.ones(len(ids.values), bool), ids) if mask is None else Ragged.of(mask, bool)
        average = options.pop("average", "token_mean")
        if isinstance(average, str):
            average = Average(average, options.pop("average_length", None))
        return UpdateJob(rows, full, options.pop("columns", {}), loss, average, **options)

    def plain_logprobs(
        self, module: Any, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
    ) -> torch.Tensor:
        """One row by itself, the plainest way: [T] with gradient."""
        ids = torch.tensor([[*map(int, prompt), *map(int, response)]])
        logits = module(input_ids=ids, use_cache=False).logits[0].float() / temperature
        start = len(prompt) - 1
        return logits[start:-1].log_softmax(-1).gather(-1, ids[0, start + 1 :, None])[:, 0]

    def assert_equal_gradients(
        self, found: dict[str, np.ndarray], expected: dict[str, np.ndarray], what: str = ""
    ) -> None:
        """To a few millionths of the largest gradient."""
        assert found.keys() == expected.keys()
        scale = max(float(np.abs(g).max()) for g in expected.values())
        for name, gradient in expected.items():
            np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=2e-6 * scale, err_msg=f"{name} {what}")

    def gradients(self, host: TorchHost) -> dict[str, np.ndarray]:
        """Gradients of the first optimizer step, read from Adam's first moment."""
        return {name: entry["exp_avg"] / 0.1 for name, entry in host.state()["optimizer"].items()}


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture(params=["llama", "gpt2", "gemma2"])
def family(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Builders of three architectures: rotary; absolute positions; capped logits and sliding windows."""
    return FAMILIES[request.param]
