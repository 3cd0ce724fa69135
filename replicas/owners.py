"""The lease under which each block may be, or was last, written: where others can read it while it changes.

Knows nothing of leases but their names, nor who shares the array.

Who copies a block out of another process's memory reads here afterwards whether it is still that lease's. Each half is
stored and loaded whole, the pair is not: so the order is epoch first when it is written, and last when it is read.
Generations of a block only grow. An epoch that is right at the end was right before, so the counter read before it is
one of that epoch, and no larger one has been written there. The other way round, an old counter that comes again in the
next epoch would look right.

    owner   epoch, counter ─▶ (the engine's queue) ─▶ the first byte that is written under them
    reader                                            bytes copied ─▶ counter, epoch: as they were before the copy?

That a reader who finds the owner unchanged has copied no byte of the next one's takes stores and loads that stay in
their order: those of x86 do, and a lock lies between the owner and the computing. On other CPUs this notices what is
not just now; the guard there is the lease, which is open until the last Ack.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from bifolio.protos.messages import Generation

EPOCH, COUNTER = 0, 1


class Owners:
    def __init__(self, array: NDArray[np.uint64]) -> None:
        """Of uint64 [rows, 2], which is kept; zeros: no row was ever written."""
        self._array = array

    @classmethod
    def of(cls, rows: int) -> Owners:
        """Which nobody else reads."""
        return cls(np.zeros((rows, 2), np.uint64))

    def set(self, rows: Iterable[int], generation: Generation) -> None:
        """To be called before the first byte of these rows is written under it."""
        index = np.fromiter(rows, np.intp)
        self._array[index, EPOCH] = generation.epoch
        self._array[index, COUNTER] = generation.counter

    def of_row(self, row: int) -> Generation:
        counter = int(self._array[row, COUNTER])
        return Generation(int(self._array[row, EPOCH]), counter)
