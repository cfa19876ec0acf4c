"""Tokenizers as the runtime needs them: Hugging Face ones adapted, small classes of your own taken as they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from flowrl.errors import EngineError
from flowrl.model import Tokenizer

NEEDED = ("vocab_size", "eos_ids", "pad_id", "encode", "encode_continuation", "decode", "fingerprint")
"""What a tokenizer class of your own must have; see `flowrl.model.Tokenizer`."""


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer behind the `flowrl.model.Tokenizer` protocol.

    `encode` applies the chat template (the text as one user message, the assistant's turn opened) or, without one, the
    tokenizer's own special tokens; either way at most one begin-of-sequence token and no end-of-sequence token.
    """

    def __init__(
        self,
        inner: Any,
        *,
        chat_template: bool | None = None,
        eos_ids: frozenset[int] = frozenset(),
        num_ids: int | None = None,
    ) -> None:
        """
        Args:
            chat_template: None uses the template when there is one.
            eos_ids: end tokens the model knows of (generation config); the tokenizer's own is added.
            num_ids: rows of the model's embedding; ids beyond it are never sampled.
        """
        has_template = bool(getattr(inner, "chat_template", None))
        if chat_template and not has_template:
            raise EngineError(
                f"chat_template=True needs a tokenizer that has a chat template; {inner.name_or_path or type(inner).__name__} "
                "has none; leave chat_template out, or set tokenizer.chat_template"
            )
        self.inner = inner
        self.uses_template = has_template if chat_template is None else chat_template
        # ids may have gaps, so the largest id counts and not the number of entries
        size = max(inner.get_vocab().values(), default=-1) + 1
        self.vocab_size: int = size if num_ids is None else min(size, num_ids)
        own = {inner.eos_token_id} - {None}
        self.eos_ids: frozenset[int] = frozenset(int(i) for i in (*eos_ids, *own) if 0 <= int(i) < self.vocab_size)
        pad = inner.pad_token_id
        self.pad_id: int = int(pad) if pad is not None else min(self.eos_ids, default=0)
        self._fingerprint = ""

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt as the model sees it."""
        if self.uses_template:
            message = [{"role": "user", "content": text}]
            text = self.inner.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            ids = self._plain(text)
            bos = self.inner.bos_token_id
            # a template that writes no BOS is completed by the tokenizer where the tokenizer always adds one
            return ids if bos is None or ids[:1] == [bos] or not self._adds_bos() else [bos, *ids]
        ids = list(self.inner(text, add_special_tokens=True)["input_ids"])
        return self._once(ids, text)

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of text that follows other tokens: no template, no special tokens added."""
        return self._plain(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens, spaces kept as they are."""
        return str(self.inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def fingerprint(self) -> str:
        """Hash of what decides which ids text becomes: vocabulary, merges, normalisation, added tokens. The chat template
        and the special tokens put around a prompt are left out: they change prompts, not what an id means."""
        if not self._fingerprint:
            self._fingerprint = hashlib.blake2b(self._identity().encode(), digest_size=12).hexdigest()
        return self._fingerprint

    def _plain(self, text: str) -> list[int]:
        return list(self.inner(text, add_special_tokens=False)["input_ids"])

    def _adds_bos(self) -> bool:
        return list(self.inner("", add_special_tokens=True)["input_ids"])[:1] == [self.inner.bos_token_id]

    def _once(self, ids: list[int], text: str) -> list[int]:
        bos, eos = self.inner.bos_token_id, self.inner.eos_token_id
        while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            ids = ids[1:]
        added_eos = eos is not None and eos != bos and ids[-1:] == [eos] and not text.endswith(self.inner.eos_token)
        return ids[:-1] if added_eos else ids

    def _identity(self) -> str:
        backend = getattr(self.inner, "backend_tokenizer", None)
        if backend is None:
            added = sorted((str(token), i) for token, i in self.inner.get_added_vocab().items())
            return json.dumps([type(self.inner).__name__, sorted(self.inner.get_vocab().items()), added])
        state = json.loads(backend.to_str())
        for changing in ("padding", "truncation", "post_processor"):
            state.pop(changing, None)
        return json.dumps(state, sort_keys=True)


class IdsOnly:
    """Stands in for a model that came without a tokenizer: token ids pass through, text is refused."""

    eos_ids: frozenset[int] = frozenset()
    pad_id = 0

    def __init__(self, name: str, vocab_size: int) -> None:
        self.name = name
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        raise self._missing()

    def encode_continuation(self, text: str) -> list[int]:
        raise self._missing()

    def decode(self, ids: Sequence[int]) -> str:
        raise self._missing()

    @property
    def fingerprint(self) -> str:
        """Empty: unknown, so it cannot be compared."""
        return ""

    def _missing(self) -> EngineError:
        return EngineError(
            f"model '{self.name}' has to turn text into tokens or back, and has no tokenizer; "
            "give it one: fr.Model(module, tokenizer=...)"
        )


def adapt_tokenizer(
    name: str, given: Any, *, chat_template: bool | None, eos_ids: frozenset[int], num_ids: int
) -> Tokenizer:
    """What `fr.Model(tokenizer=)` holds, as the runtime needs it.

    Errors: EngineError that names what a class of your own lacks, or a vocabulary larger than the model's.
    """
    if isinstance(given, PreTrainedTokenizerBase):
        return HuggingFaceTokenizer(given, chat_template=chat_template, eos_ids=eos_ids, num_ids=num_ids)
    missing = [needed for needed in NEEDED if not hasattr(given, needed)]
    if missing:
        raise EngineError(
            f"the tokenizer of model '{name}' ({type(given).__name__}) lacks {', '.join(missing)}; "
            "it must be a Hugging Face tokenizer or have what flowrl.model.Tokenizer lists"
        )
    if chat_template:
        raise EngineError(
            f"model '{name}': chat_template=True works with Hugging Face tokenizers; apply yours in encode()"
        )
    if given.vocab_size > num_ids:
        raise EngineError(
            f"the tokenizer of model '{name}' has {given.vocab_size} ids and the model's embedding {num_ids} rows; "
            "they do not belong together"
        )
    tokenizer: Tokenizer = given
    return tokenizer
