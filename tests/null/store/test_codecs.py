"""Codecs lose nothing, refuse what they did not write, and are chosen by what they save."""

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from flowrl.errors import ConfigError, MissingExtra, StoreError
from flowrl.schema import PROMPT, SAMPLE, TOKEN, TURN, ColumnType, Ragged
from flowrl.store import codecs
from flowrl.store.codecs import CODECS, FILTERED, choose, decode_buffer, encode_buffer

blosc2_or_skip = pytest.mark.skipif(not codecs.has_blosc2(), reason="needs blosc2")
AVAILABLE = CODECS if codecs.has_blosc2() else codecs.PLAIN


def there_and_back(raw: np.ndarray, codec: str, itemsize: int, inner: int | tuple[int, ...]) -> np.ndarray:
    stored = bytes(encode_buffer(raw, codec, itemsize=itemsize, inner=inner))
    return decode_buffer(np.frombuffer(stored, np.uint8), codec, len(raw), itemsize=itemsize, inner=inner)


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


# ----------------------------------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize("codec", AVAILABLE)
@given(
    raw=st.one_of(
        st.binary(max_size=300), st.builds(lambda part, times: part * times, st.binary(max_size=40), st.integers(0, 90))
    ),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    inner=st.integers(0, 9),
)
@example(b"", 4, 1)
@example(b"\x01", 8, 3)
@example(bytes(4096), 2, 64)
def test_any_bytes_come_back(codec: str, raw: bytes, itemsize: int, inner: int) -> None:
    array = np.frombuffer(raw, np.uint8)
    assert there_and_back(array, codec, itemsize, inner).tobytes() == raw


