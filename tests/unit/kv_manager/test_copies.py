"""Blocks that are copied at a word, where the other side's memory can be reached."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transfer_kit import (
    DONE,
    WAIT,
    ReachingStore,
    ScriptedSource,
    SharedStore,
    client_of,
    committed,
    content,
    filled_store,
    ids,
    in_thread,
    no_threads_left,
    outbox_of,
    put,
    serving,
    start,
)

from bifolio.kv_manager.wire import MAX_COPY, Ack, Complete, unpack
from bifolio.protos.errors import (
    Revoked,
    StalePlacement,
)
from bifolio.protos.messages import Generation

SMALL = 96
LARGE = (2 << 20) + 96  # three frames a block


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_threads_left():
        yield


def shared_pair(block_bytes: int) -> tuple[SharedStore, ReachingStore]:
    theirs, same = SharedStore(4, block_bytes), filled_store(block_bytes)
    for block in range(1, 5):
        put(theirs, block, content(same, block))
    return theirs, ReachingStore(4, block_bytes, theirs=same)


@pytest.mark.parametrize(("block_bytes", "skip"), [(SMALL, 0), (SMALL, 1), (SMALL, 3), (LARGE, 1)])
def test_what_can_be_reached_is_copied_and_never_sent(block_bytes, skip):
    theirs, target = shared_pair(block_bytes)
    target.writing = None  # nobody calls it
    with serving(ScriptedSource(theirs, 4, 8, DONE), window=1) as address, client_of(target) as client:
        pull = client.pull(address, start(skip=skip, memory=b"theirs"))
        commit = pull.run(ids(2, 4, 1))
    chunks = sum(end > skip for end in (1, 2, 3))
    assert commit == committed(skip, chunks, (3 - skip) * block_bytes)
    del target.writing
    for here, there in list(zip((2, 4, 1), (3, 1, 2), strict=True))[skip:]:
        assert content(target, here) == content(target.others[b"theirs"], there)
    for untouched in (3, *(2, 4, 1)[:skip]):
        assert content(target, untouched) == bytes(block_bytes)


@pytest.mark.parametrize("memory", [b"", b"another's", b"\0garbage"])
def test_what_cannot_be_reached_is_sent(memory):
    source, target = ScriptedSource(filled_store(SMALL), DONE), ReachingStore(4, SMALL)
    source.store.memory = memory
    with serving(source) as address, client_of(target) as client:
        assert client.pull(address, start(memory=memory)).run(ids(2, 4, 1)).payload_bytes == 3 * SMALL
    assert target.copies == 0
    assert content(target, 1) == content(source.store, 2)


@pytest.mark.parametrize("offered", [b"", b"new"])
def test_nothing_is_copied_from_a_replica_whose_address_another_has(offered):
    source, target = ScriptedSource(filled_store(SMALL), DONE), ReachingStore(4, SMALL, old=filled_store(SMALL))
    source.store.memory = offered
    with serving(source) as address, client_of(target) as client:
        pull = client.pull(address, start(memory=b"old"))
        with pytest.raises(StalePlacement, match="no longer"):
            pull.run(ids(1, 2, 3))
    assert not source.jobs
    assert target.copies == 0


def test_a_block_is_acknowledged_when_it_has_been_copied():
    theirs, target = shared_pair(SMALL)
    target.gate.clear()
    source = ScriptedSource(theirs, DONE)
    with serving(source) as address, client_of(target) as client:
        result = in_thread(client.pull(address, start(4, blocks=(3,), memory=b"theirs")), ids(1))
        assert target.begun.wait(WAIT)
        job = source.next_job()
        assert not job.closed.wait(0.05)  # all has been said, and the lease is open
        target.gate.set()
        assert result.result(WAIT).frames == 1
        assert job.closed.wait(WAIT)


def test_a_cancel_returns_when_the_copy_under_way_has_happened():
    theirs, target = shared_pair(SMALL)
    target.gate.clear()
    source = ScriptedSource(theirs, DONE)
    with serving(source) as address, client_of(target) as client:
        pull = client.pull(address, start(memory=b"theirs"))
        result = in_thread(pull, ids(1, 2, 3))
        assert target.begun.wait(WAIT)
        pull.cancel()
        assert source.next_job().closed.wait(WAIT)
        assert not result.done()
        target.gate.set()
        with pytest.raises(Revoked):
            result.result(WAIT)
        assert target.copies == 1


def test_no_more_than_a_window_of_words_is_ever_unacknowledged():
    def requests():
        for frame in range(3):
            assert len(words) - frame == 2
            acked.append(frame)
            yield Ack(frame)

    words: list[bytes] = []
    acked: list[int] = []
    store = SharedStore(4, MAX_COPY)
    store.own(ids(1, 2, 3), Generation(7, 3))
    outbox = outbox_of(start(memory=b"theirs"), store, requests(), window=2)
    for word in outbox.send(computed=10):
        words.append(word)
    assert list(map(unpack, words)) == [Complete(start().generation, i, i, 1, Generation(7, 3)) for i in range(3)]
    assert acked == [0]


def test_a_word_stands_for_blocks_of_one_owner_and_not_too_many_bytes():
    store = SharedStore(5, MAX_COPY // 2)
    store.own(ids(1, 2, 3), Generation(7, 3))
    store.own(ids(4, 5), Generation(7, 4))
    outbox = outbox_of(start(20, blocks=(1, 2, 3, 4, 5), memory=b"theirs"), store)
    words = [(word.position, word.count, word.owner.counter) for word in map(unpack, outbox.send(computed=20))]
    assert words == [(0, 2, 3), (2, 1, 3), (3, 2, 4)]
