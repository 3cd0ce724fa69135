"""The angles of rotary position embeddings (Su et al. 2021, RoFormer), in the rotate-half arrangement."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(head_dim: int, max_positions: int, theta: float) -> tuple[Tensor, Tensor]:
    """(cos, sin), each float32 [max_positions, head_dim]; elements i and i + head_dim/2 hold the angle of
    pair i.

    Angle of pair i at position p: p * theta^(-2i / head_dim). Raises ValueError for an odd head_dim.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim: {head_dim}; allowed is an even number, because positions rotate pairs")
    # frequencies in float32 and one product per angle: the roundings of transformers, so the same logits
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    angles = torch.arange(max_positions, dtype=torch.int64).float()[:, None] * frequencies[None]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()
