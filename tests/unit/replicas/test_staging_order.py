"""Steps, copies and buffers of `StagedBlocks` on a device that does everything late and out of order.

Each test is there for a wait: without it, some seed brings wrong bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from staging_kit import Late, block_of, chunk_by_chunk, two_late
from transfer_kit import (
    DONE,
    GEOMETRY,
    WAIT,
    ScriptedSource,
    client_of,
    content,
    ids,
    in_thread,
    no_threads_left,
    put,
    serving,
    start,
)

from bifolio.kv_manager.block_store import Cut, Write
from bifolio.kv_manager.heads import whole
from bifolio.kv_manager.outbox import Outbox
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.kv_manager.wire import Frame, Malformed, unpack
from bifolio.protos.errors import Revoked
from bifolio.protos.messages import BlockId, Generation
from bifolio.replicas.block_stores import StagedBlocks
from bifolio.replicas.delayed_device import DelayedDevice
from bifolio.replicas.kv_cache import KvCache
from bifolio.replicas.runner import Runner

SEEDS = range(60)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_threads_left():
        yield


def cuts(late: Late, *cuts: tuple[int, ...]) -> list[Cut]:
    """Each of whole blocks."""
    return [[(BlockId(block), 0, late.cache.block_bytes) for block in cut] for cut in cuts]


def frames_of(late: Late) -> Generator[bytes]:
    """A block each, of a stream whose client never says anything."""
    outbox = Outbox(
        start(), GEOMETRY, whole(late.store, GEOMETRY), lambda _: None, TrafficMeter(), 2, late.cache.block_bytes
    )
    return outbox.send(computed=10)


def test_what_is_read_is_what_the_step_computed():
    for seed in SEEDS:
        late = Late(seed)
        late.step(1, 2, 3)
        new = late.step(2) + late.step(3, 1)
        with closing(late.store.read(cuts(late, (2, 3), (1,), (2,), (3, 1)))) as read:
            assert [bytes(view) for [view] in read] == [new[0] + new[1], new[2], new[0], new[1] + new[2]]
        assert late.device.copies == 0


def test_a_read_waits_for_no_step_but_the_last_of_its_block():
    for seed in SEEDS:
        late, done = Late(seed), []
        (new,) = late.step(1)
        late.device.launch(lambda done=done: done.append(True))
        late.store.computed([2])
        assert content(late.store, 1) == new
        if not done:
            return
    raise AssertionError("the next step was always waited for")


def test_a_write_comes_after_the_last_owners_step_and_before_the_next():
    for seed in SEEDS:
        late = Late(seed)
        old = late.step(1, 2, 3, 4)
        new = [bytes([i]) * late.cache.block_bytes for i in range(3)]
        with late.store.writing() as write:
            for block, data in zip((1, 2, 3), new, strict=True):
                write(BlockId(block), 0, data)
        assert late.device.copies == 0
        assert late.seen(1, 2, 3, 4) == [*new, old[3]]


def test_the_first_write_comes_after_what_made_the_cache():
    for seed in SEEDS:
        late = Late(seed)
        late.device.launch(lambda late=late: late.cache.bytes.zero_())
        store = StagedBlocks(late.cache, late.device)
        put(store, 1, bytes([1]) * late.cache.block_bytes)
        late.device.settle()
        assert late.cache.bytes[1].eq(1).all()


class LateCache(KvCache):
    """Copies its blocks in their place among the steps of a late device."""

    device_of_steps: DelayedDevice

    def copy(self, source: int, block: int) -> None:
        self.device_of_steps.launch(lambda: super(LateCache, self).copy(source, block))


def forked(seed: int) -> tuple[Late, list[bytes]]:
    """Blocks 1 and 2 of a prompt are computed, and block 5 is made a copy of block 2; what they hold."""
    late = Late(seed, LateCache(6, layers=2, kv_heads=2, block_size=4, head_dim=8, dtype=torch.bfloat16))
    late.cache.device_of_steps = late.device  # type: ignore[attr-defined]
    runner: Any = Runner(None, late.cache, late.store)  # type: ignore[arg-type]
    late.step(5)
    prompt = late.step(1, 2)
    runner.copy(2, 5)
    return late, prompt


def test_a_copied_block_has_what_the_steps_before_it_computed():
    for seed in SEEDS:
        late, (_, last) = forked(seed)
        late.step(2)  # the first one goes on in its block
        assert late.seen(5) == [last]
        late, (_, last) = forked(seed)
        assert content(late.store, 5) == last


def test_the_source_of_a_copy_is_not_written_before_it_was_read():
    """Its lease may have been closed, without a step, as soon as the copy was launched."""
    for seed in SEEDS:
        late, (_, last) = forked(seed)
        put(late.store, 2, bytes(late.cache.block_bytes))
        assert late.seen(2, 5) == [bytes(late.cache.block_bytes), last]


def test_a_copy_comes_after_its_own_blocks_last_owner_and_before_what_is_written_there():
    for seed in SEEDS:
        late, _ = forked(seed)
        put(late.store, 5, bytes(late.cache.block_bytes))
        assert late.seen(5) == [bytes(late.cache.block_bytes)]


def test_data_may_go_when_a_write_returns():
    for seed in SEEDS:
        late = Late(seed)
        with late.store.writing() as write:
            for block in (1, 2, 3, 4, 5):
                data = bytearray([block]) * late.cache.block_bytes
                write(BlockId(block), 0, memoryview(data))
                data[:] = bytes(len(data))
        assert [set(block_of(late.cache, block)) for block in (1, 2, 3, 4, 5)] == [{1}, {2}, {3}, {4}, {5}]


def test_a_cut_read_leaves_no_copy_behind_in_the_buffers():
    for seed in SEEDS:
        late = Late(seed)
        old = late.step(1, 2, 3)
        with closing(late.store.read(cuts(late, (1,), (2, 1), (3,)))) as read:
            assert bytes(next(read)[0]) == old[0]
        assert late.device.copies == 0
        new = late.step(4, 5, 6)
        with closing(late.store.read(cuts(late, (4,), (5,), (6,)))) as read:
            for [view], expected in zip(read, new, strict=True):
                late.device.settle()
                assert bytes(view) == expected


def test_a_failed_writing_leaves_no_copy_behind():
    for seed in SEEDS:
        late = Late(seed)
        with pytest.raises(IndexError), late.store.writing() as write:  # noqa: PT012
            write(BlockId(1), 0, b"here")
            write(BlockId(0), 0, b"nowhere")
        assert late.device.copies == 0
        assert block_of(late.cache, 1)[:4] == b"here"


def test_reads_and_writes_of_different_blocks_do_not_mix():
    for seed in SEEDS:
        late = Late(seed)
        mine, others = late.step(1, 2, 3), late.step(4, 5, 6)
        with late.store.writing() as write, closing(late.store.read(cuts(late, (1,), (2,), (3,)))) as read:
            for block, [view], expected in zip((4, 5, 6), read, mine, strict=True):
                write(BlockId(block), 0, bytes(reversed(others[block - 4])))
                assert bytes(view) == expected
        assert late.seen(4, 5, 6) == [bytes(reversed(other)) for other in others]


@pytest.mark.parametrize("seed", range(8))
def test_a_transfer_between_two_late_devices(seed):
    here, there = two_late(seed, large=seed % 4 == 0)
    source = ScriptedSource(there.store)
    with serving(source, window=2) as address, client_of(here.store) as client:
        result = in_thread(client.pull(address, start()), ids(2, 4, 1))
        sent = chunk_by_chunk(source, there)
        assert result.result(WAIT).payload_bytes == 3 * here.cache.block_bytes
    assert here.seen(2, 4, 1) == sent
    assert (here.device.copies, there.device.copies) == (0, 0)


def test_transfers_at_once_do_not_mix():
    here, there = Late(1), Late(2)
    source = ScriptedSource(there.store)
    with serving(source) as address, client_of(here.store) as client:
        results, sent = [], []
        here.step(*range(1, 7))
        for i in (0, 3):
            own = replace(start(blocks=(i + 1, i + 2, i + 3)), generation=Generation(1, i))
            results.append(in_thread(client.pull(address, own), ids(6 - i, 5 - i, 4 - i)))
            job = source.next_job()
            sent += there.step(*own.blocks)
            for step in (4, 8, DONE):
                job.feed(step)
        assert all(result.result(WAIT) for result in results)
    assert here.seen(6, 5, 4, 3, 2, 1) == sent


class Telling(StagedBlocks):
    """Tells when it has been written to."""

    def __init__(self, late: Late) -> None:
        super().__init__(late.cache, late.device)
        self.written = threading.Event()

    @contextmanager
    def writing(self) -> Iterator[Write]:
        with super().writing() as write:

            def telling(block: BlockId, offset: int, data: memoryview | bytes) -> None:
                write(block, offset, data)
                self.written.set()

            yield telling


@pytest.mark.parametrize("end", ["cancel", "error"])
@pytest.mark.parametrize("seed", range(6))
def test_after_a_pull_that_failed_nothing_lands_any_more(seed, end):
    here, there = Late(seed), Late(seed + 100)
    source, store = ScriptedSource(there.store), Telling(here)
    there.step(*start().blocks)
    with serving(source) as address, client_of(store) as client:
        pull = client.pull(address, start())
        result = in_thread(pull, ids(1, 2, 3))
        job = source.next_job()
        job.feed(5)
        assert store.written.wait(WAIT)
        if end == "cancel":
            pull.cancel()
        else:
            job.feed(Revoked("taken back"))
        with pytest.raises(Revoked):
            result.result(WAIT)
        assert here.device.copies == 0
    new = here.step(1, 2, 3)
    here.device.settle()
    assert here.seen(1, 2, 3) == new


def test_frames_that_nobody_takes_leave_no_copy_behind():
    """The stream's lease is closed right after."""
    for seed in SEEDS:
        late = Late(seed)
        sent = late.step(*start().blocks)
        frames = frames_of(late)
        frame = unpack(next(frames))
        assert isinstance(frame, Frame)
        assert frame.payload == sent[0]
        frames.close()
        assert late.device.copies == 0
        late = Late(seed)
        late.step(*start().blocks)
        with pytest.raises(Malformed, match="awaits an ack"):
            list(frames_of(late))
        assert late.device.copies == 0
