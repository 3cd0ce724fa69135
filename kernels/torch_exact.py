"""float32 arithmetic in which a row has the same bits alone, in a batch, and in any chunk of its sequence.

A BLAS chooses its order of sums by the shape of the product, so the shapes are fixed here: every product has
`LEAST_ROWS` to `MOST_ROWS` rows, and attention goes over tiles of `TILE` keys that begin at multiples of `TILE`
positions, in ascending order. Within those bounds MKL has one order of sums per row when MKL_CBWR is strict
(`self_check.py` proves it at start, on the machine it runs on). What a row does not see adds exact zeros.

    keys     0        64       128      192
             |---------|---------|---------|     row p: max over its tiles, then sums tile by tile
    chunk a  ########## ####                     rows 0 .. 99 in one step, or one by one: the same tiles
    chunk b               ##### ######
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import Layout, read_blocks
from .plan import AttentionPlan, SequencePlan

LEAST_ROWS = 4  # with fewer, MKL takes other kernels, whose last bits differ: such products are padded with zeros
MOST_ROWS = 64
TILE = 64
_SERIAL = 32768 - 1  # elements that torch computes in one thread: cut, an odd end would be rounded otherwise


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(len(x), len(weight))
    for begin in range(0, len(x), MOST_ROWS):
        part = x[begin : begin + MOST_ROWS]
        out[begin : begin + MOST_ROWS] = (_padded(part, 0) @ weight.t())[: len(part)]
    return out if bias is None else out.add_(bias)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    rows = max(1, _SERIAL // gate.shape[-1])
    return torch.cat([F.silu(part) for part in torch.split(gate, rows)]).mul_(up)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    plan: AttentionPlan,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    out: Tensor,
    layout: Layout,
) -> None:
    """Fill `out`. The contract stands at `ops.paged_attention`, which has checked everything."""
    for s in plan.sequences:
        if s.rows:
            _attend(q[s.first_row : s.first_row + s.rows], kv, s, causal, window, scale, out, layout)


def _attend(
    q: Tensor,
    kv: Tensor,
    s: SequencePlan,
    causal: bool,
    window: int | None,
    scale: float,
    out: Tensor,
    layout: Layout,
) -> None:
    rows, heads, head_dim = q.shape
    kv_heads = kv.shape[2]
    group = heads // kv_heads
    packed = q.reshape(rows, kv_heads, group, head_dim).transpose(0, 1).reshape(kv_heads, rows * group, head_dim)
    seen = 0 if window is None else min(s.keys, max(0, s.keys - s.rows - window + 1))  # the first position
    first = seen // TILE * TILE
    k, v = _tiles(kv, s, first, seen, layout)
    position = torch.arange(s.keys - rows, s.keys).repeat_interleave(group)[:, None]
    result = torch.empty_like(packed)
    for begin in range(0, rows * group, MOST_ROWS):
        part = slice(begin, begin + MOST_ROWS)
        at = position[part]
        last = int(at[-1]) if causal else s.keys - 1
        mixed = _rows(_padded(packed[:, part], 1), k, v, at, first, last, s.keys, causal, window, scale)
        result[:, part] = mixed[:, : len(at)]
    by_row = result.view(kv_heads, rows, group, head_dim).transpose(0, 1).reshape(rows, heads, head_dim)
    out[s.first_row : s.first_row + rows] = by_row


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    first: int,
    last: int,
    keys: int,
    causal: bool,
    window: int | None,
    scale: float,
) -> Tensor:
    """Attention of q [kv_heads, m, head_dim] at `position` [rows, 1] over the tiles up to key `last`."""
    scores = []
    for tile in range(0, last + 1 - first, TILE):
        score = torch.bmm(q, k[:, tile : tile + TILE].transpose(1, 2)).mul_(scale)
        key = torch.arange(first + tile, first + tile + TILE)[None]
        hidden = key >= keys
        if causal:
            hidden = hidden | (key > position)
        if window is not None:
            hidden = hidden | (key <= position - window)
        score[:, : len(position)].masked_fill_(hidden, -torch.inf)
        scores.append(score)
    total, mixed = q.new_zeros(*q.shape[:2], 1), torch.zeros_like(q)
    if scores:
        top = torch.stack([score.amax(-1, keepdim=True) for score in scores]).amax(0)
        top.masked_fill_(top == -torch.inf, 0.0)  # a row that sees nothing: exp(-inf - 0) = 0, not NaN
        for tile, score in enumerate(scores):
            weights = score.sub_(top).exp_()
            total += weights.sum(-1, keepdim=True)
            mixed += torch.bmm(weights, v[:, tile * TILE : (tile + 1) * TILE])
    return mixed / total.masked_fill(total == 0, 1.0)


def _tiles(kv: Tensor, s: SequencePlan, first: int, seen: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """K and V from position `first` to the end of the last tile, each [kv_heads, n * TILE, head_dim]. Slots that no
    row sees, before position `seen` or past the end, are zeros, whatever they hold: 0 * NaN would be NaN."""
    block_size = kv.shape[3]
    skipped = first // block_size
    k, v = read_blocks(kv, s.blocks[skipped : -(-s.keys // block_size)], layout)
    held = slice(seen - skipped * block_size, s.keys - skipped * block_size)
    zeros = (0, 0, seen - first, (first - s.keys) % TILE)
    return F.pad(k[:, held], zeros), F.pad(v[:, held], zeros)


def _padded(x: Tensor, axis: int) -> Tensor:
    """`x` with zero rows added up to LEAST_ROWS along axis 0 or 1, the last but one."""
    missing = LEAST_ROWS - x.shape[axis]
    return F.pad(x, (0, 0, 0, missing)) if missing > 0 else x
