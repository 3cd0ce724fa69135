"""A prefill side that treats blocks as a replica does, without a model: what the tests of broken streams share.

A lease is opened by its proof, under real block tags; its blocks hold content that belongs to it alone; and the moment
that it is closed, they are written over, as their next owner would. So who reads a block too late reads something else.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from transfer_kit import DONE, GEOMETRY, ScriptedJob, ScriptedSource, content, put

from bifolio.kv_manager.block_store import Copy, Unreached
from bifolio.kv_manager.heads import Part, narrowed, whole
from bifolio.kv_manager.memory_store import MemoryStore
from bifolio.kv_manager.secret import proves, sign
from bifolio.kv_manager.tags import BlockTags
from bifolio.kv_manager.transfer import Prefilled
from bifolio.protos.errors import GeometryMismatch, InvalidRequest, StalePlacement
from bifolio.protos.messages import BlockId, Generation, Heads, Lease, ReplicaId, RequestId, Start

TWO_HEADS = replace(GEOMETRY, kv_heads=2)
KEY = b"the replica's key"
REPLICA = ReplicaId("prefill#1")
NEXT = 1 << 40  # generations of who comes next


def divided(blocks: int, block_bytes: int) -> tuple[Part, ...]:
    """A cache for each head."""
    return tuple(Part(Heads(head, 1), MemoryStore(blocks, block_bytes // 2)) for head in range(2))


def a_start(counter: int, blocks: Sequence[int], tokens: int, skip: int = 0, memory: bytes = b"") -> Start:
    """As a placement leads to it."""
    ids = tuple(map(BlockId, blocks))
    lease = Lease(REPLICA, Generation(7, counter), ids, RequestId(f"r{counter}"))
    return Start(
        lease.request,
        lease.generation,
        lease.blocks,
        tuple(i % 100 for i in range(tokens)),
        TWO_HEADS,
        arrival=1.0,
        skip_blocks=skip,
        memory=memory,
        secret=sign(KEY, lease),
    )


def content_of(start: Start, block_bytes: int) -> list[bytes]:
    """What a prefill of it leaves in its blocks."""
    noise = random.Random(start.generation.counter)
    return [noise.randbytes(block_bytes) for _ in start.blocks]


def right(start: Start, parts: Sequence[Part], blocks: Sequence[int], block_bytes: int) -> bool:
    """Whether all that was to come is in these blocks of a decode side, and nothing in those that it had before."""
    due = MemoryStore(len(blocks), block_bytes)
    for i, each in enumerate(content_of(start, block_bytes)):
        put(due, i + 1, bytes(block_bytes) if i < start.skip_blocks else each)
    return all(
        content(part.store, block) == content(narrowed(whole(due, TWO_HEADS), part.heads, TWO_HEADS), i + 1)
        for part in parts
        for i, block in enumerate(blocks)
    )


class LeasedSource(ScriptedSource):
    """Of `steps`, each of which is a share of the prompt, the last is its end."""

    def __init__(self, store: MemoryStore, blocks: int, *steps: int | Prefilled, parts: tuple[Part, ...] = ()) -> None:
        super().__init__(store, *steps, DONE)
        self.geometry = TWO_HEADS
        self.several = parts
        self.tags = BlockTags(REPLICA, blocks, grows=False)
        self._next = 0
        self._lock = threading.Lock()

    def begin(self, start: Start) -> ScriptedJob:
        if not self.geometry.fits(start.geometry):
            raise GeometryMismatch(f"[{start.geometry}] is not [{self.geometry}]")
        if len(start.blocks) != -(-len(start.tokens) // TWO_HEADS.block_size):
            raise InvalidRequest("the blocks are not those of the tokens")
        lease = Lease(REPLICA, start.generation, start.blocks, start.request, start.cached_blocks)
        if not proves(start.secret, KEY, lease):
            raise StalePlacement("the secret does not prove this lease")
        self.tags.open(lease)
        self._write(start.blocks, start.generation, content_of(start, self._block_bytes))
        job = _LeasedJob(self.steps_of(start), lambda: self._close(lease))
        with self._lock:
            self.jobs.append(job)
        self._begun.put(job)
        return job

    def steps_of(self, start: Start) -> Sequence[int | Prefilled | Exception]:
        return self.steps

    @property
    def _block_bytes(self) -> int:
        return sum(part.store.block_bytes for part in self.parts)

    def _close(self, lease: Lease) -> None:
        with self._lock:
            self._next += 1
            generation = Generation(NEXT, self._next)
        self._write(lease.blocks, generation, [b"\xee" * self._block_bytes] * len(lease.blocks))
        self.tags.close(lease.generation)

    def _write(self, blocks: Sequence[BlockId], generation: Generation, each: Sequence[bytes]) -> None:
        whole_store = MemoryStore(1, self._block_bytes)
        for part in self.parts:
            part.store.own(blocks, generation)
        for block, content_ in zip(blocks, each, strict=True):
            put(whole_store, 1, content_)
            for part in self.parts:
                put(part.store, block, content(narrowed(whole(whole_store, TWO_HEADS), part.heads, TWO_HEADS), 1))


class HaltingSource(LeasedSource):
    """Computes as many blocks as a start's `arrival` says, one by one, and then nothing more."""

    def steps_of(self, start: Start) -> Sequence[int | Prefilled | Exception]:
        steps = [(1 + i) * TWO_HEADS.block_size for i in range(int(start.arrival))]
        return [*steps, DONE] if len(steps) > len(start.blocks) else steps


class _LeasedJob(ScriptedJob):
    def __init__(self, steps: Sequence[int | Prefilled | Exception], close: Callable[[], None]) -> None:
        super().__init__(steps)
        self._close = close

    def __exit__(self, *_: object) -> None:
        self._close()
        super().__exit__()


class CopyingStore(MemoryStore):
    """Copies out of another store, and looks at its owners, as a replica's does."""

    def __init__(self, blocks: int, block_bytes: int, other: MemoryStore) -> None:
        super().__init__(blocks, block_bytes)
        self._other = other

    def reach(self, memory: bytes) -> Copy | Unreached:
        if memory != self._other.memory:
            return Unreached("hidden", "no such store")

        def copy(source: BlockId, owner: Generation, block: BlockId) -> None:
            self._write(block, 0, content(self._other, source))
            if (now := self._other.owner(source)) != owner:
                raise StalePlacement(f"block {source} is of {now}, and was of {owner}")

        return copy


class ReachedStore(MemoryStore):
    """That `CopyingStore` copies from; nobody asks it for a payload."""

    memory = b"theirs"
