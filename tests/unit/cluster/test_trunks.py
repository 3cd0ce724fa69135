"""Calls of decode streams whose deltas come by a trunk; both ends, with no Ray between them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from frontend_kit import REQUEST
from loop_kit import in_a_loop

from bifolio.cluster import trunks
from bifolio.protos.errors import ReplicaGone
from bifolio.protos.messages import Delta, Generation, Lease, Placement, ReplicaId, RequestId
from bifolio.replicas.trunk import Trunks


def placed(replica: str = "d#1") -> Placement:
    return Placement(RequestId("r"), Lease(ReplicaId(replica), Generation(1, 1), ()), None, model="m", reason="never")


class Response:
    """Of a call: its stream, which `cancel` ends."""

    def __init__(self, stream: AsyncGenerator[Any, None]) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.task = asyncio.create_task(self._run(stream))

    async def _run(self, stream: AsyncGenerator[Any, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    self.items.put_nowait(item)
        except Exception as error:
            self.items.put_nowait(error)
        finally:
            self.items.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (item := await self.items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def cancel(self) -> None:
        self.task.cancel()


class Replicas:
    """The pool's handle, with a replica for each id; a stream of theirs says what `says` yields."""

    def __init__(self, says: Callable[[], AsyncGenerator[Delta, None]]) -> None:
        self.says = says
        self.trunks: dict[str, Trunks] = {}
        self.said: list[Response] = []

    def options(self, *, method_name: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(remote=getattr(self, method_name + "_"))

    def of(self, placement: Placement) -> Trunks:
        return self.trunks.setdefault(placement.decode.replica, Trunks())

    def generate_(self, placement: Placement, request: object, name: str, number: int) -> Response:
        async def generate() -> AsyncGenerator[None, None]:
            await self.of(placement).carry(name, number, self.says())
            return
            yield

        return Response(generate())

    def said_(self, placement: Placement, name: str) -> Response:
        self.said.append(Response(self.of(placement).said(name)))
        return self.said[-1]


def counting(*tokens: int, then: Exception | None = None) -> Callable[[], AsyncGenerator[Delta, None]]:
    async def says() -> AsyncGenerator[Delta, None]:
        for token in tokens:
            await asyncio.sleep(0)
            yield Delta((token,))
        if then is not None:
            raise then

    return says


async def endless() -> AsyncGenerator[Delta, None]:
    while True:
        yield Delta((1,))
        await asyncio.sleep(0.01)


async def all_of(call: trunks.Call) -> list[int]:
    return [delta.tokens[0] async for delta in call]


@in_a_loop
async def test_streams_of_one_replica_share_a_trunk_and_come_apart():
    pool = Replicas(counting(1, 2, 3))
    it = trunks.Trunks(pool)
    calls = [it.remote(placed(), REQUEST) for _ in range(3)]
    assert [await all_of(call) for call in calls] == [[1, 2, 3]] * 3
    assert len(pool.said) == 1


@in_a_loop
async def test_each_replica_has_its_own_trunk():
    pool = Replicas(counting(1))
    it = trunks.Trunks(pool)
    for replica in ("d#1", "d#2"):
        assert await all_of(it.remote(placed(replica), REQUEST)) == [1]
    assert len(pool.said) == 2


@in_a_loop
async def test_a_stream_raises_what_its_call_broke_of():
    it = trunks.Trunks(Replicas(counting(1, 2, then=ValueError("broken"))))
    with pytest.raises(ValueError, match="broken"):
        await all_of(it.remote(placed(), REQUEST))


@in_a_loop
async def test_where_a_trunk_ends_all_its_streams_break_and_the_next_one_opens_another():
    pool = Replicas(endless)
    it = trunks.Trunks(pool)
    calls = [it.remote(placed(), REQUEST) for _ in range(2)]
    for call in calls:
        await anext(call)
    pool.said[0].cancel()
    for call in calls:
        with pytest.raises(ReplicaGone, match="has ended its trunk"):
            await all_of(call)
        call.cancel()
    again = it.remote(placed(), REQUEST)
    assert await anext(again) == Delta((1,))
    assert len(pool.said) == 2
    again.cancel()


@in_a_loop
async def test_a_stream_that_is_cancelled_is_closed_at_the_replica():
    closed = asyncio.Event()

    async def watched() -> AsyncGenerator[Delta, None]:
        try:
            async for delta in endless():
                yield delta
        finally:
            closed.set()

    call = trunks.Trunks(Replicas(watched)).remote(placed(), REQUEST)
    await anext(call)
    call.cancel()
    await asyncio.wait_for(closed.wait(), 5)


@in_a_loop
async def test_a_trunk_without_streams_is_closed_after_a_while(monkeypatch):
    monkeypatch.setattr(trunks, "IDLE_S", 0.05)
    pool = Replicas(counting(1))
    it = trunks.Trunks(pool)
    await all_of(it.remote(placed(), REQUEST))
    await all_of(it.remote(placed(), REQUEST))
    assert len(pool.said) == 1
    await asyncio.wait_for(asyncio.wait([pool.said[0].task]), 5)
    assert not pool.of(placed())._trunks
