"""What leaves a prefill's stream: blocks cut into numbered frames, at most a window of them unacknowledged.

Knows nothing about grpc, leases or who computes. Its stream's thread is the only one here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby, islice

from bifolio.protos.messages import Commit, Geometry, Start, TokenLogprobs

from .heads import Part, common
from .traffic import Stall, TrafficMeter
from .wire import MAX_COPY, MAX_PAYLOAD, Ack, Complete, Malformed, block_count, cuts, pack, pack_frame

Receive = Callable[[Stall], object]  # the client's next message, or None after its last; waits for it


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The end of a prefill's progress."""

    logits: bytes  # float32, little endian, [vocabulary]: the last position
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Outbox:
    def __init__(
        self,
        start: Start,
        geometry: Geometry,
        parts: Sequence[Part],
        receive: Receive,
        meter: TrafficMeter,
        window: int,
        max_frame: int = MAX_PAYLOAD,
    ) -> None:
        self._start = start
        self._geometry = geometry
        self._parts = common(parts, start.heads, geometry)
        self._receive = receive
        self._meter = meter
        self._window = window
        self._max_frame = max_frame
        self._next = start.skip_blocks  # the block position to send next
        self._sent = 0  # frames
        self._asked = 0  # those up to the last one with which an ack is due
        self._acked = 0
        self._bytes = 0

    def send(self, computed: int) -> Generator[bytes]:
        """The frames of the blocks that became full, now that `computed` leading tokens are computed, or launched."""
        start = self._start
        all_computed = computed >= len(start.tokens)
        end = block_count(start) if all_computed else computed // start.geometry.block_size
        if end <= self._next:
            return
        positions = range(self._next, end)
        if start.memory:
            yield from self._completed(positions)
        else:
            for part in self._parts:
                yield from self._cut(part, positions)
        self._next = end

    def settle(self, unacknowledged: int) -> None:
        """Waits until at most so many frames are unacknowledged."""
        while self._sent - self._acked > unacknowledged:
            ack = self._receive("acks")
            if not isinstance(ack, Ack):
                came = "nothing more" if ack is None else type(ack).__name__
                raise Malformed(f"frame {self._acked} awaits an ack, what came is {came}")
            if not self._acked <= ack.frame < self._sent:
                raise Malformed(f"an ack of frame {ack.frame}, due were {self._acked}..{self._sent - 1}")
            self._meter.flying(self._acked - ack.frame - 1)
            self._acked = ack.frame + 1

    def close(self) -> None:
        """No further ack is waited for."""
        self._meter.flying(self._acked - self._sent)

    def commit(self, prefilled: Prefilled) -> Generator[bytes]:
        """The last message: what was sent, and what came of the prefill besides."""
        yield pack(
            Commit(
                generation=self._start.generation,
                geometry=self._geometry,
                layers=self._geometry.layer_names,
                heads=tuple(part.heads for part in self._parts),
                tokens=len(self._start.tokens),
                first_block=self._start.skip_blocks,
                block_count=self._next - self._start.skip_blocks,
                frames=self._sent,
                payload_bytes=self._bytes,
                logits=prefilled.logits,
                queue_seconds=prefilled.queue_seconds,
                prefill_seconds=prefilled.prefill_seconds,
                prompt_logprobs=prefilled.prompt_logprobs,
            )
        )

    def _cut(self, part: Part, positions: range) -> Generator[bytes]:
        generation, blocks = self._start.generation, self._start.blocks
        frames = list(cuts(positions, part.store.block_bytes, self._max_frame))
        with closing(part.store.read([[(blocks[p], begin, end) for p, begin, end in cut] for cut in frames])) as read:
            for i, cut in enumerate(frames, 1):
                self.settle(self._window - 1)
                began = time.monotonic()
                position, offset, _ = cut[0]
                views = next(read)
                size = sum(map(len, views))
                due = self._due(last=i == len(frames))
                frame = pack_frame(generation, self._sent, part.heads, position, offset, views, due)  # a copy
                yield from self._leave(frame, size, began)

    def _completed(self, positions: range) -> Generator[bytes]:
        [part] = self._parts
        store, blocks = part.store, self._start.blocks
        most = max(1, MAX_COPY // store.block_bytes)
        for owner, run in groupby(positions, key=lambda position: store.owner(blocks[position])):
            for some in _batched(run, most):
                store.settle([blocks[position] for position in some])
                self.settle(self._window - 1)
                due = self._due(last=some[-1] == positions[-1])
                word = Complete(self._start.generation, self._sent, some[0], len(some), owner, due)
                yield from self._leave(pack(word), len(some) * store.block_bytes, time.monotonic())

    def _due(self, *, last: bool) -> bool:
        """Whether the next frame asks for an ack: twice in a window, and with the last for now."""
        if due := last or self._sent + 1 - self._asked >= max(1, self._window // 2):
            self._asked = self._sent + 1
        return due

    def _leave(self, message: bytes, size: int, began: float) -> Generator[bytes]:
        self._sent += 1
        self._bytes += size
        self._meter.flying(1)
        yield message  # until grpc has taken it
        self._meter.moved(1, size, time.monotonic() - began)


def _batched(run: Iterable[int], most: int) -> Iterator[tuple[int, ...]]:
    rest = iter(run)
    while some := tuple(islice(rest, most)):
        yield some
