"""Many transfers, one after another and at once: nothing grows, and none waits for another that stands still."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
from fault_kit import Fault, Plan
from kill_kit import eventually, files
from transfer_kit import (
    DONE,
    WAIT,
    ScriptedSource,
    client_of,
    content,
    filled_store,
    ids,
    in_thread,
    no_threads_left,
    serving,
    start,
)
from world_kit import WAYS, World, world

from bifolio.kv_manager.memory_store import MemoryStore

STREAMS = 64
LARGE = 1 << 18
LONG = range(1, 33)  # blocks of the stream that stands still: more than a window of frames


def threads() -> int:
    """Without the server's, of which there is one for each of its streams at most, and which it keeps."""
    return sum(not thread.name.startswith("prefill-stream") for thread in threading.enumerate())


@pytest.mark.parametrize("way", WAYS)
def test_a_hundred_transfers_a_third_of_them_cancelled_leave_threads_and_files_as_they_were(way: str) -> None:
    rng, ends = random.Random(8), Counter[str]()

    def some(it: World, count: int) -> None:
        for _ in range(count):
            tokens = rng.randint(1, 28)
            cancel = [Fault(WAYS[way], rng.randrange(-(-tokens // 4)), "cancel")] if rng.random() < 0.4 else []
            ends[type(it.pull(tokens, 0, Plan(cancel))).__name__] += 1

    with world(100, copied=way == "copied", window=2, max_frame=96, steps=(4, 8, 12, 16, 20, 24)) as it:
        some(it, 20)
        before = threads(), files()
        some(it, 80)
        assert eventually(lambda: threads() <= before[0])
        assert eventually(lambda: files() <= before[1])
    assert ends.keys() == {"Commit", "Revoked"}
    assert ends["Revoked"] > 25


class Halting(MemoryStore):
    """Holds what is written to the first blocks until the gate opens."""

    def __init__(self, first: int) -> None:
        super().__init__(len(LONG) + STREAMS, LARGE)
        self.begun, self.gate = threading.Event(), threading.Event()
        self._first = first

    def _write(self, block: int, offset: int, data: memoryview | bytes) -> None:
        if block <= self._first:
            self.begun.set()
            assert self.gate.wait(WAIT)
        super()._write(block, offset, data)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_others_do_not_wait_for_a_stream_that_stands_still(side: str) -> None:
    source = ScriptedSource(filled_store(LARGE, len(LONG) + STREAMS))
    target = Halting(len(LONG) if side == "decode" else 0)
    with no_threads_left(), serving(source, max_streams=STREAMS) as address, client_of(target) as client:
        still = in_thread(client.pull(address, start(4 * len(LONG), blocks=LONG)), ids(*LONG))
        job = source.next_job()
        if side == "decode":
            job.feed(DONE)
            assert target.begun.wait(WAIT)
        others = [LONG.stop + i for i in range(STREAMS - 1)]
        pulls = [in_thread(client.pull(address, start(4, blocks=[block])), ids(block)) for block in others]
        for _ in others:
            source.next_job().feed(DONE)
        assert all(pull.result(WAIT) for pull in pulls)
        assert not still.done()
        target.gate.set()
        if side == "prefill":
            job.feed(DONE)
        assert still.result(WAIT).block_count == len(LONG)
    assert all(content(target, block) == content(source.store, block) for block in [*LONG, *others])
