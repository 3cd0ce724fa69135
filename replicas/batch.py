"""One engine step as numbers: which tokens are computed, where their K and V go, what they may look at.

Built from plain rows on the host, once per step; as tensors of a device it is shared by all layers. Knows nothing about
requests or the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bifolio.kernels import AttentionPlan, plan

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of one sequence to compute now: a prompt chunk, or one token of a decoding sequence and the
    draft of what follows it.

    tokens[i] has position start + i. `blocks[j]` holds positions j * block_size onwards; it covers at least
    the last token, and positions before `start` are in the cache already.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    want_logits: bool = True  # of the last token; False for a chunk that is not the prompt's last
    targets: Sequence[int] = ()  # targets[i] follows tokens[i]: its logprob is wanted, there may be fewer than tokens
    top: int = 0  # and the logprobs of so many most probable ones at its place
    drafted: int = 0  # so many of the tokens, the last ones, are a draft: logits of each are wanted as well


@dataclass(frozen=True, slots=True, eq=False)
class HostBatch:
    """T tokens of B sequences, on the host.

    tokens, positions  int64 [T]
    slots              int64 [T]  block * block_size + offset: where the token's K and V are written
    starts             int32 [B + 1]  sequence b has the tokens starts[b] .. starts[b + 1] - 1
    lengths            int32 [B]  positions of each sequence, those of this step included
    table              int32 [B, max_blocks]  its blocks, padded with 0, the null block
    logit_rows         int64 [n]  the tokens whose logits are wanted, in the order of the rows; of a row with a draft
                       several, ascending
    scored_rows        int64 [m]  the tokens whose logits are wanted only for the logprobs of what follows them
    targets, tops      m each: what follows, and how many most probable ones are wanted besides
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    table: NDArray[np.int32]
    logit_rows: NDArray[np.int64]
    scored_rows: NDArray[np.int64]
    targets: tuple[int, ...]
    tops: tuple[int, ...]

    def on(self, device: torch.device) -> Batch:
        """Its tensors. Those of the CPU share this batch's memory."""
        whole = (self.tokens, self.positions, self.slots, self.logit_rows, self.scored_rows)
        if device == CPU:
            parts = tuple(torch.from_numpy(array) for array in whole)
        else:  # one copy
            moved = torch.from_numpy(np.concatenate(whole)).to(device, non_blocking=True)
            parts = torch.split(moved, [len(array) for array in whole])
        tokens, positions, slots, logit_rows, scored_rows = parts
        starts, lengths, table = (torch.from_numpy(array) for array in (self.starts, self.lengths, self.table))
        lines = plan(starts, lengths, table, device=device)
        return Batch(tokens, positions, slots, lines, logit_rows, scored_rows, self.targets, self.tops)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tensors of a `HostBatch`, on one device; `plan` is that of its sequences."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    plan: AttentionPlan
    logit_rows: Tensor
    scored_rows: Tensor
    targets: tuple[int, ...]
    tops: tuple[int, ...]


def build_batch(rows: Sequence[Row], block_size: int, device: torch.device = CPU) -> Batch:
    """The batch of these rows, in their order, on a device."""
    return host_batch(rows, block_size).on(device)


def host_batch(rows: Sequence[Row], block_size: int) -> HostBatch:
    """The batch of these rows, in their order. Asserts that each has tokens and blocks enough for them."""
    counts = np.array([len(row.tokens) for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    ends = starts + counts
    used = -(-ends // block_size)
    assert all(counts > 0), "a row without tokens"
    assert all(len(row.targets) <= len(row.tokens) for row in rows), "targets go past the tokens"
    assert all(row.drafted < len(row.tokens) for row in rows), "a draft of nothing"
    assert all(len(row.blocks) >= n for row, n in zip(rows, used, strict=True)), "blocks end before the tokens"

    first = np.concatenate(([0], np.cumsum(counts)))
    table = np.zeros((len(rows), int(used.max(initial=1))), dtype=np.int64)
    for line, row, n in zip(table, rows, used, strict=True):
        line[:n] = row.blocks[:n]
    owner = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(first[-1]) - first[owner] + starts[owner]
    wanted = np.array([(1 + row.drafted) * row.want_logits for row in rows], dtype=np.int64)
    return HostBatch(
        tokens=np.array([token for row in rows for token in row.tokens], dtype=np.int64),
        positions=positions,
        slots=table[owner, positions // block_size] * block_size + positions % block_size,
        starts=first.astype(np.int32),
        lengths=ends.astype(np.int32),
        table=table.astype(np.int32),
        logit_rows=np.repeat(first[1:] - np.cumsum(wanted), wanted) + np.arange(wanted.sum()),
        scored_rows=np.array(
            [at + i for at, row in zip(first.tolist(), rows, strict=False) for i in range(len(row.targets))],
            dtype=np.int64,
        ),
        targets=tuple(target for row in rows for target in row.targets),
        tops=tuple(row.top for row in rows for _ in row.targets),
    )
