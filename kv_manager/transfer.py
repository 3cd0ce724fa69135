"""The prefill side of the transfer: a stream per prefill, whose response is the KV cache.

Knows nothing about models, engines or the ledger: a `PrefillSource` computes, a `BlockStore` holds. Each
stream has a thread of the server from Start to the last Ack; it alone waits, for compute, copies and acks.

    START → begin → [ cached, or a chunk computed → its full blocks as FRAMEs, at most `window` unacknowledged ] …
          → COMMIT → last ACK → the job is left: its lease closes → status OK

If the client reaches the memory of these blocks, it says so in START, and copies each at the word that it is COMPLETE.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import grpc

from bifolio.protos.errors import BifolioError, StalePlacement, status_of
from bifolio.protos.messages import BlockId, Commit, Start, TokenLogprobs

from .wire import (
    ERROR_KEY,
    METHOD,
    SERVICE,
    Ack,
    Complete,
    Frame,
    Malformed,
    block_count,
    channel_options,
    pack,
    pack_frame,
    pieces,
    unpack,
)

logger = logging.getLogger(__name__)

MAX_DETAILS = 1000  # characters of an error's message: a trailer that is too large would replace the error


Span = tuple[BlockId, int, int]  # a block, its first byte and the byte after the last: at most MAX_PAYLOAD of them
Write = Callable[[BlockId, int, memoryview | bytes], None]  # a block, its first byte, at most MAX_PAYLOAD of data
Copy = Callable[[BlockId, BlockId], None]  # a block of another store, a block of this one


class BlockStore(Protocol):
    """The bytes of one replica's blocks, wherever they lie. Different blocks may be used from different threads at
    once; what one of the calls below gives is used by one thread, except a `Copy`."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def memory(self) -> bytes:
        """The handle by which others `reach` this store's memory, the same from then on. Empty: they do not."""

    def read(self, spans: Sequence[Span]) -> Generator[memoryview]:
        """The bytes of each span in turn: one-dimensional, contiguous, format B.

        A view holds until the next is asked for, or the generator is closed. It waits for what was launched to compute
        them, and may read ahead: so ask only for what has been launched. Close it, under the lease that it reads from:
        then it touches neither blocks nor buffers any more.
        """

    def writing(self) -> AbstractContextManager[Write]:
        """A function that writes. It has copied its data when it returns: so a frame may then be acknowledged.

        What was written is in the blocks once the context has been left, however it is left. No sooner may they be
        read, or given to someone else.
        """

    def settle(self, blocks: Sequence[BlockId]) -> None:
        """Returns when all that was computed into these blocks is there, for those who reach the memory."""

    def reach(self, memory: bytes) -> Copy | str:
        """A function that copies whole blocks from the store of that handle, or why this one cannot. Any bytes may be
        tried. The copy has happened when the function returns, or raises. It holds the memory as long as it exists."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The end of a prefill's progress."""

    logits: bytes  # float32, little endian, [vocabulary]: the last position
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class PrefillJob(Protocol):
    """One prefill under an open lease. Leaving the `with` gives up compute and lease, however far it came."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def progress(self) -> Iterable[int | Prefilled]:
        """Blocks. How many leading tokens are cached, if any are; then, after each chunk, of how many the computing of
        K and V has been launched: they are complete for who reads or settles them; `Prefilled` last."""

    def cancel(self) -> None:
        """Makes `progress` raise Revoked at once. From any thread, at any time, also after the job's end."""


class PrefillSource(Protocol):
    """What the server serves: the replica's engine and its blocks."""

    @property
    def store(self) -> BlockStore: ...

    def begin(self, start: Start) -> PrefillJob:
        """Opens the lease `start` names, after checking its blocks and geometry.

        What it raises (StalePlacement, GeometryMismatch, Draining, …) is raised at the client again.
        """


