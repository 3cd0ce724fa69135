"""What a replica computes on, as far as start-up and transfers see it: its memory, its events, and copies beside it.

Knows nothing of models, blocks or leases. Kernels are launched by `torch` and find their device by themselves.

    computing thread   launches steps; `mark` is an event behind all it has launched so far
    other threads      wait for such an event, and only then launch a `copy`; so no copy stream ever waits for computing
    other processes    reach memory that was `export`ed, if they compute on the same GPU (`shared.py`); a host's is
                       reached without a device (`host_share.py`)
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from bifolio.kernels.events import HAPPENED, Event, mark
from bifolio.kv_manager.block_store import Unreached
from bifolio.protos.errors import ConfigError

from . import shared
from .host_memory import host_memory

DeviceName = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the device."""

    total: int
    free: int  # to all processes
    reserved: int = 0  # by this process, for tensors
    peak: int = 0  # the most reserved since `reset_peak`


class Device(Protocol):
    """A place to compute. Its methods may be called from any thread."""

    @property
    def kind(self) -> DeviceName:
        """What is so called in the configuration. "cuda" has memory of its own, and computes after the call."""

    @property
    def torch(self) -> torch.device: ...

    def pinned(self, size: int) -> Tensor:
        """uint8 [size] on the host, which copies from and to the device reach directly."""

    def mark(self) -> Event:
        """Of everything that the calling thread has launched so far."""

    def copy(self, into: Tensor, source: Tensor) -> Event:
        """Launch a copy between the device and `pinned` memory, or within the device, beside the computing. Both must
        stay as they are until the event."""

    def export(self, tensor: Tensor) -> bytes | None:
        """A handle by which `reach` finds this uint8 [rows, row_bytes]; None where it could not. Once for each tensor,
        which must live as long as anyone may use the handle."""

    def reach(self, handle: bytes) -> Tensor | Unreached:
        """What was exported: the same memory, which `copy` takes. Or why it cannot be reached from here: another host
        or GPU, a process that has ended, bytes that are no handle. Any bytes may be tried."""

    def memory(self) -> Memory: ...

    def reset_peak(self) -> None:
        """Give back what is reserved and not used; `Memory.peak` begins anew."""

    def limit(self, most: int) -> None:
        """Reserve no more bytes than that from now on, whatever is free: the rest is a neighbour's."""


class HostDevice:
    """The CPU: what is launched has happened already."""

    kind: DeviceName = "cpu"
    torch = torch.device("cpu")

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def mark(self) -> Event:
        return HAPPENED

    def copy(self, into: Tensor, source: Tensor) -> Event:
        into.copy_(source)
        return HAPPENED

    def export(self, tensor: Tensor) -> bytes | None:
        return None

    def reach(self, handle: bytes) -> Tensor | Unreached:
        return Unreached("misfit", "this replica's device reaches no memory of others")

    def memory(self) -> Memory:
        return Memory(*host_memory())

    def reset_peak(self) -> None:
        pass

    def limit(self, most: int) -> None:
        pass


class CudaDevice:
    """This process's one GPU: Ray shows a replica no other."""

    kind: DeviceName = "cuda"

    def __init__(self, torch_device: torch.device) -> None:
        self.torch = torch_device
        self._in, self._out = (torch.cuda.Stream(torch_device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._place = shared.place_of(torch_device)
        self._lock = threading.Lock()  # a copy and its event are launched together

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Event:
        return mark(self.torch)

    def copy(self, into: Tensor, source: Tensor) -> Event:
        stream = self._in if into.device.type == "cuda" else self._out
        with self._lock, torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
            return mark(self.torch)

    def export(self, tensor: Tensor) -> bytes | None:
        return shared.export(tensor, self._place)

    def reach(self, handle: bytes) -> Tensor | Unreached:
        return shared.reach(handle, self.torch, self._place)

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self.torch)
        reserved = torch.cuda.memory_reserved(self.torch)
        return Memory(total, free, reserved, torch.cuda.max_memory_reserved(self.torch))

    def reset_peak(self) -> None:
        torch.cuda.synchronize(self.torch)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch)

    def limit(self, most: int) -> None:
        total = torch.cuda.get_device_properties(self.torch).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(most, 1) / total), self.torch)


def open_device(name: DeviceName) -> Device:
    """Raises ConfigError where torch finds no such device."""
    if name == "cpu":
        return HostDevice()
    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise ConfigError(
            f"engine.device: cuda, but torch {torch.__version__}, which {built}, finds no GPU in this process; install "
            "a torch for the driver (`nvidia-smi` shows it), or set engine.device: cpu"
        )
    return CudaDevice(torch.device("cuda", torch.cuda.current_device()))
