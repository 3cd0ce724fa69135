"""RoPE with the cache write, norm and activation in Triton. Contracts and checks stand in `ops.py`.

All of them wait for memory, not for arithmetic: each number is read once and written once, and what is computed in
between is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from .layout import Layout
from .triton_runtime import INTERPRETED, current

# The interpreter pays by the operation: there one program takes many rows
TOKENS = 128 if INTERPRETED else 32
NUMBERS = 65536 if INTERPRETED else 4096  # of a program that works row by row


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions", "slots"])
def _rope_and_write(
    q,
    k,
    v,
    cos,
    sin,
    positions,
    slots,
    kv,
    out,
    tokens,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    cos_row,
    sin_row,
    kv_block,
    kv_half,
    kv_head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One head of TOKENS tokens. Grid: (blocks of tokens, query heads + KV heads)."""
    head = tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = D // 2
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    i = tl.arange(0, HALF_PADDED)[None, :]
    there = t < tokens
    mask = there[:, None] & (i < HALF)
    position = tl.load(positions + t, mask=there, other=0)
    c = tl.load(cos + position[:, None] * cos_row + i, mask=mask, other=0.0)
    s = tl.load(sin + position[:, None] * sin_row + i, mask=mask, other=0.0)
    row = t.to(tl.int64)[:, None]
    if head < HEADS:
        source = q + row * q_row + head * q_head + i
        a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        target = out + (row * HEADS + head) * D + i
        tl.store(target, a * c - b * s, mask=mask)
        tl.store(target + HALF, b * c + a * s, mask=mask)
    else:
        kv_index = head - HEADS
        slot = tl.load(slots + t, mask=there, other=-1)[:, None]
        write = mask & (slot >= 0)
        key = k + row * k_row + kv_index * k_head + i
        a = tl.load(key, mask=write, other=0.0).to(tl.float32)
        b = tl.load(key + HALF, mask=write, other=0.0).to(tl.float32)
        value = v + row * v_row + kv_index * v_head + i
        place = kv + slot // BLOCK * kv_block + kv_index * kv_head + slot % BLOCK * D + i
        tl.store(place, a * c - b * s, mask=write)
        tl.store(place + HALF, b * c + a * s, mask=write)
        tl.store(place + kv_half, tl.load(value, mask=write, other=0.0), mask=write)
        tl.store(place + kv_half + HALF, tl.load(value + HALF, mask=write, other=0.0), mask=write)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x,
    residual,
    weight,
    normed,
    grown,
    rows,
    x_row,
    residual_row,
    eps,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """ROWS rows. Grid: (blocks of rows)."""
    t, i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None], tl.arange(0, SIZE_PADDED)[None, :]
    mask = (t < rows) & (i < SIZE)
    r = tl.load(x + t * x_row + i, mask=mask, other=0.0)
    if RESIDUAL:
        r = (r.to(tl.float32) + tl.load(residual + t * residual_row + i, mask=mask, other=0.0)).to(r.dtype)
        tl.store(grown + t * SIZE + i, r, mask=mask)
    r = r.to(tl.float32)  # what the next layer will see: rounded already
    scale = 1.0 / tl.sqrt(tl.sum(r * r, 1) / SIZE + eps)
    gain = tl.load(weight + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(normed + t * SIZE + i, r * scale[:, None] * gain, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _silu_mul(gate_up, out, rows, row, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK numbers of ROWS rows. Grid: (blocks of rows, blocks of numbers)."""
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    i = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (t < rows) & (i < SIZE)
    source = gate_up + t * row + i
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)
    e = tl.exp(-tl.abs(gate))  # sigmoid(x) = 1 / (1 + e) or e / (1 + e): e overflows nowhere
    tl.store(out + t * SIZE + i, gate * (tl.where(gate < 0, e, 1.0) / (1.0 + e)) * up, mask=mask)


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
    """Raises ValueError for a packed cache: that layout is the CPU's."""
    checks.plain(layout)
    tokens, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    q, k, v, cos, sin = map(_dense_rows, (q, k, v, cos, sin))
    with current(q.device):
        _rope_and_write[(triton.cdiv(tokens, TOKENS), heads + kv.shape[2])](
            q,
            k,
            v,
            cos,
            sin,
            positions.contiguous(),
            slots.contiguous(),
            kv,
            out,
            tokens,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            *kv.stride()[:3],
            HEADS=heads,
            D=head_dim,
            HALF_PADDED=triton.next_power_of_2(head_dim // 2),
            BLOCK=kv.shape[3],
            TOKENS=TOKENS,
        )
    return out


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grown = x if residual is None else torch.empty_like(normed)
    if x.numel() == 0:
        return normed, grown
    x, weight = _dense_rows(x), weight.contiguous()
    other = x if residual is None else _dense_rows(residual)
    padded = triton.next_power_of_2(size)
    together = max(1, NUMBERS // padded) if INTERPRETED or padded < 512 else 1
    with current(x.device):
        _rms_norm[(triton.cdiv(rows, together),)](
            x,
            other,
            weight,
            normed,
            grown,
            rows,
            x.stride(0),
            other.stride(0),
            eps,
            SIZE=size,
            SIZE_PADDED=padded,
            ROWS=together,
            RESIDUAL=residual is not None,
            num_warps=min(16, max(4, padded // 1024)),
        )
    return normed, grown


def silu_mul(gate_up: Tensor) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    gate_up = _dense_rows(gate_up)
    block = min(1024, triton.next_power_of_2(size))
    together = NUMBERS // block if INTERPRETED else 1
    grid = (triton.cdiv(rows, together), triton.cdiv(size, block))
    with current(gate_up.device):
        _silu_mul[grid](gate_up, out, rows, gate_up.stride(0), SIZE=size, ROWS=together, BLOCK=block)
    return out


def _dense_rows(x: Tensor) -> Tensor:
    """x, or a copy of it, with its last axis contiguous; the others at any stride."""
    return x if x.stride(-1) == 1 else x.contiguous()
