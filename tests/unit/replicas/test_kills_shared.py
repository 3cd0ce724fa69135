"""As `test_kills.py`, with blocks copied out of the other process's memory: it goes with its owner and its readers."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kill_kit import BLOCKS, MOST, PLACES, SIZE, blocks_of, child, eventually, halting, line_of
from leased_kit import TWO_HEADS, HaltingSource
from transfer_kit import WAIT, no_threads_left, serving

from bifolio.kv_manager.block_store import Copy, Unreached
from bifolio.kv_manager.heads import whole
from bifolio.kv_manager.pull import PrefillClient, Pull
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.protos.errors import BifolioError
from bifolio.protos.messages import BlockId, Generation
from bifolio.replicas.block_stores import HostBlocks
from bifolio.replicas.host_share import NAME, HostShare
from bifolio.replicas.kv_cache import KvCache


def shared() -> tuple[int, int]:
    """Mappings and open files of such memory."""
    fds = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return Path("/proc/self/maps").read_text(encoding="ascii").count(NAME), sum(NAME in name for name in fds)


def a_cache(share: HostShare | None = None) -> KvCache:
    """Of blocks of SIZE bytes."""
    memory = None if share is None else torch.from_numpy(share.blocks)
    return KvCache(MOST, 1, 2, TWO_HEADS.block_size, TWO_HEADS.head_dim, torch.float32, memory=memory)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()  # replicas of other tests
    before = shared()
    with no_threads_left():
        yield
    gc.collect()
    assert shared() == before


class Counting(HostBlocks):
    """Tells when so many blocks have been copied, and when the copy of one has begun, which goes on at the gate."""

    def __init__(self, most: int, held: BlockId) -> None:
        super().__init__(a_cache())
        self.all, self.begun, self.gate = threading.Event(), threading.Event(), threading.Event()
        self._left, self._held, self._lock = most, held, threading.Lock()

    def reach(self, memory: bytes) -> Copy | Unreached:
        copy = super().reach(memory)
        if isinstance(copy, Unreached):
            return copy

        def counting(source: BlockId, owner: Generation, block: BlockId) -> None:
            if block == self._held:
                self.begun.set()
                assert self.gate.wait(WAIT)
            copy(source, owner, block)
            with self._lock:
                self._left -= 1
                if not self._left:
                    self.all.set()

        return counting


def end_of(pull: Pull, number: int, ends: list[str]) -> None:
    """Of the error nothing stays but its name."""
    try:
        pull.run(blocks_of(number))
    except BifolioError as error:
        ends.append(type(error).__name__)


@pytest.fixture
def _nothing_collected() -> Iterator[None]:
    """What is let go is let go by who had it: when a collector would come by, nobody knows."""
    gc.disable()
    yield
    gc.enable()


PREFILL = """
import threading
from kill_kit import MOST, Staying
from share_kit import InShare
from transfer_kit import PrefillServer
store = InShare()
print(PrefillServer(Staying(store, MOST), 20).start(), store.memory.decode(), flush=True)
threading.Event().wait()
"""


@pytest.mark.usefixtures("_nothing_collected")
def test_the_memory_of_a_prefill_replica_that_dies_at_any_frame_is_let_go() -> None:
    held = blocks_of(PLACES)[1]  # a copy of it is under way then
    store, meter = Counting(sum(min(after, BLOCKS) for after in range(PLACES)) + 1, held), TrafficMeter()
    client = PrefillClient(whole(store, TWO_HEADS), meter)
    with child(PREFILL) as process:
        port, memory = line_of(process).split(" ", 1)
        starts = [halting(number, min(number, BLOCKS + 1), memory.encode()) for number in range(PLACES + 1)]
        ends: list[str] = []
        threads = [
            threading.Thread(target=end_of, args=(client.pull(f"127.0.0.1:{port}", start), number, ends))
            for number, start in enumerate(starts)
        ]
        for thread in threads:
            thread.start()
        assert store.all.wait(WAIT)
        assert store.begun.wait(WAIT)
        assert shared() == (1, 0)
        process.kill()
        process.wait(WAIT)
        store.gate.set()
        for thread in threads:
            thread.join(WAIT)
    assert ends == ["ReplicaGone"] * (PLACES + 1)
    assert dict(meter.read().ways) == {"copied": PLACES}  # of one nothing had come
    assert shared() == (0, 0), "the memory of a dead process is held"
    client.close()


DECODE = """
import sys, threading
from kill_kit import BLOCKS, pull_at_every_frame
from share_kit import OutOfShare
store = OutOfShare()
pull_at_every_frame(store, sys.argv[1], sys.argv[2].encode())
for _ in range(BLOCKS):
    store.halted.acquire()
print("halted", flush=True)
threading.Event().wait()
"""


def test_a_decode_replica_that_dies_at_any_frame_gives_back_the_leases_that_it_copied_from() -> None:
    share = HostShare(MOST + 1, SIZE)
    store = HostBlocks(a_cache(share), share)
    source = HaltingSource(store, MOST)
    with (
        serving(source, max_streams=20) as address,
        child(DECODE, address, store.export().decode()) as process,
    ):
        jobs = [source.next_job() for _ in range(2 * BLOCKS + 1)]
        assert line_of(process) == "halted"
        process.kill()
        assert all(job.closed.wait(WAIT) for job in jobs)
        assert source.tags.held == 0
        assert eventually(lambda: source.meter.read().streams == 0)
        assert (source.meter.read().in_flight, source.meter.read().done) == (0, 0)
