"""A scripted manager and scripted decode streams: what Ray would carry, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from types import SimpleNamespace

from bifolio.cluster.account import Account
from bifolio.cluster.choices import Choices
from bifolio.cluster.frontend import Frontend
from bifolio.protos.messages import (
    Ask,
    Confirmed,
    Delta,
    Generation,
    Geometry,
    Lease,
    Placement,
    ReplicaId,
    Request,
    RequestId,
    Sampling,
)

REQUEST = Request(RequestId("r"), (1, 2, 3), Sampling(10), 5.0)
GEOMETRY = Geometry("m", 1, 1, 8, 2, "float32")
STALE = Delta(resumable=("StalePlacement", "block 3 went elsewhere", None))
FAILED = Delta(resumable=("TransferFailed", "a frame is missing", "p#1"))

Script = Sequence[Delta | Exception | asyncio.Event]


class Manager:
    """Answers `admit` from the script, or with ever new placements, and notes every call."""

    def __init__(self, *answers: object, geometries: tuple[Geometry, ...] | Exception = (GEOMETRY,)) -> None:
        self.answers = list(answers)
        self.geometries = geometries
        self.lost: dict[ReplicaId, str] = {}
        self.known: set[ReplicaId] = set()
        self.asks: list[Ask] = []
        self.confirmed: list[tuple[RequestId, ...]] = []
        self.calls: list[tuple[object, ...]] = []
        self.admit = SimpleNamespace(remote=self._admit)
        self.confirm = SimpleNamespace(remote=self._confirm)
        self.cancel = SimpleNamespace(remote=self._cancel)
        self.revoke = SimpleNamespace(remote=self._revoke)
        self.report_state = SimpleNamespace(remote=lambda *args: self.calls.append(("report_state", *args)))

    async def _admit(self, ask: Ask) -> Placement:
        self.asks.append(ask)
        number = len(self.asks)
        if self.answers:
            if isinstance(answer := self.answers.pop(0), Exception):
                raise answer
            if isinstance(answer, asyncio.Event):
                await answer.wait()
        decode = Lease(ReplicaId(f"d#{number}"), Generation(1, number), ())
        prefill = Lease(ReplicaId(f"p#{number}"), Generation(2, number), ())
        return Placement(ask.request, decode, prefill, model="m", reason="long")

    async def _confirm(self, requests: tuple[RequestId, ...]) -> Confirmed:
        self.confirmed.append(requests)
        if isinstance(self.geometries, Exception):
            raise self.geometries
        return Confirmed(self.geometries, self.lost, frozenset(self.known))

    def _revoke(self, request: RequestId, known: bool = False) -> None:
        self.calls.append(("revoke", request, "known") if known else ("revoke", request))

    async def _cancel(self, request: RequestId) -> None:
        self.calls.append(("cancel", request))


class Decode:
    """The handle: each call plays the next stream of the script. A stream waits at an event."""

    def __init__(self, *streams: Script) -> None:
        self.streams = list(streams)
        self.requests: list[Request] = []
        self.cancelled = 0

    def remote(self, placement: Placement, request: Request) -> Stream:
        self.requests.append(request)
        return Stream(self, self.streams.pop(0))


class Stream:
    def __init__(self, decode: Decode, script: Script) -> None:
        self.decode, self.script = decode, script

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for each in self.script:
            if isinstance(each, Exception):
                raise each
            if isinstance(each, asyncio.Event):
                await each.wait()
            else:
                yield each

    def cancel(self) -> None:
        self.decode.cancelled += 1


def front(manager: Manager, decode: Decode) -> Frontend:
    return Frontend(manager, decode, attempts=3, silence_s=10.0)


async def deltas_of(
    manager: Manager,
    decode: Decode,
    request: Request = REQUEST,
    account: Account | None = None,
    seen: Callable[[Choices, Delta], object] = lambda choices, delta: None,
) -> list[Delta]:
    """All deltas; `seen` is called with each as it comes."""
    choices, deltas = Choices(request), []
    async with aclosing(front(manager, decode).generate(choices, account or Account())) as stream:
        async for delta in stream:
            deltas.append(delta)
            seen(choices, delta)
    return deltas


def collect(
    manager: Manager, decode: Decode, request: Request = REQUEST, account: Account | None = None
) -> dict[int | None, list[int]]:
    """The tokens of each choice."""
    tokens: dict[int | None, list[int]] = {}
    for delta in asyncio.run(deltas_of(manager, decode, request, account)):
        tokens.setdefault(delta.choice, []).extend(delta.tokens)
    return tokens
