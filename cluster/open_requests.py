"""The requests that are open at this ingress: known by their ids, confirmed at the KV manager, and cancelled from afar.

The manager takes back what belongs to a request that no ingress confirms. Its answer brings the geometries of the
models that are served, without which no keys of blocks can be computed, and the replicas that were lost: who waits for
one of them waits no longer, whatever its connection says. A manager that does not answer is started again.

Knows nothing about placements or text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import ray

from bifolio.protos.errors import BifolioError, InvalidRequest, Revoked
from bifolio.protos.messages import Confirmed, Geometry, ReplicaId, RequestId
from bifolio.replicas.cores import Cores

logger = logging.getLogger(__name__)

CONFIRM_S = 1.0  # between two confirmations
LATE_S = 1.0  # a timeout that comes so late says nothing of the manager
FIRST_S = 1.0  # how long a request waits for geometries while none are known; then it goes without keys

T = TypeVar("T")


class Lost(BifolioError):
    """The replica that serves a stream is not there any more."""


class Waiting:
    """Somebody who waits for streams, until that is ended from elsewhere."""

    def __init__(self) -> None:
        self._error: BifolioError | None = None
        self._scope: asyncio.Timeout | None = None

    def end(self, error: BifolioError) -> None:
        """What is waited for now, or would be next, raises this."""
        if self._scope is not None and self._error is None:
            self._scope.reschedule(0)  # a time long ago
        self._error = self._error or error

    async def next(self, stream: AsyncIterator[T]) -> T:
        """What the stream has next."""
        if self._error is not None:
            raise self._error
        try:
            async with asyncio.timeout(None) as self._scope:
                return await anext(stream)
        except TimeoutError:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self._scope = None

    def over(self, stream: AsyncIterable[T]) -> AsyncIterator[T]:
        """The stream, waited for so."""
        return _Over(self, aiter(stream))


class _Over(AsyncIterator[T]):
    def __init__(self, waiting: Waiting, stream: AsyncIterator[T]) -> None:
        self._waiting, self._stream = waiting, stream

    def __anext__(self) -> Coroutine[None, None, T]:
        return self._waiting.next(self._stream)


class OpenRequests:
    """Lives on one event loop, from its first request on."""

    def __init__(self, manager: Any, silence_s: float) -> None:
        """A manager that lets a call wait for `silence_s` is started again."""
        self._manager = manager
        self._silence_s = silence_s
        self._open: dict[RequestId, Waiting] = {}
        self._served: dict[ReplicaId, set[Waiting]] = {}
        self._unknown: dict[ReplicaId, float] = {}  # of those, the manager's, since when: it may have begun just now
        self._geometries: tuple[Geometry, ...] = ()
        self._cores = Cores()
        self._call: asyncio.Task[None] | None = None  # the confirmation under way, or the last one
        self._confirming: asyncio.Task[None] | None = None
        self._heard: float | None = None  # when the manager answered; None before the first call
        self._answers = True

    @property
    def silent_s(self) -> float:
        """For how long the manager has not answered."""
        return 0.0 if self._heard is None else time.monotonic() - self._heard

    def watch(self) -> None:
        """Confirm from now on, also while no request is open."""
        if self._confirming is None:
            self._heard = time.monotonic()
            self._confirming = asyncio.create_task(self._keep_confirming())

    @contextmanager
    def opened(self, id: RequestId) -> Iterator[Waiting]:
        if id in self._open:
            raise InvalidRequest(
                f"the request id {id} belongs to a request that is still open; allowed: one that is not in use",
                "request_id",
            )
        self.watch()
        opened = self._open[id] = Waiting()
        try:
            yield opened
        finally:
            del self._open[id]

    @contextmanager
    def served_by(self, replica: ReplicaId) -> Iterator[Waiting]:
        """A stream of this replica is waited for: with Lost, once the manager says that it is lost."""
        waiting = Waiting()
        self._served.setdefault(replica, set()).add(waiting)
        try:
            yield waiting
        finally:
            self._served[replica].discard(waiting)
            if not self._served[replica]:
                del self._served[replica]

    def cancel(self, id: RequestId) -> None:
        """Ends a request here and now, with Revoked, if it is open here."""
        if opened := self._open.get(id):
            opened.end(Revoked(f"request {id} was cancelled"))

    async def geometries(self) -> tuple[Geometry, ...]:
        """Of the models that are served, as far as is known. For a request that is open."""
        if not self._geometries:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._confirm()), FIRST_S)
        return self._geometries

    async def _keep_confirming(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self._confirm()
            except Exception:  # a bug of ours: without confirmations all that is open here would be taken back
                logger.exception("requests were not confirmed, going on")
            await asyncio.sleep(max(0.0, CONFIRM_S - (time.monotonic() - began)))

    def _confirm(self) -> asyncio.Task[None]:
        """One call at a time: who comes while it is under way waits for the same."""
        if self._call is None or self._call.done():
            self._call = asyncio.create_task(self._call_manager())
        return self._call

    async def _call_manager(self) -> None:
        began = time.monotonic()
        self._cores.place_loops()
        try:
            async with asyncio.timeout(self._silence_s):
                confirmed: Confirmed = await self._manager.confirm.remote(tuple(self._open))
        except TimeoutError:
            if time.monotonic() - began > self._silence_s + LATE_S:
                return  # we were held up ourselves, and its answer may be here
            logger.error("the KV manager has not answered for %g s: it is started again", self._silence_s)
            self._answers = False
            ray.kill(self._manager, no_restart=False)
        except Exception as error:  # it is being restarted, or whatever: the next call is soon enough
            if self._answers:
                logger.warning("the KV manager does not confirm requests: %r", error)
            self._answers = False
        else:
            if not self._answers:
                logger.info("the KV manager answers again, after %.1f s", self.silent_s)
            self._answers, self._heard, self._geometries = True, time.monotonic(), confirmed.geometries
            self._end_lost(confirmed)

    def _end_lost(self, confirmed: Confirmed) -> None:
        """Ends what waits for replicas that are lost, or that a manager which has begun since does not come to know."""
        now, lost = time.monotonic(), dict(confirmed.lost)
        unknown = self._served.keys() - confirmed.known - lost.keys()
        self._unknown = {replica: self._unknown.get(replica, now) for replica in unknown}
        for replica, since in self._unknown.items():
            if now - since > self._silence_s:
                lost[replica] = f"the KV manager has not heard of it for {now - since:.1f} s"
        for replica, why in lost.items():
            for waiting in self._served.get(replica, ()):
                waiting.end(Lost(f"decode replica {replica} is lost: {why}"))
