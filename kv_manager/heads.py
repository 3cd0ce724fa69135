"""Which KV heads of a block lie in which cache, and how the caches of two replicas fit together. Pure.

A replica that computes with tensor parallelism keeps each block in several caches, one for each rank, of some heads
each: a part is a slab [layers, 2, heads of the part, block_size, head_dim]. What travels names the heads that it is of:

    prefill   0 1 2 3 │ 4 5 6 7        frames of 0..2, of 3..3, of 4..5 and of 6..7: each comes out of one cache and
    decode    0 1 2 │ 3 4 5 │ 6 7      goes into one, and all of them make up the block; here 3..3 and 4..5 lie in one

The sender cuts its parts to those of the receiver. With one cache on both sides there is one part, and nothing is cut.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from bifolio.protos.messages import BlockId, Generation, Geometry, Heads

from .block_store import BlockStore, Copy, Cut, Span, Unreached, Write


class Part(NamedTuple):
    """One cache of a replica; its store's blocks are of these heads alone."""

    heads: Heads
    store: BlockStore


def whole(store: BlockStore, geometry: Geometry) -> tuple[Part, ...]:
    """The one part of a replica whose blocks are not divided."""
    return (Part(Heads(0, geometry.kv_heads), store),)


def cover(parts: Iterable[Heads], kv_heads: int) -> bool:
    """Whether every head is in exactly one of them."""
    due = 0
    for heads in sorted(parts):
        if heads.first != due or heads.count < 1:
            return False
        due += heads.count
    return due == kv_heads


def common(ours: Sequence[Part], theirs: Sequence[Heads], geometry: Geometry) -> tuple[Part, ...]:
    """Our parts, cut so that each lies in one of theirs too. With no `theirs` they have all heads in one."""
    cuts = theirs or (Heads(0, geometry.kv_heads),)
    shared = (overlap(part.heads, heads) for part in ours for heads in cuts)
    return tuple(Part(heads, narrowed(ours, heads, geometry)) for heads in shared if heads.count > 0)


def overlap(one: Heads, other: Heads) -> Heads:
    """The heads that are in both; of a count below 1 if there are none."""
    first = max(one.first, other.first)
    return Heads(first, min(one.first + one.count, other.first + other.count) - first)


def narrowed(parts: Sequence[Part], heads: Heads, geometry: Geometry) -> BlockStore:
    """The store of just these heads. Raises KeyError unless one of the parts has them all."""
    for part in parts:
        if part.heads == heads:
            return part.store
        if heads.count > 0 and overlap(part.heads, heads) == heads:
            return _Narrowed(part, heads, 2 * geometry.layers)
    raise KeyError(heads)


class _Narrowed:
    """Some heads of a part. Of each of its `rows`, one of K and one of V in each layer, they are one run of bytes."""

    memory = b""

    def __init__(self, part: Part, heads: Heads, rows: int) -> None:
        self._store = part.store
        self._row = part.store.block_bytes // rows
        head = self._row // part.heads.count
        self._begin = (heads.first - part.heads.first) * head
        self._width = heads.count * head
        self.block_bytes = rows * self._width

    def read(self, cuts: Sequence[Cut]) -> Generator[Sequence[memoryview]]:
        yield from self._store.read([[there for span in cut for there in self._spans(span)] for cut in cuts])

    @contextmanager
    def writing(self) -> Iterator[Write]:
        with self._store.writing() as write:

            def narrow(block: BlockId, offset: int, data: memoryview | bytes) -> None:
                done = 0
                for _, begin, end in self._spans((block, offset, offset + len(data))):
                    write(block, begin, memoryview(data)[done : done + end - begin])
                    done += end - begin

            yield narrow

    def settle(self, blocks: Sequence[BlockId]) -> None:
        self._store.settle(blocks)

    def own(self, blocks: Iterable[BlockId], generation: Generation) -> None:
        self._store.own(blocks, generation)

    def owner(self, block: BlockId) -> Generation:
        return self._store.owner(block)

    def reach(self, memory: bytes) -> Copy | Unreached:
        return Unreached("misfit", "only some heads of its blocks are wanted")

    def _spans(self, span: Span) -> Iterator[Span]:
        """Where a byte range of the narrowed block lies in the part's."""
        block, at, end = span
        while at < end:
            row, within = divmod(at, self._width)
            size = min(self._width - within, end - at)
            begin = row * self._row + self._begin + within
            yield block, begin, begin + size
            at += size
