"""The memory of prefill replicas that one store copies blocks from: opened once for each, shared by all pulls from it.

What is open keeps the memory of a replica that has died from coming back, to the one that starts in its place. So
it is held while it is used and a minute longer: opening takes its time, may hold up the device, and costs an event that
torch does not give back; closing may wait for the device, and so is done outside of the lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .block_store import BlockStore, Copy, Unreached

logger = logging.getLogger(__name__)

IDLE_S = 60.0
QUICKEST_S = 0.01  # between two looks at what nobody uses
MOST = 256  # replicas that are remembered; many more than ever live at once


@dataclass(slots=True, eq=False)
class _Region:
    memory: bytes
    reached: Copy | Unreached | None = None  # if it is why not, it is not tried again; None: not open
    said: str = ""
    users: int = 0
    idle_since: float = 0.0  # on the monotonic clock, while there are no users


class Regions:
    def __init__(self, store: BlockStore, idle_s: float = IDLE_S) -> None:
        self._store = store
        self._idle_s = idle_s
        self._regions: dict[str, _Region] = {}  # by address, the one last made is last
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._sweeper: threading.Thread | None = None  # while anything is open: it closes what nobody uses

    @contextmanager
    def use(self, address: str, memory: bytes) -> Iterator[Copy | Unreached]:
        """Copies blocks of the replica at this address, or says why they have to be sent."""
        forgotten: list[Copy | Unreached | None] = []
        with self._lock:
            region = self._regions.get(address)
            if region is None or region.memory != memory:  # another replica has got the address
                forgotten += self._forget(address)
                region = self._regions[address] = _Region(memory)
            if len(self._regions) > MOST:
                forgotten += self._forget(next(iter(self._regions)))
            if region.reached is None:
                region.reached = self._store.reach(memory) if memory else Unreached("none", "it shares no memory")
                _tell(address, region)
            reached = region.reached
            if isinstance(reached, Unreached) and reached.reason == "short":
                region.reached = None  # it may pass
            elif not isinstance(reached, Unreached):
                self._sweep_from_now_on()
            region.users += 1
        del forgotten  # closes it, unless a pull uses it
        try:
            yield reached
        finally:
            with self._lock:
                region.users -= 1
                region.idle_since = time.monotonic()

    def forget(self, address: str) -> None:
        """The replica there has gone. What pulls still use goes with the last of them."""
        with self._lock:
            forgotten = self._forget(address)
        del forgotten  # closes it, unless a pull uses it

    def close(self) -> None:
        """Lets go of all that no pull uses; the rest goes with the last of its users, as does what was replaced."""
        self._closed.set()
        with self._lock:
            forgotten = [self._forget(address) for address in list(self._regions)]
        del forgotten  # closes what no pull uses

    def _forget(self, address: str) -> list[Copy | Unreached | None]:
        """What the region of this address had reached: for the caller to drop when it has left the lock."""
        region = self._regions.pop(address, None)
        if region is None:
            return []
        reached, region.reached = region.reached, None
        return [reached]

    def _sweep_from_now_on(self) -> None:
        """One thread for all: to start a timer when a pull ends would take time from its first token."""
        if self._sweeper is None and not self._closed.is_set():
            self._sweeper = threading.Thread(target=self._sweep, name="regions", daemon=True)
            self._sweeper.start()

    def _sweep(self) -> None:
        while not self._closed.wait(max(self._idle_s / 4, QUICKEST_S)):
            with self._lock:
                due = time.monotonic() - self._idle_s
                opened = [r for r in self._regions.values() if r.reached and not isinstance(r.reached, Unreached)]
                over = [region for region in opened if not region.users and region.idle_since <= due]
                forgotten = [region.reached for region in over]
                for region in over:
                    region.reached = None  # the next user opens it anew
                if len(over) == len(opened):
                    self._sweeper = None
            del forgotten  # closes it
            if len(over) == len(opened):
                return


def _tell(address: str, region: _Region) -> None:
    way = f"sent: {region.reached}" if isinstance(region.reached, Unreached) else "copied out of its memory"
    if way != region.said:
        region.said = way
        logger.info("blocks of the prefill replica at %s are %s", address, way)
