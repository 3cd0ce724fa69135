"""Both sides of broken streams, joined by a real server and a client whose streams break as they are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fault_kit import Faults, Plan, break_streams
from leased_kit import TWO_HEADS, CopyingStore, LeasedSource, ReachedStore, a_start, divided, right
from transfer_kit import WAIT, in_thread, no_threads_left, serving

from bifolio.kv_manager.heads import Part, whole
from bifolio.kv_manager.memory_store import MemoryStore
from bifolio.kv_manager.pull import PrefillClient
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.kv_manager.wire import Kind
from bifolio.protos.errors import BifolioError
from bifolio.protos.messages import BlockId, Commit

MOST_BLOCKS = 7  # of a prompt
WAYS = {"sent": Kind.FRAME, "copied": Kind.COMPLETE}  # by what blocks come


@dataclass
class World:
    """Both sides, and the blocks that no stream has used yet."""

    source: LeasedSource
    client: PrefillClient
    address: str
    faults: Faults
    parts: tuple[Part, ...]
    meter: TrafficMeter
    block_bytes: int
    number: Iterator[int] = field(default_factory=count)

    def pull(self, tokens: int, skip: int, plan: Plan) -> Commit | BifolioError:
        """Its end. Raises AssertionError for wrong bytes, TimeoutError for none."""
        first = 1 + next(self.number) * (MOST_BLOCKS + 1)  # a start may be changed to have one more
        blocks = [BlockId(first + i) for i in range(-(-tokens // TWO_HEADS.block_size))]
        start = a_start(first, blocks[::-1], tokens, skip, self.source.store.memory)
        self.faults.plans[start.generation] = plan
        pull = self.client.pull(self.address, start)
        plan.cancel = pull.cancel
        try:
            commit = in_thread(pull, blocks).result(WAIT)
        except BifolioError as error:
            return error
        assert right(start, self.parts, blocks, self.block_bytes), "it was committed with wrong bytes"
        return commit


@contextmanager
def world(
    streams: int,
    *,
    copied: bool = False,
    ours_divided: bool = False,
    theirs_divided: bool = False,
    block_bytes: int = 96,
    steps: Sequence[int] = (5, 9),
    **server: Any,
) -> Iterator[World]:
    most = streams * (MOST_BLOCKS + 1)
    store: MemoryStore = (ReachedStore if copied else MemoryStore)(most, block_bytes)
    source = LeasedSource(store, most, *steps, parts=divided(most, block_bytes) if theirs_divided else ())
    target = CopyingStore(most, block_bytes, store) if copied else MemoryStore(most, block_bytes)
    parts = divided(most, block_bytes) if ours_divided else whole(target, TWO_HEADS)
    meter = TrafficMeter()
    with no_threads_left():
        with serving(source, max_streams=32, **server) as address:
            client = PrefillClient(parts, meter)
            try:
                yield World(source, client, address, break_streams(client), parts, meter, block_bytes)
            finally:
                client.close()
        assert source.tags.held == 0
        assert meter.read().streams == 0
