"""What the transfer's tests share: a scripted prefill, two stores, and threads that must be gone in the end.

No test sleeps: they wait for events, and WAIT bounds every wait.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import grpc

from bifolio.kv_manager.block_store import BlockStore, Copy, Unreached, Write
from bifolio.kv_manager.heads import Part, whole
from bifolio.kv_manager.memory_store import MemoryStore
from bifolio.kv_manager.outbox import Outbox
from bifolio.kv_manager.pull import PrefillClient, Pull
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.kv_manager.transfer import Prefilled, PrefillServer
from bifolio.kv_manager.wire import MAX_PAYLOAD, METHOD, SERVICE, cuts, unpack
from bifolio.protos.errors import Revoked
from bifolio.protos.messages import BlockId, Commit, Generation, Geometry, Heads, RequestId, Start

WAIT = 10.0
LOGITS = bytes(range(8))
DONE = Prefilled(LOGITS, queue_seconds=0.5, prefill_seconds=1.5)
GEOMETRY = Geometry("model", layers=1, kv_heads=1, head_dim=8, block_size=4, dtype="float32")


def ids(*blocks: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(block) for block in blocks)


def start(tokens: int = 10, skip: int = 0, blocks: Sequence[int] = (3, 1, 2), memory: bytes = b"") -> Start:
    """Ten tokens in blocks of four: the third block is partly filled."""
    return Start(
        RequestId("r"),
        Generation(7, 9),
        ids(*blocks),
        tuple(range(tokens)),
        GEOMETRY,
        arrival=1.0,
        skip_blocks=skip,
        memory=memory,
    )


def filled_store(block_bytes: int, blocks: int = 4) -> MemoryStore:
    store, noise = MemoryStore(blocks, block_bytes), random.Random(block_bytes)
    for block in range(1, blocks + 1):
        put(store, block, noise.randbytes(block_bytes))
    return store


def put(store: BlockStore, block: int, content: bytes) -> None:
    """Write a whole block."""
    with store.writing() as write:
        for [(_, begin, end)] in cuts(range(1), store.block_bytes, MAX_PAYLOAD):
            write(BlockId(block), begin, content[begin:end])


def content(store: BlockStore, block: int) -> bytes:
    """Read a whole block."""
    spans = [[(BlockId(block), *span[1:]) for span in cut] for cut in cuts(range(1), store.block_bytes, MAX_PAYLOAD)]
    return b"".join(bytes(view) for views in store.read(spans) for view in views)


def committed(skip: int, frames: int, size: int) -> Commit:
    heads, layers = (Heads(0, 1),), GEOMETRY.layer_names
    return Commit(start().generation, GEOMETRY, layers, heads, 10, skip, 3 - skip, frames, size, LOGITS, 0.5, 1.5)


class ScriptedJob:
    """A `PrefillJob` whose progress is what it is fed; an exception among it is raised."""

    def __init__(self, steps: Iterable[int | Prefilled | Exception]) -> None:
        self._steps: SimpleQueue[int | Prefilled | Exception | None] = SimpleQueue()
        for step in steps:
            self._steps.put(step)
        self.feed = self._steps.put
        self.cancelled = threading.Event()
        self.closed = threading.Event()
        self.times_left = 0

    def __enter__(self) -> ScriptedJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.times_left += 1
        self.closed.set()

    def progress(self) -> Iterator[int | Prefilled]:
        while True:
            step = self._steps.get(timeout=WAIT)
            if self.cancelled.is_set():
                raise Revoked("the job was cancelled")
            if isinstance(step, Exception):
                raise step
            if step is None:
                return
            yield step

    def cancel(self) -> None:
        self.cancelled.set()
        self._steps.put(None)


class ScriptedSource:
    """A `PrefillSource` whose jobs all begin with the same steps."""

    def __init__(self, store: BlockStore, *steps: int | Prefilled | Exception) -> None:
        self.store = store
        self.geometry = GEOMETRY
        self.meter = TrafficMeter()
        self.several: tuple[Part, ...] = ()
        self.steps = steps
        self.refusal: Exception | None = None
        self.jobs: list[ScriptedJob] = []
        self._begun: SimpleQueue[ScriptedJob] = SimpleQueue()

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.several or whole(self.store, self.geometry)

    def begin(self, start: Start) -> ScriptedJob:
        if self.refusal is not None:
            raise self.refusal
        job = ScriptedJob(self.steps)
        self.jobs.append(job)
        self._begun.put(job)
        return job

    def next_job(self) -> ScriptedJob:
        return self._begun.get(timeout=WAIT)


class GatedStore(MemoryStore):
    """Tells when a write has begun, and holds it until the gate opens."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        super().__init__(blocks, block_bytes)
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.writes = 0

    @contextmanager
    def writing(self) -> Iterator[Write]:
        with super().writing() as write:

            def gated(block: BlockId, offset: int, data: memoryview | bytes) -> None:
                self.begun.set()
                assert self.gate.wait(WAIT)
                write(block, offset, data)
                self.writes += 1

            yield gated


