"""Token ids as bytes: whatever the tokenizer, the bytes of a text's tokens are the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flowrl.engines.token_text import hugging_face, of_tokenizer

TEXTS = ("hello world, so it is", "naïve café 😀 مرحبا", "tabs\tand\nlines  and   blanks", "x = {1: 2}")


def byte_level() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"])
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def sentence_pieces() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<end>", *fallback]
    made.train_from_iterator(["hello world, so it is"] * 3, trainers.BpeTrainer(vocab_size=310, special_tokens=special))
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unk>")
    return found


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [byte_level, sentence_pieces])
def test_the_bytes_of_the_tokens_are_the_text(make, text: str) -> None:
    tokenizer = make()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = of_tokenizer(tokenizer)(ids)
    assert b"".join(piece or b"" for piece in pieces).decode() == text


def test_special_tokens_stand_for_nothing() -> None:
    tokenizer = byte_level()
    assert of_tokenizer(tokenizer)([tokenizer.eos_token_id]) == [None]


def test_it_is_read_from_a_folder_and_not_looked_for_elsewhere(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    found = hugging_face(str(tmp_path))
    assert found is not None
    tokenizer = byte_level()
    ids = tokenizer("hello")["input_ids"]
    assert b"".join(piece or b"" for piece in found(ids)) == b"hello"
    assert hugging_face(str(tmp_path / "nowhere")) is None
    assert hugging_face("Tiny") is None and hugging_face("nobody/has-this-one") is None
