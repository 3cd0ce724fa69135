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
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

import grpc

from bifolio.protos.errors import BifolioError, ReplicaGone, Revoked, TransferFailed
from bifolio.protos.messages import BlockId, Commit, Start

from .channels import Channels
from .receipt import Receipt
from .regions import Regions
from .transfer import BlockStore, Copy
from .wire import ERROR_KEY, METHOD, SERVICE, Ack, Complete, Frame, Malformed, block_count, pack, unpack

Land = Callable[[Frame | Complete], None]  # has what a frame brings, or stands for, written into our block


class PrefillClient:
    """Pulls into one store, over one connection to each prefill replica."""

    def __init__(self, store: BlockStore, keepalive_s: float = 5.0) -> None:
        self._store = store
        self._channels = Channels(keepalive_s)
        self._regions = Regions(store)

    def pull(self, address: str, start: Start) -> Pull:
        """Copies from `start.memory`, if it can be reached from here."""
        return Pull(self._store, self._channels, self._regions, address, start)

    def close(self) -> None:
        """Closes the connections; pulls still running fail."""
        self._channels.close()
        self._regions.close()


class Pull:
    """One transfer. `run` it once, in a worker thread; `cancel` it from any other."""

    def __init__(self, store: BlockStore, channels: Channels, regions: Regions, address: str, start: Start) -> None:
        self._store = store
        self._channels = channels
        self._regions = regions
        self._address = address
        self._start = start
        self._receipt = Receipt(start, store.block_bytes)
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        self._cancelled = False
        self.began = 0.0  # when `run` was entered, on the monotonic clock

    @property
    def frames_received(self) -> int:
        return self._receipt.frames

    @property
    def bytes_received(self) -> int:
        return self._receipt.bytes

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
        self.began = time.monotonic()
        try:
            with (
                self._channels.use(self._address) as channel,
                self._regions.use(self._address, self._start.memory) as copy,
                self._landing(copy, blocks) as land,
            ):
                return self._receive(channel, land)
        except (grpc.RpcError, Malformed) as error:
            if self._cancelled:
                raise self._revoked() from error
            raise _translated(error, self._address) from error

    @contextmanager
    def _landing(self, copy: Copy | None, blocks: Sequence[BlockId]) -> Iterator[Land]:
        """All has landed when it is left."""
        if copy is not None:
            theirs, copy_block = self._start.blocks, copy
            yield lambda frame: copy_block(theirs[frame.position], blocks[frame.position])
            return
        self._start = replace(self._start, memory=b"")
        self._receipt = Receipt(self._start, self._store.block_bytes)
        with self._store.writing() as write:

            def put(frame: Frame | Complete) -> None:
                assert isinstance(frame, Frame), "the receipt takes no other where blocks are sent"
                write(blocks[frame.position], frame.offset, frame.payload)

            yield put

    def _receive(self, channel: grpc.Channel, land: Land) -> Commit:
        acks: SimpleQueue[int | None] = SimpleQueue()
        with self._lock:
            if self._cancelled:
                raise self._revoked()
            # No serializers: bytes in, bytes out.
            prefill: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            call = self._call = prefill(_requests(self._start, acks))
        commit: Commit | None = None
        try:
            for raw in call:  # raises an RpcError unless the stream ends with OK
                match unpack(raw):
                    case (Frame() | Complete()) as frame if commit is None:
                        self._receipt.add(frame)
                        land(frame)
                        acks.put(frame.index)
                    case Commit() as manifest if commit is None:
                        self._receipt.check(manifest)
                        commit = manifest
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


def _translated(error: grpc.RpcError | Malformed, address: str) -> BifolioError:
    if isinstance(error, Malformed):
        return TransferFailed(f"the Prefill stream from {address} is unusable: {error}")
    details = error.details() or ""
    names = [str(entry.value) for entry in error.trailing_metadata() or () if entry.key == ERROR_KEY]
    for cls in _family(BifolioError):
        if cls.__name__ in names:
            return cls(details)
    kind = ReplicaGone if error.code() is grpc.StatusCode.UNAVAILABLE else TransferFailed
    return kind(f"the Prefill stream from {address} broke: {error.code().name}: {details}")


def _family(cls: type[BifolioError]) -> Iterator[type[BifolioError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _family(child)
