"""RoPE with the cache write, norm and activation in plain torch. Contracts and checks stand in `ops.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import Layout, write_slots


def rope_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv: Tensor,
    *,
    layout: Layout,
) -> Tensor:
    half = q.shape[-1] // 2
    c, s = cos[positions, None, :half], sin[positions, None, :half]
    rotated_k = _rotate(k, c, s)
    written = slots >= 0
    if not bool(written.all()):
        slots, rotated_k, v = slots[written], rotated_k[written], v[written]
    write_slots(kv, slots, rotated_k, v, layout)
    return _rotate(q, c, s)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of x [T, heads, D] in float32; cos and sin are [T, 1, D/2]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = x if residual is None else residual + x
    return F.rms_norm(residual, weight.shape, weight, eps), residual


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
