"""The decode side of the transfer: opens a Prefill stream, copies its blocks, and vouches for what it got.

Knows nothing about engines or placements. However a stream fails, it ends as one of our errors: the one the
prefill side raised, Revoked after a cancel, ReplicaGone when the connection broke, TransferFailed for the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

import grpc

from bifolio.protos.errors import BifolioError, ReplicaGone, Revoked, TransferFailed
from bifolio.protos.messages import BlockId, Commit, Start

from .channels import Channels
from .receipt import Receipt
from .transfer import BlockStore
from .wire import ERROR_KEY, METHOD, SERVICE, Ack, Frame, Malformed, block_count, pack, unpack


class PrefillClient:
    """Pulls into one store, over one connection to each prefill replica."""

    def __init__(self, store: BlockStore, keepalive_s: float = 5.0) -> None:
        self._store = store
        self._channels = Channels(keepalive_s)

    def pull(self, address: str, start: Start) -> Pull:
        return Pull(self._store, self._channels, address, start)

    def close(self) -> None:
        """Closes the connections; pulls still running fail."""
        self._channels.close()


class Pull:
    """One transfer. `run` it once, in a worker thread; `cancel` it from any other."""

    def __init__(self, store: BlockStore, channels: Channels, address: str, start: Start) -> None:
        self._store = store
        self._channels = channels
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
        """Copies block position i into `blocks[i]`, and returns the commit once everything it says is true.

        Only this thread writes to the store. So once `run` has returned or raised, and not earlier (after a
        cancel it may be copying a frame still), the blocks may be given to someone else.
        """
        assert len(blocks) >= block_count(self._start), "the lease is too small for the tokens"
        self.began = time.monotonic()
        try:
            with self._channels.use(self._address) as channel:
                return self._receive(channel, blocks)
        except (grpc.RpcError, Malformed) as error:
            if self._cancelled:
                raise self._revoked() from error
            raise _translated(error, self._address) from error

    def _receive(self, channel: grpc.Channel, blocks: Sequence[BlockId]) -> Commit:
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
                    case Frame() as frame if commit is None:
                        self._receipt.add(frame)
                        self._store.write(blocks[frame.position], frame.offset, frame.payload)
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
