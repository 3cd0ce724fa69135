"""When what was launched on a device has happened, for a host that has to know."""

from __future__ import annotations

from typing import Protocol

import torch


class Event(Protocol):
    """Something launched that will have happened."""

    def wait(self) -> None:
        """The calling thread sleeps until then. From any thread, any number of times."""


def mark(device: torch.device) -> Event:
    """Of everything that the calling thread has launched so far on its current stream of the device."""
    return _CudaEvent(torch.cuda.current_stream(device)) if device.type == "cuda" else HAPPENED


class _Happened:
    def wait(self) -> None:
        pass


HAPPENED: Event = _Happened()


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # blocking: who waits sleeps, the cores belong to the loops
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()
