"""From logits to token ids: each row by its own request's parameters, history and place in the random sequence.

Knows nothing about the model, the batch's make-up or leases; a row's answer is the same in any company.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bifolio.kernels import sample

from .logprobs import token_logprobs
from .penalties import SamplingState, adjust, needs_adjusting
from .rng import uniform
from .sequence import Choice


@torch.inference_mode()
def sample_tokens(logits: Tensor, states: Sequence[SamplingState]) -> list[Choice]:
    """One choice per row of `logits`, float32 [len(states), vocabulary], on any device. MUTATES the rows that are
    penalised, biased or masked; the others are not even copied.

    Raises ValueError when there are not as many logits as states.
    """
    if logits.shape[0] != len(states):
        raise ValueError(f"logits: {logits.shape[0]} rows; allowed is {len(states)}, one for each sequence")
    if not states:
        return []
    raw = list(logits)  # views, or copies of what is about to change: the model's own, for the logprobs
    for i, state in enumerate(states):
        if needs_adjusting(state):
            if state.sampling.logprobs is not None:
                raw[i] = logits[i].clone()
            adjust(logits[i], state)
    settings = [state.sampling for state in states]
    ids: list[int] = sample(
        logits,
        torch.tensor([s.temperature for s in settings], dtype=torch.float64),
        torch.tensor([s.top_p for s in settings], dtype=torch.float64),
        torch.tensor([s.top_k for s in settings], dtype=torch.int64),
        torch.tensor([s.min_p for s in settings], dtype=torch.float64),
        torch.tensor([_uniform(state) for state in states], dtype=torch.float64),
    ).tolist()
    return [
        (id, None if s.logprobs is None else token_logprobs(row[None].cpu(), [id], [s.logprobs])[0])
        for id, s, row in zip(ids, settings, raw, strict=True)
    ]


def _uniform(state: SamplingState) -> float:
    s = state.sampling
    return uniform(s.seed, s.choice, state.position) if s.temperature > 0 else 0.0
