"""Choosing tokens in Triton: one program a row, which walks over the vocabulary in blocks. Contract and checks of
shapes stand in `ops.py`; `torch_sample.py` is the same rule in plain torch.

Nothing is sorted. The border of the kept set is searched among the integers that order as the logits do: each walk sums
what lies above a few of them, evenly spread, and the search goes on between two. Weights are computed anew in each
walk, so the only memory is the result, and a row takes the same steps in any batch. Knows nothing of requests, of
penalties or of where random numbers come from.

Ties are those of logits. Two that differ by less than float64 can tell once the peak is taken off (both below 1e-9 or
so, far from the peak) weigh the same; the larger is kept first here, and the lower id in `torch_sample.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_runtime import INTERPRETED, current

# The interpreter pays by the operation. More pivots or fewer warps would spill registers, on gfx942 first
BLOCK = 65536 if INTERPRETED else 4096
PIVOTS, WARPS = 8, 8

NONE = tl.constexpr(2**31 - 1)  # above every id
LOWEST = tl.constexpr(-(2**31) + 0x7FFFFF)  # the key of -inf


@triton.jit
def _key(x):
    """An int32 that orders as the float32 does; -0 becomes 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, peak, temperature):
    # the maximum is taken off before the division: a tiny temperature must not overflow
    return tl.exp((x.to(tl.float64) - peak) / temperature)


@triton.jit
def _block(row, start, V, BLOCK: tl.constexpr):
    """(ids, logits). What lies past the last is -inf, which is never drawn."""
    i = start + tl.arange(0, BLOCK)
    return i, tl.load(row + i, mask=i < V, other=float("-inf"))


@triton.jit
def _kept(i, x, border, limit, peak, temperature, min_p):
    """The weights of what may be drawn, 0 for the others. The most probable token weighs exactly 1."""
    key, weight = _key(x), _weight(x, peak, temperature)
    kept = (key > border) | ((key == border) & (i <= limit))
    return tl.where(kept & (weight >= min_p), weight, 0.0)


@triton.jit
def _largest(row, V, BLOCK: tl.constexpr):
    """(the largest logit, the first id that has it, or -1 if the row is no distribution)"""
    peak = tl.full((), float("-inf"), tl.float32)
    first = tl.full((), -1, tl.int32)
    for start in range(0, V, BLOCK):
        i, x = _block(row, start, V, BLOCK)
        x = tl.where(x != x, float("inf"), x)  # tl.max drops NaN
        largest = tl.max(x, 0)
        if largest > peak:
            peak = largest
            first = tl.min(tl.where(x == largest, i, NONE), 0)
    return peak, tl.where(peak < float("inf"), first, -1)


@triton.jit
def _border(
    row, V, low, end, needed, peak, temperature, WEIGH: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr
):
    """(the largest key from which on there is as much as `needed`, how much lies above it). Much is the sum of weights
    or, without WEIGH, the number of keys.

        low <= ... pivots, `step` apart ... < end      from low on there is enough, from end on there is not
    """
    above = needed - needed  # a zero of its dtype
    while end - low > 1:
        step = (end - low + PIVOTS) // (PIVOTS + 1)
        pivots = tl.minimum(low + step * (1 + tl.arange(0, PIVOTS)), end)
        sums = tl.zeros([PIVOTS], needed.dtype) + above
        for start in range(0, V, BLOCK):
            _, x = _block(row, start, V, BLOCK)
            key = _key(x)
            inside = (key >= low) & (key < end)
            if tl.max(inside.to(tl.int32), 0) > 0:  # after a few steps most blocks hold none
                much = tl.where(inside, _weight(x, peak, temperature), 0.0) if WEIGH else inside.to(tl.int32)
                sums += tl.sum(tl.where(key[None, :] >= pivots[:, None], much[None, :], 0), 1)
        enough = sums >= needed
        above = tl.max(tl.where(enough, above, sums), 0)
        low += tl.sum(enough.to(tl.int32), 0) * step
        end = tl.minimum(low + step, end)
    return low, above


