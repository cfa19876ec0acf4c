"""The task that training benchmarks share: sort digits, with a tiny Llama that has seen a few demonstrations.

Needs torch, transformers and tokenizers only, so that it also runs where FlowRL is not installed.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from examples import grpo_by_hand
from examples.tiny import MAX_TOKENS, CharTokenizer, Row, make_task, tiny_llama


@dataclass(frozen=True, slots=True)
class Settings:
    """What both sides of a comparison are given."""

    hidden_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    prompts: int = 64
    """A step."""
    group_size: int = 8
    max_tokens: int = MAX_TOKENS
    lr: float = 3e-4
    clip: float = 0.2
    eps: float = 1e-4
    """Added to the deviation of a group."""
    max_grad_norm: float = 1.0
    threads: int = 2
    seed: int = 0
    warmup_steps: int = 75
    """Supervised steps before both sides begin."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


CASES = {
    "tiny": Settings(),
    "small": Settings(hidden_size=256, num_layers=4, num_heads=8, prompts=32),
}
"""`tiny` is the demo's model; in `small`, more of a step is matrix products and less is Python."""


def fast_tokenizer() -> PreTrainedTokenizerFast:
    """`CharTokenizer` as a Hugging Face tokenizer: same ids, a begin-of-sequence token before a prompt."""
    chars = CharTokenizer()
    special = {"<pad>": chars.pad_id, "<bos>": chars.bos_id, "<eos>": chars.eos_id}
    vocabulary = {**special, **{character: chars.encode(character, bos=False)[0] for character in chars.alphabet}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    # what a tokenizer of characters does around a text: a begin-of-sequence token, no end
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", chars.bos_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def warmed_model(settings: Settings) -> LlamaForCausalLM:
    """A policy that is right some of the time, so that there is something to learn from rewards."""
    policy = tiny_llama(
        settings.seed,
        hidden_size=settings.hidden_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
    )
    args = argparse.Namespace(seed=settings.seed, sft_steps=settings.warmup_steps, sft_batch=64, sft_lr=2e-3)
    grpo_by_hand.warm_up(policy, train_rows(settings), args)
    return policy


def train_rows(settings: Settings) -> list[Row]:
    """Prompts in the order in which both sides take them."""
    return make_task(settings.seed)[0]


def save_start(settings: Settings, folder: Path) -> Path:
    """Write the warmed policy and its tokenizer where both sides load them from."""
    torch.set_num_threads(settings.threads)
    warmed_model(settings).save_pretrained(folder)
    fast_tokenizer().save_pretrained(folder)
    return folder
