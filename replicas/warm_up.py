"""The largest steps that a replica will ever compute, computed once before it is ready: their kernels are compiled, and
what they take of the device's memory is seen.

They read and write the null block alone, so a cache that has no other will do; it is spoiled then. Knows nothing of
sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bifolio.kernels import sample

from .batch import Row
from .runner import SCORED_AT_ONCE, Runner

NULL = 0


def largest_steps(
    max_batched_tokens: int, max_sequences: int, max_positions: int, block_size: int
) -> tuple[list[Row], ...]:
    """A step of prompts of all sequences, one of a single chunk at the end of the context, one of decode tokens there.

    Each is the largest in something: rows of logits; partial results of attention, and what is held to score a
    prompt; sequences with long block tables.
    """
    last = max_positions - 1
    sequences = min(max_sequences, max_batched_tokens)
    each = min(max_batched_tokens // sequences, max_positions)
    chunk = min(max_batched_tokens, max_positions)
    blocks = [NULL] * -(-max_positions // block_size)
    prompts = [Row([0] * each, 0, blocks) for _ in range(sequences)]
    targets = [0] * min(SCORED_AT_ONCE, chunk)
    end = [Row([0] * chunk, max_positions - chunk, blocks, targets=targets)]
    decoding = [Row([0], last, blocks) for _ in range(sequences)]
    return prompts, end, decoding


@torch.inference_mode()
def warm_up(runner: Runner, steps: Sequence[Sequence[Row]]) -> None:
    """Compute them, and sample from what comes: a row greedily, the others not. SPOILS the null block."""
    for rows in steps:
        logits = runner.run(rows)
        torch.cat([logits, logits])  # as many again may come from other replicas, to be sampled with these
        temperature = torch.ones(len(logits), dtype=torch.float64)
        temperature[0] = 0
        half = torch.full_like(temperature, 0.5)
        sample(logits, temperature, half, torch.full((len(logits),), 50), half, half).tolist()