@triton.jit
def _first(row, V, point, border, limit, peak, temperature, min_p, EQUALS: tl.constexpr, BLOCK: tl.constexpr):
    """(the first id up to which kept weights sum to more than `point`, or NONE, their sum to the end of its block).
    With EQUALS, keys equal to the border count instead, 1 each."""
    first = tl.full((), NONE, tl.int32)
    before = tl.full((), 0.0, tl.float64)
    start = tl.full((), 0, tl.int32)
    while (first == NONE) & (start < V):
        i, x = _block(row, start, V, BLOCK)
        equal = (_key(x) == border).to(tl.float64)
        much = equal if EQUALS else _kept(i, x, border, limit, peak, temperature, min_p)
        # In a parallel scan a sum may round to more than the next. So weights of 0 are left out, lest one be drawn,
        # and the largest sum is carried on, not the last
        sums = tl.where(much > 0, before + tl.cumsum(much, 0), before)
        first = tl.min(tl.where(sums > point, i, NONE), 0)
        before = tl.max(sums, 0)
        start += BLOCK
    return first, before


@triton.jit
def _draw(row, V, peak, temperature, top_p, top_k, min_p, uniform, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    # Kept are the keys above `border` and, of those equal to it, the first `equals`
    border = tl.full((), LOWEST, tl.int64)
    equals = tl.full((), NONE, tl.float64)
    end = _key(peak).to(tl.int64) + 1
    peak = peak.to(tl.float64)
    if (top_k > 0) & (top_k < V):
        count = top_k.to(tl.int32)
        border, more = _border(row, V, border, end, count, peak, temperature, False, BLOCK, PIVOTS)
        equals = (count - more).to(tl.float64)
    if top_p < 1:
        total = equals * _weight(_logit(border), peak, temperature)
        for start in range(0, V, BLOCK):
            _, x = _block(row, start, V, BLOCK)
            total += tl.sum(tl.where(_key(x) > border, _weight(x, peak, temperature), 0.0), 0)
        needed = tl.maximum(top_p * total, 1e-30)  # never 0: the most probable token is kept
        nucleus, above = _border(row, V, border, end, needed, peak, temperature, True, BLOCK, PIVOTS)
        edge = _weight(_logit(nucleus), peak, temperature)
        share = tl.ceil((needed - above) / tl.where(edge > 0, edge, 1.0))
        # between 1 and what top_k leaves, however the sums have rounded
        equals = tl.minimum(tl.maximum(share, 1.0), tl.where(nucleus == border, equals, NONE))
        border = nucleus

    limit = tl.full((), NONE, tl.int32)  # the last id at which a key equal to the border is kept
    if equals < V:
        limit, _ = _first(row, V, equals - 1, border, limit, peak, temperature, min_p, True, BLOCK)

    # Two walks: the first exceeds nothing and finds the total. They are one code, so that their sums agree to the bit
    # and the second cannot end without a token
    drawn = tl.full((), NONE, tl.int32)
    point = tl.full((), float("inf"), tl.float64)
    for _ in range(2):
        drawn, total = _first(row, V, point, border, limit, peak, temperature, min_p, False, BLOCK)
        # uniform < 1, but its product may round up to the total: stay below it
        below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
        point = tl.minimum(uniform * total, below)
    return drawn


@triton.jit
def _sample(ids, logits, settings, V, stride, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """ids int64 [B], -1 for a row that is no distribution; settings float64 [B, 5]. Grid: (rows)."""
    program = tl.program_id(0).to(tl.int64)
    row, settings = logits + program * stride, settings + program * 5
    temperature = tl.load(settings)
    peak, answer = _largest(row, V, BLOCK)
    if (answer >= 0) & (temperature > 0):
        top_p, top_k = tl.load(settings + 1), tl.load(settings + 2)
        min_p, uniform = tl.load(settings + 3), tl.load(settings + 4)
        answer = _draw(row, V, peak, temperature, top_p, top_k, min_p, uniform, BLOCK, PIVOTS)
    tl.store(ids + program, answer.to(tl.int64))


def sample(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    # one copy to the device, for callers hold them on the host; the only wait is for the ids
    settings = torch.stack([column.double() for column in (temperature, top_p, top_k, min_p, uniforms)], dim=1)
    settings = settings.to(logits.device, non_blocking=True)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocabulary))
        with current(logits.device):
            _sample[(rows,)](
                ids, logits, settings, vocabulary, logits.stride(0), BLOCK=block, PIVOTS=PIVOTS, num_warps=WARPS
            )
    chosen = ids.cpu()
    if bool((chosen < 0).any()):
        raise ValueError("logits: a row that holds NaN or +inf, or nothing but -inf; allowed is none of these")
    return chosen