class ReachingStore(MemoryStore):
    """Reaches the stores it is told of; a copy tells that it has begun, and goes on when the gate opens."""

    def __init__(self, blocks: int, block_bytes: int, **others: MemoryStore) -> None:
        super().__init__(blocks, block_bytes)
        self.others = {name.encode(): store for name, store in others.items()}
        self.tried: list[bytes] = []
        self.owners: list[Generation] = []  # as they were said
        self.copies = 0
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def reach(self, memory: bytes) -> Copy | Unreached:
        self.tried.append(memory)
        if (other := self.others.get(memory)) is None:
            return Unreached("hidden", "no such store")

        def copy(source: BlockId, owner: Generation, block: BlockId) -> None:
            self.owners.append(owner)
            self.begun.set()
            assert self.gate.wait(WAIT)
            self._write(block, 0, content(other, source))
            self.copies += 1

        return copy


class SharedStore(MemoryStore):
    """A prefill side that is reached as `theirs`, and never asked for a payload."""

    memory = b"theirs"

    def read(self, spans: object) -> Generator[memoryview]:
        raise AssertionError("a payload was asked for")


def outbox_of(start: Start, store: BlockStore, says: Iterable[object] = (), window: int = 9) -> Outbox:
    """That of a stream whose client `says` so."""
    said = iter(says)
    return Outbox(start, GEOMETRY, whole(store, GEOMETRY), lambda _: next(said, None), TrafficMeter(), window)


@contextmanager
def serving(
    source: ScriptedSource, max_streams: int = 4, window: int = 8, keepalive_s: float = 5.0, **options: Any
) -> Iterator[str]:
    """A PrefillServer's address. In the end every job has been left exactly once, and nothing is under way."""
    server = PrefillServer(source, max_streams, window, keepalive_s=keepalive_s, **options)
    try:
        yield f"127.0.0.1:{server.start()}"
    finally:
        server.stop(grace=WAIT)
    assert server.active == 0
    traffic = source.meter.read()
    assert (traffic.streams, traffic.in_flight) == (0, 0)
    assert [job.times_left for job in source.jobs] == [1] * len(source.jobs)


@contextmanager
def raw_serving(answer: Callable[[Start], Iterable[bytes]]) -> Iterator[str]:
    """The address of a server that answers a Start with any bytes at all."""

    def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        first = unpack(next(requests))
        assert isinstance(first, Start)
        yield from answer(first)

    threads = ThreadPoolExecutor(2)
    handler = grpc.method_handlers_generic_handler(SERVICE, {METHOD: grpc.stream_stream_rpc_method_handler(serve)})
    server = grpc.server(threads, handlers=(handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
        threads.shutdown()


class RawClient:
    """A client that sends what it is told to, and acknowledges nothing by itself."""

    def __init__(self, address: str, method: str = METHOD) -> None:
        requests: SimpleQueue[bytes | None] = SimpleQueue()
        self.send = requests.put
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self.call = self._channel.stream_stream(f"/{SERVICE}/{method}")(iter(requests.get, None), timeout=WAIT)

    def receive(self):
        return unpack(next(self.call))

    def end(self) -> grpc.StatusCode:
        with contextlib.suppress(grpc.RpcError):
            for _ in self.call:
                pass
        return self.call.code()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.call.cancel()
        self.send(None)
        self._channel.close()


@contextmanager
def client_of(
    store: BlockStore, keepalive_s: float = 5.0, meter: TrafficMeter | None = None, **options: Any
) -> Iterator[PrefillClient]:
    client = PrefillClient(whole(store, GEOMETRY), meter or TrafficMeter(), keepalive_s=keepalive_s, **options)
    try:
        yield client
    finally:
        client.close()


def in_thread(pull: Pull, blocks: Sequence[BlockId]) -> Future[Commit]:
    """What `run` will return or raise, as the decode replica calls it."""
    future: Future[Commit] = Future()

    def run() -> None:
        try:
            future.set_result(pull.run(blocks))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextmanager
def no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT)
        assert not thread.is_alive(), thread
