"""A policy and a task small enough to learn on two CPU cores: sort the digits of a string.

The pieces every example shares: a character tokenizer, a Llama built on the spot, the prompts, the examples for
supervised warm-up, and the reward. Nothing is downloaded, and everything follows from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import flowrl as fr

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

Row = dict[str, str]

MAX_TOKENS = 6
"""Five digits and the end of the response."""


class CharTokenizer:
    """One token per character of a fixed alphabet, after three special tokens.

    It is all that a run needs of a tokenizer of your own: see `flowrl.model.Tokenizer`.
    """

    pad_id = 0
    bos_id = 1
    eos_id = 2
    eos_ids = frozenset({2})

    def __init__(self, alphabet: str = "0123456789=") -> None:
        self.alphabet = alphabet
        self._to_id = {character: 3 + i for i, character in enumerate(alphabet)}

    @property
    def vocab_size(self) -> int:
        return 3 + len(self.alphabet)

    @property
    def fingerprint(self) -> str:
        return f"characters {self.alphabet}"

    def encode(self, text: str, *, bos: bool = True, eos: bool = False) -> list[int]:
        """The ids of a text; a character outside the alphabet is a KeyError."""
        return [self.bos_id] * bos + [self._to_id[character] for character in text] + [self.eos_id] * eos

    def encode_continuation(self, text: str) -> list[int]:
        """The ids of a text that follows others."""
        return self.encode(text, bos=False)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids up to the first end-of-sequence; the other special tokens vanish."""
        text = []
        for token in ids:
            if token == self.eos_id:
                break
            if token > self.eos_id:
                text.append(self.alphabet[token - 3])
        return "".join(text)


def tiny_llama(
    seed: int, *, hidden_size: int = 96, num_layers: int = 2, num_heads: int = 4, max_length: int = 32
) -> LlamaForCausalLM:
    """A randomly initialised Llama in fp32; the same seed gives the same weights."""
    import torch  # here, so that a flow beside it is checked without waiting for torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = CharTokenizer()
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_id,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random stream must not depend on who builds the model
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def tiny_model(seed: int, *, head: str = "lm", lr: float = 3e-4) -> fr.Model:
    """The tiny Llama as a model of a run."""
    return fr.Model(
        tiny_llama(seed),
        tokenizer=CharTokenizer(),
        head=head,
        optimizer=fr.AdamW(lr=lr),
        device="cpu",
        micro_batch_tokens=65536,
    )


def make_task(
    seed: int, *, num_train: int = 4096, num_heldout: int = 512, digits: Sequence[int] = (3, 4, 5)
) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, no prompt twice, so the two are disjoint.

    Each row has `prompt_id`, `prompt` (digits and an equals sign) and `answer` (the digits in order).
    """
    generator = random.Random(seed)
    rows: dict[str, Row] = {}
    while len(rows) < num_train + num_heldout:
        text = "".join(generator.choices("0123456789", k=generator.choice(digits)))
        rows.setdefault(text, {"prompt_id": text, "prompt": f"{text}=", "answer": "".join(sorted(text))})
    everything = list(rows.values())
    generator.shuffle(everything)  # short prompts run out first, so the order of drawing is not the same all along
    return everything[num_heldout:], everything[:num_heldout]


def sft_examples(rows: Sequence[Row], seed: int, *, num_examples: int, noise: float = 0.4) -> list[Row]:
    """Demonstrations for warm-up, a share of them wrong: two places of the answer have been exchanged.

    A model that imitates them for a moment sorts only some of the time, and is in doubt about every digit. The doubt is
    what reinforcement learning works with: a policy that is wrong and sure of it never samples anything better.
    """
    generator = random.Random(seed)
    examples = []
    for _ in range(num_examples):
        row = generator.choice(rows)
        response = list(row["answer"])
        if generator.random() < noise:
            i, j = generator.sample(range(len(response)), 2)
            response[i], response[j] = response[j], response[i]
        examples.append({"prompt": row["prompt"], "response": "".join(response)})
    return examples


def score(response_text: str, answer: str) -> float:
    """1.0 for exactly the answer, 0.0 for anything else."""
    return float(response_text == answer)
