"""Token ids as bytes of text, for people who look at what was sampled. No model is loaded, and nothing is downloaded.

Example:
    pieces = hugging_face("Qwen/Qwen2.5-0.5B")         # or None where its tokenizer is not on this machine
    pieces([9707, 11, 151643])                         # [b"Hello", b",", None]

One character may lie in two tokens; so tokens stand for bytes, and whoever shows them puts characters together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Pieces = Callable[[Sequence[int]], list[bytes | None]]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def hugging_face(source: str) -> Pieces | None:
    """Of the tokenizer of a model, from this machine's files only; None where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (
        OSError,
        ValueError,
        KeyError,
        ImportError,
    ):  # not on this machine, or of a kind that is not known: ids are shown
        return None
    return of_tokenizer(tokenizer)


def of_tokenizer(tokenizer: Any) -> Pieces:
    """Of a Hugging Face tokenizer. Special tokens stand for no text."""
    special = set(tokenizer.all_special_ids)
    alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else None

    def pieces(ids: Sequence[int]) -> list[bytes | None]:
        names = tokenizer.convert_ids_to_tokens(list(ids))
        return [
            None if one in special or name is None else _bytes(tokenizer, one, name, alphabet)
            for one, name in zip(ids, names, strict=True)
        ]

    return pieces


def _bytes(tokenizer: Any, one: int, name: str, alphabet: dict[str, int] | None) -> bytes:
    if alphabet is not None:
        if all(letter in alphabet for letter in name):
            return bytes(alphabet[letter] for letter in name)
        return name.encode("utf-8", "replace")  # added to the vocabulary as it is
    if found := _BYTE.fullmatch(name):
        return bytes([int(found[1], 16)])
    if _SPACE in name:
        return name.replace(_SPACE, " ").encode("utf-8", "replace")
    return str(tokenizer.decode([one])).encode("utf-8", "replace")


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether its tokens are written in the letters that stand for bytes (GPT-2 and those after it)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hasattr(tokenizer, "byte_decoder")
    return '"ByteLevel"' in json.dumps(json.loads(backend.to_str()).get("decoder"))


def _byte_alphabet() -> dict[str, int]:
    """Letter -> byte: the printable bytes as they are, the others from U+0100 on (`bytes_to_unicode` of GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
