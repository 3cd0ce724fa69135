"""What a request changes in its logits before a token is chosen: penalties, biases, and stop ids that come too early.

Knows nothing about other rows, and keeps nothing from token to token: all is counted from the request's own history,
so a resumed request goes on as if it had never stopped.

    model's logits ─▶ repetition ─▶ presence, frequency ─▶ logit_bias ─▶ min_tokens ─▶ temperature, top_k, top_p, min_p

Repetition comes first because it looks at the sign of the logit: that of the model, not one a bias has moved. Those
after it only add, so their order among themselves changes nothing. The mask comes last, so that no bias lifts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bifolio.protos.messages import Sampling


class SamplingState(NamedTuple):
    """Where a request stands when a token is chosen: its parameters, and its history of prompt and answer."""

    sampling: Sampling
    tokens: Sequence[int]
    prompt_length: int

    @property
    def position(self) -> int:
        """Tokens generated since the original prompt: the place of the next one."""
        return len(self.tokens) - self.prompt_length


def needs_adjusting(state: SamplingState) -> bool:
    s = state.sampling
    return (
        s.repetition_penalty != 1
        or bool(s.logit_bias)
        or ((s.presence_penalty != 0 or s.frequency_penalty != 0) and state.position > 0)
        or (bool(s.stop_token_ids) and state.position < s.min_tokens)
    )


def adjust(row: Tensor, state: SamplingState) -> None:
    """MUTATES `row`, float32 [vocabulary].

    repetition            Keskar et al. 2019 (CTRL), as in Hugging Face: of every id in prompt or answer, a positive
                          logit is divided, another multiplied
    presence, frequency   OpenAI's formula: of every id in the answer, logit - presence - count * frequency
    min_tokens            stop ids get -inf. Were nothing left then, they keep their logits: a request always ends
    """
    s, device = state.sampling, row.device
    if s.repetition_penalty != 1:
        seen = torch.tensor(state.tokens, device=device)  # an id seen twice writes the same value twice
        logits = row[seen]
        row[seen] = torch.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
    if (s.presence_penalty or s.frequency_penalty) and state.position > 0:
        ids, counts = np.unique(state.tokens[state.prompt_length :], return_counts=True)
        less = torch.from_numpy(s.presence_penalty + s.frequency_penalty * counts).float().to(device)
        row[torch.from_numpy(ids).to(device)] -= less
    if s.logit_bias:
        biased, biases = zip(*s.logit_bias, strict=True)
        amounts = torch.tensor(biases, dtype=torch.float32, device=device)
        row.index_add_(0, torch.tensor(biased, device=device), amounts)
    if s.stop_token_ids and state.position < s.min_tokens:
        stops = torch.tensor(s.stop_token_ids, device=device)
        kept = row[stops]
        row[stops] = -torch.inf
        if row.max() == -torch.inf:
            row[stops] = kept