ODD = {
    "<f2": [0x7E01, 0xFE00, 0x7C01, 0x7C00, 0xFC00, 0x8000, 0x0000, 0x0001, 0x8001, 0x7BFF, 0xFBFF, 0x3C00],
    "<f4": [0x7FC00001, 0xFFC12345, 0x7F800001, 0x7F800000, 0xFF800000, 0x80000000, 0, 1, 0x80000001, 0x7F7FFFFF],
    "<f8": [0x7FF8000000000001, 0xFFF0000000000001, 0x7FF0000000000000, 0xFFF0000000000000, 1 << 63, 0, 1],
    "<i4": [0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0, 1],
    "<i8": [(1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0, 1],
}
"""Bit patterns at which an order of integers, or a sum, could go wrong: NaN payloads, infinities, -0.0, subnormals, limits."""


@pytest.mark.parametrize("codec", AVAILABLE)
@pytest.mark.parametrize("dtype", ODD)
@pytest.mark.parametrize("inner", [1, 3, 64])
def test_every_odd_number_comes_back_bit_for_bit(codec: str, dtype: str, inner: int) -> None:
    patterns = np.array(ODD[dtype], np.uint64)
    picked = np.random.default_rng(1).choice(patterns, (50, inner)).astype(f"<u{np.dtype(dtype).itemsize}")
    numbers = picked.view(dtype)
    raw = numbers.reshape(-1).view(np.uint8)
    back = there_and_back(raw, codec, numbers.itemsize, (2, inner))
    assert back.tobytes() == numbers.tobytes()


def test_all_float16_come_back_from_differences() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    made = codecs._differences(every, 2, 64)
    assert made.tobytes() != every.tobytes()
    codecs._sums(made, 2, 64)
    assert made.tobytes() == every.tobytes()


def test_differences_of_falling_logits_are_small_and_not_negative() -> None:
    falling = np.sort(np.random.default_rng(2).normal(0, 0.5, (100, 64)).astype(np.float16))[:, ::-1].copy()
    # across zero a float's order jumps by nothing: -0.0 and 0.0 are neighbours
    made = codecs._differences(falling.reshape(-1).view(np.uint8), 2, 64).view(np.uint16).reshape(100, 64)
    assert int(made[:, 1:].max()) < 1 << 15


@pytest.mark.parametrize("codec", [c for c in AVAILABLE if c != "none"])
@pytest.mark.parametrize("size", [100, 101, 250])
def test_a_buffer_of_several_frames(codec: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_FRAME", 100)
    assert there_and_back(noise(size), codec, 2, 5).tobytes() == noise(size).tobytes()


@pytest.mark.parametrize("codec", [c for c in AVAILABLE if c != "none"])
def test_what_is_stored_beside_the_values_is_small(codec: str) -> None:
    assert len(encode_buffer(np.zeros(64_000, np.uint8), codec, itemsize=4, inner=8)) < 1000
    assert len(encode_buffer(noise(64_000), codec, itemsize=4, inner=8)) < 64_000 + 300


@pytest.mark.parametrize("codec", AVAILABLE)
@pytest.mark.parametrize("asked", [999, 1001, 4000])
def test_another_length_than_was_encoded_is_refused(codec: str, asked: int) -> None:
    stored = np.frombuffer(bytes(encode_buffer(np.zeros(1000, np.uint8), codec, itemsize=4, inner=2)), np.uint8)
    with pytest.raises(StoreError, match="damaged"):
        decode_buffer(stored, codec, asked, itemsize=4, inner=2)


@pytest.mark.parametrize("codec", AVAILABLE)
def test_threads_do_not_disturb_each_other(codec: str) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        raw = np.sort(noise(40_000, seed).view(np.float32).view(np.int32)).view(np.uint8)
        for _ in range(8):
            if there_and_back(raw, codec, 4, 8).tobytes() != raw.tobytes():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("codec", AVAILABLE)
@pytest.mark.parametrize("size", [1, 7, 2000])
def test_a_torn_buffer_is_refused(codec: str, size: int) -> None:
    raw = np.repeat(noise(250), 8)[:size].copy()
    stored = np.frombuffer(bytes(encode_buffer(raw, codec, itemsize=4, inner=4)), np.uint8)
    for end in range(len(stored)):
        with pytest.raises(StoreError, match="damaged"):
            decode_buffer(stored[:end], codec, len(raw), itemsize=4, inner=4)


@pytest.mark.parametrize("codec", [c for c in AVAILABLE if c != "none"])
@given(st.binary(max_size=80), st.integers(1, 500))
def test_bytes_of_somebody_else_end_in_an_error_or_in_bytes(codec: str, stored: bytes, raw_bytes: int) -> None:
    try:
        found = decode_buffer(stored, codec, raw_bytes, itemsize=2, inner=3)
    except StoreError:
        return
    assert len(found) == raw_bytes


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(ConfigError, match="snappy"):
        encode_buffer(noise(10), "snappy", itemsize=1)
    with pytest.raises(ConfigError, match="snappy"):
        decode_buffer(noise(10), "snappy", 10, itemsize=1)
    with pytest.raises(ConfigError, match="gzip"):
        choose(np.zeros(9, np.float32), SAMPLE.f32, "gzip")


@pytest.mark.parametrize("codec", FILTERED)
def test_without_blosc2_the_extra_is_named(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "blosc2", None)
    codecs._parameters.cache_clear()
    with pytest.raises(MissingExtra, match=r"flowrl\[codecs\]"):
        decode_buffer(noise(64), codec, 128, itemsize=2)
    with pytest.raises(MissingExtra, match=r"flowrl\[codecs\]"):
        encode_buffer(noise(64), codec, itemsize=2)


# ------------------------------------------------------------------------------------------------------------- choice


def lists(flat: np.ndarray, rows: int = 64) -> Ragged:
    return Ragged(flat, np.linspace(0, len(flat), rows + 1).astype(np.int64))


def zipf_ids(count: int = 60_000) -> np.ndarray:
    random = np.random.default_rng(3)
    words = [random.zipf(1.4, int(n)).clip(0, 32_000) for n in random.integers(2, 9, 400)]
    return np.concatenate([words[i] for i in random.zipf(1.2, count).clip(1, 400) - 1])[:count].astype(np.int32)


def top_logits(tokens: int = 4000) -> np.ndarray:
    random = np.random.default_rng(4)
    gaps = random.exponential(1.0, (tokens, 64)) / np.arange(1, 65)
    exact = (20 - np.cumsum(gaps, axis=1)).astype(np.float32)
    return (exact.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float16)  # as bfloat16 has them


def wandering(count: int = 60_000) -> np.ndarray:
    return np.cumsum(np.random.default_rng(5).normal(0, 0.01, count)).astype(np.float32)


def test_ids_text_and_masks_get_lz4() -> None:
    mask = np.ones(60_000, bool)
    mask[1000:1016] = False
    words = np.array(["the", "loss", "of", "a", "policy"], object)
    texts = np.array([" ".join(words[np.random.default_rng(i).integers(0, 5, 200)]) for i in range(64)], object)
    assert choose(lists(zipf_ids()), TOKEN.i32, "lz4").endswith("lz4")
    assert choose(lists(zipf_ids()), TOKEN.i32, "zstd") != "none"
    assert choose(lists(mask), TOKEN.bool, "lz4") == "lz4"
    assert choose(texts, SAMPLE.str, "lz4") == "lz4"
    assert choose(texts, SAMPLE.str, "zstd") in ("lz4", "zstd")
    assert choose(lists(texts, 8), TURN.str, "lz4") == "lz4"
    blobs = np.array([text.encode() for text in texts], object)
    assert choose(blobs, SAMPLE.bytes, "lz4") == "lz4"


def test_repeated_prompts_get_lz4_even_where_zstd_may_be_used() -> None:
    prompts = np.repeat(zipf_ids(2000).reshape(8, 250), 8, axis=0).reshape(-1)
    assert choose(lists(prompts), PROMPT.i32["*"], "zstd") in ("lz4", "zstd", "shuffle-zstd")
    assert choose(lists(prompts), PROMPT.i32["*"], "lz4") == "lz4"


@blosc2_or_skip
def test_sorted_logits_get_differences() -> None:
    assert choose(lists(top_logits()), TOKEN.f16[64], "lz4") == "delta-bitshuffle-lz4"
    assert choose(lists(top_logits()), TOKEN.f16[64], "zstd") == "delta-shuffle-zstd"
    assert choose(lists(top_logits()), TOKEN.f16[64]) == "delta-shuffle-zstd"


@blosc2_or_skip
def test_sorted_logits_shrink_by_more_than_half_without_loss() -> None:
    raw = top_logits().reshape(-1).view(np.uint8)
    share = {codec: len(encode_buffer(raw, codec, itemsize=2, inner=(64,))) / len(raw) for codec in AVAILABLE}
    assert share["delta-bitshuffle-lz4"] <= min(0.5, 0.8 * share["lz4"])
    assert share["delta-shuffle-zstd"] <= min(0.4, 0.8 * share["zstd"])


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_noise_is_left_alone(compression: str) -> None:
    random = np.random.default_rng(6)
    assert choose(lists(random.normal(size=50_000)), TOKEN.f64, compression) == "none"
    assert choose(lists(noise(50_000)), TOKEN.u8, compression) == "none"
    blobs = np.array([noise(900, seed).tobytes() for seed in range(64)], object)
    assert choose(blobs, SAMPLE.bytes, compression) == "none"


def test_full_mantissas_are_left_alone_by_lz4() -> None:
    random = np.random.default_rng(7)
    logprobs = -np.exp(random.normal(-2, 2, 50_000)).astype(np.float32)
    assert choose(lists(logprobs), TOKEN.f32, "lz4") == "none"


@pytest.mark.parametrize("compression", codecs.COMPRESSIONS)
def test_little_or_nothing_is_left_alone(compression: str) -> None:
    assert choose(np.zeros(0, np.float32), SAMPLE.f32, compression) == "none"
    assert choose(np.zeros((0, 0), np.float32), SAMPLE.f32["k"], compression) == "none"
    assert choose(np.zeros(16, np.float32), SAMPLE.f32, compression) == "none"
    assert choose(Ragged(np.zeros(0, np.int32), np.zeros(5, np.int64)), TOKEN.i32, compression) == "none"
    assert choose(np.array(["", "a"], object), SAMPLE.str, compression) == "none"


def test_lz4_never_means_zstd_and_none_means_none() -> None:
    for values, kind in [(zipf_ids(), TOKEN.i32), (top_logits(), TOKEN.f16[64]), (wandering(), TOKEN.f32)]:
        assert "zstd" not in choose(lists(values), kind, "lz4")
        assert choose(lists(values), kind, "none") == "none"


def test_without_blosc2_only_arrows_codecs_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "has_blosc2", lambda: False)
    for compression in codecs.COMPRESSIONS:
        assert choose(lists(top_logits()), TOKEN.f16[64], compression) in codecs.PLAIN
        assert choose(lists(zipf_ids()), TOKEN.i32, compression) in codecs.PLAIN


def test_a_choice_looks_at_slices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def watched(raw: np.ndarray, codec: str, **options: object) -> bytes:
        seen.append(len(raw))
        return bytes(len(raw))

    monkeypatch.setattr(codecs, "encode_buffer", watched)
    big = np.zeros(4_000_000, np.float32)
    cases: list[tuple[Any, ColumnType]] = [
        (lists(big), TOKEN.f32),
        (lists(big.reshape(-1, 64)), TOKEN.f32[64]),
        (lists(big > 0), TOKEN.bool),
        (np.array(["long " * 100_000] * 20, object), SAMPLE.str),
        (np.array([bytes(1_000_000)] * 20, object), SAMPLE.bytes),
    ]
    for values, kind in cases:
        seen.clear()
        choose(values, kind, "lz4")
        assert seen
        assert max(seen) <= codecs.SLICE
        assert sum(seen) <= 4 * codecs.SLICES * codecs.SLICE


def test_text_that_is_no_utf8_can_be_sampled() -> None:
    assert choose(np.array(["\ud800" * 500] * 20, object), SAMPLE.str, "lz4") == "lz4"


def test_lz4_frames_are_the_same_without_arrows_own(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.frombuffer(b"experience " * 500 + b"table", np.uint8)
    by_arrow = bytes(codecs.encode_buffer(raw, "lz4", itemsize=1))
    monkeypatch.setattr(codecs, "_arrow_codec", lambda codec: codecs._Lz4Frames())
    by_lz4 = bytes(codecs.encode_buffer(raw, "lz4", itemsize=1))
    assert codecs.decode_buffer(by_arrow, "lz4", len(raw), itemsize=1).tobytes() == raw.tobytes()
    with pytest.raises(StoreError, match="damaged"):
        codecs.decode_buffer(by_arrow[:-9], "lz4", len(raw), itemsize=1)
    monkeypatch.undo()
    assert codecs.decode_buffer(by_lz4, "lz4", len(raw), itemsize=1).tobytes() == raw.tobytes()