class PrefillServer:
    """Serves `Prefill` in threads of its own, off any event loop; refuses more than `max_streams` at once."""

    def __init__(
        self,
        source: PrefillSource,
        max_streams: int,
        window: int = 8,
        host: str = "127.0.0.1",
        keepalive_s: float = 5.0,
    ) -> None:
        self._source = source
        self._window = window
        self._host = host
        self._active = 0
        self._lock = threading.Lock()
        self._threads = futures.ThreadPoolExecutor(max_streams + 2, thread_name_prefix="prefill-stream")
        # No serializers: bytes in, bytes out.
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server = grpc.server(
            self._threads,
            handlers=[grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})],
            maximum_concurrent_rpcs=max_streams + 2,  # a lease comes back before its stream has quite ended
            options=[
                *channel_options(keepalive_s),
                ("grpc.so_reuseport", 0),  # a second server on this port is an error, not a silent sharer
                ("grpc.http2.max_ping_strikes", 0),  # clients ping through long chunks; do not hang up
            ],
        )

    @property
    def active(self) -> int:
        """Streams whose lease may still be open."""
        return self._active

    def start(self) -> int:
        """Listens on a free port and returns it."""
        port: int = self._server.add_insecure_port(f"{self._host}:0")
        self._server.start()
        return port

    def stop(self, grace: float) -> None:
        """Refuses new streams, cancels those left after `grace` seconds, returns once every job is left."""
        self._server.stop(grace).wait()
        self._threads.shutdown()

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The stream's door: what goes wrong inside leaves as a status, after the job has been left."""
        with self._counted():
            try:
                yield from self._stream(requests, context)
                return
            except grpc.RpcError:
                raise  # from `requests`: the client has gone, nobody is left to tell
            except Malformed as error:
                code, details = "INVALID_ARGUMENT", str(error)
            except BifolioError as error:
                code, details = status_of(error)[0], error.message
                context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
            except Exception as error:
                logger.exception("a prefill stream failed")
                code, details = "INTERNAL", f"{type(error).__name__}: {error}"
        context.abort(grpc.StatusCode[code], details[:MAX_DETAILS])

    def _stream(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        start = next((unpack(request) for request in requests), None)
        if not isinstance(start, Start):
            raise Malformed(f"a stream begins with a start, not with {type(start).__name__}")
        store = self._source.store
        if start.memory and start.memory != store.memory:  # it would copy from one who was here before
            raise StalePlacement("the memory to copy blocks from is not, or no longer, that of this prefill replica")
        # If the client goes while a frame is being sent, grpc drops this generator: the job is left then too.
        with self._source.begin(start) as job:
            if not context.add_callback(job.cancel):  # never called for a client already gone
                return
            outbox = Outbox(start, store, requests, self._window)
            for step in job.progress():
                if isinstance(step, Prefilled):
                    yield from outbox.send(len(start.tokens))
                    yield outbox.commit(step)
                    break
                yield from outbox.send(step)
            else:
                raise RuntimeError("the job's progress ended without Prefilled")
            outbox.settle(unacknowledged=0)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1


class Outbox:
    """Cuts blocks into numbered frames and keeps at most `window` of them unacknowledged."""

    def __init__(self, start: Start, store: BlockStore, requests: Iterator[bytes], window: int) -> None:
        self._start = start
        self._store = store
        self._requests = requests
        self._window = window
        self._next = start.skip_blocks  # the block position to send next
        self._sent = 0  # frames
        self._acked = 0
        self._bytes = 0

    def send(self, computed: int) -> Iterator[bytes]:
        """The frames of the blocks that became full, now that `computed` leading tokens are computed, or launched."""
        start = self._start
        all_computed = computed >= len(start.tokens)
        end = block_count(start) if all_computed else computed // start.geometry.block_size
        if end <= self._next:
            return
        yield from self._completed(range(self._next, end)) if start.memory else self._cut(range(self._next, end))
        self._next = end

    def _cut(self, positions: range) -> Iterator[bytes]:
        start = self._start
        cuts = [(p, *piece) for p in positions for piece in pieces(self._store.block_bytes)]
        with closing(self._store.read([(start.blocks[p], begin, stop) for p, begin, stop in cuts])) as views:
            for (position, begin, stop), view in zip(cuts, views, strict=True):
                self.settle(self._window - 1)
                yield pack_frame(Frame(start.generation, self._sent, position, begin, view))  # a copy
                self._sent += 1
                self._bytes += stop - begin

    def _completed(self, positions: range) -> Iterator[bytes]:
        start = self._start
        for position in positions:
            self._store.settle([start.blocks[position]])
            self.settle(self._window - 1)
            yield pack(Complete(start.generation, self._sent, position))
            self._sent += 1
            self._bytes += self._store.block_bytes

    def settle(self, unacknowledged: int) -> None:
        """Waits until at most so many frames are unacknowledged. RpcError if the client goes meanwhile."""
        while self._sent - self._acked > unacknowledged:
            ack = next((unpack(request) for request in self._requests), None)
            if not isinstance(ack, Ack):
                raise Malformed(f"frame {self._acked} awaits an ack, what came is {type(ack).__name__}")
            if not self._acked <= ack.frame < self._sent:
                raise Malformed(f"an ack of frame {ack.frame}, due were {self._acked}..{self._sent - 1}")
            self._acked = ack.frame + 1

    def commit(self, prefilled: Prefilled) -> bytes:
        return pack(
            Commit(
                generation=self._start.generation,
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
