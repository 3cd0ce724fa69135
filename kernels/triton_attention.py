"""Paged attention in Triton, from outside: the work of a step is cut once, and two kernels of `triton_attend.py` are
launched for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton
from torch import Tensor

from . import checks
from .layout import Layout
from .plan import AttentionPlan
from .schedule import ITEM, MERGE, Capacity, Schedule, Table, decode_capacity, schedule
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
        ("triton", heads, kv_heads, head_dim, block_size, q.dtype, causal, window),
        lambda: _work(q, kv, plan, causal, window),
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


def _work(q: Tensor, kv: Tensor, plan: AttentionPlan, causal: bool, window: int | None) -> _Work:
    heads, head_dim = q.shape[1:]
    kv_heads, block_size = kv.shape[2:4]
    group, where, count = heads // kv_heads, architecture(q.device), processors(q.device)
    decode, prefill = (tiles(where, phase, head_dim, group, q.dtype.itemsize) for phase in PHASES)
    # who keeps it for new lengths keeps nothing of this step with it
    cut: Callable[[Sequence[int] | Table], Schedule] = partial(
        schedule,
        plan.starts,
        group=group,
        kv_heads=kv_heads,
        decode=decode,
        prefill=prefill,
        processors=count,
        causal=causal,
        window=window,
        batch_invariant=plan.batch_invariant,
    )
    launches: tuple[tuple[Tiles, Tensor], ...]
    if plan.fixed is None:
        made = cut(plan.lengths)
        decode_items, prefill_items, merges = _moved((made.decode, made.prefill, made.merges), q.device)
        launches, part_rows = ((decode, decode_items), (prefill, prefill_items)), made.part_rows
    else:
        longest = plan.block_table.shape[1] * block_size
        room = decode_capacity(plan.tokens, longest, kv_heads=kv_heads, decode=decode, processors=count, window=window)
        shapes = ((room.items, len(ITEM)), (room.merges, len(MERGE)))
        decode_items, merges = plan.fixed.make(shapes, lambda lengths: _decode_tables(cut(lengths), room))
        launches, part_rows = ((decode, decode_items),), room.part_rows
    return _Work(
        launches=tuple((shape, items) for shape, items in launches if len(items)),
        merges=merges,
        parts=torch.empty(part_rows, heads, head_dim, dtype=torch.float32, device=q.device),
        part_lse=torch.empty(part_rows, heads, dtype=torch.float32, device=q.device),
    )


def _decode_tables(made: Schedule, room: Capacity) -> tuple[Table, Table]:
    assert made.part_rows <= room.part_rows, "more partial results than there is room for"
    return made.decode, made.merges


def _moved(tables: Sequence[Table], device: torch.device) -> list[Tensor]:
    """To the device, in one copy."""
    moved = torch.from_numpy(np.concatenate([table.ravel() for table in tables])).to(device, non_blocking=True)
    parts = torch.split(moved, [table.size for table in tables])
    return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]
