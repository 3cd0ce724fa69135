"""One replica's array of blocks: `[blocks + 1, layers, 2, kv_heads, block_size, head_dim]` in one tensor.

A block's K and V of all layers lie together, so moving a block is one copy; a layer is a strided view, which
the kernels take as it is. Knows nothing of who owns a block: that is the ledger's business and the engine's; nor
how blocks come and go: `block_stores.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bifolio.kernels import Layout

HOST = torch.device("cpu")


class KvCache:
    """Usable blocks are numbered 1 .. `blocks`. Block 0 is the null block: zeros, never leased, read or
    written; it stands in the padding of block tables, so that padding always names memory that exists.
    """

    def __init__(
        self,
        blocks: int,
        layers: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        layout: Layout = "plain",
        device: torch.device = HOST,
        memory: Tensor | None = None,
    ) -> None:
        """Allocate, zeros: the memory is taken at once. Or live in `memory`: uint8, flat, zeros, of just the size.

        `layout` says how the K and V of a head lie in a block; the kernels are told.
        """
        self.blocks = blocks
        self.block_size = block_size
        self.dtype = dtype
        self.layout = layout
        self.device = device
        shape = (blocks + 1, layers, 2, kv_heads, block_size, head_dim)
        tensor = torch.zeros(shape, dtype=dtype, device=device) if memory is None else memory.view(dtype).view(shape)
        self.tensor: Tensor = tensor  # [blocks + 1, layers, 2, kv_heads, block_size, head_dim]
        self.bytes: Tensor = tensor.view(blocks + 1, -1).view(torch.uint8)  # the same memory [blocks + 1, block_bytes]
        self.block_bytes: int = self.bytes.shape[1]

    def copy(self, source: int, block: int) -> None:
        """Launch a copy of a whole block, on the calling thread's stream: in its place among the steps."""
        assert 1 <= min(source, block) <= max(source, block) <= self.blocks, (source, block)
        self.bytes[block].copy_(self.bytes[source])

    def layer(self, index: int) -> Tensor:
        """View [blocks + 1, 2, kv_heads, block_size, head_dim] of one layer: K at [:, 0], V at [:, 1]."""
        return self.tensor[:, index]
