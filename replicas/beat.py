"""The line between a replica and the KV manager: its registration, its heartbeat, its releases.

Lives on the replica's event loop. Knows nothing about what the leases are for. A silent manager stops nobody: streams
go on from the reserve, and the next answer, or a new registration, puts the ledger right.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from bifolio.kv_manager.actor import connect
from bifolio.protos.messages import Answer, Generation, ReplicaInfo

from .core import Core, ReplicaSpec

logger = logging.getLogger(__name__)

QUICKEST_S = 0.02  # between two beats, however often one is asked for


class Beat:
    """`revoked` is called, on the event loop, with each open lease that the manager takes back."""

    def __init__(self, core: Core, spec: ReplicaSpec, revoked: Callable[[Generation], None]) -> None:
        self._core = core
        self._kv = spec.kv
        self._manager: Any = connect(*spec.manager)
        self._revoked = revoked
        self._now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._info = core.info()

    async def start(self, info: ReplicaInfo) -> None:
        """Introduce the replica; from now on it is given work."""
        self._info = info
        await self._register()
        self._task = asyncio.create_task(self._beat())

    async def drain(self) -> None:
        """Ask for no new work."""
        await self._manager.report_state.remote(self._core.replica, "draining")

    async def stop(self) -> None:
        """The manager forgets the replica and its leases."""
        if self._task is not None:
            self._task.cancel()
        await self._manager.report_state.remote(self._core.replica, "dead")

    def close(self, generation: Generation) -> None:
        """Return a lease whose blocks nothing touches any more. From any thread; twice is harmless."""
        beat = self._core.tags.close(generation)
        if beat is not None:  # one way: if it is lost, the next report says it too
            self._manager.release.remote(self._core.replica, generation, beat)

    def if_low(self) -> None:
        """Beat at once when the reserve runs low. On the event loop."""
        if self._core.tags.low:
            self._now.set()

    async def _beat(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._now.wait(), self._kv.heartbeat_s)
                await asyncio.sleep(QUICKEST_S)
            except TimeoutError:
                pass
            self._now.clear()
            try:
                await asyncio.wait_for(self._report(), self._kv.silence_s)
            except Exception as error:
                logger.warning("%s: the KV manager did not take the heartbeat, going on: %r", self._core.replica, error)

    async def _report(self) -> None:
        answer: Answer = await self._manager.heartbeat.remote(self._core.tags.report(time.monotonic()))
        if not answer.known:
            await self._register()
        for generation in self._core.tags.apply(answer):
            logger.warning("%s: the KV manager revoked lease %s", self._core.replica, generation)
            self._revoked(generation)

    async def _register(self) -> None:
        await self._manager.register.remote(self._info, self._core.tags.report(time.monotonic()))
