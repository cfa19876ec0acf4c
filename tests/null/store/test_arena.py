"""Memory for rows: blocks never overlap, are given out again, and running out is an error."""

import errno
import gc
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from flowrl.errors import StoreError
from flowrl.store import folders
from flowrl.store.arena import Arenas, Block, Mapped, new_folder, reclaim_orphans, remove_unused, shm_folder
from flowrl.store.presence import Presence
from tests.null.store.forks import in_child


@given(st.booleans(), st.lists(st.tuples(st.booleans(), st.integers(0, 9000)), max_size=80))
def test_blocks_keep_their_bytes_and_are_given_out_again(
    tmp_path_factory: pytest.TempPathFactory, private: bool, steps: list[tuple[bool, int]]
) -> None:
    folder = None if private else tmp_path_factory.mktemp("arena")
    arenas = Arenas(folder, 1, first_bytes=4096, most_bytes=16384)
    mapped = Mapped(arenas if folder is None else folder)
    held: list[tuple[Block, int]] = []
    for number, (take, size) in enumerate(steps):
        if take or not held:
            block = arenas.allocate(size)
            assert block.nbytes == max(-(-size // 64) * 64, 64)
            assert block.offset % 64 == 0
            arenas.write(block)[:] = number % 251
            held.append((block, number % 251))
        else:
            arenas.free(held.pop(size % len(held))[0])
        assert arenas.used_bytes == sum(block.nbytes for block, _ in held) <= arenas.reserved_bytes
    for block, value in held:
        assert (mapped.root(block) == value).all(), "nobody else wrote there"
    for block, _ in held:
        arenas.free(block)
    assert arenas.used_bytes == 0
    reserved = arenas.reserved_bytes
    if reserved:
        whole = arenas.allocate(min(reserved, 4096))
        assert arenas.reserved_bytes == reserved, "free neighbours are one stretch again"
        arenas.free(whole)
    assert arenas.trim() == reserved
    assert arenas.reserved_bytes == 0
    if folder is not None:
        assert list(folder.iterdir()) == []


def test_the_smallest_stretch_that_fits_is_taken(tmp_path: Path) -> None:
    arenas = Arenas(tmp_path, 1, first_bytes=1 << 16)
    blocks = [arenas.allocate(size) for size in (640, 64, 192, 64, 1024, 64)]
    for at in (0, 2, 4):
        arenas.free(blocks[at])
    assert arenas.allocate(150).offset == blocks[2].offset
    assert arenas.allocate(700).offset == blocks[4].offset
    assert arenas.allocate(600).offset == blocks[0].offset


def test_arenas_double_up_to_a_bound_and_are_larger_for_a_larger_block(tmp_path: Path) -> None:
    arenas = Arenas(tmp_path, 3, first_bytes=4096, most_bytes=16384)
    sizes = []
    for _ in range(4):
        before = arenas.reserved_bytes
        while arenas.reserved_bytes == before:
            arenas.allocate(2048)
        sizes.append(arenas.reserved_bytes - before)
    assert sizes == [4096, 8192, 16384, 16384]
    block = arenas.allocate(100_000)
    assert (tmp_path / block.arena).stat().st_size == 102_400
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"arena-3-{n}" for n in range(1, 6)]


def test_a_block_is_freed_once(tmp_path: Path) -> None:
    arenas = Arenas(tmp_path, 1)
    block = arenas.allocate(100)
    arenas.free(block)
    for wrong in (block, Block("arena-2-1", 0, 64)):
        with pytest.raises(StoreError, match="freed twice, or is not of this process"):
            arenas.free(wrong)


@pytest.mark.parametrize("private", [False, True])
def test_views_are_read_only_and_keep_their_root(tmp_path: Path, private: bool) -> None:
    arenas = Arenas(None if private else tmp_path, 1)
    mapped = Mapped(arenas if private else tmp_path)
    block = arenas.allocate(256)
    arenas.write(block).view(np.int32)[:] = np.arange(64)
    root = mapped.root(block)
    assert len(root) == 256
    view = root[64:128].view(np.int32).reshape(4, 4)[1:, ::2]
    gone = weakref.ref(root)
    for array in (root, view):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    del root, array
    gc.collect()
    assert gone() is not None
    assert view[0].tolist() == [20, 22]
    arenas.close()
    assert view[0].tolist() == [20, 22], "closing does not take bytes away from whoever has them"
    del view
    gc.collect()
    assert gone() is None


def test_reading_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    arenas = Arenas(tmp_path, 1, first_bytes=4096)
    block = arenas.allocate(64)
    mapped = Mapped(tmp_path)
    with pytest.raises(StoreError, match="has 4096 bytes; a block ends at 4160"):
        mapped.root(Block(block.arena, 4096, 64))
    with pytest.raises(StoreError, match=r"arena-1-2 cannot be read"):
        mapped.root(Block("arena-1-2", 0, 64))
    with pytest.raises(StoreError, match="not there any more"):
        Mapped(Arenas(None, 1)).root(block)


def test_a_reader_lets_go_of_arenas_that_are_gone(tmp_path: Path) -> None:
    arenas = Arenas(tmp_path, 1, first_bytes=4096, most_bytes=4096)
    mapped = Mapped(tmp_path)
    for _ in range(5):
        block = arenas.allocate(4096)
        mapped.root(block)
        arenas.free(block)
        arenas.trim()
    assert len(mapped._views) == 1


def test_no_space_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.posix_fallocate
    asked: list[int] = []

    def at_most(descriptor: int, offset: int, nbytes: int) -> None:
        asked.append(nbytes)
        if nbytes > 1 << 16:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", at_most)
    arenas = Arenas(tmp_path, 1, first_bytes=1 << 20)
    block = arenas.allocate(5000)
    assert asked == [1 << 20, 8192], "less than wanted is enough when the block fits"
    with pytest.raises(
        StoreError, match=r"0\.25 MiB more .* are needed; .* MiB of .* MiB .*--shm-size.*private.*memory_bytes"
    ):
        arenas.allocate(1 << 18)
    assert [path.name for path in tmp_path.iterdir()] == [block.arena]
    assert arenas.reserved_bytes == 8192
    arenas.free(block)
    assert arenas.allocate(8192).arena == block.arena

    def refused(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "posix_fallocate", refused)
    with pytest.raises(StoreError, match="Permission denied"):
        arenas.allocate(1)


def test_closing_removes_own_files_only(tmp_path: Path) -> None:
    one, two = Arenas(tmp_path, 1), Arenas(tmp_path, 2)
    block, other = one.allocate(1), two.allocate(1)
    one.close()
    one.close()
    one.free(block)  # a view was collected later
    assert [path.name for path in tmp_path.iterdir()] == [other.arena]
    two.close(keep=True)
    assert (tmp_path / other.arena).exists()
    with pytest.raises(StoreError, match="closed"):
        one.allocate(1)


def test_arenas_of_the_dead_go_when_no_row_lies_in_them(tmp_path: Path) -> None:
    blocks = [Arenas(tmp_path, slot).allocate(64) for slot in (1, 2, 3)]
    root = Mapped(tmp_path).root(blocks[1])
    removed = remove_unused(tmp_path, {blocks[0].arena}, lambda slot: slot == 3)
    assert removed == 1 << 20
    assert sorted(path.name for path in tmp_path.iterdir()) == [blocks[0].arena, blocks[2].arena]
    assert root[0] == 0


def test_a_child_writes_to_arenas_of_its_own(tmp_path: Path) -> None:
    presence = Presence(tmp_path)
    arenas = Arenas(tmp_path, lambda: presence.slot)
    block = arenas.allocate(64)
    arenas.write(block)[:] = 1

    def child() -> bytes:
        mine = arenas.allocate(64)
        arenas.write(mine)[:] = 2
        arenas.free(block)  # the parent's affair
        same = Mapped(tmp_path).root(block)[0]
        arenas.close()
        return f"{mine.arena} {same} {(tmp_path / mine.arena).exists()}".encode()

    assert in_child(child) == b"arena-2-1 1 False"
    assert arenas.write(block)[0] == 1
    assert arenas.allocate(64).arena == block.arena
    numbered = Arenas(tmp_path, 9)
    assert in_child(lambda: numbered.allocate(1).arena.encode()).startswith(b"StoreError: the child of a fork")
    private = Arenas(None, 1)
    kept = private.allocate(64)
    private.write(kept)[:] = 3
    assert in_child(lambda: bytes(private.write(kept)[:1]) + bytes([private.allocate(64).offset])) == b"\x03\x40"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of its own for shared memory, as others have tables in the real one."""
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_memory_that_no_living_process_has_is_reclaimed(memory: Path) -> None:
    assert reclaim_orphans() == []
    assert shm_folder().parent == memory
    new = new_folder()
    assert shm_folder().stat().st_mode & 0o777 == 0o700
    left = Path(in_child(lambda: str(new_folder()).encode()).decode())

    def used() -> bytes:
        folder = new_folder()
        mine = Presence(folder)
        Arenas(folder, mine.slot).allocate(1)
        return str(folder).encode()

    killed, saved = (Path(in_child(used).decode()) for _ in range(2))
    (saved / "path").write_text("/somewhere")
    half = shm_folder() / ".gone-abc"
    half.mkdir()
    held = new_folder()
    presence = Presence(held)
    assert len(list(killed.iterdir())) == 3
    assert set(reclaim_orphans()) == {left, killed}
    assert {path for path in shm_folder().iterdir() if path.is_dir()} == {new, saved, held}
    assert reclaim_orphans() == []
    presence.close()
    assert set(reclaim_orphans()) == {held}
    in_use = Presence(new)
    assert not (new / "setup").exists()
    assert reclaim_orphans() == []
    in_use.close()


def test_the_lock_of_a_new_folder_is_not_kept_by_a_child(memory: Path) -> None:
    ours, theirs = os.pipe()
    hold_read, hold_write = os.pipe()
    maker = os.fork()
    if maker == 0:
        new_folder()
        if os.fork() == 0:
            os.close(hold_write)
            os.write(theirs, b"x")
            os.read(hold_read, 1)
        os._exit(0)
    os.waitpid(maker, 0)
    assert os.read(ours, 1) == b"x"
    try:
        assert len(reclaim_orphans()) == 1
    finally:
        for descriptor in (ours, theirs, hold_read, hold_write):
            os.close(descriptor)


def test_a_folder_of_somebody_else_is_not_used(memory: Path) -> None:
    elsewhere = memory / "elsewhere"
    elsewhere.mkdir()
    shm_folder().symlink_to(elsewhere)
    with pytest.raises(StoreError, match="belongs to somebody else"):
        new_folder()
    with pytest.raises(StoreError, match="belongs to somebody else"):
        reclaim_orphans()


def test_missing_shared_memory_is_named(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "SHARED_MEMORY", memory / "none")
    assert reclaim_orphans() == []
    with pytest.raises(StoreError, match=r"cannot be made.*memory='private'"):
        new_folder()


def test_a_change_that_was_interrupted_is_made_good_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = Arenas(None, 1, first_bytes=1 << 12, most_bytes=1 << 12)
    blocks = [arenas.allocate(512) for _ in range(8)]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for name, change in (("_put", lambda: arenas.free(blocks[2])), ("_take", lambda: arenas.free(blocks[1]))):
        with monkeypatch.context() as patch:
            patch.setattr(arenas, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                change()
    again = arenas.allocate(1024)
    assert (again.offset, again.nbytes) == (blocks[1].offset, 1024), "both are free, and side by side"
    assert arenas.used_bytes == 4096
    for block in (again, *blocks[:1], *blocks[3:]):
        arenas.free(block)
    assert arenas.used_bytes == 0
    assert arenas.allocate(4096).offset == 0
