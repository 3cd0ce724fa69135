"""The prefill side of the transfer: a stream per prefill, whose response is the KV cache.

Knows nothing about models, engines or the ledger: a `PrefillSource` computes, a `BlockStore` holds. Each
stream has a thread of the server from Start to the last Ack; it alone waits, for compute, copies and acks.

    START → begin → [ cached, or a chunk computed → its full blocks as FRAMEs, at most `window` unacknowledged ] …
          → COMMIT → last ACK → the job is left: its lease closes → status OK

While nothing can be sent the client is told each second that the engine goes on; a client that hears nothing gives up.
If the client reaches the memory of these blocks, it says so in START, and copies each at the word that it is COMPLETE.
A client that neither begins nor acknowledges is given up after a while: so nothing hangs, whoever fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack, closing, contextmanager, suppress
from types import TracebackType
from typing import Protocol, Self

import grpc

from bifolio.protos.errors import BifolioError, PeerRefused, StalePlacement, status_of
from bifolio.protos.messages import Geometry, Start

from . import drill
from .heads import Part
from .outbox import Outbox, Prefilled
from .patience import Patience
from .seldom import Seldom
from .tls import Tls, server_credentials
from .traffic import Stall, TrafficMeter
from .wire import ERROR_KEY, MAX_PAYLOAD, METHOD, SERVICE, Malformed, Working, channel_options, pack, unpack

__all__ = ["PrefillJob", "PrefillServer", "PrefillSource", "Prefilled"]

logger = logging.getLogger(__name__)

CERTIFIED_NAMES = "x509_subject_alternative_name"  # as grpc calls them
START_S = 2.0  # within which a client begins: it has what it needs when it calls, and until then anyone might call
LEAVE_S = 1.0  # that a stream's thread may take to leave it when it is over: it cuts a frame, at most
MAX_DETAILS = 1000  # characters of an error's message: a trailer that is too large would replace the error


class PrefillJob(Protocol):
    """One prefill under an open lease. Leaving the `with` gives up compute and lease, however far it came."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def progress(self) -> Iterable[int | Prefilled | None]:
        """Blocks. How many leading tokens are cached, if any are; then, after each chunk, of how many the computing of
        K and V has been launched: they are complete for who reads or settles them; `Prefilled` last. None in each
        second in which nothing else comes and the engine goes on."""

    def cancel(self) -> None:
        """Makes `progress` raise Revoked at once. From any thread, at any time, also after the job's end."""


class PrefillSource(Protocol):
    """What the server serves: the replica's engine and its blocks."""

    @property
    def geometry(self) -> Geometry: ...

    @property
    def parts(self) -> Sequence[Part]:
        """The caches in which its blocks are: one, unless heads are divided."""

    @property
    def meter(self) -> TrafficMeter: ...

    def begin(self, start: Start) -> PrefillJob:
        """Opens the lease `start` names, after checking its blocks and geometry.

        What it raises (StalePlacement, GeometryMismatch, Draining, …) is raised at the client again.
        """


class ClientGone(Exception):
    """Nobody is left to be told anything."""


class Stalled(Exception):
    """The client has been given up."""


