"""Blocks that go from one cache to another: on a device where all happens late and out of order, and on a host.

Each test of a device is there for a wait, or for a way out: without it, some seed brings wrong bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from staging_kit import Late, block_of, chunk_by_chunk, large_cache, shared_cache, small_cache, two_late
from transfer_kit import (
    DONE,
    WAIT,
    ScriptedSource,
    client_of,
    ids,
    in_thread,
    no_threads_left,
    outbox_of,
    put,
    serving,
    start,
)

from bifolio.kv_manager.block_store import Copy, Unreached
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.kv_manager.transfer import PrefillServer
from bifolio.kv_manager.wire import Complete, unpack
from bifolio.protos.errors import ReplicaGone, Revoked, StalePlacement
from bifolio.protos.messages import BlockId, Generation
from bifolio.replicas import host_share
from bifolio.replicas.block_stores import Blocks, HostBlocks, StagedBlocks

SEEDS = range(60)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_threads_left():
        yield


OWNER = Generation(5, 6)


def reached(here: Blocks, there: Blocks) -> Copy:
    copy = here.reach(there.export())
    assert not isinstance(copy, Unreached), copy
    return copy


def why_not(here: Blocks, handle: bytes) -> str:
    copy = here.reach(handle)
    assert isinstance(copy, Unreached), copy
    return copy.reason


def test_a_block_is_complete_when_the_word_is_sent():
    for seed in SEEDS:
        late = Late(seed)
        old = late.step(*start().blocks)
        new = late.step(*start().blocks)
        late.store.own(start().blocks, OWNER)
        words = outbox_of(start(memory=late.store.export()), late.store).send(computed=10)
        said = 0
        for index, word in enumerate(words):
            complete = unpack(word)
            assert isinstance(complete, Complete)
            assert (complete.index, complete.position, complete.owner) == (index, said, OWNER)
            for position in range(said, said := said + complete.count):
                assert block_of(late.cache, start().blocks[position]) == new[position] != old[position]
        assert said == 3


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
        copy = reached(here.store, there.store)
        mine = here.step(1, 2, 3, 4)
        for source, block in ((1, 3), (2, 1), (3, 2)):
            copy(BlockId(source), OWNER, BlockId(block))
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
    assert (commit.block_count, commit.payload_bytes) == (3, 3 * here.cache.block_bytes)
    there.step(1, 2, 3, 4)  # the next owner's
    there.device.settle()
    assert here.seen(2, 4, 1) == sent
    assert (here.device.copies, there.device.copies) == (0, 0)


class Telling(StagedBlocks):
    """Tells when it has copied."""

    def __init__(self, late: Late) -> None:
        super().__init__(late.cache, late.device)
        self.copied = threading.Event()

    def reach(self, memory: bytes) -> Copy | Unreached:
        copy = super().reach(memory)
        assert not isinstance(copy, Unreached)

        def telling(source: BlockId, owner: Generation, block: BlockId) -> None:
            copy(source, owner, block)
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


def test_blocks_of_another_size_or_kind_of_memory_are_not_reached():
    here, there = Late(0).store, Late(1, large_cache()).store
    host, shared = HostBlocks(small_cache()), HostBlocks(*shared_cache())
    assert why_not(here, there.export()) == "misfit"
    assert why_not(host, there.export()) == "misfit"
    assert why_not(here, shared.export()) == "misfit"
    assert why_not(HostBlocks(large_cache(1)), shared.export()) == "misfit"


def test_blocks_that_do_not_exist_are_refused():
    here, there = Late(0), Late(1, small_cache(blocks=4))
    copy = reached(here.store, there.store)
    for source, block in ((0, 1), (5, 1), (1, 0), (1, 7), (-1, 1)):
        with pytest.raises(IndexError, match="allowed is 1 to"):
            copy(BlockId(source), OWNER, BlockId(block))
    for block in (0, 7):
        with pytest.raises(IndexError):
            here.store.settle(ids(block))


def test_a_host_has_a_handle_if_its_cache_lies_in_memory_to_share():
    assert HostBlocks(small_cache()).export() == b""
    store = HostBlocks(*shared_cache())
    assert store.memory == b""
    assert store.export() == store.export() == store.memory != b""


@pytest.mark.parametrize("large", [False, True])
def test_a_transfer_between_two_caches_of_one_host(large):
    here, there = HostBlocks(large_cache() if large else small_cache()), HostBlocks(*shared_cache(large))
    here.writing = there.read = None  # nobody calls them
    contents, meter = [bytes([i]) * there.block_bytes for i in (1, 2, 3)], TrafficMeter()
    source, memory = ScriptedSource(there), there.export()
    there.own(start().blocks, OWNER)
    with serving(source) as address, client_of(here, meter=meter) as client:
        result = in_thread(client.pull(address, start(memory=memory)), ids(2, 4, 1))
        job = source.next_job()
        for block, content, step in zip(start().blocks, contents, (4, 8, DONE), strict=True):
            put(there, block, content)
            job.feed(step)
        assert result.result(WAIT).payload_bytes == 3 * there.block_bytes
    assert [block_of(here._cache, block) for block in (2, 4, 1, 3)] == [*contents, bytes(there.block_bytes)]
    assert meter.read().ways == {"copied": 1}


def test_a_block_that_is_written_while_it_is_copied_is_noticed_after_the_copy(monkeypatch):
    here, there = HostBlocks(small_cache()), HostBlocks(*shared_cache())
    memory, reach = there.export(), host_share.reach
    there.own(ids(1), OWNER)

    class NextOwnerComes:
        """When the bytes are taken, not before."""

        def __init__(self, found):
            self.rows, self.owners, self._blocks = found.rows, found.owners, found.blocks

        @property
        def blocks(self):
            there.own(ids(1), Generation(5, 7))
            return self._blocks

    monkeypatch.setattr(host_share, "reach", lambda *about: NextOwnerComes(reach(*about)))
    copy = here.reach(memory)
    with pytest.raises(StalePlacement, match=r"5\.6.*5\.7"):
        copy(1, OWNER, 1)


def test_a_block_that_went_to_another_lease_when_the_word_was_said_fails_the_pull():
    """As if its owner had lost the lease, and the word of it had not come yet."""
    here, there = HostBlocks(small_cache()), HostBlocks(*shared_cache())
    memory = there.export()
    there.own(start().blocks, OWNER)

    class Lost(HostBlocks):
        """The next owner comes when the word has been said."""

        def owner(self, block: int) -> Generation:
            said = super().owner(block)
            self.own([block], Generation(5, 7))
            return said

    there.__class__ = Lost
    source = ScriptedSource(there, 4, 8, DONE)
    with serving(source) as address, client_of(here) as client, pytest.raises(StalePlacement, match=r"5\.6.*5\.7"):
        client.pull(address, start(memory=memory)).run(ids(1, 2, 3))
