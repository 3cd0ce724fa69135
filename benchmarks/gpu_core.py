"""What a replica computes with, in this process and without Ray: a core under test, what is asked of it, and when what
came of it.

Sequences get blocks for all they will ever have, and where prompts are not the point K and V are noise: so an engine
decodes steadily, a few milliseconds after it was asked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_device import Bench

from bifolio.kv_manager.config import KvConfig
from bifolio.protos.messages import BlockId, Generation, ReplicaId, Sampling
from bifolio.replicas.config import EngineConfig
from bifolio.replicas.core import Core, ReplicaSpec
from bifolio.replicas.model_files import model_config
from bifolio.replicas.sequence import Add, Closed, Event, Sampled

CONTEXT = 16384  # positions of a sequence, at most
PATIENCE = 20.0  # seconds between two signs of an engine
generations = (Generation(1, n) for n in count(1))


def spec(bench: Bench, model: Path, **engine: Any) -> ReplicaSpec:
    """As a GPU has it by default, with a context that takes less time to try; on the CPU as small as it goes."""
    on: Mapping[str, Any] = {"device": "cuda", "context": min(CONTEXT, model_config(model).max_positions)}
    if bench.tiny:
        on = {
            "device": "cpu",
            "kernels": bench.ours,
            "block_size": 16,
            "kv_memory": "1024 tokens",
            "max_sequences": 4,
            "max_batched_tokens": 32,
        }
    return ReplicaSpec(model, "bfloat16", None, EngineConfig(**on | engine), KvConfig(), ("none", "none"))


@contextmanager
def heard() -> Iterator[list[str]]:
    """What replicas log meanwhile; of the lines about recorded steps the last."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = record.getMessage()
            if lines and " recorded, " in line and " recorded, " in lines[-1]:
                lines.pop()
            lines.append(line)

    logger, handler = logging.getLogger("bifolio.replicas"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class Served:
    """A core that computes, its cache full of noise. `steps` has a time for each step and what it sampled, `held` what
    tensors held before there was one."""

    def __init__(self, bench: Bench, of: ReplicaSpec) -> None:
        self.held = 0 if bench.tiny else torch.cuda.memory_allocated()
        began = time.perf_counter()
        with heard() as self.lines:
            self.core = Core(of, ReplicaId("gpu"), "decode")
        bench.wait()
        self.seconds = time.perf_counter() - began
        self.engine = of.engine
        self.steps: list[tuple[float, int]] = []
        self._changed = threading.Condition()
        self._open: set[Generation] = set()
        self._failed = ""
        for layer in range(self.core.geometry.layers):
            self.core.cache.layer(layer)[: 1 + most_blocks(bench, of.engine)].normal_()
        self.core.start(self._deliver)

    def close(self) -> None:
        self.core.stop()

    def finish(self, adds: Sequence[Add]) -> list[tuple[float, int]]:
        """The steps that these sequences take, when all have finished."""
        self.steps.clear()
        self._failed = ""
        self._open.update(add.generation for add in adds)
        for add in adds:
            self.core.submit(add)
        with self._changed:
            seen = -1
            while self._open and not self._failed:
                if seen == len(self.steps):
                    self.core.check()
                    raise RuntimeError(f"{len(self._open)} sequences wait, and no step came in {PATIENCE:.0f} s")
                seen = len(self.steps)
                self._changed.wait(PATIENCE)
        if self._failed:
            raise RuntimeError(self._failed)
        return self.steps

    def _deliver(self, events: list[Event]) -> None:
        """In the engine's thread."""
        now = time.perf_counter()
        with self._changed:
            self.steps.append((now, sum(isinstance(event, Sampled) for event in events)))
            for event in events:
                if isinstance(event, Closed):
                    self._open.discard(event.generation)
                    if event.reason != "finished":
                        self._failed = f"a sequence was closed, {event.reason}: {event.message}"
            self._changed.notify_all()

    def decoding(self, sequences: int, context: int, steps: int) -> list[Add]:
        """So many sequences that have their prompts' K and V, and take the same steps together."""
        logits = np.random.default_rng(0).standard_normal(self.core.vocabulary, dtype=np.float32).tobytes()
        return self._adds(sequences, context, steps, logits)

    def prompt(self, tokens: int) -> Add:
        """Ends with its first token."""
        return self._adds(1, tokens, 1, None)[0]

    def _adds(self, sequences: int, tokens: int, steps: int, logits: bytes | None) -> list[Add]:
        each = -(-(tokens + steps) // self.engine.block_size)
        assert each * sequences <= self.core.cache.blocks, f"{each * sequences} blocks of {self.core.cache.blocks}"
        order = (torch.randperm(each * sequences) + 1).tolist()
        return [
            Add(
                next(generations),
                tuple(torch.randint(self.core.vocabulary, (tokens,)).tolist()),
                tuple(map(BlockId, order[i * each : (i + 1) * each])),
                time.time(),
                tokens,
                Sampling(max_tokens=steps, temperature=0.0),
                logits,
            )
            for i in range(sequences)
        ]


def most_blocks(bench: Bench, engine: EngineConfig) -> int:
    """Of all that is asked at once here."""
    tokens = 1024 if bench.tiny else engine.max_sequences * 1024
    return tokens // engine.block_size
