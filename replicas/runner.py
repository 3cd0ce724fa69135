"""Runs batches through the model. Knows nothing about sequences, leases or sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bifolio.kernels.events import Event
from bifolio.protos.messages import TokenLogprobs

from .batch import HostBatch, Row, host_batch
from .block_stores import Blocks
from .graphs import DecodeGraphs
from .kv_cache import KvCache
from .llama import Llama
from .logprobs import token_logprobs

IN_FLIGHT = 2  # steps launched on a device and not done: one is computed, one is ready to follow
SCORED_AT_ONCE = 64  # rows of logits that are held together: each has the size of the vocabulary


@dataclass(frozen=True, slots=True)
class Output:
    """logits  float32 [rows, vocabulary], where the model is, of the rows that want them; holds until the next step
    scores  one for each of the batch's scored rows"""

    logits: Tensor
    scores: list[TokenLogprobs]


class Runner:
    """One model over one KV cache. `store` is told which blocks a step writes; `graphs` replays the steps it holds."""

    def __init__(self, model: Llama, cache: KvCache, store: Blocks, graphs: DecodeGraphs | None = None) -> None:
        self.model = model
        self.device = cache.device
        self.cache = cache
        self._store = store
        self._graphs = graphs
        self._launched: deque[Event] = deque(maxlen=IN_FLIGHT)

    def run(self, rows: Sequence[Row]) -> Tensor:
        """The logits of `compute`, for who scores nothing."""
        return self.compute(rows).logits

    @torch.inference_mode()
    def compute(self, rows: Sequence[Row]) -> Output:
        """One step: writes K and V of the rows' positions into the cache. It is launched then, and on a GPU perhaps
        not done; but the host is never far ahead: who comes next would wait for all that was launched."""
        batch = host_batch(rows, self.cache.block_size)
        if len(self._launched) == IN_FLIGHT:
            self._launched[0].wait()
        try:
            return self._replayed(batch) or self._eager(batch)
        finally:  # part of a step that failed may be under way
            mark = self._store.computed(np.unique(batch.slots // self.cache.block_size).tolist())
            self._launched.append(mark)

    @torch.inference_mode()
    def copy(self, source: int, block: int) -> None:
        """Give a block the content that another one has after the steps launched so far."""
        try:
            self.cache.copy(source, block)
        finally:  # the source is marked too: its next owner may write it only when it has been read
            self._store.computed((source, block))

    def works(self) -> bool:
        """Whether the device goes on after a step that failed. An illegal access is the last thing that a process does
        on a GPU, and may show only now."""
        if self.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def _replayed(self, host: HostBatch) -> Output | None:
        logits = None if self._graphs is None else self._graphs.logits(host)
        return None if logits is None else Output(logits, [])

    def _eager(self, host: HostBatch) -> Output:
        batch = host.on(self.device)
        hidden = self.model.forward(batch, self.cache)
        scores: list[TokenLogprobs] = []
        for begin in range(0, len(batch.targets), SCORED_AT_ONCE):
            part = slice(begin, begin + SCORED_AT_ONCE)
            logits = self.model.logits(hidden[batch.scored_rows[part]]).cpu()
            scores += token_logprobs(logits, batch.targets[part], batch.tops[part])
        return Output(self.model.logits(hidden[batch.logit_rows]), scores)
