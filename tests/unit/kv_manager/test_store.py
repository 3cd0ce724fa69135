"""What is remembered beyond a manager's life: in memory and in a real Valkey, also when that dies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from redis_kit import Server, server

from bifolio.kv_manager.store import MemoryStore, RedisStore, Store, reach
from bifolio.protos.errors import ConfigError, Unavailable
from bifolio.protos.messages import RequestId

NOW = 1_796_045_543_970_481_913  # not a double


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    """One for all tests that leave it as it is."""
    with server() as made:
        made.start()
        yield made


@pytest.fixture
def own() -> Iterator[Server]:
    """For a test that kills it; not started."""
    with server() as made:
        yield made


@asynccontextmanager
async def opened(url: str, cell: str = "cell") -> AsyncIterator[RedisStore]:
    store = RedisStore(url, cell)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(params=["memory", "redis"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[Store], Awaitable[None]]], None]:
    """Runs a test's coroutine function over each kind of store, empty."""

    async def main(test: Callable[[Store], Awaitable[None]]) -> None:
        if request.param == "memory":
            await test(MemoryStore())
        else:
            async with opened(request.getfixturevalue("valkey").url, request.node.name) as store:
                await test(store)

    return lambda test: asyncio.run(main(test))


Run = Callable[[Callable[[Store], Awaitable[None]]], None]


def test_an_epoch_is_the_time_or_the_one_after_the_newest(run: Run) -> None:
    async def test(store: Store) -> None:
        assert await store.epoch(NOW) == NOW
        assert await store.epoch(NOW) == NOW + 1
        assert await store.epoch(NOW - 10**12) == NOW + 2
        assert await store.epoch(NOW + 10) == NOW + 10

    run(test)


def test_epochs_are_compared_as_numbers(run: Run) -> None:
    async def test(store: Store) -> None:
        assert await store.epoch(99) == 99
        assert await store.epoch(100) == 100
        assert await store.epoch(99) == 101
        assert await store.keep(99) == 101

    run(test)


def test_an_epoch_is_kept_unless_there_is_a_later_one(run: Run) -> None:
    async def test(store: Store) -> None:
        assert await store.keep(NOW) == 0, "there was nothing"
        assert await store.keep(NOW - 1) == NOW
        assert await store.keep(NOW + 1) == NOW
        assert await store.keep(NOW) == NOW + 1
        assert await store.epoch(NOW) == NOW + 2

    run(test)


def test_tombstones_stand_for_a_while(run: Run) -> None:
    names = [RequestId(name) for name in ("a", "a#1", "ü/*?[x]", "\ud800", "bifolio:")]

    async def test(store: Store) -> None:
        assert await store.buried() == {}
        for i, name in enumerate(names):
            await store.bury(name, 100 + i)
        await store.bury(names[0], 200)
        buried = await store.buried()
        assert set(buried) == set(names)
        assert 110 < buried[names[0]] <= 200, "the later one counts"
        assert all(0 < buried[name] <= 100 + i for i, name in enumerate(names) if i)

    run(test)


def test_tombstones_end_by_themselves(run: Run) -> None:
    async def test(store: Store) -> None:
        await store.bury(RequestId("short"), 0.001)
        await store.bury(RequestId("long"), 100)
        while RequestId("short") in (buried := await store.buried()):
            await asyncio.sleep(0.001)
        assert set(buried) == {"long"}

    run(test)


def test_memory_asks_its_clock() -> None:
    now = 5.0
    store = MemoryStore(lambda: now)
    asyncio.run(store.bury(RequestId("a"), 10))
    now = 8.0
    assert asyncio.run(store.buried()) == {"a": 7.0}
    now = 15.0
    assert asyncio.run(store.buried()) == {}


def test_cells_do_not_see_each_other(valkey: Server) -> None:
    async def test() -> None:
        async with opened(valkey.url, "one") as one, opened(valkey.url, "o?e*") as other:
            assert await one.epoch(NOW) == NOW
            await one.bury(RequestId("a"), 100)
            assert await other.epoch(1) == 1
            assert await other.buried() == {}

    asyncio.run(test())


