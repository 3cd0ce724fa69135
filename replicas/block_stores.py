"""How the bytes of a `KvCache` come and go: read and written in place on a host, through staging buffers on a GPU, or
copied from the cache of another replica on the same host (`host_share.py`) or GPU.

Knows nothing of leases, frames or who asks. A step and a copy of the same block are kept apart by events that the host
waits for; so is a staging buffer's use by the host from its use by a copy.

    engine's thread   step launched ─▶ computed(blocks): one mark for all of them ─▶ … ─▶ event: chunk is computed
    read, a stream's  the block's mark has happened ─▶ copy out ─▶ copy has happened ─▶ view: a frame is packed
                      (the copies of the next frame are under way meanwhile)
    write, a pull's   data into a buffer ─▶ the block's mark has happened ─▶ copy in ─▶ … ─▶ context left:
                      (the mark of a step of its last owner)                                 all copies have happened
    copy, a pull's    (the sender has waited for its block's mark) own block's mark has happened ─▶ copy has happened

A read waits because a chunk may be announced when it is launched; a write, because the block's last owner may have let
go of it when its last step was launched. No step waits for a copy: what was pulled is computed with after its context
was left, and what is sent goes to another lease after its own was closed, and so after its last read.

Steps that only read a block leave no mark, however many leases share it: it is written again only when no open lease
has it, and what a step of a closed lease still reads then is thrown away. (So what a lease leaves in the cache is
settled before it is closed, where its last step may be under way: `jobs.py`, `streams.py`.) But a block that is copied
by the engine is marked as if it were written, and so is its copy: what comes of that read is kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import Protocol

from torch import Tensor

from bifolio.kernels.events import HAPPENED, Event
from bifolio.kv_manager.block_store import BlockStore, Copy, Cut, Unreached, Write
from bifolio.kv_manager.wire import MAX_PAYLOAD
from bifolio.protos.errors import StalePlacement
from bifolio.protos.messages import Generation

from . import host_share
from .device import Device
from .host_share import HostShare
from .kv_cache import KvCache
from .owners import Owners


class Blocks(BlockStore, Protocol):
    """The store of a replica's cache.

    Of all its methods: IndexError unless 1 <= block <= blocks, ValueError for bytes beyond a block's ends or more than
    MAX_PAYLOAD of them; `read` raises before its first view.
    """

    def export(self) -> bytes:
        """From now on `memory` is a handle for others on this machine, if there can be one; what it is."""

    def computed(self, blocks: Iterable[int]) -> Event:
        """The steps that the calling thread has launched so far write these blocks, whether they are complete or not.
        Gives the mark behind them.

        To be called by the one thread that computes, after the launch (also one that failed: part of it may be under
        way) and before anyone hears of it.
        """


class HostBlocks:
    """Of a cache in the host's memory, in place. A step is over when its call returns: nothing is to be waited for.

    Bytes are moved with the GIL held. It takes tens of microseconds for a block, and who lets go of the GIL may wait
    for milliseconds to get it back from a thread of Python: for each block.
    """

    def __init__(self, cache: KvCache, share: HostShare | None = None) -> None:
        """The share in whose memory the cache lies, if others on this host may reach it."""
        self.block_bytes = cache.block_bytes
        self.memory = b""
        self._cache = cache
        self._share = share
        self._owners = Owners.of(cache.blocks + 1) if share is None else share.owners
        self._bytes: memoryview = cache.bytes.view(-1).numpy().data

    def read(self, cuts: Sequence[Cut]) -> Generator[Sequence[memoryview]]:
        for cut in cuts:
            _check_cut(self._cache, cut)
        for cut in cuts:
            yield [self._row(block)[begin:end].toreadonly() for block, begin, end in cut]

    @contextmanager
    def writing(self) -> Iterator[Write]:
        yield self._write

    def export(self) -> bytes:
        self.memory = self._share.handle if self._share else b""
        return self.memory

    def reach(self, memory: bytes) -> Copy | Unreached:
        theirs = host_share.reach(memory, self.block_bytes)
        if isinstance(theirs, Unreached):
            return theirs

        def copy(source: int, owner: Generation, block: int) -> None:
            if not 1 <= source < theirs.rows:
                raise IndexError(f"source: {source}; allowed is 1 to {theirs.rows - 1}")
            _check(self._cache, block)
            begin = source * self.block_bytes
            self._row(block)[:] = theirs.blocks[begin : begin + self.block_bytes]
            if (now := theirs.owners.of_row(source)) != owner:
                raise StalePlacement(f"block {source} was to be copied as written under {owner}, it is under {now}")

        return copy

    def settle(self, blocks: Iterable[int]) -> None:
        pass

    def own(self, blocks: Iterable[int], generation: Generation) -> None:
        _own(self._cache, self._owners, blocks, generation)

    def owner(self, block: int) -> Generation:
        _check(self._cache, block)
        return self._owners.of_row(block)

    def computed(self, blocks: Iterable[int]) -> Event:
        return HAPPENED

    def _write(self, block: int, offset: int, data: memoryview | bytes) -> None:
        source = memoryview(data).cast("B")
        _check_cut(self._cache, [(block, offset, offset + len(source))])
        self._row(block)[offset : offset + len(source)] = source

    def _row(self, block: int) -> memoryview:
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]


class StagedBlocks:
    """Of a cache on any device, by copies over pinned buffers, which are kept: two for each read or writing under way.

    The marks are a list that one thread writes. Whoever reads or writes a block finds there the mark to wait for: it
    was put there before the message by which they know the block, that it is computed or that it is theirs.

    Others who copy blocks on the GPU do not see who owns them, there is no table beside the memory: what guards a copy
    is the sender's lease, which is open until the last Ack.
    """

    def __init__(self, cache: KvCache, device: Device) -> None:
        """In the thread that made the cache: its zeros may still be on their way."""
        self.block_bytes = cache.block_bytes
        self._cache = cache
        self._device = device
        self._marks: list[Event] = [device.mark()] * (cache.blocks + 1)
        self._owners = Owners.of(cache.blocks + 1)
        self._free: list[_Buffer] = []
        self._lock = threading.Lock()  # of the list of free buffers, and of the handle
        self.memory = b""

    def read(self, cuts: Sequence[Cut]) -> Generator[Sequence[memoryview]]:
        for cut in cuts:
            _check_cut(self._cache, cut)
        with self._two_buffers() as buffers:
            arriving: deque[_Buffer] = deque()
            for cut, buffer in zip(cuts, cycle(buffers)):
                buffer.clear()
                for block, begin, end in cut:
                    self._marks[block].wait()
                    copied = self._device.copy(buffer.more(end - begin), self._cache.bytes[block, begin:end])
                    buffer.copies.append(copied)
                arriving.append(buffer)
                if len(arriving) == len(buffers):
                    yield [arriving.popleft().arrived()]
            while arriving:
                yield [arriving.popleft().arrived()]

    @contextmanager
    def writing(self) -> Iterator[Write]:
        with self._two_buffers() as buffers:
            turns = cycle(buffers)

            def write(block: int, offset: int, data: memoryview | bytes) -> None:
                source = memoryview(data).cast("B")
                end = offset + len(source)
                _check_cut(self._cache, [(block, offset, end)])
                buffer = next(turns)
                filled = buffer.fill(source)
                self._marks[block].wait()
                buffer.copies.append(self._device.copy(self._cache.bytes[block, offset:end], filled))

            yield write

    def export(self) -> bytes:
        with self._lock:
            self.memory = self.memory or self._device.export(self._cache.bytes) or b""
        return self.memory

    def reach(self, memory: bytes) -> Copy | Unreached:
        theirs = self._device.reach(memory)
        if isinstance(theirs, Unreached):
            return theirs
        if theirs.shape[1] != self.block_bytes:
            return Unreached(
                "misfit", f"its blocks are of {theirs.shape[1]} bytes, this replica's of {self.block_bytes}"
            )

        def copy(source: int, owner: Generation, block: int) -> None:
            if not 1 <= source < len(theirs):
                raise IndexError(f"source: {source}; allowed is 1 to {len(theirs) - 1}")
            _check(self._cache, block)
            self._marks[block].wait()
            self._device.copy(self._cache.bytes[block], theirs[source]).wait()

        return copy

    def settle(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            _check(self._cache, block)
            self._marks[block].wait()

    def own(self, blocks: Iterable[int], generation: Generation) -> None:
        _own(self._cache, self._owners, blocks, generation)

    def owner(self, block: int) -> Generation:
        _check(self._cache, block)
        return self._owners.of_row(block)

    def computed(self, blocks: Iterable[int]) -> Event:
        mark = self._device.mark()
        for block in blocks:
            self._marks[block] = mark
        return mark

    @contextmanager
    def _two_buffers(self) -> Iterator[list[_Buffer]]:
        """While the host is at one, a copy is at the other. Left when the copies have happened: then they may go on to
        the next user. (Should a device fail at that, they are not used again.)"""
        buffers = [self._take(), self._take()]
        try:
            yield buffers
        finally:
            with ExitStack() as copies:
                for buffer in buffers:
                    copies.callback(buffer.wait)
            with self._lock:
                self._free += buffers

    def _take(self) -> _Buffer:
        with self._lock:
            if self._free:
                return self._free.pop()
        return _Buffer(self._device)


class _Buffer:
    """Pinned memory for one frame, `size` bytes of it in use, and the copies that use it."""

    def __init__(self, device: Device) -> None:
        self.copies: list[Event] = []
        self._tensor = device.pinned(MAX_PAYLOAD)
        self._view: memoryview = self._tensor.numpy().data
        self._size = 0

    def clear(self) -> None:
        """For other copies, when the last ones have happened."""
        self.wait()
        self.copies.clear()
        self._size = 0

    def more(self, size: int) -> Tensor:
        """So many bytes that are not in use yet."""
        begin, self._size = self._size, self._size + size
        return self._tensor[begin : self._size]

    def arrived(self) -> memoryview:
        """What the copies brought."""
        self.wait()
        return self._view[: self._size].toreadonly()

    def fill(self, source: memoryview) -> Tensor:
        """For the next copy to take, when the last one has taken what was there."""
        self.clear()
        self._view[: len(source)] = source
        return self.more(len(source))

    def wait(self) -> None:
        for copy in self.copies:
            copy.wait()


def _own(cache: KvCache, owners: Owners, blocks: Iterable[int], generation: Generation) -> None:
    rows = list(blocks)
    for block in rows:
        _check(cache, block)
    owners.set(rows, generation)


def _check(cache: KvCache, block: int) -> None:
    if not 1 <= block <= cache.blocks:
        raise IndexError(f"block: {block}; allowed is 1 to {cache.blocks}")


def _check_cut(cache: KvCache, cut: Iterable[tuple[int, int, int]]) -> None:
    size = 0
    for block, begin, end in cut:
        _check(cache, block)
        if not 0 <= begin <= end <= cache.block_bytes:
            raise ValueError(f"data: {end - begin} bytes at {begin}; allowed is 0 to {cache.block_bytes}, one block")
        size += end - begin
    if size > MAX_PAYLOAD:
        raise ValueError(f"data: {size} bytes at once; allowed is at most {MAX_PAYLOAD}")
