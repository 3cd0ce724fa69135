"""What a manager wants remembered, while its store comes and goes."""

from __future__ import annotations

import asyncio
import logging

import pytest

from bifolio.kv_manager.keeper import AGAIN_S, Keeper
from bifolio.kv_manager.store import MemoryStore
from bifolio.protos.errors import Unavailable
from bifolio.protos.messages import RequestId

A, B = RequestId("a"), RequestId("b")


class Flaky(MemoryStore):
    """A store that can be away."""

    def __init__(self) -> None:
        self.now = 0.0
        self.away = False
        super().__init__(lambda: self.now)

    def _answer(self) -> None:
        if self.away:
            raise Unavailable("gone fishing")

    async def epoch(self, now_ns: int) -> int:
        self._answer()
        return await super().epoch(now_ns)

    async def keep(self, epoch: int) -> int:
        self._answer()
        return await super().keep(epoch)

    async def bury(self, request: RequestId, seconds: float) -> None:
        self._answer()
        await super().bury(request, seconds)

    async def buried(self) -> dict[RequestId, float]:
        self._answer()
        return await super().buried()


@pytest.fixture
def store() -> Flaky:
    return Flaky()


@pytest.fixture
def keeper(store: Flaky) -> Keeper:
    return Keeper(store, 60, lambda: store.now)


def test_what_was_there_is_found_once(store: Flaky, keeper: Keeper) -> None:
    async def test() -> None:
        await store.epoch(10)
        await store.bury(A, 30)
        assert await keeper.begin(5) == keeper.epoch == 11
        assert await keeper.round() == {A: 30}
        assert await keeper.round() == {}
        assert keeper.answers
        assert not keeper.outdated

    asyncio.run(test())


def test_tombstones_are_written_by_the_next_round(store: Flaky, keeper: Keeper) -> None:
    async def test() -> None:
        await keeper.begin(1)
        await keeper.round()
        keeper.bury(A)
        assert await store.buried() == {}
        await keeper.due()  # at once
        await keeper.round()
        assert await store.buried() == {A: 60}
        store.now = 30
        await keeper.round()
        assert await store.buried() == {A: 30}, "written once"

    asyncio.run(test())


def test_what_cannot_be_written_is_owed_for_as_long_as_it_would_stand(store: Flaky, keeper: Keeper) -> None:
    async def test() -> None:
        await keeper.begin(1)
        store.away = True
        keeper.bury(A)
        await keeper.round()
        store.now = 20
        keeper.bury(B)
        await keeper.round()
        store.now, store.away = 65, False
        await keeper.round()
        assert await store.buried() == {B: 15}

    asyncio.run(test())


def test_without_a_store_the_epoch_is_the_time_and_stored_later(store: Flaky, keeper: Keeper) -> None:
    async def test() -> None:
        await store.bury(A, 30)
        store.away = True
        assert await keeper.begin(7) == 7
        assert await keeper.round() == {}
        assert not keeper.answers
        store.away = False
        assert await keeper.round() == {A: 30}
        assert keeper.answers
        assert not keeper.outdated
        assert await store.epoch(0) == 8

    asyncio.run(test())


def test_an_epoch_without_a_store_that_turns_out_too_early_is_outdated(store: Flaky, keeper: Keeper) -> None:
    async def test() -> None:
        await store.epoch(100)
        store.away = True
        await keeper.begin(7)
        await keeper.round()
        assert not keeper.outdated
        store.away = False
        await keeper.round()
        assert keeper.outdated

    asyncio.run(test())


def test_a_store_that_has_forgotten_is_told_the_epoch_again(store: Flaky, keeper: Keeper) -> None:
    async def test() -> None:
        await keeper.begin(7)
        await keeper.round()
        store._newest = 0
        await keeper.round()
        assert await store.epoch(0) == 8

    asyncio.run(test())


def test_another_manager_with_the_same_store_is_said_once(
    store: Flaky, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        await keeper.begin(7)
        await store.epoch(9)
        for _ in range(3):
            await keeper.round()
        assert not keeper.outdated

    asyncio.run(test())
    (record,) = caplog.records
    assert "another KV manager of this cell" in record.getMessage()


def test_a_store_that_is_away_is_said_at_once_then_now_and_again_and_when_it_is_back(
    store: Flaky, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        await keeper.begin(7)
        store.away = True
        keeper.bury(A)
        for now in (1, 2, 3, 1 + AGAIN_S):
            store.now = now
            await keeper.round()
        store.away = False
        await keeper.round()
        await keeper.round()

    asyncio.run(test())
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == [logging.ERROR, logging.ERROR, logging.WARNING]
    assert "the store is away, serving goes on without it: gone fishing" in said[0][1]
    assert "1 cancelled requests" in said[0][1]
    assert said[2][1] == "the store answers again: memory"


def test_a_store_that_was_emptied_is_told_again_what_still_stands(store: Flaky, keeper: Keeper) -> None:
    async def test() -> None:
        await keeper.begin(10)
        keeper.bury(A)
        store.now = 30.0
        keeper.bury(B)
        await keeper.round()
        store.__init__()  # type: ignore[misc]  # as when its process is started again
        store.now = 70.0  # A's tombstone is over
        await keeper.round()
        assert await store.buried() == {B: 20.0}
        assert await store.keep(0) == 10

    asyncio.run(test())
