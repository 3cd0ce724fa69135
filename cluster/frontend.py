"""Takes a request through admission and decode, and places it again when an attempt ends early.

Token ids only: knows nothing about HTTP, gRPC or text. `_attempts` is the one resume path: a stale placement, a lost
replica, a broken transfer and a preemption all end here, and the caller's stream goes on.

    admit ──▶ placement ──▶ decode stream ──▶ tokens …
      ▲                          │ resumable: the request with the tokens it has
      └──────────────────────────┘

A request of several choices takes the same path: as one until it has a token, then each choice for itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray.exceptions import ActorDiedError, RayActorError, RayError

from bifolio.kv_manager import keys
from bifolio.protos.errors import BifolioError, Draining, ReplicaGone, Unavailable
from bifolio.protos.messages import Ask, Delta, Geometry, Key, Placement, ReplicaId, Request, RequestId, choice_id

from .account import Account
from .choices import Choices, Merged
from .open_requests import Lost, OpenRequests
from .tries import Ended, Tries

logger = logging.getLogger(__name__)

MANAGER_S = 60.0  # how long a request waits for a KV manager that is away
AT_ONCE_S = 1.0  # in which a call to one that is away fails
LONG = 4096  # tokens: the keys of more take so long (a millisecond) that other streams would feel it


class Frontend:
    """The ingress' side of the request path."""

    def __init__(self, manager: Any, decode: Any, *, attempts: int, silence_s: float) -> None:
        """`decode` has streams by `remote`. A request ends with an error after so many `attempts` in a row that brought
        no token. `silence_s` as in OpenRequests."""
        self._manager = manager
        self._decode = decode
        self._attempts_most = attempts
        self.requests = OpenRequests(manager, silence_s)

    async def generate(self, choices: Choices, account: Account) -> AsyncGenerator[Delta, None]:
        """Each delta has new tokens of one choice, and the last of a choice says why it ends. Closing the iterator is
        the cancel. A choice that the reader gives up brings nothing more.

        The prompt's logprobs, if asked for, come once: with the first tokens of all.

        Raises InvalidRequest, Overloaded, Revoked if the request is cancelled by its id, or Unavailable after
        `attempts` that brought no token.
        """
        request = choices.request
        with self.requests.opened(request.id) as opened:
            refused = False
            try:
                async with aclosing(Merged("all", self._attempts(request, account, self._tries()))) as streams:
                    while choices.open:
                        delta = await opened.next(streams)
                        choice = delta.choice
                        if choice not in choices.open:
                            continue
                        if delta.tokens:
                            choices.take(delta)
                            yield delta
                            if delta.finish is None and choice not in choices.open and choices.open:
                                self._manager.revoke.remote(choice_id(request.id, choice))
                                await streams.close(choice)
                        if delta.resumable is not None and choice in choices.open:
                            tries = self._tries()
                            tries.failed(Ended(*delta.resumable), account.placement, time.monotonic())
                            account.resumes += 1
                            streams.add(choice, self._attempts(choices.alone(choice), account, tries))
            except BifolioError:
                refused = True  # so no admission is on its way, and the id may be used again
                raise
            finally:
                if choices.open:  # one way; whatever it still holds or waits for
                    self._manager.revoke.remote(request.id, known=refused)

    async def cancel(self, id: RequestId) -> None:
        """Gives a request up, wherever it is or will be. Unavailable if that cannot be noted for good."""
        self.requests.cancel(id)
        await self._ask(self._manager.cancel, id)

    async def _attempts(self, request: Request, account: Account, tries: Tries) -> AsyncGenerator[Delta, None]:
        """Deltas of attempt after attempt, until all of the request has ended. If several choices have begun and do not
        end together, those that are left come out as resumable: each is to go on as a request of its own."""
        while True:
            if tries.count:
                await asyncio.sleep(tries.pause_s)
            placement = await self._admit(request, tries, account)
            began, left, brought = time.monotonic(), set(_numbers(request)), False
            tokens: list[int] = []  # of the only choice
            try:
                async with aclosing(self._attempt(placement, request)) as deltas:
                    async for delta in deltas:
                        if delta.tokens and not brought:
                            brought = True
                            account.paused += tries.brought(time.monotonic())
                            account.first_tokens(delta, placement, began)
                        if request.n == 1:
                            tokens.extend(delta.tokens)
                        if delta.finish is not None or delta.resumable is not None:
                            left.discard(delta.choice)
                        yield delta
                return
            except Ended as error:
                ended = error
            logger.warning("request %s: an attempt ended: %s", request.id, ended.message)
            if request.n > 1 and (brought or len(left) < request.n):
                for choice in sorted(left):
                    yield Delta(resumable=(ended.name, str(ended), ended.replica), choice=choice)
                return
            tries.failed(ended, placement, time.monotonic())
            account.resumes += 1
            if tokens:
                request = replace(request, generated=(*request.generated, *tokens), prompt_logprobs=None)

    async def _attempt(self, placement: Placement, request: Request) -> AsyncGenerator[Delta, None]:
        """The deltas of one decode stream, each of one choice. Raises Ended if not all choices end in it."""
        replica = placement.decode.replica
        ended = Ended("ReplicaGone", f"the stream of decode replica {replica} ended without a reason", replica)
        stream = self._decode.remote(placement, request)
        left, over = request.n, False
        try:
            with self.requests.served_by(replica) as waiting:
                async for delta in waiting.over(stream):
                    if request.n == 1 and delta.choice != request.sampling.choice:
                        delta = replace(delta, choice=request.sampling.choice)
                    if delta.resumable is not None:
                        early = self._ended(*delta.resumable)
                        if request.n == 1 or delta.choice is None:
                            ended, over = early, True
                            delta = replace(delta, resumable=None)
                    left -= delta.finish is not None or delta.resumable is not None
                    if delta.tokens or delta.resumable is not None:
                        yield delta
        except Exception as error:
            ended = self._lost(replica, error)
        finally:
            if left and not over:
                stream.cancel()
        if left:
            raise ended

    def _tries(self) -> Tries:
        return Tries(self._attempts_most)

    def _ended(self, name: str, message: str, replica: str | None) -> Ended:
        """Why a decode stream ended early, in its own words. A prefill replica that is gone is reported."""
        if name == ReplicaGone.__name__ and replica is not None:
            self._manager.report_state.remote(replica, "unreachable")
        return Ended(name, message, replica)

    def _lost(self, replica: ReplicaId, error: Exception) -> Ended:
        """Why a decode stream broke: whatever Serve or the network raised, the replica is not to be relied on."""
        ours = own_error(error)
        if isinstance(ours, Lost):  # the manager knows
            return Ended("ReplicaGone", ours.message, replica)
        if isinstance(ours, Draining):  # it finishes what it has
            self._manager.report_state.remote(replica, "draining")
        if isinstance(ours, Draining | ReplicaGone):  # the router's words
            return Ended(type(ours).__name__, ours.message, replica)
        if isinstance(ours, BifolioError):
            raise ours
        if isinstance(error, RayActorError):
            dead = isinstance(error, ActorDiedError)
            self._manager.report_state.remote(replica, "dead" if dead else "unreachable")
        return Ended("ReplicaGone", f"the stream of decode replica {replica} broke: {error!r}", replica)

    async def _admit(self, request: Request, tries: Tries, account: Account) -> Placement:
        """Waits as long as the KV manager lets it, and a moment for a manager that is restarting. The last try relies
        on no cache, in case that is what is wrong."""
        ask = Ask(
            request.id,
            len(request.history),
            request.most_tokens,
            request.arrival,
            tries.avoid,
            n=request.n,
            keys={} if tries.last else await self._keys(request, account.model),
            model=account.model,
            tenant=request.tenant,
            priority=request.priority,
            cause=tries.cause,
        )
        account.asked = account.asked or time.monotonic()
        placement: Placement = await self._ask(self._manager.admit, ask)
        account.placement = placement
        return placement

    async def _keys(self, request: Request, model: str | None) -> dict[str, tuple[Key, ...]]:
        """By model. None where the whole prompt is to be computed, because every token of it is to be reported on."""
        if request.prompt_logprobs is not None:
            return {}
        geometries = [g for g in await self.requests.geometries() if model in (None, g.fingerprint)]
        if len(request.history) > LONG:
            return await asyncio.to_thread(_keys_of, request, geometries)
        return _keys_of(request, geometries)

    async def _ask(self, method: Any, argument: Any) -> Any:
        """What the KV manager answers. Raises its errors, and Unavailable if it stays away."""
        away = time.monotonic()
        while True:
            called = time.monotonic()
            try:
                return await method.remote(argument)
            except RayActorError as error:
                now = time.monotonic()
                away = now if now - called > AT_ONCE_S else away  # until now it was there, or hung
                if now - away > MANAGER_S:
                    raise Unavailable(
                        f"the KV manager does not answer; try again in some seconds: {error!r}"
                    ) from error
                await asyncio.sleep(0.1)
            except RayError as error:
                raise own_error(error) or error from error


def _numbers(request: Request) -> Iterable[int]:
    return range(request.n) if request.n > 1 else (request.sampling.choice,)


def _keys_of(request: Request, geometries: Iterable[Geometry]) -> dict[str, tuple[Key, ...]]:
    return {g.fingerprint: keys.chain(keys.root(g, request.salt), request.history, g.block_size) for g in geometries}


def own_error(error: BaseException) -> BifolioError | None:
    """The error of ours that Ray has wrapped, as it was raised."""
    cause = getattr(error, "cause", error)
    return cause if isinstance(cause, BifolioError) else None
