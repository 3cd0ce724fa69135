"""The requests that are open at this ingress: known by their ids, confirmed at the KV manager, and cancelled from afar.

The manager takes back what belongs to a request that no ingress confirms. Its answer brings the geometries of the
models that are served, without which no keys of blocks can be computed. Knows nothing about placements or text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from bifolio.protos.errors import InvalidRequest, Revoked
from bifolio.protos.messages import Geometry, RequestId

logger = logging.getLogger(__name__)

CONFIRM_S = 1.0  # between two confirmations
FIRST_S = 1.0  # how long a request waits for geometries while none are known; then it goes without keys

T = TypeVar("T")


class Open:
    """One of them. What it waits for ends when it is cancelled."""

    def __init__(self, id: RequestId) -> None:
        self._id = id
        self._cancelled = False
        self._scope: asyncio.Timeout | None = None

    def cancel(self) -> None:
        if self._scope is not None and not self._cancelled:
            self._scope.reschedule(0)  # a time long ago
        self._cancelled = True

    async def next(self, stream: AsyncIterator[T]) -> T:
        """What the stream has next. Raises Revoked at once if the request is cancelled, or has been."""
        revoked = Revoked(f"request {self._id} was cancelled")
        if self._cancelled:
            raise revoked
        try:
            async with asyncio.timeout(None) as self._scope:
                return await anext(stream)
        except TimeoutError:
            if self._cancelled:
                raise revoked from None
            raise
        finally:
            self._scope = None


class OpenRequests:
    """Lives on one event loop, from its first request on."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._open: dict[RequestId, Open] = {}
        self._geometries: tuple[Geometry, ...] = ()
        self._call: asyncio.Task[None] | None = None  # the confirmation under way, or the last one
        self._confirming: asyncio.Task[None] | None = None
        self._heard = True

    @contextmanager
    def opened(self, id: RequestId) -> Iterator[Open]:
        if id in self._open:
            raise InvalidRequest(
                f"the request id {id} belongs to a request that is still open; allowed: one that is not in use",
                "request_id",
            )
        if self._confirming is None:
            self._confirming = asyncio.create_task(self._keep_confirming())
        opened = self._open[id] = Open(id)
        try:
            yield opened
        finally:
            del self._open[id]

    def cancel(self, id: RequestId) -> None:
        """Ends a request here and now, if it is open here."""
        if opened := self._open.get(id):
            opened.cancel()

    async def geometries(self) -> tuple[Geometry, ...]:
        """Of the models that are served, as far as is known. For a request that is open."""
        if not self._geometries:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._confirm()), FIRST_S)
        return self._geometries

    async def _keep_confirming(self) -> None:
        while True:
            began = time.monotonic()
            await self._confirm()
            await asyncio.sleep(max(0.0, CONFIRM_S - (time.monotonic() - began)))

    def _confirm(self) -> asyncio.Task[None]:
        """One call at a time: who comes while it is under way waits for the same."""
        if self._call is None or self._call.done():
            self._call = asyncio.create_task(self._call_manager())
        return self._call

    async def _call_manager(self) -> None:
        try:
            self._geometries = await self._manager.confirm.remote(tuple(self._open))
            self._heard = True
        except Exception as error:  # it is being restarted, or whatever: the next call is soon enough
            if self._heard:
                logger.warning("the KV manager does not confirm requests: %r", error)
            self._heard = False
