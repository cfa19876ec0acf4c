"""A loader's batches as torch tensors, in threads and in forked processes, at bounded memory."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.errors import ConfigError, StoreError
from flowrl.schema import PROMPT, SAMPLE, TOKEN
from flowrl.store.loader import Loader
from flowrl.store.rows import RowBatch
from flowrl.store.source import BatchRows

ROOT = Path(__file__).resolve().parents[3]


def rows_of(count: int, longest: int = 40, seed: int = 0) -> RowBatch:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, longest, count)
    return RowBatch(
        {
            "prompt_ids": [draw.integers(0, 9, 3) for _ in range(count)],
            "reward": np.arange(count, dtype=np.float32),
            "is_right": draw.random(count) < 0.5,
            "response_ids": [draw.integers(0, 99, n) for n in lengths],
            "loss_mask": [draw.random(n) < 0.5 for n in lengths],
            "logprobs": [draw.random(n, dtype=np.float32) for n in lengths],
            "teacher": [draw.random((n, 3)).astype(np.float16) for n in lengths],
            "version": draw.integers(0, 2**40, count),
        },
        {
            "prompt_ids": PROMPT.i32["*"], "reward": SAMPLE.f32, "is_right": SAMPLE.bool, "response_ids": TOKEN.i32,
            "loss_mask": TOKEN.bool, "logprobs": TOKEN.f32, "teacher": TOKEN.f16[3], "version": SAMPLE.i64,
        },
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_tensors_hold_what_the_arrays_hold(layout: str, prefetch: int, device: Any) -> None:
    options: dict[str, Any] = {"batch_rows": 7, "layout": layout, "shuffle": True, "seed": 1}
    batch = rows_of(50)
    arrays = list(Loader(batch, **options))
    tensors = list(Loader(batch, device=device, prefetch=prefetch, **options))
    assert len(arrays) == len(tensors) == 8
    for one, other in zip(arrays, tensors, strict=True):
        assert list(one) == list(other)
        for name in one:
            assert isinstance(other[name], torch.Tensor) and other[name].device.type == "cpu"
            assert other[name].numpy().dtype == one[name].dtype
            assert np.array_equal(other[name].numpy(), one[name]), name
    tensors[0]["logprobs"].add_(1)  # a batch belongs to whoever has it
    assert np.array_equal(tensors[1]["logprobs"].numpy(), arrays[1]["logprobs"])


def test_kept_tensors_are_never_overwritten() -> None:
    batch = rows_of(200)
    expected = [part["logprobs"] for part in Loader(batch, batch_rows=4, layout="padded")]
    for prefetch in (0, 1, 3):
        loader = Loader(batch, batch_rows=4, layout="padded", device="cpu", prefetch=prefetch)
        kept = [part["logprobs"].detach()[:, :2] for part in loader]  # nothing but a view of a view
        for one, other in zip(kept, expected, strict=True):
            assert np.array_equal(one.numpy(), other[:, :2])


def test_a_backward_pass_reads_its_own_batch_whatever_is_reused() -> None:
    batch = rows_of(60)
    options: dict[str, Any] = {"batch_rows": 4, "layout": "padded", "device": "cpu"}
    weight = torch.ones((), requires_grad=True)
    losses = [
        (weight * part["logprobs"]).sum() for part in Loader(batch, reuse=True, **options)
    ]  # each keeps its tensor
    for loss, part in zip(losses, Loader(batch, **options), strict=True):
        (found,) = torch.autograd.grad(loss, weight)
        assert torch.equal(found, part["logprobs"].sum())
    for one, other in zip(Loader(batch, reuse=True, **options), Loader(batch, **options), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "cuda"}, "device='cuda' and torch finds no CUDA device here"),
        ({"device": "cpu", "pin": True}, "pin=True and torch finds no CUDA device here"),
        ({"device": "cqu"}, "'cpu' or 'cuda'; found 'cqu'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Loader(rows_of(3), layout="packed", **options)


def test_an_error_of_the_thread_has_its_traceback_through_torch_too() -> None:
    class Broken(BatchRows):
        def places(self, columns: Any) -> Any:
            return None

        def rows(self, indices: Any, columns: Any) -> Any:
            raise PermissionError("segments/000.arrow")

    loader = Loader(Broken(rows_of(9)), layout="padded", device="cpu", prefetch=1)
    with pytest.raises(PermissionError, match="segments") as caught:
        next(iter(loader))
    names = []
    trace = caught.value.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert "_work" in names and names[-1] == "rows"  # from the thread, down to where it happened


@pytest.mark.parametrize("slow", ["consumer", "thread"])
def test_whoever_is_slower_nothing_is_lost(slow: str) -> None:
    class Slow(BatchRows):
        def places(self, columns: Any) -> Any:
            return None

        def rows(self, indices: Any, columns: Any) -> Any:
            if slow == "thread":
                time.sleep(0.005)
            return super().rows(indices, columns)

    found = []
    for part in Loader(Slow(rows_of(60)), batch_rows=3, layout="packed", device="cpu", prefetch=2):
        if slow == "consumer":
            time.sleep(0.005)
        found += part["reward"].tolist()
    assert found == list(range(60))


MEMORY = """
import sys, numpy as np
from tests.cpu.store.test_loader_device import peak_of_an_epoch
print(*peak_of_an_epoch(int(sys.argv[1]), int(sys.argv[2])))
"""


def peak_of_an_epoch(count: int, prefetch: int) -> tuple[int, int]:
    """(bytes of staging, growth of the process's peak while it reads) of `count` rows of 40 KB each."""
    offsets = np.arange(count + 1) * 10_000
    flat = np.ones(count * 10_000, np.float32)
    from flowrl.schema import Ragged

    batch = RowBatch({"logprobs": Ragged(flat, offsets)}, {"logprobs": TOKEN.f32})
    loader = Loader(batch, batch_rows=16, layout="padded", device="cpu", prefetch=prefetch, shuffle=True)
    for part in Loader(batch.slice(0, 64), batch_rows=16, layout="padded", device="cpu", prefetch=prefetch):
        del part  # compiled and warm

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = _status("VmRSS")
    total = 0.0
    for part in loader:
        total += float(part["logprobs"].sum())
    assert total == count * 10_000
    (carrier,) = loader._idle
    return carrier.pool.nbytes, _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from /proc")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_memory_is_that_of_the_batches_in_use(prefetch: int) -> None:
    batch_bytes = 16 * 10_000 * 5  # values and mask
    found = {}
    for count in (300, 3000):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(count), str(prefetch)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        found[count] = [int(number) for number in done.stdout.split()]
    most = batch_bytes * (max(prefetch, 1) + 2) * 1.4
    for staging, grown in found.values():
        assert staging < most
        assert grown < most + (4 << 20)
    # ten times the rows, the same memory, but for one block that depends on how the threads meet
    assert found[3000][0] <= 1.2 * (found[300][0] + batch_bytes)


def test_a_forked_process_starts_anew_and_is_told_about_the_old_iterator() -> None:
    loader = Loader(rows_of(60), batch_rows=3, layout="packed", prefetch=2)
    iterator = iter(loader)
    next(iterator)
    expected = [part["reward"].tolist() for part in Loader(rows_of(60), batch_rows=3, layout="packed")]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            again = [part["reward"].tolist() for part in loader]
            try:
                for _ in iterator:
                    pass
            except StoreError as error:
                code = 0 if again == expected and "forked" in str(error) else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(list(iterator)) == 19  # the parent goes on
    assert not [thread for thread in threading.enumerate() if thread.name == "flowrl-loader"]


def test_a_program_that_ends_in_the_middle_of_an_epoch_ends() -> None:
    code = (
        "from tests.cpu.store.test_loader_device import rows_of, Loader\n"
        "iterator = iter(Loader(rows_of(60), batch_rows=3, layout='packed', device='cpu', prefetch=2))\n"
        "next(iterator)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
