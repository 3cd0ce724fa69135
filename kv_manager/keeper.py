"""What a KV manager wants remembered, and a store that may be away: serving never waits for it. Knows nothing about
leases, Ray, or which store it is.

    begin ──▶ the epoch, from the store, or without it from the clock alone
    round ──▶ epoch stored, owed tombstones written, those that were there found once       again and again
              a store that has lost the epoch has lost all: every tombstone that still stands is owed again

A coroutine that does rounds is the only one to use the store; `bury` and the rest belong to its event loop, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from bifolio.protos.errors import Unavailable
from bifolio.protos.messages import RequestId

from .store import Store

logger = logging.getLogger(__name__)

ROUND_S = 5.0
AGAIN_S = 60.0  # a store that is still away is named in the log this often


class Keeper:
    """`tombstone_s`: for how long a cancelled request is refused."""

    def __init__(self, store: Store, tombstone_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.epoch = 0
        self.answers = True  # the store, when it was last asked
        self.outdated = False  # the epoch was not the store's, and a later one has been there: begin again
        self._store = store
        self._tombstone_s = tombstone_s
        self._clock = clock
        self._owed: dict[RequestId, float] = {}  # tombstones to be written, until when they stand
        self._written: dict[RequestId, float] = {}  # and those that have been
        self._stored = False  # the epoch, once
        self._found = False  # the tombstones that were there
        self._shared = False  # said so
        self._named = 0.0  # when it was last said that the store is away
        self._wake = asyncio.Event()

    @property
    def where(self) -> str:
        return self._store.where

    async def begin(self, now_ns: int) -> int:
        """The epoch."""
        try:
            self.epoch = await self._store.epoch(now_ns)
            self._stored = True
        except Unavailable as error:
            self.epoch = now_ns
            self._is_away(error)
        return self.epoch

    async def round(self) -> dict[RequestId, float]:
        """Brings the store up to date. Returns the tombstones that were there, with the seconds they still stand: once,
        when it first answers."""
        self._owed, self._written = self._standing(self._owed), self._standing(self._written)
        try:
            await self._keep()
            for request, until in list(self._owed.items()):
                if (left := until - self._clock()) > 0:
                    await self._store.bury(request, left)
                if self._owed[request] == until:
                    self._written[request] = self._owed.pop(request)
            found = {} if self._found else await self._store.buried()
        except Unavailable as error:
            self._is_away(error)
            return {}
        self._found = True
        if not self.answers:
            logger.warning("the store answers again: %s", self.where)
        self.answers = True
        return found

    def bury(self, request: RequestId) -> None:
        """Owes a tombstone to the store: the next round writes it, at once if somebody waits for one."""
        self._owed[request] = self._clock() + self._tombstone_s
        self._wake.set()

    async def due(self) -> None:
        """Returns when it is time for a round."""
        try:
            async with asyncio.timeout(ROUND_S):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def close(self) -> None:
        await self._store.close()

    def _standing(self, tombstones: dict[RequestId, float]) -> dict[RequestId, float]:
        return {request: until for request, until in tombstones.items() if until > self._clock()}

    async def _keep(self) -> None:
        newest = await self._store.keep(self.epoch)
        if not newest and self._stored:
            logger.warning("the store has forgotten what it held, and is told again: %s", self.where)
            self._owed = self._written | self._owed
        if newest > self.epoch and not self._stored:
            self.outdated = True
        elif newest > self.epoch and not self._shared:
            self._shared = True
            logger.error(
                "another KV manager of this cell has begun with the same store, %s: give each cluster a database "
                "of its own",
                self.where,
            )
        self._stored = True

    def _is_away(self, error: Unavailable) -> None:
        now = self._clock()
        if self.answers or now - self._named >= AGAIN_S:
            self._named = now
            logger.error(
                "the store is away, serving goes on without it: %s. Should this manager end before it is back, %d "
                "cancelled requests are forgotten, and the next manager's epoch is the clock's alone",
                error.message,
                len(self._owed),
            )
        self.answers = False
