"""Attached processes: numbers never come twice, pins are seen by all, and end with the process."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from flowrl.errors import StoreError, WaitTimeout
from flowrl.store import folders
from flowrl.store.log import CommitLog
from flowrl.store.presence import LocalPresence, Presence
from tests.null.store.forks import in_child


def test_numbers_are_never_used_again(tmp_path: Path) -> None:
    first, second = Presence(tmp_path), Presence(tmp_path)
    assert (first.slot, second.slot) == (1, 2)
    assert first.is_alive(2)
    second.close()
    second.close()
    assert not first.is_alive(2)
    assert folders.slots(tmp_path) == [1]
    assert Presence(tmp_path).slot == 3
    assert not first.is_alive(99)
    assert Presence.alive_in(tmp_path, 1)


def test_numbers_can_outlive_the_memory(tmp_path: Path) -> None:
    disk, one, two = tmp_path / "disk", tmp_path / "one", tmp_path / "two"
    for folder in (disk, one, two):
        folder.mkdir()
    slots = [Presence(folder, counter=disk).slot for folder in (one, one, two, one)]
    assert slots == [1, 2, 3, 4]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1), st.integers(1, 600)), max_size=200))
def test_pins_are_counted_and_seen_by_all(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("presence")
    each = [Presence(folder), Presence(folder)]
    counts: list[dict[int, int]] = [{}, {}]
    for pin, who, uid in steps:
        if pin:
            each[who].pin(uid)
            counts[who][uid] = counts[who].get(uid, 0) + 1
        else:
            each[who].unpin(uid)
            counts[who][uid] = max(counts[who].get(uid, 0) - 1, 0)
    pinned = {uid for count in counts for uid, n in count.items() if n}
    for presence in each:
        assert presence.pinned(range(1, 601)) == pinned
        assert presence.pinned(range(1, 601, 7)) == pinned & set(range(1, 601, 7))
        assert presence.pinned([]) == set()
    each[0].close()
    assert each[1].pinned(range(1, 601)) == {uid for uid, n in counts[1].items() if n}
    each[1].close()


def test_any_number_of_pins_fits(tmp_path: Path) -> None:
    one, two = Presence(tmp_path), Presence(tmp_path)
    uids = [5 << 40 | n for n in range(3000)]
    for uid in uids:
        one.pin(uid)
    assert two.pinned(uids) == set(uids)
    assert two.pinned([1, uids[7]]) == {uids[7]}
    for uid in uids:
        one.unpin(uid)
    assert two.pinned(uids) == set()
    size = (tmp_path / "process-1").stat().st_size
    for uid in uids:
        one.pin(uid)
    assert (tmp_path / "process-1").stat().st_size == size, "entries are used again"


def test_no_space_for_a_pin_is_an_error_and_pins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    presence, other = Presence(tmp_path), Presence(tmp_path)
    for uid in range(1, 505):
        presence.pin(uid)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(StoreError, match="No space left"):
            presence.pin(505)
        with pytest.raises(StoreError, match=r"no process can be added.*No space left"):
            Presence(tmp_path)
    assert sorted(folders.slots(tmp_path)) == [1, 2]
    assert [path.name for path in tmp_path.glob("new-*")] == []
    assert other.pinned(range(1, 600)) == set(range(1, 505))
    presence.pin(505)
    assert other.pinned([505]) == {505}


def test_a_dead_process_has_no_pins_and_its_file_goes(tmp_path: Path) -> None:
    presence = Presence(tmp_path)

    def child() -> bytes:
        mine = Presence(tmp_path)
        mine.pin(7)
        return f"{mine.slot} {presence.alive_in(tmp_path, mine.slot)}".encode()

    assert in_child(child) == b"2 True"
    assert sorted(folders.slots(tmp_path)) == [1, 2]
    assert not presence.is_alive(2)
    assert presence.pinned([7]) == set()
    assert folders.slots(tmp_path) == [1]


def test_a_child_has_a_number_of_its_own_and_no_pins(tmp_path: Path) -> None:
    presence, other = Presence(tmp_path), Presence(tmp_path)
    presence.pin(7)
    presence.pin(8)

    def child() -> bytes:
        assert folders.slots(tmp_path).__len__() == 2, "a child that does not use the table is not one of its processes"
        presence.unpin(7)  # a view it inherited is collected
        presence.pin(9)
        assert presence.is_alive(1)
        assert presence.is_alive(presence.slot)
        return f"{presence.slot} {sorted(other.pinned([7, 8, 9]))}".encode()

    assert in_child(child) == b"3 [7, 8, 9]"
    assert other.pinned([7, 8, 9]) == {7, 8}, "the child's pins ended with it, the parent's did not"
    assert in_child(lambda: presence.close() or b"closed") == b"closed"
    assert other.is_alive(1)
    assert (tmp_path / "process-1").exists()


def test_a_parents_lock_is_not_kept_by_its_child(tmp_path: Path) -> None:
    """A process whose child lives on is dead all the same."""
    ours, theirs = os.pipe()
    hold_read, hold_write = os.pipe()
    parent = os.fork()
    if parent == 0:
        presence = Presence(tmp_path)
        presence.pin(7)
        if os.fork() == 0:
            os.close(hold_write)
            os.write(theirs, b"x")
            os.read(hold_read, 1)  # lives until the test is over
        os._exit(0)
    os.waitpid(parent, 0)
    assert os.read(ours, 1) == b"x"
    try:
        assert not Presence.alive_in(tmp_path, 1)
        assert Presence(tmp_path).pinned([7]) == set()
    finally:
        for descriptor in (ours, theirs, hold_read, hold_write):
            os.close(descriptor)


def test_a_process_cannot_come_to_a_table_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    presence = Presence(folder)
    assert not folders.remove_folder(folder)
    assert folders.remove_folder(folder, own_slot=presence.slot)
    assert not folder.exists()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreError, match="is gone"):
        Presence(folder)
    presence.close()
    with pytest.raises(StoreError, match="closed"):
        presence.pin(3)


def test_a_forgotten_presence_is_dead(tmp_path: Path) -> None:
    presence = Presence(tmp_path)
    assert Presence.alive_in(tmp_path, presence.slot)
    del presence
    assert not Presence.alive_in(tmp_path, 1)


def test_who_only_reads_or_has_left_keeps_pins_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    owner, left = Presence(folder), Presence(folder)
    reader = Presence(folder, only_reads=True)
    assert sorted(folders.living(folder)) == [1, 2]
    left.pin(7)
    reader.pin(8)
    left.leave()
    assert list(folders.living(folder)) == [1]
    assert owner.pinned([7, 8, 9]) == {7, 8}
    assert [Presence.alive_in(folder, slot) for slot in (1, 2, 3)] == [True, False, False]
    assert in_child(lambda: reader.pin(9) or str(list(folders.living(folder))).encode()) == b"[1]"
    assert not folders.remove_folder(folder)
    assert folders.remove_folder(folder, own_slot=owner.slot)
    for presence in (owner, left, reader):
        presence.unpin(7)
        presence.close()


def test_a_holder_that_does_not_go_on_is_waited_for_no_longer_than_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it was stopped in the middle."""
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(folders, "LONGEST_WAIT_S", 0.0)
    folder = folders.new_folder()
    acts = {folder.parent / "lock": folders.new_folder, folder / "slots": lambda: Presence(folder)}
    acts[folder / "lock"] = lambda: CommitLog.create(folder)
    for file, act in acts.items():
        with open(file, "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(WaitTimeout, match=rf"waited 0 s for the lock of {file};.*end it"):
                act()
        act()


def test_pins_of_a_private_table_are_counted() -> None:
    presence = LocalPresence()
    presence.pin(1)
    presence.pin(1)
    presence.pin(2)
    presence.unpin(1)
    presence.unpin(2)
    presence.unpin(3)
    assert presence.pinned([1, 2, 3]) == {1}
    assert presence.is_alive(presence.slot)
    assert not presence.is_alive(2)
    presence.close()
    assert presence.pinned([1]) == set()
