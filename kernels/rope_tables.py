"""The angles of rotary position embeddings (Su et al. 2021, RoFormer), in the rotate-half arrangement.

Knows nothing of how a model arrives at its frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(frequencies: Tensor, max_positions: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(cos, sin), each float32 [max_positions, D] and multiplied by `scale`; elements i and i + D/2 hold the angle
    of pair i.

    frequencies  float32 [D/2]; the angle of pair i at position p is p * frequencies[i]

    For 131,072 positions of D = 128 that is 134 MB: build them once a model, never per layer.
    """
    # one product in float32 per angle: the rounding of transformers, so the same logits
    angles = torch.arange(max_positions, dtype=torch.int64).float()[:, None] * frequencies[None]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
