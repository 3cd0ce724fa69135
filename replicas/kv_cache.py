"""One replica's array of blocks: `[blocks + 1, layers, 2, kv_heads, block_size, head_dim]` in one tensor.

A block's K and V of all layers lie together, so moving a block is one copy; a layer is a strided view, which
the kernels take as it is. Knows nothing of who owns a block: that is the ledger's business and the engine's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bifolio.kernels import Layout


class KvCache:
    """Usable blocks are numbered 1 .. `blocks`. Block 0 is the null block: zeros, never leased, read or
    written here; it stands in the padding of block tables, so that padding always names memory that exists.

    Also the store that block transfers read from and write to (`kv_manager.transfer.BlockStore`). No locks:
    the generation protocol keeps a block's writer and readers apart.
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
    ) -> None:
        """Allocate. The memory is zero, and the operating system gives it only as it is first written.

        `layout` says how the K and V of a head lie in a block; the kernels are told.
        """
        self.blocks = blocks
        self.block_size = block_size
        self.dtype = dtype
        self.layout = layout
        shape = (blocks + 1, layers, 2, kv_heads, block_size, head_dim)
        self._tensor = torch.zeros(shape, dtype=dtype)
        self._layers = tuple(self._tensor[:, i] for i in range(layers))
        raw = self._tensor.view(blocks + 1, -1).view(torch.uint8).numpy()  # numpy has no bfloat16; bytes it has
        self.block_bytes: int = raw.shape[1]
        self._bytes = memoryview(raw.reshape(-1).data)

    @staticmethod
    def bytes_per_block(layers: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
        """`block_bytes` of such a cache, to work out how many blocks fit in a budget."""
        return layers * 2 * kv_heads * block_size * head_dim * dtype.itemsize

    def layer(self, index: int) -> Tensor:
        """View [blocks + 1, 2, kv_heads, block_size, head_dim] of one layer: K at [:, 0], V at [:, 1]."""
        return self._layers[index]

    def read(self, block: int) -> memoryview:
        """The `block_bytes` bytes of a block, not copied and read-only: they change as the block is written.

        Raises IndexError unless 1 <= block <= blocks.
        """
        start = self._start(block)
        return self._bytes[start : start + self.block_bytes].toreadonly()

    def write(self, block: int, offset: int, data: memoryview | bytes) -> None:
        """Copy `data` into a block, from byte `offset` on.

        Raises IndexError unless 1 <= block <= blocks, ValueError when the data would pass the block's ends.
        """
        start = self._start(block)
        size = memoryview(data).nbytes
        if offset < 0 or offset + size > self.block_bytes:
            raise ValueError(f"data: {size} bytes at {offset}; allowed is 0 to {self.block_bytes}, one block")
        self._bytes[start + offset : start + offset + size] = memoryview(data).cast("B")

    def _start(self, block: int) -> int:
        if not 1 <= block <= self.blocks:
            raise IndexError(f"block: {block}; allowed is 1 to {self.blocks}")
        return block * self.block_bytes
