"""Log lines of what may happen very often: one in a while of each kind, with how many there were since the last.

Knows nothing of what is logged.
"""

from __future__ import annotations

import logging
import threading
import time

EVERY_S = 5.0


class Seldom:
    def __init__(self, logger: logging.Logger, every_s: float = EVERY_S) -> None:
        self._logger = logger
        self._every_s = every_s
        self._last: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}
        self._lock = threading.RLock()  # a stream may be ended by the garbage collector, in any line

    def warning(self, kind: str, message: str) -> None:
        """Of few kinds: each is remembered."""
        now = time.monotonic()
        with self._lock:
            if now - self._last.get(kind, now - self._every_s) < self._every_s:
                self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
                return
            self._last[kind], unsaid = now, self._unsaid.pop(kind, 0)
        more = f" ({unsaid} more of this kind since the last that was logged)" if unsaid else ""
        self._logger.warning("%s%s", message, more)
