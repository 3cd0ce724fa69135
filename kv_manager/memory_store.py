"""`MemoryStore`: blocks in plain memory. For tests, tools, and trying the transfer without a model."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from bifolio.protos.messages import BlockId, Generation

from .block_store import Copy, Cut, Unreached, Write


class MemoryStore:
    """A `BlockStore` of blocks 0 .. `blocks`. As in a `KvCache`, block 0 is the null block: never written."""

    memory = b""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._bytes = np.zeros((blocks + 1, block_bytes), np.uint8)
        self._owners = [Generation(0, 0)] * (blocks + 1)

    def read(self, cuts: Sequence[Cut]) -> Generator[Sequence[memoryview]]:
        for cut in cuts:
            yield [self._range(block, begin, end - begin).data.toreadonly() for block, begin, end in cut]

    @contextmanager
    def writing(self) -> Iterator[Write]:
        yield self._write

    def settle(self, blocks: Iterable[int]) -> None:
        pass

    def own(self, blocks: Iterable[BlockId], generation: Generation) -> None:
        for block in blocks:
            self._owners[block] = generation

    def owner(self, block: BlockId) -> Generation:
        return self._owners[block]

    def reach(self, memory: bytes) -> Copy | Unreached:
        return Unreached("none", "plain memory reaches no other")

    def _write(self, block: int, offset: int, data: memoryview | bytes) -> None:
        assert block != 0, "the null block is never written"
        self._range(block, offset, len(data)).data[:] = data

    def _range(self, block: int, offset: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        assert 0 <= offset <= self.block_bytes - length, f"{length} bytes at {offset} leave the block"
        assert 0 <= block < len(self._bytes), f"there is no block {block}"
        return self._bytes[block, offset : offset + length]
