"""Waits that have an end: of the watch itself, and of streams whose client says nothing more."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from transfer_kit import (
    DONE,
    WAIT,
    GatedStore,
    RawClient,
    ScriptedSource,
    client_of,
    filled_store,
    ids,
    in_thread,
    no_threads_left,
    serving,
    start,
)

from bifolio.kv_manager.patience import Patience
from bifolio.kv_manager.wire import Ack, Commit, pack
from bifolio.protos.errors import TransferFailed

SMALL = 96
SOON = 0.1


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_threads_left():
        yield


@pytest.fixture
def patience() -> Iterator[Patience]:
    it = Patience(SOON, SOON)
    yield it
    it.close()


def test_a_wait_that_takes_too_long_is_given_up_once(patience: Patience):
    given_up, calls = threading.Event(), []
    with patience.waiting(lambda: (calls.append(1), given_up.set())):
        assert given_up.wait(WAIT)
        assert not threading.Event().wait(3 * SOON)
    assert calls == [1]


def test_a_wait_that_ended_in_time_is_not_given_up(patience: Patience):
    calls: list[int] = []
    with patience.waiting(lambda: calls.append(1)):
        pass
    late = threading.Event()
    with patience.waiting(late.set):
        assert late.wait(WAIT)  # a look later than the first one's time
    assert not calls


def test_a_wait_that_cannot_be_given_up_does_not_end_the_watch(patience: Patience):
    def broken() -> None:
        raise RuntimeError("no")

    late = threading.Event()
    with patience.waiting(broken), patience.waiting(late.set):
        assert late.wait(WAIT)


def test_a_client_that_never_begins_holds_no_thread_of_the_server():
    source = ScriptedSource(filled_store(SMALL))
    with serving(source, stall_s=SOON) as address, RawClient(address) as client:
        assert client.end().name == "CANCELLED"
    assert not source.jobs
    assert source.meter.read().failed == {"Stalled": 1}


@pytest.mark.parametrize("acks", [[], [0], [0, 1]])
def test_a_client_that_acknowledges_no_more_is_given_up_with_its_lease(acks):
    source = ScriptedSource(filled_store(SMALL), 4, 8, DONE)
    with serving(source, stall_s=SOON) as address, RawClient(address) as client:
        client.send(pack(start()))
        for frame in acks:
            client.send(pack(Ack(frame)))
        assert client.end().name == "CANCELLED"
        assert source.next_job().closed.wait(WAIT)
    assert source.meter.read().failed == {"Stalled": 1}


def test_long_computing_is_no_stall():
    source = ScriptedSource(filled_store(SMALL), 4)
    store = GatedStore(4, SMALL)
    store.gate.set()
    with serving(source, stall_s=SOON) as address, client_of(store) as client:
        result = in_thread(client.pull(address, start()), ids(1, 2, 3))
        job = source.next_job()
        assert store.begun.wait(WAIT)
        assert not job.closed.wait(5 * SOON)
        job.feed(DONE)
        assert isinstance(result.result(WAIT), Commit)


def test_a_decode_side_that_lands_nothing_for_long_is_given_up_and_told():
    source, store = ScriptedSource(filled_store(SMALL), DONE), GatedStore(4, SMALL)
    with serving(source, stall_s=SOON) as address, client_of(store) as client:
        result = in_thread(client.pull(address, start()), ids(1, 2, 3))
        assert source.next_job().closed.wait(WAIT)
        store.gate.set()
        with pytest.raises(TransferFailed, match="CANCELLED"):
            result.result(WAIT)
