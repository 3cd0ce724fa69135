"""The decode side of the transfer: opens a Prefill stream, copies its blocks, and vouches for what it got.

    payload of a frame ──write──▶ own block            the prefill replica's block ──copy──▶ own block
                                                       (if its memory can be reached: nothing comes but the word)

Knows nothing about engines or placements. However a stream fails, it ends as one of our errors: the one the
prefill side raised, Revoked after a cancel, ReplicaGone when the connection broke, TransferFailed for the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from queue import SimpleQueue

import grpc

from bifolio.protos.errors import Revoked, StalePlacement, TransferFailed
from bifolio.protos.messages import BlockId, Commit, Heads, Start

from . import drill
from .block_store import Copy, Unreached, Write
from .channels import Channels, is_lost, translated
from .heads import Part, narrowed
from .receipt import Receipt
from .regions import Regions
from .tls import Tls
from .traffic import TrafficMeter
from .wire import METHOD, SERVICE, Ack, Complete, Frame, Malformed, Working, block_count, pack, unpack

Land = Callable[[Frame | Complete], None]  # has what a frame brings, or stands for, written into our block


class PrefillClient:
    """Pulls into the caches of one replica, over one connection to each prefill replica."""

    def __init__(
        self,
        parts: Sequence[Part],
        meter: TrafficMeter,
        *,
        keepalive_s: float = 5.0,
        tls: Tls | None = None,
        copies: bool = True,
        vocabulary: int | None = None,
    ) -> None:
        """Without `copies` all blocks are sent, also where the memory that they are in could be reached. With a
        `vocabulary`, logits of another one are refused."""
        self._parts = tuple(parts)
        self._meter = meter
        self._channels = Channels(keepalive_s, tls)
        self._regions = Regions(parts[0].store) if copies and len(parts) == 1 else None
        self._vocabulary = vocabulary

    def pull(self, address: str, start: Start) -> Pull:
        """Copies from `start.memory`, if it can be reached from here."""
        return Pull(self._parts, self._meter, self._channels, self._regions, self._vocabulary, address, start)

    def close(self) -> None:
        """Closes the connections; pulls still running fail."""
        self._channels.close()
        if self._regions is not None:
            self._regions.close()


class Pull:
    """One transfer. `run` it once, in a worker thread; `cancel` it from any other."""

    def __init__(
        self,
        parts: Sequence[Part],
        meter: TrafficMeter,
        channels: Channels,
        regions: Regions | None,
        vocabulary: int | None,
        address: str,
        start: Start,
    ) -> None:
        self._parts = parts
        self._meter = meter
        self._channels = channels
        self._regions = regions
        self._vocabulary = vocabulary
        self._address = address
        self._start = start
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        self._cancelled = False
        self.began = 0.0  # when `run` was entered, on the monotonic clock
        self._heard = time.monotonic()  # when something came the last time

    def silent_s(self) -> float:
        """For how long nothing has come: frames come or, each second, the word that they are worked at."""
        return time.monotonic() - self._heard

    def cancel(self) -> None:
        """Ends `run` with Revoked, now or as soon as it is called. Idempotent. Frees no block: see `run`."""
        with self._lock:
            self._cancelled = True
            if self._call is not None:
                self._call.cancel()

    def run(self, blocks: Sequence[BlockId]) -> Commit:
        """Copies block position i, from `skip_blocks` on, into `blocks[i]`, and returns the commit once everything it
        says is true.

        Only this thread writes to the store, and all it wrote lands before it goes on. So once `run` has returned
        or raised, and not earlier (after a cancel it may be copying a frame still), the blocks may be computed
        with, or given to someone else.
        """
        assert len(blocks) >= block_count(self._start), "the lease is too small for the tokens"
        self.began = self._heard = time.monotonic()
        with self._meter.stream():
            try:
                return self._connected(blocks)
            except (grpc.RpcError, Malformed, StalePlacement, Revoked) as error:
                # Or as long as the error is somewhere, so are the frames that it came through, and the memory of a
                # replica that has died: one of grpc's is kept by its call, too
                error.with_traceback(None)
                if self._cancelled:
                    raise self._revoked() from error
                if isinstance(error, StalePlacement | Revoked):
                    raise
                if isinstance(error, Malformed):
                    raise TransferFailed(f"the Prefill stream from {self._address} is unusable: {error}") from error
                if is_lost(error) and self._regions is not None:
                    self._regions.forget(self._address)
                raise translated(error, self._address) from error

    def _connected(self, blocks: Sequence[BlockId]) -> Commit:
        with self._channels.use(self._address) as channel, self._reached() as reached:
            return self._received(channel, reached, blocks)

    @contextmanager
    def _reached(self) -> Iterator[Copy | Unreached]:
        """The memory in which the blocks are, if we copy them."""
        if self._regions is None:
            many = len(self._parts) > 1
            yield Unreached("misfit", "our heads are divided") if many else Unreached("off", "kv.copies is false")
            return
        with self._regions.use(self._address, self._start.memory) as reached:
            yield reached

    def _received(self, channel: grpc.Channel, reached: Copy | Unreached, blocks: Sequence[BlockId]) -> Commit:
        start = self._start
        if isinstance(reached, Unreached):
            heads = tuple(part.heads for part in self._parts) if len(self._parts) > 1 else ()
            start = replace(start, memory=b"", heads=heads)
        receipt = Receipt(start, sum(part.store.block_bytes for part in self._parts), self._vocabulary)
        if isinstance(reached, Unreached):
            with self._landing(receipt, blocks) as land:
                return self._receive(channel, start, receipt, land, f"sent: {reached.reason}")
        theirs, copy = start.blocks, reached

        def copied(frame: Frame | Complete) -> None:
            assert isinstance(frame, Complete), "the receipt takes no other where blocks are copied"
            for position in range(frame.position, frame.position + frame.count):
                if self._cancelled:
                    raise self._revoked()
                copy(theirs[position], frame.owner, blocks[position])

        return self._receive(channel, start, receipt, copied, "copied")

    @contextmanager
    def _landing(self, receipt: Receipt, blocks: Sequence[BlockId]) -> Iterator[Land]:
        """All has landed when it is left."""
        writes: dict[Heads, Write] = {}
        with ExitStack() as stack:

            def put(frame: Frame | Complete) -> None:
                assert isinstance(frame, Frame), "the receipt takes no other where blocks are sent"
                if (write := writes.get(frame.heads)) is None:
                    try:
                        store = narrowed(self._parts, frame.heads, self._start.geometry)
                    except KeyError:
                        raise Malformed(f"heads {frame.heads} are in no cache of ours together") from None
                    write = writes[frame.heads] = stack.enter_context(store.writing())
                for position, offset, data in frame.pieces(receipt.part_bytes(frame.heads)):
                    write(blocks[position], offset, data)

            yield put

    def _receive(self, channel: grpc.Channel, start: Start, receipt: Receipt, land: Land, way: str) -> Commit:
        acks: SimpleQueue[int | None] = SimpleQueue()
        with self._lock:
            if self._cancelled:
                raise self._revoked()
            # No serializers: bytes in, bytes out.
            prefill: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            try:
                call = self._call = prefill(_requests(start, acks))
            except ValueError as error:  # as grpc says it
                raise TransferFailed(f"the connection to {self._address} was closed: {error}") from error
        commit: Commit | None = None
        accepted = False
        try:
            while True:
                with self._meter.stalled("frames"):
                    raw = next(call, None)  # raises an RpcError unless the stream ends with OK
                if raw is None:
                    break
                drill.point("transfer")
                self._heard = time.monotonic()
                if not accepted:
                    accepted = True
                    self._meter.way(way)
                match unpack(raw):
                    case (Frame() | Complete()) as frame if commit is None:
                        began = time.monotonic()
                        size = receipt.add(frame)
                        land(frame)
                        self._meter.moved(1, size, time.monotonic() - began)
                        if frame.due:
                            acks.put(frame.index)
                    case Working() if commit is None:
                        pass
                    case Commit() as manifest if commit is None:
                        receipt.check(manifest)
                        commit = manifest
                        acks.put(None)  # nothing more to say: if an ack was lost, nobody waits for it
                    case other:
                        raise Malformed(f"a {type(other).__name__} is out of place here")
            if commit is None:
                raise Malformed("the stream ended without a commit")
            return commit
        finally:
            call.cancel()  # frees the prefill side; does nothing to a call that has ended
            acks.put(None)

    def _revoked(self) -> Revoked:
        return Revoked(f"the transfer of request {self._start.request} was cancelled")


def _requests(start: Start, acks: SimpleQueue[int | None]) -> Iterator[bytes]:
    """Consumed by a thread of grpc's own, which lives until a None."""
    yield pack(start)
    while (frame := acks.get()) is not None:
        yield pack(Ack(frame))
