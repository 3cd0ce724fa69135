"""Decode steps recorded once and replayed: a GPU computes a small step faster than a host can launch its kernels.

    at start    for each size  | warm up | record forward and logits, over tensors that stay where they are |
    each step   | fill those tensors, padded to the next size | replay |

Only steps whose sequences all have a single token and want its logits are replayed; prompts and scores are computed
eagerly. Knows nothing of requests, leases or sampling.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bifolio.kernels import StaticPlan

from .batch import Batch, HostBatch
from .kv_cache import KvCache
from .llama import Llama

Progress = Callable[[int, int, int], None]  # done, total, size


def graph_sizes(max_sequences: int) -> tuple[int, ...]:
    """Steps of how many sequences are recorded: 1, 2, 4, 8, 16, 24, .. 64, then four to each doubling, and
    `max_sequences` itself.

    A padding row costs little: a decode step reads all weights for however few rows, and padding has no keys. Matrix
    products come in tiles of 8 rows at least, so finer sizes would save nothing. Beyond 64 rows a fifth more of them
    is what padding costs at worst, and each size costs time and memory at start.
    """
    sizes, size = [1, 2, 4], 8
    while size < max_sequences:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 3))
    return (*(s for s in sizes if s < max_sequences), max_sequences)


class Recorder(Protocol):
    """Makes what computes the same again, over the same tensors."""

    def record(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Calls `compute`, perhaps more than once. What it gives back launches the same, and gives the tensor that the
        result is in, always the same one."""


class CudaRecorder:
    """CUDA graphs. They share one pool of memory, so only one of them may run at a time, and each overwrites what
    another left there."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _recording_stream()

    def record(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        current = torch.cuda.current_stream()
        # What happens once, kernels compiled, tables made, workspaces taken, may not happen while recording
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the replica may use the device meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@cache
def _recording_stream() -> torch.cuda.Stream:
    """One for all recorders: cuBLAS keeps tens of megabytes for each stream that it has worked on."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class RepeatingRecorder:
    """For who has no GPU: calls `compute` again."""

    def record(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        result = compute()

        @torch.inference_mode()
        def replay() -> Tensor:
            again = compute()
            return result if again is result else result.copy_(again)

        return replay


class DecodeGraphs:
    """The decode steps of one model over one cache, recorded for each of `sizes`. One thread uses it."""

    def __init__(
        self,
        model: Llama,
        cache: KvCache,
        sizes: Sequence[int],
        recorder: Recorder,
        progress: Progress = lambda done, total, size: None,
    ) -> None:
        """Records them all, which takes a while; `progress` is called after each. Reads and writes no block.

        Raises ValueError for sizes that are none, and where other kernels than Triton's compute.
        """
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes: {list(sizes)}; allowed is at least one, all of them 1 or more")
        self._sizes = sorted(set(sizes))
        self._blocks = -(-model.config.max_positions // cache.block_size)
        largest = self._sizes[-1]
        self._static = StaticPlan(largest, self._blocks, cache.device)
        # One for all sizes: a graph's own result would take memory as long as the graph is there
        self._logits = torch.empty(largest, model.config.vocab_size, dtype=torch.float32, device=cache.device)
        self._replays: dict[int, Callable[[], Tensor]] = {}
        # The largest first: the smaller ones find all they need in the memory that it has left in the pool
        for done, size in enumerate(reversed(self._sizes), 1):
            self._replays[size] = recorder.record(self._step(model, cache, size))
            progress(done, len(self._sizes), size)

    def logits(self, host: HostBatch) -> Tensor | None:
        """float32 [n, vocabulary] on the device, of the step's n sequences, valid until the next call; launched, not
        waited for. None where the step is not of n single tokens that all want logits and score nothing, or n is more
        than the largest size: then nothing was computed.

        Raises ValueError as `StaticPlan.fill` does.
        """
        n = len(host.lengths)
        if not (0 < n <= self._sizes[-1] and _is_decode(host, n)):
            return None
        size = self._sizes[bisect.bisect_left(self._sizes, n)]
        self._static.fill(size, host.tokens, host.positions, host.slots, host.lengths, host.table)
        return self._replays[size]()[:n]

    def _step(self, model: Llama, cache: KvCache, size: int) -> Callable[[], Tensor]:
        static, device = self._static, cache.device
        rows, none = torch.arange(size, device=device), torch.empty(0, dtype=torch.int64, device=device)
        inputs = (static.tokens[:size], static.positions[:size], static.slots[:size])
        batch, into = Batch(*inputs, static.plan(size), rows, none, (), ()), self._logits[:size]

        @torch.inference_mode()
        def compute() -> Tensor:
            return into.copy_(model.logits(model.forward(batch, cache)))

        return compute


def _is_decode(host: HostBatch, n: int) -> bool:
    """Each of the n sequences has one token, and wants its logits: none has a draft."""
    return len(host.tokens) == n and np.array_equal(host.logit_rows, np.arange(n)) and len(host.scored_rows) == 0
