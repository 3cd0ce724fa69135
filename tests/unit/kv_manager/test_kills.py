"""Either side killed while streams are at every frame: the other's end at once, with the right error, leaving nothing.

One process more for each side that dies: it has a stream at each place where one can be.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from kill_kit import (
    BLOCKS,
    MOST,
    PLACES,
    SIZE,
    blocks_of,
    child,
    eventually,
    files,
    halting,
    line_of,
)
from leased_kit import TWO_HEADS, HaltingSource
from transfer_kit import WAIT, in_thread, no_threads_left, serving

from bifolio.kv_manager.heads import whole
from bifolio.kv_manager.memory_store import MemoryStore
from bifolio.kv_manager.pull import PrefillClient
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.protos.errors import ReplicaGone


class Counting(MemoryStore):
    """Tells when so many blocks have been written."""

    def __init__(self, most: int) -> None:
        super().__init__(MOST, SIZE)
        self.all = threading.Event()
        self._left = most
        self._counting = threading.Lock()

    def _write(self, block: int, offset: int, data: memoryview | bytes) -> None:
        super()._write(block, offset, data)
        with self._counting:
            self._left -= 1
            if not self._left:
                self.all.set()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with no_threads_left(), serving(HaltingSource(MemoryStore(MOST, SIZE), MOST)) as address:
        client = PrefillClient(whole(MemoryStore(MOST, SIZE), TWO_HEADS), TrafficMeter())
        client.pull(address, halting(0, PLACES)).run(blocks_of(0))  # what grpc opens once, and keeps
        client.close()
    before = files()
    with no_threads_left():
        yield
    assert eventually(lambda: files() <= before), files() - before


PREFILL = """
import threading
from kill_kit import MOST, SIZE, Staying
from transfer_kit import MemoryStore, PrefillServer
print(PrefillServer(Staying(MemoryStore(MOST, SIZE), MOST), 20, max_frame=SIZE).start(), flush=True)
threading.Event().wait()
"""


def test_a_prefill_replica_dies_with_a_stream_after_every_frame() -> None:
    store, meter = Counting(sum(min(after, BLOCKS) for after in range(PLACES))), TrafficMeter()
    with child(PREFILL) as process:
        address = f"127.0.0.1:{line_of(process)}"
        client = PrefillClient(whole(store, TWO_HEADS), meter)
        pulls = [in_thread(client.pull(address, halting(after, after)), blocks_of(after)) for after in range(PLACES)]
        assert store.all.wait(WAIT)
        process.kill()
        for pull in pulls:
            with pytest.raises(ReplicaGone, match="UNAVAILABLE"):
                pull.result(WAIT)
        client.close()
    traffic = meter.read()
    assert (traffic.streams, traffic.done, dict(traffic.failed)) == (0, 0, {"ReplicaGone": PLACES})


DECODE = """
import sys, threading
from kill_kit import BLOCKS, MOST, SIZE, halts_at, pull_at_every_frame
from transfer_kit import MemoryStore
halted = threading.Semaphore(0)
class Halting(MemoryStore):
    def _write(self, block, offset, data):
        if halts_at((block - 1) // 10, block):
            halted.release()
            threading.Event().wait()
        super()._write(block, offset, data)
pull_at_every_frame(Halting(MOST, SIZE), sys.argv[1])
for _ in range(BLOCKS):
    halted.acquire()
print("halted", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("window", [1, 8])
def test_a_decode_replica_dies_with_a_stream_at_every_frame(window: int) -> None:
    source = HaltingSource(MemoryStore(MOST, SIZE), MOST)
    with serving(source, max_streams=20, window=window, max_frame=SIZE) as address, child(DECODE, address) as process:
        jobs = [source.next_job() for _ in range(2 * BLOCKS + 1)]
        assert line_of(process) == "halted"
        process.kill()
        assert all(job.closed.wait(WAIT) for job in jobs)
        assert source.tags.held == 0
        assert eventually(lambda: source.meter.read().streams == 0)
        assert (source.meter.read().in_flight, source.meter.read().done) == (0, 0)
