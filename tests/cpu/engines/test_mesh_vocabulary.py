"""Bytes of a head that is cut by tokens, as PyTorch's memory tracker sees them on fake tensors of one rank of many."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from flowrl.cost.memory import LogitBytes
from flowrl.engines.forward import SLICE_ELEMENTS
from flowrl.engines.mesh.vocabulary import HeadPart, stats_of_part, top_of_part

HIDDEN, VOCAB, TP = 4096, 128_256, 8
SLICE = SLICE_ELEMENTS // VOCAB


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", rank=0, world_size=TP, store=FakeStore())
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("work", "with_entropy", "num_slices", "expected"),
    [
        ("train", False, 1, 8),  # what is kept, one copy in fp32, its gradient in bf16
        ("train", True, 1, 10),  # two copies in fp32
        ("train", False, 6, 6),
        ("train", True, 6, 8),
        ("score", False, 1, 6),
        ("score", False, 6, 6),
        ("score", True, 6, 8),
        ("top", False, 6, 6),
    ],
)
def test_logits_take_less_than_is_planned(
    group: dist.ProcessGroup, work: str, with_entropy: bool, num_slices: int, expected: int
) -> None:
    """Bytes of each logit of one slice and one rank, whatever the number of slices."""
    cuts = [slice(start, start + SLICE) for start in range(0, num_slices * SLICE, SLICE)]
    with FakeTensorMode():
        hidden = torch.randn(num_slices * SLICE, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(VOCAB // TP, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        targets, temperature = torch.zeros(len(hidden), dtype=torch.int64), torch.ones(len(hidden))
        part = HeadPart(weight, None, group, VOCAB)
        tracker = MemTracker()
        given = (hidden, weight, targets, temperature)
        tracker.track_external(*given)
        with tracker, torch.set_grad_enabled(work == "train"):
            if work == "top":
                for cut in cuts:
                    top_of_part(part, hidden[cut], temperature[cut], 20)
            else:
                logprobs, entropy = stats_of_part(part, hidden, targets, temperature, cuts, with_entropy=with_entropy)
                if work == "train":
                    (logprobs.sum() if entropy is None else logprobs.sum() + entropy.sum()).backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    gradients = (hidden.nbytes + weight.nbytes) if work == "train" else 0
    found = (peak["Total"] - sum(tensor.nbytes for tensor in given) - gradients) / (SLICE * VOCAB / TP)
    assert found == pytest.approx(expected, rel=0.03)
    planned = LogitBytes()
    assert found < (planned.cross_entropy if work == "train" else planned.log_softmax_no_grad)


def test_only_plain_heads_that_are_cut_have_a_part() -> None:
    assert HeadPart.of(None, VOCAB) is None
    assert HeadPart.of(nn.Linear(2, 3), 3) is None
    assert HeadPart.of(nn.Identity(), 3) is None
