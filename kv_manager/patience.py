"""An end to waiting: what waits for another for too long is given up.

A stream of grpc's can be waited for without an end only, so one thread looks at all waits and ends what is over its
time. Knows nothing about streams.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

NEVER = (math.inf, None)
LOOKS = 4  # in the least time that a wait may take: it ends at most a quarter late


class Patience:
    """`close` it in the end: it has a thread.

    Without a lock: the garbage collector may end a stream that was dropped, and with it a wait, in any line of any
    thread, be it this one's. So the dictionary is changed by single operations only, and looked at in a copy.
    """

    def __init__(self, seconds: float, soonest: float) -> None:
        """What a wait may take: `soonest` is the least that `waiting` is given."""
        self.seconds = seconds
        self._every = min(seconds, soonest) / LOOKS
        self._waits: dict[object, tuple[float, Callable[[], object]]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self, give_up: Callable[[], object], seconds: float | None = None) -> Iterator[None]:
        """Calls `give_up`, in a thread of its own, if the context takes too long. It is called once, and may be late:
        when the context has just been left."""
        wait = object()
        self._waits[wait] = time.monotonic() + (seconds or self.seconds), give_up
        try:
            yield
        finally:
            self._waits.pop(wait, None)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._every):
            now = time.monotonic()
            for wait in list(self._waits):
                until, _ = self._waits.get(wait, NEVER)
                if until > now or (over := self._waits.pop(wait, None)) is None:
                    continue
                try:
                    over[1]()
                except Exception:  # a bug of ours: without this thread no wait would ever end
                    logger.exception("a wait could not be given up, going on")