class PrefillServer:
    """Serves `Prefill` in threads of its own, off any event loop; refuses more than `max_streams` at once."""

    def __init__(
        self,
        source: PrefillSource,
        max_streams: int,
        window: int = 16,
        host: str = "127.0.0.1",
        *,
        keepalive_s: float = 5.0,
        stall_s: float = 10.0,
        max_frame: int = MAX_PAYLOAD,
        tls: Tls | None = None,
    ) -> None:
        """`window` of frames, each of at most `max_frame` bytes; a client that lets us wait for `stall_s` is given up.
        With `tls` it must have a certificate of the same authority."""
        self._source = source
        self._window, self._max_frame = window, max_frame
        self._host = host
        self._active = 0
        self._over: dict[object, float] = {}  # streams that have ended at grpc and not here, and since when
        self._lock = threading.RLock()  # the garbage collector may end a stream that was dropped, in any line
        self._threads = futures.ThreadPoolExecutor(max_streams + 2, thread_name_prefix="prefill-stream")
        # No serializers: bytes in, bytes out.
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._serve)
        self._credentials = server_credentials(tls) if tls else None
        self._name = tls.name if tls else None
        self._patience = Patience(stall_s, START_S)
        self._log = Seldom(logger)
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

    def stalled_s(self) -> float:
        """For how long a stream's thread has not left a stream that is over; 0 if each leaves in time."""
        now = time.monotonic()
        longest = max((now - since for since in list(self._over.values())), default=0.0)
        return longest if longest > LEAVE_S else 0.0

    def start(self) -> int:
        """Listens on a free port and returns it."""
        address = f"{self._host}:0"
        if self._credentials is None:
            port: int = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, self._credentials)
        self._server.start()
        return port

    def stop(self, grace: float) -> None:
        """Refuses new streams, cancels those left after `grace` seconds, returns once every job is left."""
        self._server.stop(grace).wait()
        self._threads.shutdown()
        self._patience.close()

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The stream's door: what goes wrong inside leaves as a status, after the job has been left."""
        peer = context.peer()  # unknown once it has gone

        def failed(error: Exception) -> None:
            if not context.is_active():
                return  # a client that has gone says nothing more, which may come to us as a mistake of its own
            kind = type(error).__name__
            self._log.warning(kind, f"a prefill stream of {peer} ended: {kind}: {error}")

        with self._counted(context) as leave:
            try:
                with self._source.meter.stream():
                    inbox = _Inbox(requests, context, self._source.meter, self._patience)
                    yield from self._stream(inbox, context, leave)
                return
            except ClientGone:
                return  # as is its right: it is no more than a request that was cancelled
            except Stalled as error:
                self._log.warning("Stalled", f"a prefill stream of {peer} was given up: {error}")
                return  # its status is CANCELLED, whatever is said
            except Malformed as error:
                failed(error)
                code, details = "INVALID_ARGUMENT", str(error)
            except BifolioError as error:
                failed(error)
                code, details = status_of(error)[0], error.message
                context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
            except Exception as error:
                logger.exception("a prefill stream failed")
                code, details = "INTERNAL", f"{type(error).__name__}: {error}"
        context.abort(grpc.StatusCode[code], details[:MAX_DETAILS])

    def _stream(self, inbox: _Inbox, context: grpc.ServicerContext, leave: Callable[[], None]) -> Iterator[bytes]:
        if self._name is not None and self._name.encode() not in context.auth_context().get(CERTIFIED_NAMES, ()):
            raise PeerRefused(f"a certificate for the DNS name {self._name} (kv.tls.name) is needed")
        source, start = self._source, inbox.receive("start")
        if not isinstance(start, Start):
            raise Malformed(f"a stream begins with a start, not with {type(start).__name__}")
        memory = source.parts[0].store.memory if len(source.parts) == 1 else b""
        if start.memory and start.memory != memory:  # it would copy from one who was here before
            raise StalePlacement("the memory to copy blocks from is not, or no longer, that of this prefill replica")
        # If the client goes while a frame is being sent, grpc drops this generator: the job is left then too.
        with source.begin(start) as job, ExitStack() as left:
            left.callback(leave)
            if not context.add_callback(job.cancel):  # never called for a client already gone
                raise ClientGone("the client has left it")
            source.meter.way("copied" if start.memory else "sent")
            outbox = Outbox(
                start, source.geometry, source.parts, inbox.receive, source.meter, self._window, self._max_frame
            )
            with closing(outbox):
                for step in job.progress():
                    drill.point("transfer")
                    if step is None:
                        yield from inbox.patient(word for word in (pack(Working()),))
                    elif isinstance(step, Prefilled):
                        yield from inbox.patient(outbox.send(len(start.tokens)))
                        yield from inbox.patient(outbox.commit(step))
                        break
                    else:
                        yield from inbox.patient(outbox.send(step))
                else:
                    raise RuntimeError("the job's progress ended without Prefilled")
                outbox.settle(unacknowledged=0)

    @contextmanager
    def _counted(self, context: grpc.ServicerContext) -> Iterator[Callable[[], None]]:
        """Gives what is to be called when the stream's thread has nothing more to do for it: a job may still wait for
        its engine then, which is not the transfer's fault."""
        stream, left = object(), False

        def over() -> None:
            with self._lock:
                if not left:
                    self._over[stream] = time.monotonic()

        def leave() -> None:
            nonlocal left
            with self._lock:
                left = True
                self._over.pop(stream, None)

        with self._lock:
            self._active += 1
        context.add_callback(over)
        try:
            yield leave
        finally:
            leave()
            with self._lock:
                self._active -= 1


class _Inbox:
    """What a client says, and how long we wait for it."""

    def __init__(
        self, requests: Iterator[bytes], context: grpc.ServicerContext, meter: TrafficMeter, patience: Patience
    ) -> None:
        self._requests, self._context, self._meter, self._patience = requests, context, meter, patience
        self._stalled = False

    def receive(self, what_for: Stall) -> object:
        """Its next message; None if it says nothing more."""
        message: bytes | None = None
        seconds = min(START_S, self._patience.seconds) if what_for == "start" else self._patience.seconds
        with self._patience.waiting(self._give_up, seconds), self._meter.stalled(what_for), suppress(grpc.RpcError):
            message = next(self._requests, None)
        if message is not None:
            return unpack(message)
        if self._stalled:
            raise Stalled(f"it let us wait for its {what_for} for more than {seconds:g} s")
        if not self._context.is_active():
            raise ClientGone("the client has left it")
        return None

    def patient(self, messages: Generator[bytes]) -> Iterator[bytes]:
        """Gives a client up that reads nothing, too."""
        with closing(messages):  # at once, also when grpc drops this generator: it reads from blocks of the lease
            for message in messages:
                with self._patience.waiting(self._give_up):
                    yield message

    def _give_up(self) -> None:
        self._stalled = True
        self._context.cancel()
