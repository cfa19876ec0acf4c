"""A loader's batches on a CUDA device: right values, in bounded memory, copied while the device works."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.schema import PROMPT, SAMPLE, TOKEN, Ragged
from flowrl.store.loader import Loader
from flowrl.store.rows import RowBatch

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu


def rows_of(count: int, longest: int = 60, width: int = 8) -> RowBatch:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, longest, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    return RowBatch(
        {
            "prompt_ids": [draw.integers(0, 9, 3) for _ in range(count)],
            "reward": np.arange(count, dtype=np.float32),
            "response_ids": Ragged(draw.integers(0, 99, total).astype(np.int32), offsets),
            "loss_mask": Ragged(draw.random(total) < 0.5, offsets),
            "logprobs": Ragged(draw.random(total, dtype=np.float32), offsets),
            "teacher": Ragged(draw.random((total, width), dtype=np.float32).astype(np.float16), offsets),
            "version": np.arange(count) + 2**40,
        },
        {
            "prompt_ids": PROMPT.i32["*"], "reward": SAMPLE.f32, "response_ids": TOKEN.i32, "loss_mask": TOKEN.bool,
            "logprobs": TOKEN.f32, "teacher": TOKEN.f16[width], "version": SAMPLE.i64,
        },
    )  # fmt: skip


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name in one:
        found = other[name].cpu().numpy()
        assert found.dtype == one[name].dtype and np.array_equal(found, one[name]), name


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("pin", [None, False])
def test_batches_on_the_device_are_those_in_memory(layout: str, prefetch: int, pin: bool | None, device: str) -> None:
    batch = rows_of(100)
    options: dict[str, Any] = {"batch_rows": 7, "layout": layout, "shuffle": True}
    loader = Loader(batch, device=device, prefetch=prefetch, pin=pin, **options)
    arrays = Loader(batch, **options)
    for _ in range(2):  # the second epoch uses the memory of the first
        kept = list(loader)  # kept, so that a block used too early shows
        for one, other in zip(arrays, kept, strict=True):
            assert all(tensor.is_cuda for tensor in other.values())
            same(one, other)


def test_batches_are_made_in_page_locked_memory(device: str) -> None:
    loader = Loader(rows_of(40), batch_rows=8, layout="padded", device=device, prefetch=1)
    for _ in loader:
        pass
    (carrier,) = loader._idle
    blocks: Any = carrier.pool._blocks
    assert blocks and all(torch.from_numpy(block).is_pinned() for block in blocks)
    assert len(blocks) <= 2
    for part in Loader(rows_of(9), layout="padded", device="cpu", pin=True):
        assert part["logprobs"].is_pinned()


def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="CUDA devices"):
        Loader(rows_of(3), layout="packed", device="cuda:99")


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_no_more_batches_lie_on_the_device_than_were_promised(prefetch: int, device: str) -> None:
    batch = rows_of(2000, width=64)
    options: dict[str, Any] = {"batch_rows": 64, "layout": "padded", "pad_multiple": 64}
    one = max(sum(a.nbytes for a in part.values()) for part in Loader(batch, **options))
    weight = torch.randn(2048, 2048, device=device)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, before_reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    outcome = torch.zeros((), device=device)
    for part in Loader(batch, device=device, prefetch=prefetch, **options):
        for _ in range(8):  # the device is far behind the loop
            weight = torch.mm(weight, weight).clamp_(-1, 1)
        outcome += part["logprobs"].sum()
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    work = 3 * weight.nbytes + (1 << 20)
    assert grown <= max(2, prefetch + 1) * one * 1.05 + work
    # memory that waits for the device to be done with it counts as reserved
    assert torch.cuda.max_memory_reserved() - before_reserved <= (max(2, prefetch + 1) + 1) * one * 1.3 + work + (
        64 << 20
    )


def test_values_are_right_while_the_device_is_behind(device: str) -> None:
    batch = rows_of(600, width=64)
    options: dict[str, Any] = {"batch_rows": 30, "layout": "padded"}
    expected = [(part["logprobs"].sum(dtype=np.float64), part["teacher"].copy()) for part in Loader(batch, **options)]
    for prefetch in (1, 4):
        stream = torch.cuda.Stream()
        found = []
        with torch.cuda.stream(stream):
            for part in Loader(batch, device=device, prefetch=prefetch, **options):
                torch.cuda._sleep(20_000_000)  # about 10 ms: this batch is read long after the next ones are copied
                found.append((part["logprobs"].double().sum(), part["teacher"].clone()))
                del part
        stream.synchronize()
        for (total, teacher), (wanted, values) in zip(found, expected, strict=True):
            assert float(total) == pytest.approx(wanted, rel=1e-9)
            assert np.array_equal(teacher.cpu().numpy(), values)


def test_copies_do_not_wait_for_the_consumer(device: str) -> None:
    # while the consumer's stream sleeps, the next batch is already there: its event is done before the stream is
    batch = rows_of(120)
    iterator = iter(Loader(batch, batch_rows=30, layout="packed", device=device, prefetch=2))
    first = next(iterator)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # about 0.2 s
    slept = torch.cuda.current_stream().record_event()
    made = iterator._get()  # type: ignore[attr-defined]
    made.copied.synchronize()
    assert not slept.query(), "the copy waited for the consumer's stream"
    assert len(first["reward"]) == 30
    torch.cuda.synchronize()
