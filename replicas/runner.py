"""Runs batches through the model. Knows nothing about sequences, leases or sampling."""

from __future__ import annotations

import torch

from .batch import Batch
from .kv_cache import KvCache
from .llama import Llama


class Runner:
    """One model over one KV cache."""

    def __init__(self, model: Llama, cache: KvCache) -> None:
        self.model = model
        self.cache = cache
        self.block_size = cache.block_size

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Compute one step: writes K and V of the batch's positions into the cache.

        Returns the logits of the rows that want them, float32 [rows, vocabulary], on the CPU.
        """
        hidden = self.model.forward(batch, self.cache)
        return self.model.logits(hidden[batch.logit_rows]).cpu()
