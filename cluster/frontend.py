"""Takes a request through admission and decode, and places it again when an attempt ends early.

Token ids only: knows nothing about HTTP, gRPC or text. This loop is the one resume path: a stale placement, a lost
replica, a broken transfer and a preemption all end here, and the caller's stream goes on.

    admit ──▶ placement ──▶ decode stream ──▶ tokens …
      ▲                          │ resumable: the request with the tokens it has
      └──────────────────────────┘
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import RayActorError

from bifolio.protos.errors import ReplicaGone, Resumable, Unavailable
from bifolio.protos.messages import Ask, Delta, FinishReason, Moved, Placement, ReplicaId, Request, Timings

logger = logging.getLogger(__name__)

MOST_TRIES = 3  # attempts in a row that bring no token
MANAGER_S = 10.0  # how long a request waits for a KV manager that is being restarted


@dataclass(slots=True)
class Account:
    """What an answer cost, kept while it streams. Times are seconds since the request's arrival or durations."""

    began: float = field(default_factory=time.monotonic)
    prepared: float = 0.0  # validated and tokenized
    admitted: float = 0.0  # waited for the first placement
    ttft: float = 0.0
    timings: Timings = field(default_factory=Timings)
    moved: Moved = field(default_factory=Moved)
    placement: Placement | None = None
    resumes: int = 0

    def elapsed(self) -> float:
        return time.monotonic() - self.began


class Frontend:
    """The ingress' side of the request path."""

    def __init__(self, manager: Any, decode: Any) -> None:
        self._manager = manager
        self._decode = decode.options(stream=True, method_name="generate")

    async def generate(
        self, request: Request, account: Account
    ) -> AsyncGenerator[tuple[tuple[int, ...], FinishReason | None], None]:
        """New tokens and, with the last, why the answer ends. Closing the iterator is the cancel.

        Raises InvalidRequest, Overloaded, or Unavailable after `MOST_TRIES` attempts that brought no token.
        """
        tries = 0
        avoid: tuple[ReplicaId, ...] = ()
        done = False
        try:
            while not done:
                placement = await self._admit(request, avoid, account)
                cause: Resumable | None = None
                try:
                    async with aclosing(self._attempt(placement, request)) as deltas:
                        async for delta in deltas:
                            if delta.resumable is not None:
                                name, message, replica = delta.resumable
                                cause = Resumable(f"{name}: {message}", replica)
                            if delta.tokens:
                                self._first(delta, account)
                                request = replace(request, generated=request.generated + delta.tokens)
                                tries = 0
                                done = delta.finish is not None
                                yield delta.tokens, delta.finish
                except (RayActorError, ReplicaGone) as error:
                    lost = placement.decode.replica
                    cause = Resumable(f"decode replica {lost} is gone: {error!r}", lost)
                    self._manager.report_state.remote(lost, "dead")
                if done:
                    return
                cause = cause or Resumable("the decode stream ended without a reason")
                tries += 1
                account.resumes += 1
                logger.warning("request %s: attempt %d ended: %s", request.id, tries, cause.message)
                if tries >= MOST_TRIES:
                    raise Unavailable(
                        f"{tries} attempts in a row brought no token; the last ended with {cause.message}"
                    )
                if cause.replica is not None:
                    avoid = (*avoid, ReplicaId(cause.replica))
        finally:
            if not done:
                self._manager.revoke.remote(request.id)  # one way; whatever it still holds or waits for

    async def _admit(self, request: Request, avoid: tuple[ReplicaId, ...], account: Account) -> Placement:
        """Waits as long as the KV manager lets it, and a moment for a manager that is restarting."""
        ask = Ask(request.id, len(request.history), request.most_tokens, request.arrival, avoid)
        began = time.monotonic()
        while True:
            try:
                placement: Placement = await self._manager.admit.remote(ask)
                break
            except RayActorError as error:
                if time.monotonic() - began > MANAGER_S:
                    raise Unavailable(
                        f"the KV manager does not answer; try again in some seconds: {error!r}"
                    ) from error
                await asyncio.sleep(0.1)
        if account.placement is None:
            account.admitted = time.monotonic() - began
        account.placement = placement
        return placement

    async def _attempt(self, placement: Placement, request: Request) -> AsyncGenerator[Delta, None]:
        stream = self._decode.remote(placement, request)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.cancel()

    @staticmethod
    def _first(delta: Delta, account: Account) -> None:
        """Enter the parts of the time to the first token; those of a resume do not count."""
        if account.ttft == 0.0 and delta.timings is not None and delta.moved is not None:
            account.ttft = account.elapsed()
            account.timings, account.moved = delta.timings, delta.moved
