"""From logits to token ids: each row by its own request's parameters and its own place in the random
sequence.

Knows nothing about the model, the batch's make-up or requests; a row's answer is the same in any company.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bifolio.kernels import sample
from bifolio.protos.messages import Sampling

from .rng import uniform


def sample_tokens(logits: Tensor, rows: Sequence[tuple[Sampling, int]]) -> list[int]:
    """One token id per row of `logits`, float32 [len(rows), vocabulary].

    Each row comes with its sampling parameters and the place of the token being chosen: how many tokens its
    request has generated since the original prompt. Raises ValueError when there are not as many logits as
    rows.
    """
    if logits.shape[0] != len(rows):
        raise ValueError(f"logits: {logits.shape[0]} rows; allowed is {len(rows)}, one for each sequence")
    if not rows:
        return []
    uniforms = [uniform(s.seed, 0, position) if s.temperature > 0 else 0.0 for s, position in rows]
    ids = sample(
        logits,
        torch.tensor([s.temperature for s, _ in rows], dtype=torch.float64),
        torch.tensor([s.top_p for s, _ in rows], dtype=torch.float64),
        torch.tensor([s.top_k for s, _ in rows], dtype=torch.int64),
        torch.tensor(uniforms, dtype=torch.float64),
    )
    chosen: list[int] = ids.tolist()
    return chosen
