"""One engine step as tensors: which tokens are computed, where their K and V go, what they may look at.

Built from plain rows, once per step, and shared by all layers. Knows nothing about requests or the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bifolio.kernels import AttentionPlan, plan


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of one sequence to compute now: a prompt chunk, or one token of a decoding sequence.

    tokens[i] has position start + i. `blocks[j]` holds positions j * block_size onwards; it covers at least
    the last token, and positions before `start` are in the cache already.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    want_logits: bool = True  # of the last token; False for a chunk that is not the prompt's last
    targets: Sequence[int] = ()  # targets[i] follows tokens[i]: its logprob is wanted, there may be fewer than tokens
    top: int = 0  # and the logprobs of so many most probable ones at its place


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of B sequences. All tensors are on the CPU.

    tokens, positions  int64 [T]
    slots              int64 [T]  block * block_size + offset: where the token's K and V are written
    plan               of the B sequences; block tables are padded with 0, the null block
    logit_rows         int64 [n]  the tokens whose logits are wanted, in the order of the rows
    scored_rows        int64 [m]  the tokens whose logits are wanted only for the logprobs of what follows them
    targets, tops      m each: what follows, and how many most probable ones are wanted besides
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    plan: AttentionPlan
    logit_rows: Tensor
    scored_rows: Tensor
    targets: tuple[int, ...]
    tops: tuple[int, ...]


def build_batch(rows: Sequence[Row], block_size: int) -> Batch:
    """The batch of these rows, in their order. Asserts that each has tokens and blocks enough for them."""
    counts = np.array([len(row.tokens) for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    ends = starts + counts
    used = -(-ends // block_size)
    assert all(counts > 0), "a row without tokens"
    assert all(len(row.targets) <= len(row.tokens) for row in rows), "targets go past the tokens"
    assert all(len(row.blocks) >= n for row, n in zip(rows, used, strict=True)), "blocks end before the tokens"

    first = np.concatenate(([0], np.cumsum(counts)))
    table = np.zeros((len(rows), int(used.max(initial=1))), dtype=np.int64)
    for line, row, n in zip(table, rows, used, strict=True):
        line[:n] = row.blocks[:n]
    owner = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(first[-1]) - first[owner] + starts[owner]
    slots = table[owner, positions // block_size] * block_size + positions % block_size
    wanted = np.array([row.want_logits for row in rows], dtype=bool)
    scored = [at + i for at, row in zip(first.tolist(), rows, strict=False) for i in range(len(row.targets))]

    block_table = torch.from_numpy(table.astype(np.int32))
    seq_lens = torch.from_numpy(ends.astype(np.int32))
    cu_q = torch.from_numpy(first.astype(np.int32))
    return Batch(
        tokens=torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int64),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        plan=plan(cu_q, seq_lens, block_table),
        logit_rows=torch.from_numpy(first[1:][wanted] - 1),
        scored_rows=torch.tensor(scored, dtype=torch.int64),
        targets=tuple(target for row in rows for target in row.targets),
        tops=tuple(row.top for row in rows for _ in row.targets),
    )
