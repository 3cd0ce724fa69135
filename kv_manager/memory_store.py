"""`MemoryStore`: blocks in plain memory. For tests, tools, and trying the transfer without a model."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

from .transfer import Copy, Span, Write


class MemoryStore:
    """A `BlockStore` of blocks 0 .. `blocks`. As in a `KvCache`, block 0 is the null block: never written."""

    memory = b""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._memory = memoryview(bytearray((blocks + 1) * block_bytes))

    def read(self, spans: Sequence[Span]) -> Generator[memoryview]:
        for block, begin, end in spans:
            yield self._range(block, begin, end - begin).toreadonly()

    @contextmanager
    def writing(self) -> Iterator[Write]:
        yield self._write

    def settle(self, blocks: Iterable[int]) -> None:
        pass

    def reach(self, memory: bytes) -> Copy | str:
        return "plain memory reaches no other"

    def _write(self, block: int, offset: int, data: memoryview | bytes) -> None:
        assert block != 0, "the null block is never written"
        self._range(block, offset, len(data))[:] = data

    def _range(self, block: int, offset: int, length: int) -> memoryview:
        assert 0 <= offset <= self.block_bytes - length, f"{length} bytes at {offset} leave the block"
        assert 0 <= block < len(self._memory) // self.block_bytes, f"there is no block {block}"
        begin = block * self.block_bytes + offset
        return self._memory[begin : begin + length]