def test_more_tombstones_than_one_answer_holds(valkey: Server) -> None:
    async def test() -> None:
        async with opened(valkey.url, "many") as store:
            with valkey.client() as client:
                client.mset({f"other:{i}": "" for i in range(3000)})
            for i in range(2500):
                await store.bury(RequestId(f"r{i}"), 1000)
            assert len(await store.buried()) == 2500

    asyncio.run(test())


def test_two_managers_never_have_the_same_epoch(valkey: Server) -> None:
    taken: list[int] = []

    async def test() -> None:
        async with opened(valkey.url, "race") as store:
            for _ in range(200):
                taken.append(await store.epoch(NOW))

    threads = [threading.Thread(target=asyncio.run, args=(test(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(NOW, NOW + 800))


def test_a_server_that_dies_is_said_and_one_that_starts_again_is_used(own: Server) -> None:
    async def test() -> None:
        async with opened(own.url) as store:
            with pytest.raises(Unavailable, match=r"redis\.sock cannot be used: .*No such file"):
                await store.epoch(NOW)
            own.start()
            assert await store.epoch(NOW) == NOW
            await store.bury(RequestId("a"), 100)
            own.kill()
            for ask in (store.epoch(NOW), store.keep(NOW), store.bury(RequestId("b"), 1), store.buried()):
                with pytest.raises(Unavailable, match="cannot be used"):
                    await ask
            own.start()
            assert await store.buried() == {}
            assert await store.keep(NOW) == 0, "it has forgotten everything"

    asyncio.run(test())


def test_a_server_that_hangs_is_given_up(own: Server) -> None:
    async def test() -> None:
        async with opened(own.url) as store:
            assert await store.epoch(NOW) == NOW
            own.pause()
            with pytest.raises(Unavailable, match="cannot be used"):
                await store.epoch(NOW)
            own.resume()
            assert await store.epoch(NOW) > NOW

    own.start()
    asyncio.run(test())


def test_what_is_no_epoch_is_said(valkey: Server) -> None:
    async def test() -> None:
        async with opened(valkey.url, "strange") as store:
            with valkey.client() as client:
                client.set("bifolio:{strange}:epoch", "z" * 30)
            for ask in (store.epoch(NOW), store.keep(NOW)):
                with pytest.raises(Unavailable, match="cannot be used"):
                    await ask

    asyncio.run(test())


def test_reach_names_the_reason_and_no_password(own: Server) -> None:
    with pytest.raises(Unavailable, match=r"unix:///.*redis\.sock cannot be used: .*No such file"):
        asyncio.run(reach(own.url, "cell"))
    with pytest.raises(Unavailable, match=r"^redis://127\.0\.0\.1:1 cannot be used: .*connect"):
        asyncio.run(reach("redis://:s3cret@127.0.0.1:1", "cell"))
    own.start("s3cret")
    asyncio.run(reach(own.url, "cell"))
    with pytest.raises(Unavailable, match=r"already authenticated"):
        asyncio.run(reach(own.url.replace(":s3cret@", ""), "cell"))
    with pytest.raises(Unavailable, match=r"invalid username-password") as refused:
        asyncio.run(reach(own.url.replace("s3cret", "wr0ng"), "cell"))
    assert "wr0ng" not in str(refused.value)


def test_reach_wants_to_write(own: Server) -> None:
    own.start()
    asyncio.run(reach(own.url, "cell"))
    with own.client() as client:
        client.config_set("maxmemory", 1)
        client.config_set("maxmemory-policy", "noeviction")
    with pytest.raises(Unavailable, match="maxmemory"):
        asyncio.run(reach(own.url, "cell"))


def test_an_option_that_the_client_does_not_know_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"^redis\.url: redis://h: .*socket_timeout") as refused:
        RedisStore("redis://:s3cret@h?socket_timeout=s3cret", "cell")
    assert "s3cret" not in str(refused.value)
