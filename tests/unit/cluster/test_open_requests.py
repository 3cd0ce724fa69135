"""Requests that are open: confirmed at the KV manager, as long as they are, whatever happens to it."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from frontend_kit import GEOMETRY, REQUEST, Decode, Manager, collect
from ray.exceptions import ActorDiedError

from bifolio.cluster import open_requests
from bifolio.cluster.open_requests import Lost, OpenRequests, Waiting
from bifolio.protos.messages import Confirmed, Delta, ReplicaId, RequestId


def test_geometries_are_there_for_the_first_request():
    manager = Manager()
    collect(manager, Decode([Delta((7,), "stop")]))
    assert manager.confirmed[0] == (REQUEST.id,)
    assert list(manager.asks[0].keys) == ["m"]


def test_open_requests_are_confirmed_again_and_again_and_one_call_is_under_way_at_most(monkeypatch):
    async def run() -> None:
        calls, answer = [], asyncio.Event()

        async def confirm(ids):
            calls.append(ids)
            await answer.wait()
            return Confirmed((GEOMETRY,))

        manager = Manager()
        manager.confirm.remote = confirm
        requests = OpenRequests(manager, 10.0)
        with requests.opened(RequestId("a")):
            waiting = [asyncio.create_task(requests.geometries()) for _ in range(5)]
            with requests.opened(RequestId("b")):
                while not calls:
                    await asyncio.sleep(0)
                for _ in range(20):
                    await asyncio.sleep(0)
                assert calls == [("a", "b")]
                answer.set()
                assert await asyncio.gather(*waiting) == [(GEOMETRY,)] * 5
            while len(calls) < 4:
                await asyncio.sleep(0)
        assert calls[-1] == ("a",)

    monkeypatch.setattr(open_requests, "CONFIRM_S", 0.0)
    asyncio.run(run())


def test_a_manager_that_is_dead_is_asked_again(monkeypatch, caplog):
    async def run() -> None:
        manager = Manager(geometries=ActorDiedError())
        requests = OpenRequests(manager, 10.0)
        with requests.opened(RequestId("a")):
            assert await requests.geometries() == ()
            while len(manager.confirmed) < 3:
                await asyncio.sleep(0)
        manager.geometries = (GEOMETRY,)
        while not await requests.geometries():
            await asyncio.sleep(0)
        manager.geometries = ActorDiedError()
        seen = len(manager.confirmed)
        while len(manager.confirmed) < seen + 3:
            await asyncio.sleep(0)
        assert await requests.geometries() == (GEOMETRY,), "what was known is still true"

    monkeypatch.setattr(open_requests, "CONFIRM_S", 0.0)
    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert len(caplog.records) == 2, "each time it stops answering, once"


def test_a_manager_that_does_not_answer_is_not_waited_for_long(monkeypatch):
    async def run() -> None:
        manager = Manager()
        manager.confirm.remote = lambda ids: asyncio.Event().wait()
        assert await OpenRequests(manager, 10.0).geometries() == ()

    monkeypatch.setattr(open_requests, "FIRST_S", 0.0)
    asyncio.run(run())


def test_a_stream_that_times_out_by_itself_is_not_cancelled():
    async def run() -> None:
        async def stream():
            raise TimeoutError("of the stream's own")
            yield

        with pytest.raises(TimeoutError, match="of the stream's own"):
            await Waiting().next(stream())

    asyncio.run(run())


def test_requests_are_confirmed_also_where_nobody_asks_for_geometries(monkeypatch):
    async def run() -> None:
        manager = Manager()
        with OpenRequests(manager, 10.0).opened(RequestId("a")):
            while len(manager.confirmed) < 2:
                await asyncio.sleep(0)
        assert manager.confirmed[0] == ("a",)

    monkeypatch.setattr(open_requests, "CONFIRM_S", 0.0)
    asyncio.run(run())


def test_who_waits_for_a_replica_that_is_lost_waits_no_longer(monkeypatch):
    async def run() -> None:
        manager = Manager()
        requests = OpenRequests(manager, 10.0)

        async def stream():
            yield 1
            await asyncio.Event().wait()

        requests.watch()
        with requests.served_by(ReplicaId("d")) as lost, requests.served_by(ReplicaId("e")) as other:
            iterator = lost.over(stream())
            assert await anext(iterator) == 1
            manager.lost = {ReplicaId("d"): "it has not reported for 5.0 s"}
            with pytest.raises(Lost, match="decode replica d is lost: it has not reported for 5"):
                await anext(iterator)
            with pytest.raises(Lost):  # nor does who comes late
                await lost.next(iterator)
            assert await other.next(other.over(stream())) == 1

    monkeypatch.setattr(open_requests, "CONFIRM_S", 0.0)
    asyncio.run(run())


def test_a_manager_that_stands_still_is_started_again(monkeypatch, caplog):
    killed = []

    async def run() -> None:
        manager = Manager()
        manager.confirm.remote = lambda ids: asyncio.Event().wait()
        monkeypatch.setattr(open_requests.ray, "kill", lambda actor, no_restart: killed.append((actor, no_restart)))
        requests = OpenRequests(manager, 0.01)
        assert requests.silent_s == 0.0
        requests.watch()
        while not killed:
            await asyncio.sleep(0.001)
        assert killed == [(manager, False)]
        assert requests.silent_s >= 0.01

    asyncio.run(run())
    assert "has not answered for 0.01 s: it is started again" in caplog.text


def test_who_waits_for_a_replica_that_a_new_manager_does_not_come_to_know_waits_no_longer(monkeypatch):
    async def run() -> None:
        manager = Manager()
        manager.known = {ReplicaId("e")}
        requests = OpenRequests(manager, 1.0)

        async def stream(go: asyncio.Event):
            await go.wait()
            yield 1

        requests.watch()
        go = asyncio.Event()
        with requests.served_by(ReplicaId("d")) as unknown, requests.served_by(ReplicaId("e")) as known:
            waits = asyncio.create_task(known.next(known.over(stream(go))))
            with pytest.raises(Lost, match="the KV manager has not heard of it for"):
                await unknown.next(unknown.over(stream(go)))
            go.set()
            assert await waits == 1

    monkeypatch.setattr(open_requests, "CONFIRM_S", 0.0)
    asyncio.run(run())


def test_a_manager_is_not_blamed_for_what_held_us_up(monkeypatch):
    killed = []

    async def run() -> None:
        manager, asked, answered = Manager(), [], asyncio.Event()

        async def confirm(ids):
            asked.append(ids)
            await answered.wait()
            return Confirmed((GEOMETRY,))

        manager.confirm.remote = confirm
        requests = OpenRequests(manager, 0.05)
        requests.watch()
        while not asked:
            await asyncio.sleep(0)
        time.sleep(0.2)  # as when the process is stopped
        await asyncio.sleep(0)
        answered.set()
        while not await requests.geometries():
            await asyncio.sleep(0)

    monkeypatch.setattr(open_requests.ray, "kill", lambda *_, **__: killed.append(1))
    monkeypatch.setattr(open_requests, "LATE_S", 0.1)
    monkeypatch.setattr(open_requests, "CONFIRM_S", 0.0)
    asyncio.run(run())
    assert not killed


def test_confirming_goes_on_whatever_happens(monkeypatch, caplog):
    async def run() -> None:
        manager = Manager()
        monkeypatch.setattr(OpenRequests, "_end_lost", lambda *_: 1 / 0)
        OpenRequests(manager, 10.0).watch()
        while len(manager.confirmed) < 3:
            await asyncio.sleep(0)

    monkeypatch.setattr(open_requests, "CONFIRM_S", 0.0)
    asyncio.run(run())
    assert "requests were not confirmed, going on" in caplog.text
