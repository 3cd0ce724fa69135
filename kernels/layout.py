"""What the numbers of one block of a KV cache mean: where K and V of a position lie within the P * D of a head.

The shape of a cache is the same in every layout, [num_blocks, 2, HK, P, D], and so is the size of a block: it
moves as bytes. With w numbers in a 32-bit word (bfloat16: 2, float32: 1), k[p, d] and v[p, d] of one head lie at:

    plain      K  [P][D]        K and V  p0 d0, p0 d1, p0 d2, ...
               V  [P][D]

    packed     K  [D/w][P][w]   bfloat16  | p0 d0, p0 d1 | p1 d0, p1 d1 | ...  | p0 d2, p0 d3 | ...
                                float32   | p0 d0 | p1 d0 | ...  | p0 d1 | ...
               V  [P/w][D][w]   bfloat16  | p0 d0, p1 d0 | p0 d1, p1 d1 | ...  | p2 d0, p3 d0 | ...
                                float32   | p0 d0 | p0 d1 | ...  | p1 d0 | ...

So a vector of words holds one dim (or two) of many keys: that is what a dot product over D wants of K, and one
over P of V. A layout is part of a deployment, never of a machine: whoever computes reads the one that is declared.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Layout = Literal["plain", "packed"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
PACKABLE = (torch.bfloat16, torch.float32)


def kv_layout(dtype: torch.dtype, head_dim: int, block_size: int, device_type: str = "cpu") -> Layout:
    """The layout of a cache that is to be fast: packed on CPUs, for the numbers and sizes that can be packed."""
    fits = dtype in PACKABLE and head_dim % numbers_in_word(dtype) == 0 and block_size % numbers_in_word(dtype) == 0
    return "packed" if fits and device_type == "cpu" else "plain"


def numbers_in_word(dtype: torch.dtype) -> int:
    return 4 // dtype.itemsize


def read_blocks(kv: Tensor, blocks: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Copies of K and V [HK, n * P, D] of the n blocks numbered in `blocks`, int64 [n], positions in order."""
    kv_heads, block_size, head_dim = kv.shape[2:]
    heads_first = kv.permute(1, 2, 0, 3, 4)  # one copy both gathers the blocks and joins them per head
    if kv.dtype == torch.float8_e4m3fn:  # no gather for this dtype in torch: move the bytes
        pages = heads_first.view(torch.uint8).index_select(2, blocks).view(kv.dtype)
    else:
        pages = heads_first.index_select(2, blocks)
    k, v = pages
    if layout == "packed":
        w = numbers_in_word(kv.dtype)
        words = k.view(torch.int32).view(kv_heads, -1, head_dim // w, block_size)  # many times faster than by number
        k = words.transpose(2, 3).contiguous().view(kv_heads, -1, head_dim // w).view(kv.dtype)
        v = v.view(kv_heads, -1, block_size // w, head_dim, w).transpose(3, 4)
    return k.reshape(kv_heads, -1, head_dim), v.reshape(kv_heads, -1, head_dim)


def write_slots(kv: Tensor, slots: Tensor, k: Tensor, v: Tensor, layout: Layout) -> None:
    """Write k and v [T, HK, D] at `slots`, int64 [T], none of them negative, and nothing beside them."""
    blocks, _, kv_heads, block_size, head_dim = kv.shape
    block, offset = slots // block_size, slots % block_size
    if layout == "plain":
        by_slot = kv.permute(1, 0, 3, 2, 4)  # [2, blocks, block_size, kv_heads, head_dim]
        by_slot[0].index_put_((block, offset), k)
        by_slot[1].index_put_((block, offset), v)
        return
    w = numbers_in_word(kv.dtype)
    keys = kv[:, 0].view(blocks, kv_heads, head_dim // w, block_size, w).permute(0, 3, 1, 2, 4)
    values = kv[:, 1].view(blocks, kv_heads, block_size // w, head_dim, w).permute(0, 2, 4, 1, 3)
    keys.index_put_((block, offset), k.view(len(k), kv_heads, head_dim // w, w))
    values.index_put_((block, offset // w, offset % w), v)
