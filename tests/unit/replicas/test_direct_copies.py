"""Blocks that go from one cache to another on the device, where all happens late and out of order.

Each test is there for a wait, or for a way out: without it, some seed brings wrong bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from staging_kit import Late, block_of, chunk_by_chunk, large_cache, small_cache, two_late
from transfer_kit import WAIT, ScriptedSource, client_of, ids, in_thread, no_threads_left, serving, start

from bifolio.kv_manager.transfer import Copy, Outbox, PrefillServer
from bifolio.kv_manager.wire import Complete, unpack
from bifolio.protos.errors import ReplicaGone, Revoked
from bifolio.protos.messages import BlockId
from bifolio.replicas.block_stores import HostBlocks, StagedBlocks

SEEDS = range(60)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_threads_left():
        yield


def reached(here: Late, there: Late) -> Copy:
    copy = here.store.reach(there.store.export())
    assert not isinstance(copy, str), copy
    return copy


def test_a_block_is_complete_when_the_word_is_sent():
    for seed in SEEDS:
        late = Late(seed)
        old = late.step(*start().blocks)
        new = late.step(*start().blocks)
        words = Outbox(start(memory=late.store.export()), late.store, iter(()), window=9).send(computed=10)
        for position, word in enumerate(words):
            assert unpack(word) == Complete(start().generation, position, position)
            assert block_of(late.cache, start().blocks[position]) == new[position] != old[position]


def test_a_word_waits_for_no_step_but_the_last_of_its_block():
    for seed in SEEDS:
        late, done = Late(seed), []
        late.step(1)
        late.device.launch(lambda done=done: done.append(True))
        late.store.computed([2])
        late.store.settle(ids(1))
        if not done:
            return
    raise AssertionError("the next step was always waited for")


def test_a_copy_comes_after_the_last_owners_step_and_before_the_next():
    for seed in SEEDS:
        here, there = Late(seed), Late(seed + 100)
        sent = there.step(1, 2, 3)
        there.device.settle()
        copy = reached(here, there)
        mine = here.step(1, 2, 3, 4)
        for source, block in ((1, 3), (2, 1), (3, 2)):
            copy(BlockId(source), BlockId(block))
            assert block_of(here.cache, block) == sent[source - 1]
            assert here.device.copies == 0
        assert here.seen(1, 2, 3, 4) == [sent[1], sent[2], sent[0], mine[3]]


@pytest.mark.parametrize("seed", range(12))
def test_a_transfer_between_two_caches_of_one_device(seed):
    here, there = two_late(seed, large=seed % 6 == 0)
    here.store.writing = there.store.read = None  # nobody calls them
    source, memory = ScriptedSource(there.store), there.store.export()
    with serving(source, window=1 + seed % 2) as address, client_of(here.store) as client:
        result = in_thread(client.pull(address, start(memory=memory)), ids(2, 4, 1))
        sent = chunk_by_chunk(source, there)
        commit = result.result(WAIT)
    assert (commit.frames, commit.payload_bytes) == (3, 3 * here.cache.block_bytes)
    there.step(1, 2, 3, 4)  # the next owner's
    there.device.settle()
    assert here.seen(2, 4, 1) == sent
    assert (here.device.copies, there.device.copies) == (0, 0)


class Telling(StagedBlocks):
    """Tells when it has copied."""

    def __init__(self, late: Late) -> None:
        super().__init__(late.cache, late.device)
        self.copied = threading.Event()

    def reach(self, memory: bytes) -> Copy | str:
        copy = super().reach(memory)
        assert not isinstance(copy, str)

        def telling(source: BlockId, block: BlockId) -> None:
            copy(source, block)
            self.copied.set()

        return telling


@pytest.mark.parametrize("end", ["cancel", "error", "cut"])
@pytest.mark.parametrize("seed", range(5))
def test_after_a_pull_that_failed_nothing_is_copied_any_more(seed, end):
    here, there = Late(seed), Late(seed + 100)
    source, store = ScriptedSource(there.store), Telling(here)
    there.step(*start().blocks)
    server = PrefillServer(source, max_streams=1)
    with client_of(store) as client:
        pull = client.pull(f"127.0.0.1:{server.start()}", start(memory=there.store.export()))
        result = in_thread(pull, ids(1, 2, 3))
        job = source.next_job()
        job.feed(5)
        assert store.copied.wait(WAIT)
        if end == "cancel":
            pull.cancel()
        elif end == "error":
            job.feed(Revoked("taken back"))
        else:
            server.stop(grace=0)
        with pytest.raises(ReplicaGone if end == "cut" else Revoked):
            result.result(WAIT)
        assert here.device.copies == 0
        assert job.closed.wait(WAIT)
    server.stop(grace=0)
    new = here.step(1, 2, 3)
    there.step(*start().blocks)
    there.device.settle()
    assert here.seen(1, 2, 3) == new


def test_a_handle_is_made_once_and_only_when_asked_for():
    store = Late(0).store
    assert store.memory == b""
    assert store.export() == store.export() == store.memory != b""


def test_blocks_of_another_size_or_of_a_host_are_not_reached():
    here, there, host = Late(0), Late(1, large_cache()), HostBlocks(small_cache())
    assert "bytes" in here.store.reach(there.store.export())
    assert host.export() == b""
    assert "host" in host.reach(there.store.export())


def test_blocks_that_do_not_exist_are_refused():
    here, there = Late(0), Late(1, small_cache(blocks=4))
    copy = reached(here, there)
    for source, block in ((0, 1), (5, 1), (1, 0), (1, 7), (-1, 1)):
        with pytest.raises(IndexError, match="allowed is 1 to"):
            copy(BlockId(source), BlockId(block))
    for block in (0, 7):
        with pytest.raises(IndexError):
            here.store.settle(ids(block))
