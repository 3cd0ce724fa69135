"""Decode steps over tensors that stay where they are, so that a step which was recorded once can be replayed: steps
differ only by what stands in them.

    rows    | sequences of this step   | padding: no keys, slot -1  | of larger steps
            0                          n                            size
    bytes   | tokens | positions | slots | seq_lens | the block table: n rows, packed |  one copy, of what is needed
            | work tables, cut for `size` rows |  one copy for each shape of layer that asked

The work of padding is an item without keys, which gives zeros, and sequences are cut as they are without it
(`schedule.py`): so padding changes no bit of them. Knows nothing of graphs, models or layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .backend import runs_triton
from .events import HAPPENED, Event, mark
from .plan import AttentionPlan, Cut, check_blocks

ALIGNED = 16  # bytes: where each array begins
Mark = Callable[[torch.device], Event]


class StaticPlan:
    """Of decode steps of up to `sequences` sequences with one token each. The thread that fills it launches what reads
    it, on one stream.

    tokens, positions, slots  int64 [sequences], on the device; as in `rope_and_write`, tokens as they are embedded

    These and the plans' tensors never move; `fill` changes them.
    """

    def __init__(self, sequences: int, max_blocks: int, device: torch.device, *, mark: Mark = mark) -> None:
        """Allocates. Every row is padding until it is filled; a sequence has up to `max_blocks` blocks.

        Raises ValueError where other kernels than Triton's compute: they read lengths on the host.
        """
        if not runs_triton(device):
            raise ValueError(
                f"static plan: on {device}, where other kernels than Triton's compute; allowed is a GPU, or "
                "engine.kernels: triton with TRITON_INTERPRET=1. Plan each step with `plan` instead"
            )
        self._device, self._mark = device, mark
        self._inputs = _Mirror(
            [(torch.int64, (sequences,))] * 3 + [(torch.int32, (sequences,)), (torch.int32, (sequences * max_blocks,))],
            device,
            mark,
        )
        self.tokens, self.positions, self.slots, self._seq_lens, self._packed = self._inputs.tensors
        self._cu_q = torch.arange(sequences + 1, dtype=torch.int32, device=device)
        self._table = torch.zeros(sequences, max_blocks, dtype=torch.int32, device=device)
        self._plans: dict[int, AttentionPlan] = {}
        self._tables: dict[int, _Tables] = {}
        self._inputs.arrays[2].fill(-1)
        self._inputs.send()

    def plan(self, size: int) -> AttentionPlan:
        """That of the first `size` rows, always the same. It has no lengths on the host, for who would look at them
        when a step is recorded."""
        if size not in self._plans:
            if not 1 <= size <= len(self._table):
                raise ValueError(f"size: {size}; allowed is 1 to {len(self._table)}")
            self._tables[size] = _Tables(self._inputs.arrays[3][:size], self._device, self._mark)
            self._plans[size] = AttentionPlan(
                cu_q=self._cu_q[: size + 1],
                seq_lens=self._seq_lens[:size],
                block_table=self._table[:size],
                starts=tuple(range(size + 1)),
                lengths=(),
                host_table=None,
                batch_invariant=False,
                fixed=self._tables[size],
            )
        return self._plans[size]

    @torch.inference_mode()
    def fill(
        self,
        size: int,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        lengths: NDArray[np.int32],
        table: NDArray[np.int32],
    ) -> None:
        """Launch what makes the next step of `plan(size)` that of these n <= size sequences.

        tokens, positions, slots  [n]
        lengths  [n]  keys, the token of this step included
        table    [n, any up to max_blocks]  the block of position p is table[b, p // block_size]

        Allocates nothing on the device, and waits for nothing but its own copies of the step before. Table entries
        past a sequence's blocks, and all of padding's, are of steps before, or the null block. Raises ValueError for
        what does not fit, and as `AttentionPlan.check_blocks` does for the caches that the plan was used with; then
        nothing has changed.
        """
        plan, (n, columns) = self.plan(size), table.shape
        if n > size or columns > self._table.shape[1]:
            raise ValueError(f"table: shape {[n, columns]}; allowed is up to {[size, self._table.shape[1]]}")
        if n and lengths.min() < 0:
            raise ValueError(f"lengths: {lengths.tolist()}; allowed is 0 or more")
        for num_blocks, block_size in plan.caches:
            check_blocks(lengths.tolist(), table, columns, num_blocks, block_size)
        self._inputs.settle()
        *rows, packed = self._inputs.arrays
        for row, values, padding in zip(rows, (tokens, positions, slots, lengths), (0, 0, -1, 0), strict=True):
            row[:n] = values
            row[n:] = padding
        packed[: n * columns] = table.reshape(-1)
        self._inputs.send(n * columns)
        self._table[:n, :columns].copy_(self._packed[: n * columns].view(n, columns))
        self._tables[size].refill()


class _Tables:
    """The `FixedTables` of one size, over lengths on the host that somebody else changes."""

    def __init__(self, lengths: NDArray[np.int32], device: torch.device, mark: Mark) -> None:
        self._lengths, self._device, self._mark = lengths, device, mark
        self._made: list[tuple[_Mirror, Cut]] = []

    @torch.inference_mode()
    def make(self, shapes: Sequence[tuple[int, int]], cut: Cut) -> tuple[Tensor, ...]:
        mirror = _Mirror([(torch.int32, shape) for shape in shapes], self._device, self._mark)
        self._made.append((mirror, cut))
        self._cut_into(mirror, cut)
        return mirror.tensors

    def refill(self) -> None:
        for mirror, cut in self._made:
            mirror.settle()
            self._cut_into(mirror, cut)

    def _cut_into(self, mirror: _Mirror, cut: Cut) -> None:
        for lines, new in zip(mirror.arrays, cut(self._lengths), strict=True):
            assert len(new) <= len(lines), "more work than there is room for"
            lines[: len(new)] = new
            lines[len(new) :] = -1
        mirror.send()


class _Mirror:
    """Arrays on the host, all zeros, and tensors on the device that become like them when they are sent."""

    def __init__(self, parts: Sequence[tuple[torch.dtype, tuple[int, ...]]], device: torch.device, mark: Mark) -> None:
        counts = [math.prod(shape) for _, shape in parts]
        sizes = [
            -(-count * dtype.itemsize // ALIGNED) * ALIGNED for count, (dtype, _) in zip(counts, parts, strict=True)
        ]
        *self._begins, total = accumulate(sizes, initial=0)
        self._here = torch.zeros(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.zeros(total, dtype=torch.uint8, device=device)
        self._mark = mark
        self._arrived = HAPPENED
        here, self.tensors = (
            tuple(
                whole[begin : begin + count * dtype.itemsize].view(dtype).view(shape)
                for begin, count, (dtype, shape) in zip(self._begins, counts, parts, strict=True)
            )
            for whole in (self._here, self._there)
        )
        self.arrays: tuple[NDArray[Any], ...] = tuple(part.numpy() for part in here)

    def settle(self) -> None:
        """Wait until the arrays may be written: what was sent has arrived."""
        self._arrived.wait()

    def send(self, last: int | None = None) -> None:
        """Launch the copy, of the last part only its first `last` numbers. `settle` before the arrays are written
        again."""
        end = None if last is None else self._begins[-1] + last * self.arrays[-1].itemsize
        self._there[:end].copy_(self._here[:end], non_blocking=True)
        self._arrived = self._mark(self._there.device)
