"""Paged attention in Triton, from outside: the work of a step is cut once, and two kernels of `triton_attend.py` are
launched for each layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from . import checks
from .layout import Layout
from .plan import AttentionPlan
from .schedule import schedule
from .tiles import PHASES, Tiles, tiles
from .triton_attend import attend, combine
from .triton_runtime import architecture, current, processors

PARTS_AT_ONCE = 16
FARTHEST = 2**30  # keys back: positions are 32-bit numbers
NO_FLOAT8 = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_87")


@dataclass(frozen=True, slots=True)
class _Work:
    """A `Schedule` on the device, with room for its partial results: of one step, for all layers of one shape."""

    launches: tuple[tuple[Tiles, Tensor], ...]
    merges: Tensor
    parts: Tensor  # float32 [part_rows, HQ, D]
    part_lse: Tensor  # float32 [part_rows, HQ], in base 2


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
    """Fill `out` (and `lse`). The contract stands at `ops.paged_attention`, which has checked everything else.

    Raises ValueError for a packed cache, which is the CPU's, and for float8 where the GPU cannot convert it.
    """
    where = architecture(q.device)
    if kv.dtype != q.dtype and where in NO_FLOAT8:
        raise ValueError(f"kv: dtype {kv.dtype} on {where}; allowed is {q.dtype}, or float8 from sm_89 on")
    checks.plain(layout)
    heads, head_dim = q.shape[1:]
    kv_heads, block_size = kv.shape[2:4]
    window = None if window is None else min(window, FARTHEST)
    work = plan.once(
        ("triton", heads, kv_heads, head_dim, q.dtype, causal, window),
        lambda: _work(q, kv_heads, plan, causal, window),
    )
    into = out if out.stride(-1) == 1 else torch.empty_like(q)
    log_sums = into if lse is None else lse if lse.is_contiguous() else torch.empty(lse.shape, device=lse.device)
    common = {
        "HEADS": heads,
        "D": head_dim,
        "D_PADDED": triton.next_power_of_2(head_dim),
        "SINKS": sinks is not None,
        "LSE": lse is not None,
    }
    results = (into, log_sums, work.parts, work.part_lse, q if sinks is None else sinks.contiguous())
    with current(q.device):
        for shape, items in work.launches:
            attend[(len(items) * kv_heads,)](
                q,
                kv,
                *results,
                plan.cu_q,
                plan.seq_lens,
                plan.block_table,
                items,
                scale * k_scale * math.log2(math.e),
                v_scale,
                *q.stride()[:2],
                *into.stride()[:2],
                *kv.stride()[:3],
                plan.block_table.stride(0),
                GROUP=heads // kv_heads,
                BLOCK=block_size,
                ROWS=shape.rows,
                KEYS=shape.keys,
                STAGES=shape.stages,
                CAUSAL=causal,
                WINDOW=window or 0,
                SOFTCAP=softcap or 0.0,
                FLOAT8=kv.dtype != q.dtype,
                num_warps=shape.warps,
                num_stages=shape.stages,
                **common,
            )
        if len(work.merges):
            combine[(len(work.merges), heads)](*results, work.merges, *into.stride()[:2], PARTS=PARTS_AT_ONCE, **common)
    if into is not out:
        out.copy_(into)
    if lse is not None and log_sums is not lse:
        lse.copy_(log_sums)


def _work(q: Tensor, kv_heads: int, plan: AttentionPlan, causal: bool, window: int | None) -> _Work:
    heads, head_dim = q.shape[1:]
    group, where = heads // kv_heads, architecture(q.device)
    decode, prefill = (tiles(where, phase, head_dim, group, q.dtype.itemsize) for phase in PHASES)
    cut = schedule(
        plan.starts,
        plan.lengths,
        group=group,
        kv_heads=kv_heads,
        decode=decode,
        prefill=prefill,
        processors=processors(q.device),
        causal=causal,
        window=window,
        batch_invariant=plan.batch_invariant,
    )
    # one copy to the device for all tables
    tables = (cut.decode, cut.prefill, cut.merges)
    moved = torch.from_numpy(np.concatenate([table.ravel() for table in tables])).to(q.device, non_blocking=True)
    decode_items, prefill_items, merges = (
        part.view(table.shape) for part, table in zip(torch.split(moved, [t.size for t in tables]), tables, strict=True)
    )
    launches = ((decode, decode_items), (prefill, prefill_items))
    return _Work(
        launches=tuple((shape, items) for shape, items in launches if len(items)),
        merges=merges,
        parts=torch.empty(cut.part_rows, heads, head_dim, dtype=torch.float32, device=q.device),
        part_lse=torch.empty(cut.part_rows, heads, dtype=torch.float32, device=q.device),
    )
