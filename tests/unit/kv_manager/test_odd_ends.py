"""Ends of streams at awkward moments: each is one of our errors, comes in bounded time, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import grpc
import pytest
from kill_kit import eventually
from transfer_kit import (
    DONE,
    WAIT,
    RawClient,
    ReachingStore,
    ScriptedSource,
    client_of,
    filled_store,
    ids,
    in_thread,
    no_threads_left,
    serving,
    start,
)

from bifolio.kv_manager.block_store import Copy
from bifolio.kv_manager.memory_store import MemoryStore
from bifolio.kv_manager.patience import Patience
from bifolio.kv_manager.transfer import PrefillServer
from bifolio.kv_manager.wire import pack
from bifolio.protos.errors import BifolioError, ReplicaGone, Revoked, StalePlacement

SMALL = 96
SOON = 0.1


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_threads_left():
        yield


def test_a_client_that_does_not_read_its_commit_is_given_up() -> None:
    """It is connected, and answers pings; the commit's logits and logprobs are more than the network takes unread."""
    source = ScriptedSource(filled_store(SMALL), replace(DONE, logits=bytes(16 << 20)))
    with serving(source, stall_s=SOON) as address, RawClient(address) as client:
        client.send(pack(start(skip=3)))
        assert source.next_job().closed.wait(WAIT / 2)


def test_a_client_that_is_closed_just_before_the_call_ends_its_pull_with_one_of_our_errors() -> None:
    source = ScriptedSource(filled_store(SMALL), DONE)
    with serving(source) as address, client_of(MemoryStore(4, SMALL)) as client:
        use = client._channels.use

        @contextlib.contextmanager
        def closing(address: str) -> Iterator[grpc.Channel]:
            with use(address) as channel:
                client.close()
                yield channel

        client._channels.use = closing  # type: ignore[method-assign]
        with pytest.raises(BifolioError):
            client.pull(address, start()).run(ids(1, 2, 3))


def test_a_pull_that_begins_after_its_client_was_closed_opens_no_connection() -> None:
    source = ScriptedSource(filled_store(SMALL), DONE)
    with serving(source) as address, client_of(MemoryStore(4, SMALL)) as client:
        client.close()
        with pytest.raises(BifolioError):
            client.pull(address, start()).run(ids(1, 2, 3))
        assert not client._channels._links


def test_a_cancel_that_makes_the_copy_under_way_stale_is_a_cancel() -> None:
    """The other side closes its lease at once, and the block goes to somebody else before it has been copied."""

    class Cancelling(ReachingStore):
        def reach(self, memory: bytes) -> Copy:
            def copy(*_: object) -> None:
                pull.cancel()
                raise StalePlacement("the block is of another lease")

            return copy

    class Theirs(MemoryStore):
        memory = b"theirs"

    source = ScriptedSource(Theirs(4, SMALL), 4)
    with serving(source) as address, client_of(Cancelling(4, SMALL)) as client:
        pull = client.pull(address, start(memory=b"theirs"))
        with pytest.raises(Revoked):
            pull.run(ids(1, 2, 3))


def test_a_wait_that_the_garbage_collector_ends_does_not_end_the_watch() -> None:
    """A generator that was dropped may be ended in any line of any thread: also where the watch looks at its waits."""
    patience = Patience(SOON, SOON)

    def dropped() -> Iterator[None]:
        with patience.waiting(lambda: None):
            yield

    class Collecting(dict):  # type: ignore[type-arg]
        def _collect(self) -> None:
            wait = dropped()
            next(wait)
            cycle: list[object] = [wait]
            cycle.append(cycle)
            del wait, cycle
            gc.collect(0)

        def items(self):  # type: ignore[no-untyped-def]
            self._collect()
            return super().items()

        def __iter__(self):  # type: ignore[no-untyped-def]
            self._collect()
            return super().__iter__()

    patience._waits = Collecting()
    late, done = threading.Event(), threading.Event()

    def wait() -> None:
        with patience.waiting(late.set):
            done.wait(WAIT)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    try:
        assert late.wait(WAIT), "the watch waits for itself"
        patience.close()
    finally:
        done.set()


@pytest.mark.parametrize(
    ("size", "requests"),
    [(SMALL, []), (SMALL, [pack(start())]), (4 << 20, [pack(start())])],
    ids=["before its start", "before its acks", "that takes no frame"],
)
def test_stopping_waits_for_no_client(size: int, requests: Sequence[bytes]) -> None:
    source = ScriptedSource(filled_store(size), DONE)
    server = PrefillServer(source, 4)  # whose patience is longer than this test's
    with RawClient(f"127.0.0.1:{server.start()}") as client:
        for request in requests:
            client.send(request)
        assert eventually(lambda: server.active == 1)
        stopping = threading.Thread(target=server.stop, args=(0.0,), daemon=True)
        stopping.start()
        stopping.join(WAIT / 2)
        assert not stopping.is_alive()
    assert server.active == 0
    assert all(job.closed.is_set() for job in source.jobs)


def test_a_replica_that_takes_the_connection_and_says_nothing_is_gone() -> None:
    """Frozen, or its machine is cut off: grpc gives a connection 20 s by itself."""
    with socket.create_server(("127.0.0.1", 0)) as silent, client_of(MemoryStore(4, SMALL), keepalive_s=0.2) as client:
        pull = client.pull(f"127.0.0.1:{silent.getsockname()[1]}", start())
        with pytest.raises(ReplicaGone):
            in_thread(pull, ids(1, 2, 3)).result(WAIT)


def test_a_client_that_only_says_that_it_has_no_more_to_say_holds_no_lease() -> None:
    source = ScriptedSource(filled_store(4 << 20), DONE)
    with serving(source, stall_s=SOON) as address, RawClient(address) as client:
        client.send(pack(start()))
        client.send(None)
        assert source.next_job().closed.wait(WAIT)
