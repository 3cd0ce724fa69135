"""What a replica's side of the transfers counts: `protos.messages.Traffic`, kept by many threads.

Pure but for the clock that it measures waits with. Knows nothing about streams, frames' content or who reads it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from bifolio.protos.measures import Traffic

from .block_store import WhyNot

# Waiting, by what for: at the sender the peer's first message, its acknowledgements; at the receiver what the sender
# computes and sends. (That the network takes no more counts as moving: it lowers the bandwidth)
Stall = Literal["start", "acks", "frames"]

# For people
WHY_NOT_COPIED: Mapping[WhyNot, str] = {
    "off": "kv.copies is false",
    "none": "memory is not shared",
    "elsewhere": "the other is on another machine or GPU",
    "hidden": "the other process is hidden",
    "gone": "the other process has ended",
    "misfit": "the two caches do not fit",
    "short": "too many open files, or too little memory",
}


@dataclass(slots=True)
class _Waits:
    """Of one kind: how many are under way, and what all of them came to until then."""

    under_way: int = 0
    seconds: float = 0.0
    until: float = 0.0

    def add_up(self, now: float) -> None:
        self.seconds += self.under_way * (now - self.until)
        self.until = now


class TrafficMeter:
    def __init__(self) -> None:
        # Of the reentrant kind: the garbage collector may end a generator that was dropped, and with it a stream or a
        # wait, in whatever line a thread happens to be, be it one below. For the same reason no line that counts calls
        # anything in Python between its reading and its writing: hence no `Counter`.
        self._lock = threading.RLock()
        self._streams = self._in_flight = self._done = self._frames = self._bytes = 0
        self._failed: dict[str, int] = defaultdict(int)
        self._ways: dict[str, int] = defaultdict(int)
        self._moving = 0.0
        self._waits: dict[Stall, _Waits] = {}

    @contextmanager
    def stream(self) -> Iterator[None]:
        """A stream, from its beginning to its end. An exception that leaves it is what it failed of; those of Python's
        own that say that its generator was dropped count as "cancelled"."""
        with self._lock:
            self._streams += 1
        outcome: str | None = "cancelled"
        try:
            yield
            outcome = None
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            with self._lock:
                self._streams -= 1
                if outcome is None:
                    self._done += 1
                else:
                    self._failed[outcome] += 1

    def way(self, name: str) -> None:
        """How the blocks of a stream travel: "copied", "sent", or "sent: " and the word of WHY_NOT_COPIED. There is an
        end of these words, because each becomes a label of a metric: sentences belong in the log."""
        with self._lock:
            self._ways[name] += 1

    def moved(self, frames: int, size: int, seconds: float) -> None:
        """So many bytes were cut and packed, or have landed, which took so long."""
        with self._lock:
            self._frames += frames
            self._bytes += size
            self._moving += seconds

    def flying(self, change: int) -> None:
        """So many frames more, or less, are sent and not acknowledged."""
        with self._lock:
            self._in_flight += change

    @contextmanager
    def stalled(self, what_for: Stall) -> Iterator[None]:
        """A wait for the other side. It counts from its beginning on: what hangs shows while it hangs."""
        self._wait(what_for, 1)
        try:
            yield
        finally:
            self._wait(what_for, -1)

    def read(self) -> Traffic:
        with self._lock:
            now = time.monotonic()
            for waits in self._waits.values():
                waits.add_up(now)
            return Traffic(
                self._streams,
                self._in_flight,
                self._done,
                dict(self._failed),
                dict(self._ways),
                self._frames,
                self._bytes,
                self._moving,
                {what_for: waits.seconds for what_for, waits in self._waits.items()},
            )

    def _wait(self, what_for: Stall, change: int) -> None:
        with self._lock:
            waits = self._waits.get(what_for)
            if waits is None:
                waits = self._waits[what_for] = _Waits()
            waits.add_up(time.monotonic())
            waits.under_way += change
