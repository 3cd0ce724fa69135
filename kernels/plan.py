"""The attention plan: what every layer of one engine step would otherwise work out again.

Knows lengths and block numbers; knows nothing of heads, dtypes or the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import checks

T = TypeVar("T")

Cut = Callable[[NDArray[np.int32]], tuple[NDArray[np.int32], ...]]  # lengths in, tables of work out


class FixedTables(Protocol):
    """Keeps tables of work where they are while the lengths that they are made of change: a `StaticPlan` does."""

    def make(self, shapes: tuple[tuple[int, int], ...], cut: Cut) -> tuple[Tensor, ...]:
        """int32 tensors of these shapes. Whenever there are new lengths, `cut` is asked for their first lines, and the
        lines after those become -1."""


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


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Built once per engine step by `plan`, shared by all layers, valid while its tensors stay as they were."""

    cu_q: Tensor
    seq_lens: Tensor
    block_table: Tensor
    starts: tuple[int, ...]  # cu_q on the host
    lengths: tuple[int, ...]  # seq_lens on the host
    host_table: Tensor | None  # block_table on the host, if it was there
    batch_invariant: bool
    fixed: FixedTables | None = None  # of a static plan: its tensors change, and `lengths` is empty
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)
    _checked: set[tuple[int, int]] = field(default_factory=set, init=False, repr=False)

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    @cached_property
    def sequences(self) -> tuple[SequencePlan, ...]:
        """For who computes sequence by sequence. It takes time to make: a native kernel reads the tensors."""
        table = self.block_table.long()  # block * stride passes 2^31 in a cache of a few gigabytes
        return tuple(
            SequencePlan(first_row=begin, rows=end - begin, keys=keys, blocks=blocks)
            for (begin, end), keys, blocks in zip(pairwise(self.starts), self.lengths, table, strict=True)
        )

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives: made for the first layer that asks by this key, and kept for those after it."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def check_blocks(self, num_blocks: int, block_size: int) -> None:
        """That every position lies in a block of such a cache. Looks once, however many layers ask.

        Raises ValueError for too few blocks and for numbers past the cache's ends; not for those of a table that was
        made on a device: a look would make it wait.
        """
        if (num_blocks, block_size) in self._checked:
            return
        table = None if self.host_table is None else self.host_table.numpy()
        check_blocks(self.lengths, table, self.block_table.shape[1], num_blocks, block_size)
        self._checked.add((num_blocks, block_size))

    @property
    def caches(self) -> Collection[tuple[int, int]]:
        """num_blocks and block_size of those that `check_blocks` was asked for."""
        return self._checked


def check_blocks(
    lengths: Sequence[int], table: NDArray[np.int32] | None, columns: int, num_blocks: int, block_size: int
) -> None:
    """As `AttentionPlan.check_blocks`, of what is on the host. table [len(lengths), any]; None is not known."""
    if (longest := max(lengths, default=0)) > columns * block_size:
        raise ValueError(
            f"block_table: {columns} blocks of {block_size} positions a sequence; one has {longest} positions"
        )
    # what is outside is perhaps in the padding alone, which may hold anything
    if table is not None and table.size and (table.min() < 0 or table.max() >= num_blocks):
        for b, (line, keys) in enumerate(zip(table.tolist(), lengths, strict=True)):
            for block in line[: -(-keys // block_size)]:
                if not 0 <= block < num_blocks:
                    raise ValueError(f"block_table: block {block} in sequence {b}; allowed is 0 to {num_blocks - 1}")


def plan(
    cu_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    device: torch.device | None = None,
    batch_invariant: bool = False,
) -> AttentionPlan:
    """Plan the attention of one step over B sequences.

    cu_q         int32 [B + 1]  sequence b owns rows cu_q[b] .. cu_q[b + 1] - 1; starts at 0, never falls
    seq_lens     int32 [B]      keys of sequence b, the rows of this step included
    block_table  int32 [B, max_blocks]  the block of position p is block_table[b, p // block_size]
    device       where attention is computed; None is where the tensors are. Tensors of the host are copied there, and
                 must stay as they are until the step is done; those of a device are read back, which waits for it
    batch_invariant  a sequence has the same bits alone and in any batch on GPUs too, where that costs some of the speed
                 of few long sequences, and up to 64 * HQ * D * 4 bytes for each row of a decoding sequence; on CPUs
                 it always has

    All contiguous, on one device. Reads the lengths on the host. Raises ValueError for a wrong shape, dtype or
    layout, a cu_q that falls and a negative length; `AttentionPlan.check_blocks` looks at the blocks.
    """
    checks.shape("seq_lens", seq_lens, (None,), "B")
    sequences = len(seq_lens)
    checks.shape("cu_q", cu_q, (sequences + 1,), "B + 1")
    checks.shape("block_table", block_table, (sequences, None), "B, max_blocks")
    for name, x in (("cu_q", cu_q), ("seq_lens", seq_lens), ("block_table", block_table)):
        checks.dtype(name, x, (torch.int32,))
        checks.contiguous(name, x)
    checks.same_device(cu_q, seq_lens=seq_lens, block_table=block_table)
    starts, lengths = tuple(cu_q.tolist()), tuple(seq_lens.tolist())
    if starts[0] != 0 or any(a > b for a, b in pairwise(starts)):
        raise ValueError(f"cu_q: {list(starts)}; allowed are row numbers that start at 0 and never fall")
    if min(lengths, default=0) < 0:
        raise ValueError(f"seq_lens: {list(lengths)}; allowed is 0 or more")
    host_table = block_table if block_table.device.type == "cpu" else None
    if device is not None and device != block_table.device:
        cu_q, seq_lens, block_table = (x.to(device, non_blocking=True) for x in (cu_q, seq_lens, block_table))
    return AttentionPlan(cu_q, seq_lens, block_table, starts, lengths, host_table, batch_invariant)
