"""The KV manager as a real actor in a private local Ray."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")  # read when Ray is imported

import ray
from redis_kit import Server, server

from bifolio.kv_manager.actor import connect, start
from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.tags import BlockTags
from bifolio.protos.errors import DoesNotFit, GeometryMismatch, Overloaded, Revoked, Unavailable
from bifolio.protos.messages import Ask, Confirmed, Geometry, Placement, Release, ReplicaId, ReplicaInfo, RequestId

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("default")]

GEOMETRY = Geometry("m", 1, 1, 8, 4, "float32")
DECODE = ReplicaInfo(ReplicaId("d"), "decode", GEOMETRY, blocks=8)
CONFIG = KvConfig(admission_queue=3, admission_wait_s=3, heartbeat_s=0.2, silence_s=30, passing_s=0)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    place = tempfile.mkdtemp(prefix="bk", dir="/tmp")  # short: Ray's sockets lie below it
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80_000_000,
        _temp_dir=place,
    )
    yield
    ray.shutdown()
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def manager(request: pytest.FixtureRequest) -> Iterator[Any]:
    handle = start(request.node.name, "test", CONFIG)
    yield handle
    ray.kill(handle)


@pytest.fixture
def tags(manager: Any) -> BlockTags:
    tags = BlockTags(DECODE.id, DECODE.blocks)
    ray.get(manager.register.remote(DECODE, tags.report(0, complete=True)))
    return tags


@pytest.fixture
def redis() -> Iterator[Server]:
    """Not started."""
    with server() as made:
        yield made


@pytest.fixture
def remembering(request: pytest.FixtureRequest, redis: Server) -> Iterator[Any]:
    """A manager with a Redis, which is not started."""
    handle = start(request.node.name, "test", CONFIG, redis.url)
    yield handle
    ray.kill(handle)


def ask(name: str, tokens: int = 28, arrival: float = 0.0) -> Ask:
    return Ask(RequestId(name), tokens, tokens + 1, arrival)


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def waiting(manager: Any, n: int) -> None:
    wait_until(lambda: ray.get(manager.snapshot.remote())["waiting"] == n)


def kill_process(manager: Any) -> None:
    os.kill(ray.get(manager.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)


def restarted(manager: Any, than: int) -> dict[str, Any]:
    """The status of a manager whose epoch is greater."""
    found: dict[str, Any] = {}

    def later() -> bool:
        try:
            found.update(ray.get(manager.snapshot.remote()))
        except ray.exceptions.RayActorError:
            return False
        return bool(found["epoch"] > than)

    wait_until(later, 30)
    return found


def test_placement_and_release_wake_the_next(manager: Any, tags: BlockTags) -> None:
    first: Placement = ray.get(manager.admit.remote(ask("a")))
    second = manager.admit.remote(ask("b"))
    waiting(manager, 1)
    tags.open(first.decode)
    release = tags.close(first.decode.generation)
    manager.release.remote((release, Release(ReplicaId("gone"), first.decode.generation, 0)))
    placement = ray.get(second, timeout=2)
    assert placement.request == "b"
    tags.open(placement.decode)


def test_waiters_are_placed_in_order_of_arrival(manager: Any, tags: BlockTags) -> None:
    held: Placement = ray.get(manager.admit.remote(ask("held")))
    late = manager.admit.remote(ask("late", arrival=2.0))
    waiting(manager, 1)
    early = manager.admit.remote(ask("early", arrival=1.0))
    waiting(manager, 2)
    manager.release.remote((Release(tags.replica, held.decode.generation, tags.beat),))
    assert ray.get(early, timeout=2).request == "early"
    with pytest.raises(Overloaded):  # admission_wait_s
        ray.get(late, timeout=10)


def test_errors_arrive_as_ours_with_their_attributes(manager: Any, tags: BlockTags) -> None:
    with pytest.raises(DoesNotFit, match="40 positions") as never:
        ray.get(manager.admit.remote(ask("huge", 39)))
    assert never.value.field == "max_tokens"
    assert type(never.value.cause) is DoesNotFit  # type: ignore[attr-defined]
    other = ReplicaInfo(ReplicaId("e"), "decode", Geometry("m", 1, 1, 8, 16, "float32"), blocks=8)
    with pytest.raises(GeometryMismatch, match="block_size=16"):
        ray.get(manager.register.remote(other, BlockTags(other.id, 8).report(0, complete=True)))


def test_over_the_bound_is_refused_at_once(manager: Any) -> None:
    calls = [manager.admit.remote(ask(f"r{i}", arrival=i)) for i in range(CONFIG.admission_queue)]
    waiting(manager, CONFIG.admission_queue)
    with pytest.raises(Overloaded) as refused:
        ray.get(manager.admit.remote(ask("late", arrival=99)), timeout=2)
    assert refused.value.retry_after >= 1
    for call in calls:  # in this cell there is no decode replica to wait for
        with pytest.raises(Unavailable, match="no decode replica"):
            ray.get(call, timeout=10)


def test_revoke_ends_waiting_and_comes_before_admit(manager: Any) -> None:
    call = manager.admit.remote(ask("a"))
    waiting(manager, 1)
    manager.revoke.remote(RequestId("a"))
    with pytest.raises(Revoked):
        ray.get(call, timeout=2)
    again = manager.admit.remote(ask("a"))  # it was known, so its name may be used again
    waiting(manager, 1)
    manager.revoke.remote(RequestId("a"))
    with pytest.raises(Revoked, match="no longer waits"):
        ray.get(again, timeout=2)
    manager.revoke.remote(RequestId("b"))
    with pytest.raises(Revoked, match="was cancelled"):
        ray.get(manager.admit.remote(ask("b")), timeout=2)


def test_cancel_ends_waiting_by_family(manager: Any) -> None:
    calls = [manager.admit.remote(ask(name)) for name in ("a", "a#1", "b")]
    waiting(manager, 3)
    manager.cancel.remote(RequestId("a"))
    for call in calls[:2]:
        with pytest.raises(Revoked, match="no longer waits: it was cancelled"):
            ray.get(call, timeout=2)
    waiting(manager, 1)
    with pytest.raises(Revoked):
        ray.get(manager.admit.remote(ask("a#2")), timeout=2)


def test_a_cancelled_call_leaves_the_queue(manager: Any) -> None:
    call = manager.admit.remote(ask("a"))
    waiting(manager, 1)
    ray.cancel(call)
    waiting(manager, 0)


def test_confirm_tells_the_geometries_there_are(manager: Any, tags: BlockTags) -> None:
    confirmed: Confirmed = ray.get(manager.confirm.remote((RequestId("a"),)))
    assert (confirmed.geometries, confirmed.known) == ((GEOMETRY,), {DECODE.id})


def test_the_snapshot_tells_who_waits_and_where_things_are_remembered(manager: Any, tags: BlockTags) -> None:
    ray.get(manager.admit.remote(ask("held")))
    manager.admit.remote(Ask(RequestId("a"), 28, 29, 0.0, tenant="x"))
    waiting(manager, 1)
    status = ray.get(manager.snapshot.remote())
    assert status["queue"]["tenants"] == {"x": 1}
    assert status["queue"]["admitted"] == 1
    assert status["queue"]["oldest_s"] >= 0
    assert status["store"] == {"where": "memory", "answers": True}
    assert status["replicas"][0]["leased"] == status["replicas"][0]["total"] - status["replicas"][0]["free"]


def test_a_restarted_manager_gets_its_leases_back(manager: Any, tags: BlockTags) -> None:
    placement: Placement = ray.get(manager.admit.remote(ask("a", 8)))
    tags.open(placement.decode)
    tags.apply(ray.get(manager.heartbeat.remote(tags.report(0))))
    before = ray.get(manager.snapshot.remote())
    kill_process(manager)

    def registered_again() -> bool:
        try:
            answer = ray.get(manager.heartbeat.remote(tags.report(0)))
        except ray.exceptions.RayActorError:
            return False
        if not answer.known:
            ray.get(manager.register.remote(DECODE, tags.report(0, complete=True)))
        return bool(answer.known)

    wait_until(registered_again, 20)
    after = ray.get(connect("test_a_restarted_manager_gets_its_leases_back", "test").snapshot.remote())
    assert after["epoch"] > before["epoch"]
    fields = ("free", "leased", "reserve", "active")
    assert [after["replicas"][0][f] for f in fields] == [before["replicas"][0][f] for f in fields]
    assert ray.get(manager.admit.remote(ask("b", 4))).decode.generation > placement.decode.generation


def test_the_next_manager_knows_the_epoch_and_what_was_cancelled(redis: Server, request: pytest.FixtureRequest) -> None:
    name = request.node.name
    ahead = 2 * time.time_ns()
    redis.start(**{f"bifolio:{{test/{name}}}:epoch": ahead})
    with redis.client() as client:
        manager = start(name, "test", CONFIG, redis.url)
        try:
            assert ray.get(manager.snapshot.remote())["epoch"] == ahead + 1
            ray.get(manager.cancel.remote(RequestId("a")))
            key = f"bifolio:{{test/{name}}}:cancelled:a"
            wait_until(lambda: bool(client.exists(key)))
            assert 0 < client.ttl(key) <= CONFIG.tombstone_s
            kill_process(manager)
            assert restarted(manager, ahead + 1)["epoch"] == ahead + 2
            with pytest.raises(Revoked):
                ray.get(manager.admit.remote(ask("a")), timeout=2)
        finally:
            ray.kill(manager)


def test_a_redis_that_is_away_stops_nobody(redis: Server, remembering: Any) -> None:
    tags = BlockTags(DECODE.id, DECODE.blocks)
    ray.get(remembering.register.remote(DECODE, tags.report(0, complete=True)))
    status = ray.get(remembering.snapshot.remote())
    assert status["store"] == {"where": redis.url, "answers": False}
    ray.get(remembering.cancel.remote(RequestId("gone")))
    assert ray.get(remembering.admit.remote(ask("a")), timeout=2).request == "a"
    redis.start()
    ray.get(remembering.cancel.remote(RequestId("later")))  # wakes the keeper
    wait_until(lambda: ray.get(remembering.snapshot.remote())["store"]["answers"], 20)
    with redis.client() as client:
        (epoch,) = client.keys("*:epoch")
        assert int(client.get(epoch)) == status["epoch"]
        assert {key.rpartition(b":")[2] for key in client.keys("*:cancelled:*")} == {b"gone", b"later"}
    redis.kill()
    ray.get(remembering.cancel.remote(RequestId("a")))
    wait_until(lambda: not ray.get(remembering.snapshot.remote())["store"]["answers"], 20)
    assert ray.get(remembering.snapshot.remote())["epoch"] == status["epoch"]


def test_a_manager_that_began_without_redis_begins_again_when_its_epoch_was_too_early(
    redis: Server, remembering: Any, request: pytest.FixtureRequest
) -> None:
    began = ray.get(remembering.snapshot.remote())["epoch"]
    ahead = 2 * time.time_ns()
    redis.start(**{f"bifolio:{{test/{request.node.name}}}:epoch": ahead})
    with contextlib.suppress(ray.exceptions.RayActorError):
        ray.get(remembering.cancel.remote(RequestId("wakes it")))
    assert restarted(remembering, began)["epoch"] == ahead + 1
