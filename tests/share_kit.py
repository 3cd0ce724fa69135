"""Stores whose blocks other processes copy, without torch: what a process that is to be killed soon can start with."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kill_kit import MOST, SIZE, halts_at
from transfer_kit import MemoryStore

from bifolio.kv_manager.block_store import Copy, Unreached
from bifolio.protos.messages import BlockId, Generation
from bifolio.replicas.host_share import HostShare, Reached, reach


class InShare(MemoryStore):
    """Blocks in memory of this host."""

    def __init__(self) -> None:
        self.block_bytes = SIZE
        self.share = HostShare(MOST + 1, SIZE)
        self.memory = self.share.handle
        self._bytes = self.share.blocks.reshape(MOST + 1, SIZE)

    def own(self, blocks: Iterable[BlockId], generation: Generation) -> None:
        self.share.owners.set(blocks, generation)

    def owner(self, block: BlockId) -> Generation:
        return self.share.owners.of_row(block)


class OutOfShare(MemoryStore):
    """Copies out of such memory, and halts as `halts_at` says."""

    def __init__(self) -> None:
        super().__init__(MOST, SIZE)
        self.halted = threading.Semaphore(0)

    def reach(self, memory: bytes) -> Copy | Unreached:
        found = reach(memory, SIZE)
        if not isinstance(found, Reached):
            return found

        def copy(source: BlockId, owner: Generation, block: BlockId) -> None:
            if halts_at((block - 1) // 10, block):
                self.halted.release()
                threading.Event().wait()
            self._write(block, 0, found.blocks[source * SIZE : (source + 1) * SIZE])
            assert found.owners.of_row(source) == owner

        return copy
