"""Paged attention in Triton: one kernel for prompt chunks and single tokens, and one that merges what it left in parts.

The query heads of one KV head are rows of one tile: K and V are read once for all of them, whatever their number G.

    rows of a tile, G = 3   | token 0: head 0, 1, 2 | token 1: head 0, 1, 2 | ... | unused |
    keys of an item         | masked | no mask: every row sees every key | masked |
                            ^ first key          (the window's edge, the diagonal, the end)   end key ^

Softmax is online (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022), in float32 and in base 2: scale *
log2(e) is multiplied once, and exp2 is what the hardware has. Which items there are is `schedule.py`'s business, how
they are launched `triton_attention.py`'s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .schedule import ITEM, MERGE

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Stands for the maximum of a row that has seen nothing: exp2(-inf - LEAST) is 0, where -inf - -inf would be NaN
LEAST = tl.constexpr(-3.4e38)
ITEM_FIELDS = tl.constexpr(len(ITEM))
MERGE_FIELDS = tl.constexpr(len(MERGE))
# Their places in memory differ from step to step: nothing is to be compiled anew for that
TABLES = ["block_table", "cu_q", "items", "merges", "seq_lens"]


@triton.jit
def _scores(q, k, scale, SOFTCAP: tl.constexpr):
    """q k^T in base 2: [rows, keys]."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP > 0:
        # |tanh(x)| = (1 - e) / (1 + e) with e = exp(-2 |x|), which overflows nowhere, but cancels near 0; there it is
        # x - x^3 / 3. scale holds log2(e) already
        x = s * (scale * (LN_2 / SOFTCAP))
        e = tl.math.exp2(tl.abs(x) * (-2.0 * LOG2_E))
        t = tl.where(x < 0, e - 1.0, 1.0 - e) / (1.0 + e)
        s = tl.where(tl.abs(x) < 0.04, x - x * x * x / 3.0, t) * (SOFTCAP * LOG2_E)
    else:
        s = s * scale
    return s


@triton.jit
def _absorb(s, v, top, total, mixed):
    """One step of the online softmax: scores s [rows, keys] and their V join the maximum, the sum and the output."""
    grown = tl.maximum(top, tl.max(s, 1))
    base = tl.maximum(grown, LEAST)
    weights = tl.math.exp2(s - base[:, None])
    shrink = tl.math.exp2(top - base)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
    return grown, total * shrink + tl.sum(weights, 1), mixed


