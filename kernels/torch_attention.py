"""Paged attention in plain torch: each sequence on its own, so its result never depends on its batch-mates.

Two ways: torch's fused attention for the common case, and the formula written out in float32 for all else.
Unused slots may be copied by the gather, but no arithmetic ever touches them: 0 * NaN would be NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import Layout, read_blocks
from .plan import AttentionPlan, SequencePlan


def paged_attention(
    q: Tensor,
    kv: Tensor,
    plan: AttentionPlan,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    k_scale: float,
    v_scale: float,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
    layout: Layout,
) -> None:
    """Fill `out` (and `lse`). The contract stands at `ops.paged_attention`, which has checked everything."""
    common = window is None and softcap is None and sinks is None and lse is None and kv.dtype == q.dtype
    for s in plan.sequences:
        rows = slice(s.first_row, s.first_row + s.rows)
        if s.rows == 0:
            continue
        # the first row is the one that looks back furthest
        first = 0 if window is None else min(s.keys, max(0, s.keys - s.rows - window + 1))
        k, v = _gather(kv, s, first, layout)
        if common and s.keys > 0 and (s.keys >= s.rows or not causal):
            _fused(q[rows], k, v, s, causal, scale, out[rows])
        else:
            visible = _visible(s, first, causal, window)
            k, v = k.float() * k_scale, v.float() * v_scale
            row_lse = None if lse is None else lse[rows]
            _written_out(q[rows], k, v, visible, softcap, sinks, scale, out[rows], row_lse)


def _gather(kv: Tensor, s: SequencePlan, first: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """K and V of positions first .. keys - 1, each [kv_heads, keys - first, head_dim]."""
    block_size = kv.shape[3]
    skipped = first // block_size
    k, v = read_blocks(kv, s.blocks[skipped : -(-s.keys // block_size)], layout)
    held = slice(first - skipped * block_size, s.keys - skipped * block_size)
    return k[:, held], v[:, held]


def _visible(s: SequencePlan, first: int, causal: bool, window: int | None) -> Tensor | None:
    """bool [rows, keys - first], True where the row sees the key; None when every row sees every key."""
    if not causal:
        return None
    device = s.blocks.device
    position = torch.arange(s.keys - s.rows, s.keys, device=device)[:, None]
    key = torch.arange(first, s.keys, device=device)[None]
    visible = key <= position
    return visible if window is None else visible & (key > position - window)


def _fused(q: Tensor, k: Tensor, v: Tensor, s: SequencePlan, causal: bool, scale: float, out: Tensor) -> None:
    """torch's fused attention: float32 softmax and sums inside, no [rows, keys] matrix in memory."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    k, v = k[None], v[None]
    if rows == 1:  # the query heads of one KV head are rows of one small problem: K and V are read once
        packed = q.view(1, kv_heads, heads // kv_heads, head_dim)
        out.copy_(F.scaled_dot_product_attention(packed, k, v, scale=scale).view(1, heads, head_dim))
        return
    whole = rows == s.keys
    mask = s.causal_mask if causal and not whole else None
    grouped = heads != kv_heads
    result = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, mask, is_causal=causal and whole, scale=scale, enable_gqa=grouped
    )
    out.copy_(result[0].transpose(0, 1))


def _written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """softmax(q k^T * scale) v in float32, with every option, one [heads, rows, keys] matrix in memory."""
    rows, heads, head_dim = q.shape
    kv_heads, keys = k.shape[0], k.shape[1]
    group = heads // kv_heads
    by_head = q.float().view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    packed = by_head.reshape(kv_heads, -1, head_dim)
    scores = (packed @ k.transpose(1, 2)).view(heads, rows, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores.masked_fill_(~visible, -torch.inf)
    # a sink is one more key without a value; -inf is no sink, and stands for the maximum of no keys at all
    no_sink = torch.full((heads,), -torch.inf, device=q.device)
    sink = (no_sink if sinks is None else sinks.float())[:, None, None].expand(heads, rows, 1)
    top = torch.cat((sink, scores), dim=-1).amax(dim=-1, keepdim=True)
    base = top.masked_fill(top == -torch.inf, 0.0)  # a row that sees nothing: exp(-inf - 0) = 0, not NaN
    weights = torch.exp(scores - base)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(sink - base)
    mixed = (weights.view(kv_heads, group * rows, keys) @ v).view(heads, rows, head_dim)
    out.copy_((mixed / total.masked_fill(total == 0, 1.0)).transpose(0, 1))
    if lse is not None:
        lse.copy_((base + total.log()).squeeze(-1).t())
