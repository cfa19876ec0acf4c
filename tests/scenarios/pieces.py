"""Tiny models, tokenizers and short ways to run a flow. Everything follows from a seed and takes milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer as Backend, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import flowrl as fr
from flowrl.engines.null import NullHost
from flowrl.engines.protocol import Host, Sampled, SampleRequest, SamplingOptions
from tests.bigram import Bigram

VOCAB = 14
"""Of `examples.tiny.CharTokenizer`: pad 0, begin 1, end 2, then `0123456789=`."""


def gpt2(seed: int = 0, *, vocab: int = VOCAB) -> GPT2LMHeadModel:
    """Absolute positions: a shift by one pad shows, which rotary positions would hide."""
    config = GPT2Config(
        vocab_size=vocab, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).eval()


def chain(links: Sequence[tuple[int, int]], *, size: int = VOCAB) -> Bigram:
    """After the first id of a link comes its second, almost surely."""
    table = torch.zeros(size, size)
    for first, second in links:
        table[first, second] = 50.0
    return Bigram(table)


class Ids:
    """Text is ids in words: `"3 4"` is `[3, 4]`. Nothing is added and nothing hidden."""

    pad_id = 0

    def __init__(self, vocab_size: int = VOCAB, eos_ids: frozenset[int] = frozenset()) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    encode_continuation = encode

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids if i not in self.eos_ids)

    @property
    def fingerprint(self) -> str:
        return f"ids {self.vocab_size}"


WORDS = "<pad> <s> </s> <user> <bot> <think> </think> x 4 two plus is hello".split()
CHAT = (
    "{{ bos_token }}{% for m in messages %}<user> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def words(template: str | None = None) -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer of whole words that puts `<s>` in front by itself; `<think>` is an ordinary word of it."""
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["<user>", "<bot>"],
    )  # fmt: skip
    made.chat_template = template
    return made


class ScriptEngine:
    """Opens models whose answers are written down: `Model({tuple of prompt ids: ids of the answer})`.

    Every request is kept in `ScriptEngine.asked`, so that a test sees the exact ids a model was given.
    """

    name = "script"
    asked: ClassVar[list[list[int]]] = []

    def open(self, name: str, model: fr.Model, uses: frozenset[str], *, seed: int) -> Host:
        return ScriptHost(name, model, seed=seed)


class ScriptHost(NullHost):
    """See `ScriptEngine`. Log-probability of token t of a turn: -(t + 1) / 8."""

    def generate(self, requests: Sequence[SampleRequest], options: SamplingOptions) -> list[Sampled]:
        script: Mapping[tuple[int, ...], list[int]] = self.spec.source
        found = []
        for request in requests:
            ScriptEngine.asked.append(list(request.prompt_ids))
            ids = script[tuple(request.prompt_ids)][: request.max_tokens]
            is_ended = bool(ids) and ids[-1] in self.tokenizer.eos_ids
            found.append(Sampled(ids, [-(t + 1) / 8 for t in range(len(ids))], "stop" if is_ended else "length"))
        return found


def run(flow: Any, *, engine: str = "torch", out: Any = None, **inputs: Any) -> fr.Run:
    """A run that shows nothing and, without `out`, writes nothing; of data given as a list, each step takes every row."""
    inputs = {name: fr.Data(value, batch="all") if isinstance(value, list) else value for name, value in inputs.items()}
    return fr.run_local(flow, engine=engine, out=out, progress="off", **inputs)


def policy(module: Any, tokenizer: Any, **options: Any) -> fr.Model:
    """A model that trains without clipping of gradients, so that steps are as large as they say."""
    options.setdefault("optimizer", fr.AdamW(lr=1e-2, max_grad_norm=None))
    return fr.Model(module, tokenizer=tokenizer, device="cpu", **options)
