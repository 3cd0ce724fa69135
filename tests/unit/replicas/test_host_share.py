"""Blocks that other processes of the host copy: who can, who cannot, and that nothing is left."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from staging_kit import block_of, small_cache

from bifolio.kv_manager.block_store import Unreached
from bifolio.protos.errors import StalePlacement
from bifolio.protos.messages import BlockId, Generation
from bifolio.replicas import host_share
from bifolio.replicas.block_stores import HostBlocks
from bifolio.replicas.host_share import HostShare, Reached, reach, share

NAME = "kv-of-test-host-share"  # not that of others in this process
ROWS, ROW_BYTES = 5, 512  # a row is a block of `small_cache`
OWNER = Generation(3, 7)
FIELDS = ("pid", "fd", "key", "rows", "row_bytes", "boot", "numbers")


def changed(handle: bytes, **fields: object) -> bytes:
    return json.dumps(list({**dict(zip(FIELDS, json.loads(handle), strict=True)), **fields}.values())).encode()


def reached(handle: bytes) -> Reached:
    found = reach(handle, ROW_BYTES)
    assert isinstance(found, Reached), found
    return found


def why_not(handle: bytes, row_bytes: int = ROW_BYTES) -> str:
    found = reach(handle, row_bytes)
    assert isinstance(found, Unreached), found
    assert found.why
    return found.reason


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count(f"memfd:{NAME}")


def open_files() -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += NAME in os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # that of the listing
            continue
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host_share, "NAME", NAME)
    yield
    assert (mappings(), open_files()) == (0, 0)


CHILD = f"""
import sys
import numpy as np
from bifolio.protos.messages import Generation
from bifolio.replicas import host_share
host_share.NAME = "{NAME}"
share = host_share.HostShare({ROWS}, {ROW_BYTES})
rows = share.blocks.reshape({ROWS}, {ROW_BYTES})
print(share.handle.decode(), flush=True)
for line in sys.stdin:  # a row has another owner from now on, and other content
    row, epoch, counter, content = map(int, line.split())
    share.owners.set([row], Generation(epoch, counter))
    rows[row] = content
    print("done", flush=True)
"""


class Child:
    """Another process that shares blocks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.handle = self._line().encode()

    def write(self, row: int, owner: Generation, content: int) -> None:
        assert self.process.stdin is not None
        print(row, *owner, content, file=self.process.stdin, flush=True)
        assert self._line() == "done"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def child() -> Iterator[Child]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


def test_a_block_of_another_process_is_copied_while_its_owner_is_the_same() -> None:
    cache = small_cache()
    with child() as other:
        other.write(2, OWNER, 65)
        copy = HostBlocks(cache).reach(other.handle)
        assert not isinstance(copy, Unreached), copy
        copy(BlockId(2), OWNER, BlockId(4))
        assert block_of(cache, 4) == bytes([65]) * ROW_BYTES
        assert not cache.bytes[:4].any()
        assert not cache.bytes[5:].any()
        other.write(2, Generation(3, 8), 66)
        with pytest.raises(StalePlacement, match=r"3\.7.*3\.8"):
            copy(BlockId(2), OWNER, BlockId(5))
        copy(BlockId(2), Generation(3, 8), BlockId(5))
        assert block_of(cache, 5) == bytes([66]) * ROW_BYTES
        for source, block in ((0, 1), (5, 1), (-1, 1), (1, 0), (1, 7)):
            with pytest.raises(IndexError, match="allowed is 1 to"):
                copy(BlockId(source), Generation(0, 0), BlockId(block))


def test_memory_of_a_process_that_was_killed_stays_while_it_is_mapped() -> None:
    with child() as other:
        other.write(1, OWNER, 65)
        found = reached(other.handle)
        other.kill()
        assert bytes(found.blocks[ROW_BYTES : 2 * ROW_BYTES]) == bytes([65]) * ROW_BYTES
        assert found.owners.of_row(1) == OWNER
        assert why_not(other.handle) == "gone"
        assert mappings() == 1


