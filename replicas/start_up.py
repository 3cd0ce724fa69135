"""From a loaded model to a replica that can compute: the largest steps are tried, the KV cache takes the memory that
they leave, and decode steps are recorded.

    weights ─▶ the largest steps, on the null block alone ─▶ one recorded   what they take
        ─▶ the cache, of what is left ─▶ all recorded ─▶ the largest steps once more, beside all that

Deciding how large the cache is, is `kv_memory.py`'s business. Knows nothing of leases or Ray.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import torch

from bifolio.kernels import Layout, runs_triton
from bifolio.protos.errors import ConfigError

from . import host_share
from .block_stores import Blocks, HostBlocks, StagedBlocks
from .config import EngineConfig
from .device import Device
from .graphs import CudaRecorder, DecodeGraphs, Recorder, RepeatingRecorder, graph_sizes
from .kv_cache import KvCache
from .kv_memory import CUDA_OVERHEAD, BlockShape, Budget, Sizing, size_cache
from .llama import Llama
from .runner import Runner
from .warm_up import largest_steps, warm_up

logger = logging.getLogger(__name__)

GRAPH = 16 << 20  # bytes of a recorded step that the driver holds beside torch's memory: a generous guess


@dataclass(frozen=True, slots=True)
class Prepared:
    sizing: Sizing  # how the cache came to its size
    cache: KvCache
    store: Blocks
    runner: Runner
    eager: Runner  # the same without recorded steps


def prepare(
    llama: Llama,
    engine: EngineConfig,
    layout: Layout,
    device: Device,
    *,
    share: float = 1.0,
    decodes: bool = True,
    copies: bool = True,
) -> Prepared:
    """share: of the device's memory that is this replica's; decodes: whether steps of single tokens come, to be
    recorded; where none do, and with `copies`, those of a host are in memory that others reach.

    On a GPU this takes seconds to a minute, and says in the log how far it is. Raises ConfigError for a cache that the
    device cannot hold.
    """
    maker = _Maker(llama, engine, layout, device, shares=device.kind == "cpu" and copies and not decodes)
    sizes = graph_sizes(engine.max_sequences) if decodes and engine.cuda_graphs and runs_triton(device.torch) else ()
    lines: tuple[str, ...] = ("not even the largest steps fit beside the weights",)
    try:
        if device.kind == "cuda" and share < 1:
            device.limit(math.floor(device.memory().total * share) - CUDA_OVERHEAD)
        sizing = size_cache(engine.kv_memory, maker.shape, maker.budget(sizes, share), llama.config.max_positions)
        for line in (lines := sizing.lines):
            logger.info(line)
        cache, store = maker.cache(sizing.blocks)
        eager = Runner(llama, cache, store)
        runner = Runner(llama, cache, store, maker.graphs(cache, sizes)) if sizes else eager
        if device.kind == "cuda":
            maker.rehearse(eager)  # what was worked out is tried, before the replica says that it is there
    except (torch.OutOfMemoryError, MemoryError) as error:
        more = ", or give its pool more of a GPU (num_gpus)" if device.kind == "cuda" else ""
        raise ConfigError(
            f"the memory of {device.torch} is used up while the replica starts: {'; '.join(lines)}; set "
            f"engine.kv_memory, max_batched_tokens or max_sequences to less{more}: {str(error).splitlines()[0]}"
        ) from error
    return Prepared(sizing, cache, store, runner, eager)


class _Maker:
    """What is made twice: on the null block alone to see what it takes, and then to be used."""

    def __init__(self, llama: Llama, engine: EngineConfig, layout: Layout, device: Device, shares: bool) -> None:
        self._llama, self._engine, self._layout, self._device = llama, engine, layout, device
        self._shares = shares
        self.shape = BlockShape.of(llama.config, engine.block_size, llama.dtype.itemsize)

    def cache(self, blocks: int) -> tuple[KvCache, Blocks]:
        c, device = self._llama.config, self._device
        share = host_share.share(blocks + 1, self.shape.bytes) if self._shares else None
        cache = KvCache(
            blocks,
            c.layers,
            c.kv_heads,
            self._engine.block_size,
            c.head_dim,
            self._llama.dtype,
            self._layout,
            device.torch,
            None if share is None else torch.from_numpy(share.blocks),
        )
        return cache, HostBlocks(cache, share) if device.kind == "cpu" else StagedBlocks(cache, device)

    def graphs(self, cache: KvCache, sizes: tuple[int, ...]) -> DecodeGraphs:
        began = time.monotonic()

        def progress(done: int, total: int, size: int) -> None:
            logger.info("decode step of %d recorded, %d of %d, %.1f s", size, done, total, time.monotonic() - began)

        return DecodeGraphs(self._llama, cache, sizes, self._recorder(), progress)

    def rehearse(self, runner: Runner) -> None:
        """The largest steps, on the null block, which is zeros again afterwards."""
        began, engine = time.monotonic(), self._engine
        positions = self._llama.config.max_positions
        warm_up(runner, largest_steps(engine.max_batched_tokens, engine.max_sequences, positions, engine.block_size))
        runner.cache.bytes[0].zero_()
        logger.info("the largest steps computed in %.1f s", time.monotonic() - began)

    def budget(self, sizes: tuple[int, ...], share: float) -> Budget:
        """What there is, and what of it is taken, now or in the largest step."""
        device = self._device
        if device.kind == "cpu":  # its memory is not ours alone, and steps take little of it: nothing to be tried
            return Budget.of_host(device.memory())
        device.reset_peak()
        weights = device.memory().reserved
        null, store = self.cache(0)
        self.rehearse(Runner(self._llama, null, store))
        activations = device.memory().peak - weights
        graphs = self._recorded(null, sizes)
        del store, null
        device.reset_peak()
        memory = device.memory()
        return Budget(memory.total, memory.free, memory.reserved, share, weights, activations, graphs)

    def _recorded(self, null: KvCache, sizes: tuple[int, ...]) -> int:
        """Bytes that recorded steps hold: the largest is tried, and those after it use its memory."""
        if not sizes:
            return 0
        self._device.reset_peak()
        before = self._device.memory().reserved
        held = DecodeGraphs(self._llama, null, sizes[-1:], self._recorder())
        taken = self._device.memory().reserved - before
        del held
        return taken + GRAPH * len(sizes)

    def _recorder(self) -> Recorder:
        return RepeatingRecorder() if self._device.torch.type == "cpu" else CudaRecorder()
