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

from ray.exceptions import RayActorError, RayError

from bifolio.protos.errors import BifolioError, Preempted, ReplicaGone, Resumable, Unavailable
from bifolio.protos.messages import Ask, Delta, Moved, Placement, ReplicaId, Request, Timings

logger = logging.getLogger(__name__)

MOST_TRIES = 3  # attempts in a row that bring no token
PAUSE_S = 0.05  # before the next attempt, for each that brought no token
MANAGER_S = 10.0  # how long a request waits for a KV manager that is being restarted


@dataclass(slots=True)
class Account:
    """What an answer cost, kept while it streams. Times are durations in seconds."""

    began: float = field(default_factory=time.monotonic)
    waited: float = 0.0  # for admission, and in attempts that failed, before the first token
    ttft: float = 0.0
    timings: Timings = field(default_factory=Timings)  # of the attempt that brought the first token
    moved: Moved = field(default_factory=Moved)  # of the last attempt, as is the placement
    placement: Placement | None = None
    resumes: int = 0

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def admitted(self, placement: Placement, waited: float) -> None:
        self.placement = placement
        if self.ttft == 0.0:
            self.waited += waited

    def first_token(self, delta: Delta) -> None:
        """Enter the first tokens of an attempt; later ones say nothing new."""
        if delta.moved is not None:
            self.moved = delta.moved
        if delta.timings is not None and self.ttft == 0.0:
            self.ttft, self.timings = self.elapsed(), delta.timings

    def resumed(self, spent: float) -> None:
        self.resumes += 1
        if self.ttft == 0.0:
            self.waited += spent


class Frontend:
    """The ingress' side of the request path."""

    def __init__(self, manager: Any, decode: Any) -> None:
        self._manager = manager
        self._decode = decode.options(stream=True, method_name="generate")

    async def generate(self, request: Request, account: Account) -> AsyncGenerator[Delta, None]:
        """Each delta has new tokens, and the last says why the answer ends. Closing the iterator is the cancel.

        The prompt's logprobs, if asked for, come once: with the first tokens of all.

        Raises InvalidRequest, Overloaded, or Unavailable after `MOST_TRIES` attempts that brought no token.
        """
        tries = 0
        avoid: tuple[ReplicaId, ...] = ()
        used: tuple[ReplicaId, ...] = ()  # prefill replicas of attempts that did not end by decode's fault
        done = False
        try:
            while not done:
                placement = await self._admit(request, avoid, account)
                began = time.monotonic()
                cause = Resumable("the decode stream ended without a reason", placement.decode.replica)
                try:
                    async with aclosing(self._attempt(placement, request)) as deltas:
                        async for delta in deltas:
                            if delta.resumable is not None:
                                cause = self._cause(*delta.resumable)
                            if delta.tokens:
                                account.first_token(delta)
                                generated = request.generated + delta.tokens
                                request = replace(request, generated=generated, prompt_logprobs=None)
                                tries = 0
                                done = delta.finish is not None
                                yield delta
                except Exception as error:
                    cause = self._lost(placement, error)
                if done:
                    return
                tries += not isinstance(cause, Preempted)  # it waits for its turn again, nothing has failed
                logger.warning("request %s: an attempt ended: %s", request.id, cause.message)
                if tries >= MOST_TRIES:
                    raise Unavailable(
                        f"{tries} attempts in a row brought no token; the last ended with {cause.message}"
                    )
                if placement.prefill is not None and cause.replica != placement.decode.replica:
                    used = (*used, placement.prefill.replica)
                if cause.replica is not None:
                    avoid = (*avoid, ReplicaId(cause.replica))
                if tries == MOST_TRIES - 1:  # for the last attempt: decode can prefill itself
                    avoid = (*avoid, *used)
                await asyncio.sleep(PAUSE_S * tries)
                account.resumed(time.monotonic() - began)
        finally:
            if not done:
                self._manager.revoke.remote(request.id)  # one way; whatever it still holds or waits for

    def _cause(self, name: str, message: str, replica: str | None) -> Resumable:
        """Why a decode stream ended early, in its own words. A prefill replica that is gone is reported."""
        if name == ReplicaGone.__name__ and replica is not None:
            self._manager.report_state.remote(replica, "dead")
        kind = Preempted if name == Preempted.__name__ else Resumable
        return kind(f"{name}: {message}", replica)

    def _lost(self, placement: Placement, error: Exception) -> Resumable:
        """Why a decode stream broke: whatever Serve or the network raised, the replica is not to be relied on."""
        ours = own_error(error)
        replica = placement.decode.replica
        if isinstance(ours, ReplicaGone):  # Serve no longer offers it: it is leaving, and finishes what it has
            self._manager.report_state.remote(replica, "draining")
        elif isinstance(ours, BifolioError):
            raise ours
        elif isinstance(error, RayActorError):
            self._manager.report_state.remote(replica, "dead")
        return Resumable(f"the stream of decode replica {replica} broke: {error!r}", replica)

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
            except RayError as error:
                raise own_error(error) or error from error
        account.admitted(placement, time.monotonic() - began)
        return placement

    async def _attempt(self, placement: Placement, request: Request) -> AsyncGenerator[Delta, None]:
        stream = self._decode.remote(placement, request)
        ended = False
        try:
            async for delta in stream:
                ended = delta.finish is not None or delta.resumable is not None
                yield delta
        finally:
            if not ended:
                stream.cancel()


def own_error(error: BaseException) -> BifolioError | None:
    """The error of ours that Ray has wrapped, as it was raised."""
    cause = getattr(error, "cause", error)
    return cause if isinstance(cause, BifolioError) else None