def test_no_other_process_can_write_or_resize_it() -> None:
    with child() as other:
        pid, fd, *_ = json.loads(other.handle)
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(opened, ROWS * ROW_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.pwrite(opened, b"x", 0)
            for size in (0, 1 << 20):
                with pytest.raises(PermissionError):
                    os.ftruncate(opened, size)
        finally:
            os.close(opened)
        assert not any(reached(other.handle).blocks)


def test_in_one_process_it_is_the_same_memory() -> None:
    own = HostShare(ROWS, ROW_BYTES)
    found = reached(own.handle)
    own.blocks[ROW_BYTES] = 9
    own.owners.set([1], OWNER)
    assert (found.rows, len(found.blocks), found.blocks[ROW_BYTES]) == (ROWS, ROWS * ROW_BYTES, 9)
    assert found.owners.of_row(1) == OWNER
    with pytest.raises(TypeError, match="read-only"):
        found.blocks[0] = 1


def test_a_mapping_goes_with_the_last_who_holds_it() -> None:
    own = HostShare(ROWS, ROW_BYTES)
    found = reached(own.handle)
    assert (mappings(), open_files()) == (2, 1)
    blocks = found.blocks
    del found
    assert mappings() == 2
    del blocks
    assert mappings() == 1
    tensor = torch.from_numpy(own.blocks)
    del own
    assert (mappings(), open_files()) == (1, 0)
    assert not tensor.any()


def test_its_memory_is_taken_at_once_and_its_file_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for populate in (host_share._MADV_POPULATE_WRITE, 9999):  # an older Linux does not know it
        monkeypatch.setattr(host_share, "_MADV_POPULATE_WRITE", populate)
        own = HostShare(300, 4096)
        pid, fd, *_ = json.loads(own.handle)
        assert pid == os.getpid()
        assert os.fstat(fd).st_blocks * 512 >= 300 * 4096
        assert not os.get_inheritable(fd)


def test_bytes_of_other_sizes_are_no_obstacle() -> None:
    for rows, row_bytes in ((1, 1), (3, 4097), (257, 16)):
        own = HostShare(rows, row_bytes)
        own.blocks[:] = 7
        own.owners.set(range(rows), OWNER)
        found = reach(own.handle, row_bytes)
        assert isinstance(found, Reached)
        assert bytes(found.blocks) == bytes([7]) * (rows * row_bytes)
        assert found.owners.of_row(rows - 1) == OWNER


def test_another_host_or_container_is_told() -> None:
    own = HostShare(ROWS, ROW_BYTES)
    assert why_not(changed(own.handle, boot="another")) == "elsewhere"
    assert why_not(changed(own.handle, numbers="pid:[1]")) == "hidden"


@pytest.mark.parametrize("what", ["_open", "_here"])
def test_what_may_not_be_opened_is_hidden(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    own = HostShare(ROWS, ROW_BYTES)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(host_share, what, refuse)
    assert why_not(own.handle) == "hidden"


def test_another_size_of_blocks_is_a_misfit() -> None:
    own = HostShare(ROWS, ROW_BYTES)
    assert why_not(own.handle, ROW_BYTES + 1) == "misfit"


def test_another_process_with_its_number_is_not_taken_for_it() -> None:
    """The same process number and file descriptor, and something else there."""
    one, other = HostShare(ROWS, ROW_BYTES), HostShare(ROWS, ROW_BYTES)
    fd = json.loads(other.handle)[1]
    assert why_not(changed(one.handle, fd=fd)) == "gone"
    assert why_not(changed(one.handle, key="")) == "gone"
    for rows in (ROWS + 1000, 10**30):
        assert why_not(changed(one.handle, rows=rows)) == "gone"
        assert why_not(changed(one.handle, rows=rows, key="")) == "gone"
    assert why_not(changed(one.handle, pid=2**22 + 1)) == "gone"
    assert why_not(changed(one.handle, pid=10**30, fd=10**30)) == "gone"
    assert reached(one.handle)


def test_nothing_but_such_memory_is_opened_to_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """To open the end of a pipe, say, would wait, or make it look used."""
    own = HostShare(ROWS, ROW_BYTES)
    ends, opened = os.pipe(), list[Any]()
    try:
        monkeypatch.setattr(os, "open", lambda *what: opened.append(what))
        assert [why_not(changed(own.handle, fd=end)) for end in ends] == ["gone", "gone"]
        assert opened == []
    finally:
        monkeypatch.undo()
        for end in ends:
            os.close(end)


def test_memory_that_could_be_cut_off_is_not_mapped() -> None:
    """Who looks beyond the end of a file is killed: only sealed ones are taken."""
    own = HostShare(ROWS, ROW_BYTES)
    _, fd, *_ = json.loads(own.handle)
    size = os.fstat(fd).st_size
    made_up = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(made_up, os.pread(fd, size, 0), 0)
        assert os.fstat(made_up).st_size == size
        assert why_not(changed(own.handle, fd=made_up)) == "gone"
    finally:
        os.close(made_up)


@pytest.mark.parametrize(
    "handle",
    [
        b"",
        b"\xff\0\x80",
        b"null",
        b"7",
        b'"sevenAB"',
        b"{}",
        b"[]",
        b"[1,2,3,4,5,6,7]",
        b'[1,3,"zz",4,512,"boot","pid"]',
        b'[1,3,"00",4,512,7,"pid"]',
        b'[1,3,"00",4,512,"boot","pid",0]',
        b'["1",3,"00",4,512,"boot","pid"]',
        b'[1,-3,"00",4,512,"boot","pid"]',
        b'[1,3,"00",0,512,"boot","pid"]',
        b'[1,3,"00",4,1e3,"boot","pid"]',
        b'[1,"key","",0,4,512,[]]',  # of a GPU
        b"[" * 100_000,
        b"9" * 10_000,
        bytes(range(256)),
    ],
)
def test_bytes_that_are_no_handle_are_a_misfit(handle: bytes) -> None:
    assert why_not(handle) == "misfit"


def test_too_little_memory_says_how_much_was_asked_for() -> None:
    """More than there are addresses for, on a host that promises any memory too."""
    with pytest.raises(MemoryError, match="46116860") as caught:
        share(1 << 31, 1 << 31)
    assert caught.value.__cause__ is not None
    assert open_files() == 0, "though the error is still held"


def test_a_host_that_has_no_such_memory_stops_no_replica(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(host_share, "_memfd_create", refuse)
    assert share(ROWS, ROW_BYTES) is None
    assert "Operation not permitted" in caplog.text


def test_a_kernel_that_knows_fewer_flags_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    create: Any = host_share._memfd_create

    def older(flags: int) -> int:
        if flags & ~(os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING):
            raise OSError(22, "Invalid argument")
        return int(create(flags))

    monkeypatch.setattr(host_share, "_memfd_create", older)
    assert reached(HostShare(ROWS, ROW_BYTES).handle)
