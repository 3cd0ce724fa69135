"""How the bytes of a `KvCache` come and go: read and written in place on a host, through staging buffers on a GPU, or
copied from the cache of another replica on the same GPU.

Knows nothing of leases, frames or who asks. A step and a copy of the same block are kept apart by events that the host
waits for; so is a staging buffer's use by the host from its use by a copy.

    engine's thread   step launched ─▶ computed(blocks): one mark for all of them ─▶ … ─▶ event: chunk is computed
    read, a stream's  the block's mark has happened ─▶ copy out ─▶ copy has happened ─▶ view: a frame is packed
                      (the copy of the next span is under way meanwhile)
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

from bifolio.kernels.events import HAPPENED, Event
from bifolio.kv_manager.transfer import BlockStore, Copy, Span, Write
from bifolio.kv_manager.wire import MAX_PAYLOAD

from .device import Device
from .kv_cache import KvCache


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
    """Of a cache in the host's memory, in place. A step is over when its call returns: nothing is to be waited for."""

    memory = b""

    def __init__(self, cache: KvCache) -> None:
        self.block_bytes = cache.block_bytes
        self._cache = cache
        self._memory: memoryview = cache.bytes.view(-1).numpy().data

    def read(self, spans: Sequence[Span]) -> Generator[memoryview]:
        for span in spans:
            _check(self._cache, span)
        for block, begin, end in spans:
            start = block * self.block_bytes
            yield self._memory[start + begin : start + end].toreadonly()

    @contextmanager
    def writing(self) -> Iterator[Write]:
        yield self._write

    def export(self) -> bytes:
        return self.memory

    def reach(self, memory: bytes) -> Copy | str:
        return "this replica's blocks are in the host's memory"

    def settle(self, blocks: Iterable[int]) -> None:
        pass

    def computed(self, blocks: Iterable[int]) -> Event:
        return HAPPENED

    def _write(self, block: int, offset: int, data: memoryview | bytes) -> None:
        source = memoryview(data).cast("B")
        _check(self._cache, (block, offset, offset + len(source)))
        start = block * self.block_bytes + offset
        self._memory[start : start + len(source)] = source


class StagedBlocks:
    """Of a cache on any device, by copies over pinned buffers, which are kept: two for each read or writing under way.

    The marks are a list that one thread writes. Whoever reads or writes a block finds there the mark to wait for: it
    was put there before the message by which they know the block, that it is computed or that it is theirs.
    """

    def __init__(self, cache: KvCache, device: Device) -> None:
        """In the thread that made the cache: its zeros may still be on their way."""
        self.block_bytes = cache.block_bytes
        self._cache = cache
        self._device = device
        self._marks: list[Event] = [device.mark()] * (cache.blocks + 1)
        self._free: list[_Buffer] = []
        self._lock = threading.Lock()  # of the list of free buffers, and of the handle
        self.memory = b""

    def read(self, spans: Sequence[Span]) -> Generator[memoryview]:
        for span in spans:
            _check(self._cache, span)
        with self._two_buffers() as buffers:
            arriving: deque[_Buffer] = deque()
            for (block, begin, end), buffer in zip(spans, cycle(buffers)):
                self._marks[block].wait()
                buffer.size = end - begin
                buffer.copied = self._device.copy(buffer.tensor[: buffer.size], self._cache.bytes[block, begin:end])
                arriving.append(buffer)
                if len(arriving) == len(buffers):
                    yield arriving.popleft().arrived()
            while arriving:
                yield arriving.popleft().arrived()

    @contextmanager
    def writing(self) -> Iterator[Write]:
        with self._two_buffers() as buffers:
            turns = cycle(buffers)

            def write(block: int, offset: int, data: memoryview | bytes) -> None:
                source = memoryview(data).cast("B")
                end = offset + len(source)
                _check(self._cache, (block, offset, end))
                buffer = next(turns)
                buffer.fill(source)
                self._marks[block].wait()
                buffer.copied = self._device.copy(self._cache.bytes[block, offset:end], buffer.tensor[: buffer.size])

            yield write

    def export(self) -> bytes:
        with self._lock:
            self.memory = self.memory or self._device.export(self._cache.bytes) or b""
        return self.memory

    def reach(self, memory: bytes) -> Copy | str:
        theirs = self._device.reach(memory)
        if isinstance(theirs, str):
            return theirs
        if theirs.shape[1:] != self._cache.bytes.shape[1:]:
            return f"its blocks are of {theirs.shape[1]} bytes, this replica's of {self.block_bytes}"

        def copy(source: int, block: int) -> None:
            if not 1 <= source < len(theirs):
                raise IndexError(f"source: {source}; allowed is 1 to {len(theirs) - 1}")
            _check(self._cache, (block, 0, 0))
            self._marks[block].wait()
            self._device.copy(self._cache.bytes[block], theirs[source]).wait()

        return copy

    def settle(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            _check(self._cache, (block, 0, 0))
            self._marks[block].wait()

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
        return _Buffer(self._device, min(self.block_bytes, MAX_PAYLOAD))


class _Buffer:
    """Pinned memory, `size` bytes of it in use, and the copy that used it last."""

    def __init__(self, device: Device, capacity: int) -> None:
        self.tensor = device.pinned(capacity)
        self.size = 0
        self.copied: Event | None = None
        self._view: memoryview = self.tensor.numpy().data

    def arrived(self) -> memoryview:
        """What the last copy brought."""
        self.wait()
        return self._view[: self.size].toreadonly()

    def fill(self, source: memoryview) -> None:
        """For the next copy to take, when the last one has taken what was there."""
        self.wait()
        self.size = len(source)
        self._view[: self.size] = source

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.wait()


def _check(cache: KvCache, span: tuple[int, int, int]) -> None:
    block, begin, end = span
    if not 1 <= block <= cache.blocks:
        raise IndexError(f"block: {block}; allowed is 1 to {cache.blocks}")
    if not 0 <= begin <= end <= cache.block_bytes:
        raise ValueError(f"data: {end - begin} bytes at {begin}; allowed is 0 to {cache.block_bytes}, one block")
    if end - begin > MAX_PAYLOAD:
        raise ValueError(f"data: {end - begin} bytes at once; allowed is at most {MAX_PAYLOAD}")
