"""What a GPU's logits are held against: the same tokens through the CPU's float32 kernels, from the same weights.

Knows nothing of how the others were computed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from bifolio.kernels import kv_layout, using

from .batch import Row, build_batch
from .core import ReplicaSpec, load_model
from .device import HostDevice
from .differences import Logits
from .kv_cache import KvCache
from .llama import Llama
from .model_files import model_config

PACKING = 1.25  # times the weights' bytes: while they are packed, and for what a prompt's step takes


class Float32:
    """The model once more, loaded when it is first asked. `missing` says why it cannot be, and is empty if it can."""

    def __init__(self, spec: ReplicaSpec) -> None:
        # Beside a GPU nothing else uses the cores
        threads = spec.engine.threads if spec.engine.device == "cpu" else len(os.sched_getaffinity(0))
        changed = {"device": "cpu", "kernels": "auto", "exact": False, "kv_memory": "auto", "context": None}
        engine = spec.engine.model_copy(update=changed | {"threads": threads})
        self._spec = replace(spec, dtype="float32", quantization=None, engine=engine)
        self._llama: Llama | None = None
        need = 4 * PACKING * sum(map(math.prod, model_config(spec.model).tensors().values()))
        free = HostDevice().memory().free
        self.missing = "" if need < free else f"takes {need / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free"

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> list[Logits]:
        """A row for each token of the answer: what it would be chosen from, after those before it. One step."""
        tokens = [*prompt, *answer[:-1]]
        with using("auto"), torch.inference_mode():  # whatever computes elsewhere in this process
            self._llama = self._llama or load_model(self._spec).llama
            c, size = self._llama.config, self._spec.engine.block_size
            blocks, layout = -(-len(tokens) // size), kv_layout(torch.float32, c.head_dim, size)
            cache = KvCache(blocks, c.layers, c.kv_heads, size, c.head_dim, torch.float32, layout)
            hidden = self._llama.forward(build_batch([Row(tokens, 0, range(1, blocks + 1))], size), cache)
            return list(self._llama.logits(hidden[-len(answer) :]).numpy())