@triton.jit
def _blocks_at(table, key, keys, end, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """The block numbers of keys key .. key + KEYS - 1: one where they lie in one block, else one for each key."""
    if BLOCK % KEYS == 0:
        block = tl.load(table + key // BLOCK, mask=key < end, other=0)
    else:
        block = tl.load(table + (key + keys) // BLOCK, mask=key + keys < end, other=0)
    return block


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=TABLES)
def attend(
    q,
    kv,
    out,
    lse,
    parts,
    part_lse,
    sinks,
    cu_q,
    seq_lens,
    block_table,
    items,
    scale,
    v_scale,
    q_row,
    q_head,
    out_row,
    out_head,
    kv_block,
    kv_half,
    kv_head,
    table_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """One item of one KV head. Grid: items x KV heads, all heads of an item before those of the next, shorter one."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    item = items + tl.program_id(0) // KV_HEADS * ITEM_FIELDS
    group = tl.program_id(0) % KV_HEADS
    sequence = tl.load(item)
    if sequence < 0:
        return
    first_row = tl.load(item + 1)
    first_key = tl.load(item + 2)
    end_key = tl.load(item + 3)
    part = tl.load(item + 4)
    start = tl.load(cu_q + sequence)
    rows = tl.load(cu_q + sequence + 1) - start
    HELD: tl.constexpr = ROWS // GROUP

    # int64 before it is multiplied: a cache passes 2^31 elements
    position = tl.load(seq_lens + sequence) - rows + first_row  # of the tile's first row
    r, keys, d = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, D_PADDED)
    row = first_row + r // GROUP
    head = group * GROUP + r % GROUP
    live = (r < HELD * GROUP) & (row < rows)
    token = (start + row).to(tl.int64)
    in_head = d < D
    query = tl.load(
        q + token[:, None] * q_row + head.to(tl.int64)[:, None] * q_head + d[None, :],
        mask=live[:, None] & in_head[None, :],
        other=0.0,
    )
    k_head = kv + group.to(tl.int64) * kv_head
    v_head = k_head + kv_half
    table = block_table + sequence.to(tl.int64) * table_row
    at_row = position + r // GROUP

    # keys clear .. clear_end - 1, in whole tiles, are seen by every row
    clear, clear_end = first_key, end_key
    seen_from = 0
    if WINDOW > 0:
        seen_from = position - WINDOW + 1  # by the first row; the last row sees less
        clear = tl.cdiv(tl.maximum(seen_from + HELD - 1, 0), KEYS) * KEYS
        clear = tl.minimum(tl.maximum(clear, first_key), tl.cdiv(end_key - first_key, KEYS) * KEYS + first_key)
    if CAUSAL:
        clear_end = tl.minimum(position + 1, end_key)
    clear_end = clear + tl.maximum(clear_end - clear, 0) // KEYS * KEYS

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D_PADDED], tl.float32)
    # The next tile's blocks are loaded one tile ahead: so the compiler can keep several K and V on their way
    block = _blocks_at(table, clear, keys, clear_end, BLOCK, KEYS)
    for key in tl.range(clear, clear_end, KEYS, num_stages=STAGES):
        if BLOCK % KEYS == 0:
            at = block.to(tl.int64) * kv_block + (key % BLOCK + keys) * D
        else:
            at = block.to(tl.int64) * kv_block + (key + keys) % BLOCK * D
        if D == D_PADDED:
            k = tl.load(k_head + at[:, None] + d[None, :])
            v = tl.load(v_head + at[:, None] + d[None, :])
        else:
            k = tl.load(k_head + at[:, None] + d[None, :], mask=in_head[None, :], other=0.0)
            v = tl.load(v_head + at[:, None] + d[None, :], mask=in_head[None, :], other=0.0)
        block = _blocks_at(table, key + KEYS, keys, clear_end, BLOCK, KEYS)
        s = _scores(query, k.to(query.dtype), scale, SOFTCAP)
        top, total, mixed = _absorb(s, v.to(query.dtype), top, total, mixed)

    # the tiles before and after, where each row sees what it may; what none sees is not even loaded: 0 * NaN is NaN
    before = clear - first_key
    for i in tl.range(0, before + tl.maximum(end_key - clear_end, 0), KEYS):
        edge = tl.where(i < before, first_key + i, clear_end + i - before) + keys
        there = (edge < end_key) & (edge >= seen_from)
        edge_block = tl.load(table + edge // BLOCK, mask=there, other=0)
        at = edge_block.to(tl.int64) * kv_block + edge % BLOCK * D
        mask = there[:, None] & in_head[None, :]
        k = tl.load(k_head + at[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_head + at[:, None] + d[None, :], mask=mask, other=0.0)
        seen = there[None, :]
        if CAUSAL:
            seen = seen & (edge[None, :] <= at_row[:, None])
        if WINDOW > 0:
            seen = seen & (edge[None, :] > at_row[:, None] - WINDOW)
        s = tl.where(seen, _scores(query, k.to(query.dtype), scale, SOFTCAP), float("-inf"))
        top, total, mixed = _absorb(s, v.to(query.dtype), top, total, mixed)

    if SINKS:  # once for all keys: a part leaves it to the merge
        sink = tl.load(sinks + head, mask=live & (part < 0), other=float("-inf")).to(tl.float32) * LOG2_E
        top, total, shrink = _join(top, total, sink)
        mixed = mixed * shrink[:, None]
    if FLOAT8:
        mixed = mixed * v_scale
    found = mixed / _or_one(total)[:, None]
    log_sum = top + tl.math.log2(_or_one(total))
    mask = live[:, None] & in_head[None, :]
    if part >= 0:
        part_row = (part + r // GROUP).to(tl.int64) * HEADS + head
        tl.store(parts + part_row[:, None] * D + d[None, :], found, mask=mask)
        tl.store(part_lse + part_row, log_sum, mask=live)
    else:
        tl.store(out + token[:, None] * out_row + head.to(tl.int64)[:, None] * out_head + d[None, :], found, mask=mask)
        if LSE:
            tl.store(lse + token * HEADS + head, log_sum * LN_2, mask=live)


@triton.jit
def _or_one(total):
    """A denominator. That of a row which saw nothing is 0, and its output, 0 / 1, as well."""
    return tl.where(total > 0, total, 1.0)


@triton.jit
def _join(top, total, score):
    """A maximum and a sum take in one more score; what was mixed so far is to shrink by the third."""
    grown = tl.maximum(top, score)
    base = tl.maximum(grown, LEAST)
    shrink = tl.math.exp2(top - base)
    return grown, total * shrink + tl.math.exp2(score - base), shrink


@triton.jit(do_not_specialize_on_alignment=TABLES)
def combine(
    out,
    lse,
    parts,
    part_lse,
    sinks,
    merges,
    out_row,
    out_head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    """One head of one row that was computed in parts. Grid: (rows, heads).

    With (O_i, lse_i), outputs and denominators of disjoint keys, O = sum w_i O_i / sum w_i, where w_i = 2^(lse_i - max
    lse): the online softmax again, by parts instead of keys.
    """
    merge = merges + tl.program_id(0) * MERGE_FIELDS
    head = tl.program_id(1).to(tl.int64)
    token = tl.load(merge).to(tl.int64)
    if token < 0:
        return
    first = tl.load(merge + 1)
    step = tl.load(merge + 2)
    count = tl.load(merge + 3)
    i, d = tl.arange(0, PARTS), tl.arange(0, D_PADDED)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([D_PADDED], tl.float32)
    for begin in range(0, count, PARTS):
        there = begin + i < count
        place = (first + (begin + i) * step).to(tl.int64) * HEADS + head
        found = tl.load(part_lse + place, mask=there, other=float("-inf"))
        grown = tl.maximum(top, tl.max(found, 0))
        base = tl.maximum(grown, LEAST)
        weights = tl.math.exp2(found - base)
        shrink = tl.math.exp2(top - base)
        part = tl.load(parts + place[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        mixed = mixed * shrink + tl.sum(part * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = grown
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top, total, shrink = _join(top, total, sink)
        mixed = mixed * shrink
    tl.store(out + token * out_row + head * out_head + d, mixed / _or_one(total), mask=d < D)
    if LSE:
        natural = (top + tl.math.log2(_or_one(total))) * LN_2
        tl.store(lse + token * HEADS + head + tl.arange(0, 1), natural)
