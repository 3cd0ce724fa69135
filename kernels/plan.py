"""The attention plan: what every layer of one engine step would otherwise work out again.

Knows lengths and block numbers; knows nothing of heads, dtypes or the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from . import checks


@dataclass(frozen=True)
class SequencePlan:
    """Rows first_row .. first_row + rows - 1 of the step's tokens are the last `rows` of `keys` positions."""

    first_row: int
    rows: int
    keys: int
    blocks: Tensor  # int64 [max_blocks]; entries past the last position's block mean nothing

    @cached_property
    def causal_mask(self) -> Tensor:
        """bool [rows, keys], True where visible: row i has position keys - rows + i and sees up to it."""
        device = self.blocks.device
        return torch.ones(self.rows, self.keys, dtype=torch.bool, device=device).tril_(self.keys - self.rows)


@dataclass(frozen=True)
class AttentionPlan:
    """Built once per engine step by `plan`, shared by all layers, valid for the tensors it was built from."""

    tokens: int
    sequences: tuple[SequencePlan, ...]


def plan(cu_q: Tensor, seq_lens: Tensor, block_table: Tensor) -> AttentionPlan:
    """Plan the attention of one step over B sequences.

    cu_q         int32 [B + 1]  sequence b owns rows cu_q[b] .. cu_q[b + 1] - 1; starts at 0, never falls
    seq_lens     int32 [B]      keys of sequence b, the rows of this step included
    block_table  int32 [B, max_blocks]  the block of position p is block_table[b, p // block_size]

    Reads the lengths on the host. Raises ValueError for a wrong shape or dtype, or a cu_q that falls.
    """
    sequences = seq_lens.shape[0]
    checks.shape("seq_lens", seq_lens, (None,), "B")
    checks.shape("cu_q", cu_q, (sequences + 1,), "B + 1")
    checks.shape("block_table", block_table, (sequences, None), "B, max_blocks")
    for name, x in (("cu_q", cu_q), ("seq_lens", seq_lens), ("block_table", block_table)):
        checks.dtype(name, x, (torch.int32,))
    starts: list[int] = cu_q.tolist()
    lengths: list[int] = seq_lens.tolist()
    if starts[0] != 0 or any(a > b for a, b in pairwise(starts)):
        raise ValueError(f"cu_q: {starts}; allowed are row numbers that start at 0 and never fall")
    table = block_table.long()  # block * stride passes 2^31 in a cache of a few gigabytes
    return AttentionPlan(
        tokens=starts[-1],
        sequences=tuple(
            SequencePlan(first_row=begin, rows=end - begin, keys=keys, blocks=blocks)
            for (begin, end), keys, blocks in zip(pairwise(starts), lengths, table, strict=True)
        ),
    )
