"""Runs batches through the model. Knows nothing about sequences, leases or sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bifolio.protos.messages import TokenLogprobs

from .batch import Batch
from .kv_cache import KvCache
from .llama import Llama
from .logprobs import token_logprobs

SCORED_AT_ONCE = 64  # rows of logits that are held together: each has the size of the vocabulary


@dataclass(frozen=True, slots=True)
class Output:
    """logits  float32 [rows, vocabulary], on the CPU, of the rows that want them
    scores  one for each of the batch's scored rows"""

    logits: torch.Tensor
    scores: list[TokenLogprobs]


class Runner:
    """One model over one KV cache."""

    def __init__(self, model: Llama, cache: KvCache) -> None:
        self.model = model
        self.cache = cache
        self.block_size = cache.block_size

    def run(self, batch: Batch) -> torch.Tensor:
        """The logits of `compute`, for who scores nothing."""
        return self.compute(batch).logits

    @torch.inference_mode()
    def compute(self, batch: Batch) -> Output:
        """One step: writes K and V of the batch's positions into the cache."""
        hidden = self.model.forward(batch, self.cache)
        scores: list[TokenLogprobs] = []
        for begin in range(0, len(batch.targets), SCORED_AT_ONCE):
            part = slice(begin, begin + SCORED_AT_ONCE)
            logits = self.model.logits(hidden[batch.scored_rows[part]]).cpu()
            scores += token_logprobs(logits, batch.targets[part], batch.tops[part])
        return Output(self.model.logits(hidden[batch.logit_rows]).cpu(), scores)
