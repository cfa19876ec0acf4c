"""Runs of a weights edge that go wrong, what they leave, and what is refused before anything moves."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.engines.reshard.control import BoardControl, Loop, LoopControl
from flowrl.engines.reshard.copies import CopyList, widened
from flowrl.engines.reshard.program import Program, program_for
from flowrl.engines.reshard.resharder import Resharder
from flowrl.engines.reshard.transports import LoopTransport
from flowrl.errors import ConfigError, EngineError, StaleWeightsError, WaitTimeout
from flowrl.mesh import Layout
from flowrl.planner.boxes import Holding


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    kind: str
    split_axis: int | None
    layer: int | None = None
    parts: tuple[int, ...] = ()


TENSORS = (
    Tensor("up.weight", (16, 8), "up", 0),
    Tensor("down.weight", (8, 16), "down", 1),
    Tensor("norm.weight", (9,), "norm", None),
)
WHOLE = {one.name: torch.randn(one.shape, generator=torch.Generator().manual_seed(7)) for one in TENSORS}


def program(**options: Any) -> Program:
    source, target = Holding(Layout.parse("f2"), (0, 1)), Holding(Layout.parse("t2"), (0, 1))
    return program_for(TENSORS, source, target, **{"source_dtype": "float32", "bucket_bytes": 256, **options})


def filled(shelves: Any, values: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[int, dict[str, torch.Tensor]]:
    return {
        device: {
            name: values[name][tuple(slice(*interval) for interval in slots[0].box)].to(dtype).contiguous()
            for name, slots in shelf.slots.items()
        }
        for device, shelf in shelves.items()
    }


class Breaking(LoopTransport):
    """Raises when it comes to a bucket, once."""

    breaks_at: int | None = None

    def start(self, bucket: int) -> None:
        if bucket == self.breaks_at:
            self.breaks_at = None
            raise RuntimeError("the cable is out")
        super().start(bucket)


@dataclass
class Pair:
    """Both ends of an edge."""

    ends: list[Resharder]
    transports: list[Breaking]
    source: dict[int, dict[str, torch.Tensor]]
    target: dict[int, dict[str, torch.Tensor]]
    expected: dict[int, dict[str, torch.Tensor]]

    def run(self, version: int, **options: Any) -> list[Any]:
        """What each end returned or raised."""
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(end.run, version, **options) for end in self.ends]
            return [one.exception(30) or one.result() for one in running]

    def is_exact(self) -> bool:
        return all(
            torch.equal(local, self.target[device][name])
            for device, parts in self.expected.items()
            for name, local in parts.items()
        )


def pair(timeout_s: float = 20, **options: Any) -> Pair:
    made = program()
    loop = Loop(made.devices, timeout_s=timeout_s)
    source = filled(made.source, WHOLE, torch.float32)
    expected = filled(made.target, WHOLE, torch.bfloat16)
    target = {d: {n: torch.full_like(t, torch.nan) for n, t in parts.items()} for d, parts in expected.items()}
    ends, transports = [], []
    for device in made.devices:
        control = LoopControl(loop, device)
        transports.append(Breaking(loop, control))
        ends.append(
            Resharder(
                made, device, source=source[device], target=target[device], transport=transports[-1], control=control,
                oracle=WHOLE.__getitem__, **options,
            )
        )  # fmt: skip
    return Pair(ends, transports, source, target, expected)


def test_a_run_brings_all_and_sets_the_version_last() -> None:
    seen: list[Any] = []
    found = pair(rebuild=lambda: seen.append([end.version for end in found.ends]))
    ran = found.run(3)
    assert found.is_exact()
    assert [end.version for end in found.ends] == [3, 3]
    assert seen == [[None, None], [None, None]]  # derived weights are made before the version is set
    assert (
        sum(one.sent_bytes for one in ran) == sum(one.received_bytes for one in ran) == found.ends[0].program.wire_bytes
    )
    assert all(one.num_buckets == found.ends[0].program.num_buckets > 1 for one in ran)


def test_a_rank_that_raises_leaves_both_stale_until_a_full_run_passes() -> None:
    found = pair()
    found.run(1)
    found.transports[1].breaks_at = 1
    first, second = found.run(2)
    assert isinstance(second, EngineError)
    assert "'f2 -> t2' to version 2 failed on device 1: the cable is out" in str(second)
    assert isinstance(first, EngineError)
    assert "device 1 gave up" in str(first)
    for end in found.ends:
        assert end.version == 1
        with pytest.raises(StaleWeightsError, match='version 2 failed.*verify="full"'):
            end.check()
    for error in found.run(3):  # refused by both, and neither waits for the other
        assert isinstance(error, StaleWeightsError)
    ran = found.run(3, verify="full")
    assert [one.num_checked for one in ran] == [
        sum(t.nbytes for t in found.expected[device].values()) for device in (0, 1)
    ]
    assert found.is_exact()
    for end in found.ends:
        end.check()
    assert [one.version for one in found.run(4)] == [4, 4]


def test_a_rank_that_never_comes_is_named_in_time() -> None:
    found = pair(timeout_s=0.2)
    with pytest.raises(
        WaitTimeout, match=r"devices \[1\] did not come to the start of version 5 of 'f2 -> t2' within 0.2 s"
    ):
        found.ends[0].run(5)
    assert found.ends[0].is_stale


def test_a_rank_that_stops_in_the_middle_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = pair(timeout_s=0.3)
    monkeypatch.setattr(found.transports[1], "start", lambda bucket: None)  # sends nothing, and awaits nothing
    errors = found.run(1)
    late = [error for error in errors if isinstance(error, WaitTimeout)]
    assert late  # whose time is over first; the other gives up, or its time is over too
    assert all(re.search(r"device . did not send its messages of bucket . within 0.3 s", str(error)) for error in late)
    assert all(isinstance(error, WaitTimeout | EngineError) for error in errors)
    assert all(end.is_stale for end in found.ends)


def test_ranks_that_want_different_versions_are_refused() -> None:
    found = pair()
    with ThreadPoolExecutor(2) as pool:
        errors = [one.exception(30) for one in [pool.submit(found.ends[0].run, 1), pool.submit(found.ends[1].run, 2)]]
    assert any("device 1 runs version 2 with verify='sample', device 0 version 1" in str(error) for error in errors)
    assert all(isinstance(error, EngineError) for error in errors)


def test_every_version_is_checked_at_other_places_also_out_of_order() -> None:
    """Samples are drawn ahead, for the version that comes next; another one is drawn when it comes."""
    found = pair()
    for version in (1, 2, 3, 7, 5):
        ran = found.run(version)
        assert found.is_exact()
        assert len({one.num_checked for one in ran}) == 1 and ran[0].num_checked > 0
        for end in found.ends:
            ready = end._digests._next
            assert ready is not None and ready.version == version + 1
            assert ready.chosen == end._digests._sampler.draw(version + 1)
    spoiled = found.target[0]
    end = found.ends[0]
    unpack = end._unpacks[-1].run
    end._unpacks[-1].run = lambda: (unpack(), [t.add_(1) for t in spoiled.values()])  # type: ignore[method-assign, assignment]
    assert all("is not what device" in str(error) for error in found.run(6))  # what was drawn ahead finds it too


def test_a_write_to_the_target_during_a_run_is_found_by_the_sample() -> None:
    found = pair()

    def spoil() -> None:
        for tensor in found.target[0].values():
            tensor.add_(1)

    end = found.ends[0]
    unpack = end._unpacks[-1].run
    end._unpacks[-1].run = lambda: (unpack(), spoil())  # type: ignore[method-assign, assignment]
    errors = found.run(1)
    assert all(isinstance(error, EngineError) for error in errors)
    assert all("is not what device" in str(error) for error in errors)
    assert all(end.is_stale for end in found.ends)


def test_a_wrong_element_is_found_by_the_full_check() -> None:
    found = pair(rebuild=lambda: found.target[1]["norm.weight"][3].add_(1))
    first, second = found.run(1, verify="full")
    assert "1 of 9 elements of norm.weight on device 1 differ" in str(second)
    assert isinstance(first, EngineError)
    assert isinstance(found.run(1, verify="off")[0], StaleWeightsError)


def test_storage_that_was_replaced_is_refused() -> None:
    found = pair()
    found.run(1)
    parameter = found.target[0]["up.weight"]
    parameter.data = parameter.data.clone()
    first, second = found.run(2)
    assert "'up.weight' has other storage" in str(first)
    assert isinstance(second, EngineError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("up.weight"), "lacks 'up.weight'"),
        (lambda t: t.update({"up.weight": t["up.weight"][:3]}), r"local shape \(3, 8\)"),
        (
            lambda t: t.update({"up.weight": t["up.weight"].double()}),
            "is torch.float64; the program was made for bfloat16",
        ),
        (lambda t: t.update({"down.weight": t["down.weight"].T.contiguous().T}), "must be contiguous"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    made = program()
    loop = Loop(made.devices)
    target = filled(made.target, WHOLE, torch.bfloat16)[0]
    change(target)
    control = LoopControl(loop, 0)
    source = filled(made.source, WHOLE, torch.float32)[0]
    with pytest.raises(ConfigError, match=message):
        Resharder(made, 0, source=source, target=target, transport=LoopTransport(loop, control), control=control)


def test_a_full_check_needs_an_oracle() -> None:
    found = pair()
    found.ends[0]._oracle = None
    with pytest.raises(ConfigError, match="give the Resharder an oracle"):
        found.ends[0].run(1, verify="full")
    with pytest.raises(ConfigError, match="verify is one of off, sample, full; found 'some'"):
        found.ends[0].run(1, verify="some")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------- parts


def test_strided_copies_move_the_longest_elements_that_fit() -> None:
    target, source = torch.zeros(6, 64, dtype=torch.bfloat16), torch.randn(6, 64).bfloat16()
    wide, _ = widened(target[:, 8:24], source[:, 16:32])
    assert wide.dtype == torch.complex128
    odd, _ = widened(target[:, 1:4], source[:, 2:5])
    assert odd.dtype in (torch.int16, torch.bfloat16)
    CopyList(
        [(target[:, 8:24], source[:, 16:32]), (target[:, 1:4], source[:, 2:5]), (target[0, 32:], source[0, 32:])]
    ).run()
    assert torch.equal(target[:, 8:24], source[:, 16:32])
    assert torch.equal(target[:, 1:4], source[:, 2:5])
    assert torch.equal(target[0, 32:], source[0, 32:])
    assert int((target[1:, 24:] != 0).sum()) == 0


def test_processes_agree_over_a_board(tmp_path: Path) -> None:
    ends = [BoardControl(tmp_path / "board", (4, 7), device, timeout_s=20) for device in (4, 7)]
    with ThreadPoolExecutor(2) as pool:
        for attempt in range(3):
            for end in ends:
                end.begin()
            for count in range(5):
                found = [pool.submit(end.exchange, [attempt, count, end.device, -(2**60)], "it") for end in ends]
                wanted = [[attempt, count, device, -(2**60)] for device in (4, 7)]
                assert [one.result(20) for one in found] == [wanted, wanted]


def test_a_board_tells_of_failures_of_this_attempt_only(tmp_path: Path) -> None:
    ends = [BoardControl(tmp_path / "board", (0, 1), device, timeout_s=0.2) for device in (0, 1)]
    for end in ends:
        end.begin()
    ends[1].fail()
    with pytest.raises(EngineError, match="device 1 gave up, so that device 1 did not come to the start"):
        ends[0].exchange([1], "the start")
    for end in ends:
        end.begin()
    with pytest.raises(WaitTimeout, match="device 1 did not come to the start within 0.2 s"):
        ends[0].exchange([1], "the start")
    ends[0].post(BoardControl.PACKED, 3)
    ends[1].await_(0, BoardControl.PACKED, 3, "pack")
    with pytest.raises(WaitTimeout, match="device 0 did not pack"):
        ends[1].await_(0, BoardControl.PACKED, 4, "pack")
