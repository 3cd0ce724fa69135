"""What this ingress last saw of the KV manager. Who asks never waits longer than it says, also of a manager that is
stuck or being started again. Of a snapshot it knows only how many replicas there are, and the epoch: each manager has
one of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from ray.exceptions import RayActorError


class LastSeen:
    """Lives on one event loop, and has one question under way at most.

    A manager that has just begun knows no replicas: until they have registered, for `settle_s` at most, what its
    predecessor knew is still the better answer to whether the cluster is well.
    """

    def __init__(self, manager: Any, settle_s: float) -> None:
        self._manager = manager
        self._settle_s = settle_s
        self._question: asyncio.Future[dict[str, Any]] | None = None
        self._asked = 0.0  # when that was
        self._heard = time.monotonic()  # the last answer, or our beginning
        self._epoch, self._since = 0, 0.0  # of the manager that answered last, and its first answer
        self._settled: dict[str, Any] | None = None

    @property
    def heard_s(self) -> float:
        """Seconds since the last answer, or since the beginning. Nobody may have asked since."""
        return time.monotonic() - self._heard

    @property
    def settled(self) -> dict[str, Any] | None:
        """The last snapshot of a manager that has come to know its replicas; None before there was one at all."""
        return self._settled

    async def ask(self, timeout_s: float) -> dict[str, Any]:
        """The manager's snapshot. Raises TimeoutError, or RayActorError of a manager that is being started again."""
        if self._question is None or self._question.done():
            self._asked = time.monotonic()
            self._question = asyncio.ensure_future(self._ask())
            self._question.add_done_callback(lambda done: done.cancelled() or done.exception())  # maybe nobody waits
        return await asyncio.wait_for(asyncio.shield(self._question), timeout_s)

    async def refresh(self, timeout_s: float) -> None:
        """Ask, and put up with no answer. A question that is under way has to be answered in that time too."""
        if self._question is not None and not self._question.done():
            timeout_s -= time.monotonic() - self._asked
        if timeout_s > 0:
            with contextlib.suppress(TimeoutError, RayActorError):
                await self.ask(timeout_s)

    async def _ask(self) -> dict[str, Any]:
        snapshot: dict[str, Any] = await self._manager.snapshot.remote()
        now = self._heard = time.monotonic()
        if snapshot["epoch"] != self._epoch:
            self._epoch, self._since = snapshot["epoch"], now
        before = self._settled
        if (
            before is None
            or before["epoch"] == self._epoch
            or len(snapshot["replicas"]) >= len(before["replicas"])
            or now - self._since >= self._settle_s
        ):
            self._settled = snapshot
        return snapshot
