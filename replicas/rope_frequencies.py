"""The formulas of RoPE and its scalings, each with the roundings of transformers, so that the logits are the same.

Knows nothing of models or files.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .rope_scaling import Divided, Linear, Llama3, RopeScaling, Yarn


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, float]:
    """(float32 [head_dim / 2], what cos and sin are multiplied by); pair i turns by theta^(-2i / head_dim) a position,
    if not scaled."""
    periods = theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    frequencies = 1.0 / periods
    match scaling:
        case None:
            return frequencies, 1.0
        case Linear():
            return frequencies / scaling.factor, 1.0
        case Divided():
            return frequencies / torch.tensor(scaling.divisors, dtype=torch.float32), 1.0
        case Llama3():
            return _llama3(frequencies, scaling), 1.0
        case Yarn():
            return _yarn(periods, head_dim, theta, scaling), scaling.attention_factor


def _llama3(frequencies: Tensor, s: Llama3) -> Tensor:
    waves = 2 * math.pi / frequencies
    ramp = (s.original / waves - s.low) / (s.high - s.low)
    between = (1 - ramp) * frequencies / s.factor + ramp * frequencies
    long, short = waves > s.original / s.low, waves < s.original / s.high
    return torch.where(long, frequencies / s.factor, torch.where(short, frequencies, between))


def _yarn(periods: Tensor, head_dim: int, theta: float, s: Yarn) -> Tensor:
    def pair_that_turns(times: float) -> float:  # so often over the original length
        return head_dim * math.log(s.original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(s.beta_fast), pair_that_turns(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (s.factor * periods) * (1 - kept) + 1.0 / periods * kept
