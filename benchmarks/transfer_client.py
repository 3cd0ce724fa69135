"""The receiving side of many small transfers: one cache, in which each of those who pull at once has a place of its
own; pulls may be cancelled, or their process killed, at any piece that lands.

A piece is what is written or copied at once, so this depends on no clock.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from transfer_source import Offer, Shape, cache_of, noise, start_of

from bifolio.kv_manager.block_store import Copy, Unreached, Write
from bifolio.kv_manager.heads import whole
from bifolio.kv_manager.pull import PrefillClient
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.protos.errors import Revoked
from bifolio.protos.messages import BlockId, Generation
from bifolio.replicas.block_stores import HostBlocks
from bifolio.replicas.kv_cache import KvCache


class Tripwire(HostBlocks):
    """Does something when so many pieces are about to land in a thread."""

    def __init__(self, cache: KvCache) -> None:
        super().__init__(cache)
        self._armed = threading.local()

    def arm(self, pieces: int, then: Callable[[], object]) -> None:
        """For this thread; 0 is never."""
        self._armed.left, self._armed.then = pieces, then

    @contextmanager
    def writing(self) -> Iterator[Write]:
        with super().writing() as write:

            def watched(block: BlockId, offset: int, data: memoryview | bytes) -> None:
                self._landing()
                write(block, offset, data)

            yield watched

    def reach(self, memory: bytes) -> Copy | Unreached:
        reached = super().reach(memory)
        if isinstance(reached, Unreached):
            return reached
        copy: Copy = reached

        def watched(source: BlockId, owner: Generation, block: BlockId) -> None:
            self._landing()
            copy(source, owner, block)

        return watched

    def _landing(self) -> None:
        self._armed.left -= 1
        if self._armed.left == 0:
            self._armed.then()


class Client:
    """Of a sender whose cache has as many places as ours, each of `spare` times the blocks of a transfer: so another
    transfer brings other bytes to the same place."""

    def __init__(self, shape: Shape, offer: Offer, places: int, blocks: int, spare: float = 1.5) -> None:
        self._shape, self._offer, self._blocks = shape, offer, blocks
        self._place = place_of(blocks, spare)
        cache = cache_of(shape, places * self._place)
        cache.bytes.fill_(1)  # touched
        self._cache, self._store, self.meter = cache, Tripwire(cache), TrafficMeter()
        parts = whole(self._store, shape.geometry)
        self._clients = {copies: PrefillClient(parts, self.meter, copies=copies) for copies in (False, True)}
        self._sent = noise(shape, places * self._place)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def pull(
        self,
        place: int,
        generation: Generation,
        *,
        copies: bool,
        cancel_at: int = 0,
        name: str = "r",
        then: Callable[[], object] | None = None,
    ) -> bool:
        """Whether it came to its end: it does unless it is to be cancelled at a piece that exists. RuntimeError if
        other bytes came than were sent. `then` is called at that piece instead of a cancel."""
        shuffle, first = random.Random(generation.counter), place * self._place + 1
        theirs, ours = (
            tuple(BlockId(first + block) for block in shuffle.sample(range(self._place), self._blocks))
            for _ in range(2)
        )
        start = start_of(self._shape, name, generation, theirs, self._offer.memory)
        pull = self._clients[copies].pull(self._offer.servers[0], start)
        self._store.arm(cancel_at, then or pull.cancel)
        try:
            pull.run(ours)
        except Revoked:
            return False
        at = shuffle.randrange(self._blocks)
        if not np.array_equal(self._cache.bytes[ours[at]].numpy(), self._sent[theirs[at] - 1]):
            raise RuntimeError(f"transfer {generation}: other bytes came than were sent")
        return True

    def whole(self, place: int, generation: Generation, copies: bool) -> bool:
        """For calls from another process."""
        return self.pull(place, generation, copies=copies)

    def die(self, place: int, generation: Generation, copies: bool, at: int) -> None:
        """This process is killed at that piece."""
        self.pull(place, generation, copies=copies, cancel_at=at, then=lambda: os.kill(os.getpid(), signal.SIGKILL))


def place_of(blocks: int, spare: float = 1.5) -> int:
    return int(blocks * spare)
