"""What a replica says to a KV manager, whose answers are scripted here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.tags import BlockTags
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.protos.errors import StalePlacement
from bifolio.protos.measures import Speeds, Traffic
from bifolio.protos.messages import (
    BlockId,
    Generation,
    Geometry,
    Key,
    Lease,
    Release,
    ReplicaId,
    ReplicaInfo,
    Reply,
    Report,
)
from bifolio.replicas import beat
from bifolio.replicas.beat import Beat
from bifolio.replicas.cores import Cores

REPLICA = ReplicaId("d")
INFO = ReplicaInfo(REPLICA, "decode", Geometry("m", 1, 1, 8, 4, "float32"), 8)
NEVER = KvConfig(heartbeat_s=60, offer_ttl_s=180, silence_s=180, confirm_s=180)  # no beat but those asked for


class Manager:
    """Takes calls as an actor's handle does; `answer` makes the reply to a report."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.answer: Callable[[Report], Reply] = lambda report: Reply(report.beat)

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": lambda _, *of: self._called(name, *of)})()

    def _called(self, name: str, *of: Any) -> asyncio.Future[Any]:
        self.calls.put_nowait((name, of[-1]))
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result(self.answer(of[-1]) if name == "heartbeat" else None)
        return done

    async def next(self, name: str) -> Any:
        while True:
            called, of = await asyncio.wait_for(self.calls.get(), 20)
            if called == name:
                return of


class Core:
    def __init__(self) -> None:
        self.stood = 0.0  # seconds, of the engine
        self.replica = REPLICA
        self.tags = BlockTags(REPLICA, 8)
        self.speeds = Speeds(123.0, 0.5)
        self.meter = TrafficMeter()
        self.cores = Cores()

    def stalled_s(self) -> float:
        return self.stood


class Role:
    """What the beat asks and tells a replica's work."""

    def __init__(self, revoked: Callable[[Generation], None]) -> None:
        self.revoke = revoked
        self.gave_up: list[str] = []
        self.stood = 0.0  # seconds, of a transfer
        self.left = 0  # times that it was asked to leave

    def give_up(self, why: str) -> None:
        self.gave_up.append(why)

    def stalled_s(self) -> float:
        return self.stood

    def leave(self) -> None:
        self.left += 1


def lease(counter: int, *blocks: int) -> Lease:
    return Lease(REPLICA, Generation(1, counter), tuple(map(BlockId, blocks)))


