"""`DelayedDevice`: a device on which all happens late, and copies in any order. It shows where a wait is missing.

A real device is nearly always done before the host looks; so code without its waits passes on it, and fails some day
under load. Here what is launched happens by chance: some of it at each later call, the rest when it is waited for.

    launch   computing: in the order in which it was launched, as on one stream
    copy     before, between or after any computing and any other copy, whatever the order in which they were launched;
             it moves what is then there, and `pinned` memory is full of POISON until something arrives

What has been launched and nobody waits for does not happen by itself, as if the device were slow without end. Memory
that was exported is reached from any such device in the process, as if all were one GPU.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from bifolio.kernels.events import Event
from bifolio.kv_manager.block_store import Unreached

from . import shared
from .device import DeviceName, Memory

POISON = 0xCD
ROOMY = Memory(total=1 << 30, free=1 << 30)


class DelayedDevice:
    """A `Device` of plain memory. The same calls in the same order give the same with the same seed.

    All that happens does so in the thread of some caller, one at a time.
    """

    kind: DeviceName = "cuda"
    torch = torch.device("cpu")

    def __init__(self, seed: int, memory: Memory = ROOMY) -> None:
        """`memory` is what `memory()` says, until something else is set."""
        self.says = memory
        self.most: int | None = None  # what `limit` was told
        self._random = random.Random(seed)
        self._haste = self._random.choice((0.0, 0.3, 0.6))  # how readily something happens unasked
        self._lock = threading.RLock()
        self._computing: deque[_Launched] = deque()
        self._copies: list[_Launched] = []

    @property
    def copies(self) -> int:
        """Copies that have been launched and have not happened."""
        return len(self._copies)

    def launch(self, compute: Callable[[], object]) -> None:
        """A step: called later, after all that was launched before. It may call nothing of this device."""
        with self._lock:
            self._computing.append(_Launched(self, compute))
            self._let_happen()

    def settle(self) -> None:
        """All that has been launched happens, as if time passed."""
        with self._lock:
            while self._one():
                pass

    def pinned(self, size: int) -> Tensor:
        return torch.full((size,), POISON, dtype=torch.uint8)

    def mark(self) -> Event:
        with self._lock:
            self._let_happen()
            return self._computing[-1] if self._computing else _Launched(self, None)

    def copy(self, into: Tensor, source: Tensor) -> Event:
        assert into.shape == source.shape, "a copy between different shapes"
        with self._lock:
            copy = _Launched(self, lambda: into.copy_(source))
            self._copies.append(copy)
            self._let_happen()
            return copy

    def export(self, tensor: Tensor) -> bytes | None:
        return shared.export(tensor)

    def reach(self, handle: bytes) -> Tensor | Unreached:
        return shared.reach(handle, self.torch)

    def memory(self) -> Memory:
        return self.says

    def reset_peak(self) -> None:
        pass

    def limit(self, most: int) -> None:
        self.most = most

    def wait_for(self, launched: _Launched) -> None:
        """Let things happen until this one has."""
        with self._lock:
            self._let_happen()
            if launched in self._copies and self._random.random() < 0.5:  # it overtakes all others
                self._copies.remove(launched)
                launched.happen()
            while launched.pending:
                self._one()
            self._let_happen()  # before the caller looks

    def _let_happen(self) -> None:
        while self._random.random() < self._haste and self._one():
            pass

    def _one(self) -> bool:
        """The next step or any copy, by chance; False if there is none."""
        i = self._random.randrange(-1, len(self._copies)) if self._copies else -1
        if i >= 0:
            self._copies.pop(i).happen()
        elif self._computing:
            self._computing.popleft().happen()
        elif self._copies:
            self._copies.pop().happen()
        else:
            return False
        return True


class _Launched:
    """A step or a copy; and the event that it has happened."""

    def __init__(self, device: DelayedDevice, do: Callable[[], object] | None) -> None:
        self._device = device
        self._do = do

    @property
    def pending(self) -> bool:
        return self._do is not None

    def happen(self) -> None:
        do, self._do = self._do, None
        if do is not None:
            do()

    def wait(self) -> None:
        self._device.wait_for(self)
