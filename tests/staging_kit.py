"""What the tests of stores share: small caches, and steps that write their blocks when the device likes."""

from __future__ import annotations

import random

import torch
from transfer_kit import DONE, ScriptedSource, start

from bifolio.replicas.block_stores import StagedBlocks
from bifolio.replicas.delayed_device import DelayedDevice
from bifolio.replicas.host_share import HostShare
from bifolio.replicas.kv_cache import KvCache


def small_cache(blocks: int = 6, dtype: torch.dtype = torch.bfloat16) -> KvCache:
    """Blocks of 2 x 2 x 2 x 4 x 8 numbers."""
    return KvCache(blocks, layers=2, kv_heads=2, block_size=4, head_dim=8, dtype=dtype)


def large_cache(blocks: int = 4) -> KvCache:
    """Blocks of a little more than MAX_PAYLOAD."""
    return KvCache(blocks, layers=9, kv_heads=2, block_size=64, head_dim=128, dtype=torch.float32)


def shared_cache(large: bool = False) -> tuple[KvCache, HostShare]:
    """One as above, in memory that others reach."""
    plain = large_cache(4) if large else small_cache(6)
    share, layer = HostShare(len(plain.bytes), plain.block_bytes), plain.layer(0)
    layers = plain.block_bytes // (layer[0].numel() * layer.itemsize)
    memory = torch.from_numpy(share.blocks)
    sizes = (plain.blocks, layers, layer.shape[2], plain.block_size, layer.shape[4])
    return KvCache(*sizes, plain.dtype, memory=memory), share


def block_of(cache: KvCache, block: int) -> bytes:
    return cache.bytes[block].numpy().tobytes()


def two_late(seed: int, large: bool) -> tuple[Late, Late]:
    """Caches of two replicas, whose blocks 1 to 4 steps are about to write: of the last owners."""
    here, there = (Late(number, large_cache() if large else None) for number in (seed, seed + 100))
    there.step(1, 2, 3, 4)
    here.step(1, 2, 3, 4)
    return here, there


def chunk_by_chunk(source: ScriptedSource, there: Late) -> list[bytes]:
    """The prompt of `start()` computed in three steps, of each of which the stream is told when it is launched; what
    they write."""
    job, sent = source.next_job(), []
    for step in (4, 8, DONE):
        sent += there.step(start().blocks[len(sent)])
        job.feed(step)
    return sent


class Late:
    """A cache on a `DelayedDevice`, with its store; `step` is what an engine does, `computed` what it computed."""

    def __init__(self, seed: int, cache: KvCache | None = None) -> None:
        self.device = DelayedDevice(seed)
        self.cache = cache or small_cache()
        self.store = StagedBlocks(self.cache, self.device)
        self._noise = random.Random(seed)

    def step(self, *blocks: int) -> list[bytes]:
        """Launch a step that writes new content to these blocks; what that will be."""
        contents = [self._noise.randbytes(self.cache.block_bytes) for _ in blocks]

        def compute() -> None:
            for block, new in zip(blocks, contents, strict=True):
                self.cache.bytes[block] = torch.frombuffer(bytearray(new), dtype=torch.uint8)

        self.device.launch(compute)
        self.store.computed(blocks)
        return contents

    def seen(self, *blocks: int) -> list[bytes]:
        """What a step that is launched now finds in these blocks."""
        found: list[bytes] = []
        self.device.launch(lambda: found.extend(block_of(self.cache, block) for block in blocks))
        self.device.mark().wait()
        return found