Work = Callable[[Beat, Core, Manager], Coroutine[Any, Any, None]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs `work` with a replica that has registered."""

    def run(
        work: Work,
        kv: KvConfig = NEVER,
        revoked: Callable[[Generation], None] = lambda _: None,
        role: Role | None = None,
    ) -> None:
        manager = Manager()
        monkeypatch.setattr(beat, "connect", lambda *_: manager)

        class Spec:
            pass

        spec: Any = Spec()
        spec.kv, spec.manager = kv, ("name", "namespace")

        async def go() -> None:
            core: Any = Core()
            it = Beat(core, spec)
            does = role or Role(revoked)
            await it.start(INFO, does, does.leave)
            await work(it, core, manager)
            await it.stop()

        asyncio.run(go())

    return run


def test_a_replica_registers_with_a_complete_report_and_its_speeds(play: Callable[..., None]) -> None:
    async def work(it: Beat, core: Core, manager: Manager) -> None:
        report = await manager.next("register")
        assert (report.beat, report.since, report.speeds) == (1, 0, Speeds(123.0, 0.5))

    play(work)


def test_every_report_says_what_has_been_moved(play: Callable[..., None]) -> None:
    async def work(it: Beat, core: Core, manager: Manager) -> None:
        assert (await manager.next("register")).traffic == Traffic()
        core.meter.moved(frames=3, size=100, seconds=0.5)
        it.drain()
        assert (await manager.next("heartbeat")).traffic == Traffic(frames=3, bytes=100, moving_s=0.5)

    play(work)


def test_leases_closed_in_one_tick_go_in_one_call_from_whatever_thread(play: Callable[..., None]) -> None:
    async def work(it: Beat, core: Core, manager: Manager) -> None:
        for counter in range(1, 7):
            core.tags.open(lease(counter, counter))
        core.tags.fill(Generation(1, 2), [Key(b"k" * 32)])
        threads = [threading.Thread(target=it.close, args=(Generation(1, counter),)) for counter in range(1, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:  # the loop has had no turn since
            thread.join()
        it.close(Generation(1, 3))
        releases: tuple[Release, ...] = await manager.next("release")
        assert sorted(release.generation.counter for release in releases) == [1, 2, 3, 4, 5]
        assert {release.beat for release in releases} == {1}
        assert [key for release in releases for key in release.keys] == [(BlockId(2), b"k" * 32)]
        it.close(Generation(1, 6))
        assert [release.generation.counter for release in await manager.next("release")] == [6]
        it.close(Generation(1, 6))
        await asyncio.sleep(0)
        assert manager.calls.empty()

    play(work)


@pytest.mark.parametrize("ask", ["on the loop", "in a thread"])
def test_a_refused_placement_is_reported_at_once(play: Callable[..., None], ask: str) -> None:
    async def work(it: Beat, core: Core, manager: Manager) -> None:
        core.tags.open(lease(1, 1))
        it.if_due()
        await manager.next("heartbeat")  # the reserve is to be filled
        with pytest.raises(StalePlacement):
            core.tags.open(lease(2, 1))
        if ask == "on the loop":
            it.if_due()
        else:
            await asyncio.to_thread(it.ask_if_due)
        assert [x.generation.counter for x in (await manager.next("heartbeat")).leases] == [1]

    play(work)


def test_a_manager_that_does_not_know_the_replica_is_told_everything(play: Callable[..., None]) -> None:
    async def work(it: Beat, core: Core, manager: Manager) -> None:
        await manager.next("register")
        core.tags.open(lease(1, 1))
        core.tags.fill(Generation(1, 1), [Key(b"a" * 32)])
        it.drain()
        assert (await manager.next("heartbeat")).keys == ((BlockId(1), b"a" * 32),)
        it.drain()
        assert (await manager.next("heartbeat")).keys == ()
        manager.answer = lambda report: Reply(report.beat, known=False)
        it.drain()
        report = await manager.next("register")
        assert (report.since, report.keys, report.draining) == (0, ((BlockId(1), b"a" * 32),), True)

    play(work)


def test_revoked_leases_are_named_to_whom_they_concern(play: Callable[..., None]) -> None:
    heard: list[Generation] = []

    async def work(it: Beat, core: Core, manager: Manager) -> None:
        core.tags.open(lease(1, 1))
        manager.answer = lambda report: Reply(report.beat, revoked=(Generation(1, 1), Generation(1, 9)))
        it.if_due()
        await manager.next("heartbeat")
        while not heard:
            await asyncio.sleep(0)
        assert heard == [Generation(1, 1)]

    play(work, revoked=heard.append)


def test_what_stands_still_is_reported_at_once_and_given_up_as_long_as_it_does(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    role = Role(lambda _: None)

    async def work(it: Beat, core: Core, manager: Manager) -> None:
        core.stood = 31.0
        assert (await manager.next("heartbeat")).stalled == {"engine": 31.0}
        while len(role.gave_up) < 2:
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="d stands still: engine"):
            it.check()
        core.stood, role.stood = 0.0, 4.0
        assert (await manager.next("heartbeat")).stalled == {"transfer": 4.0}
        role.stood = 0.0
        assert (await manager.next("heartbeat")).stalled == {}
        it.check()

    monkeypatch.setattr(beat, "LOOK_S", 0.0)
    play(work, role=role)
    assert role.gave_up[0] == "it has ended no step for 31.0 s"


def test_a_replica_that_is_asked_to_leave_does(play: Callable[..., None]) -> None:
    role = Role(lambda _: None)

    async def work(it: Beat, core: Core, manager: Manager) -> None:
        manager.answer = lambda report: Reply(report.beat, leave=True)
        it.drain()
        await manager.next("heartbeat")
        while not role.left:
            await asyncio.sleep(0)

    play(work, role=role)


def test_its_goodbye_is_none_of_a_dead_replica(play: Callable[..., None]) -> None:
    async def work(it: Beat, core: Core, manager: Manager) -> None:
        await it.stop()
        assert await manager.next("report_state") == "gone"

    play(work)
