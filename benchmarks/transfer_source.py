"""The sending side of the transfer's benchmarks, without a model: caches full of noise and a `PrefillSource` whose
prompts are computed as soon as they are asked for, unless one is told to stall.

Lives in a process of its own (`transfer_partner.py`); so does plain TCP's and raw gRPC's sender, which send from the
same memory.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import numpy as np
import torch

from bifolio.kv_manager.heads import whole
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.kv_manager.transfer import Prefilled, PrefillServer
from bifolio.kv_manager.wire import MAX_PAYLOAD, channel_options
from bifolio.protos.errors import Revoked
from bifolio.protos.measures import Traffic
from bifolio.protos.messages import BlockId, Generation, Geometry, RequestId, Start
from bifolio.replicas.block_stores import HostBlocks
from bifolio.replicas.host_share import HostShare
from bifolio.replicas.kv_cache import KvCache

RAW = "/bench.Raw/Send"
PIECE = 1 << 20  # of TCP and raw gRPC
STALLED = "stalled"  # how the ids of requests begin that get stuck after their first blocks
LOGITS = bytes(4 * 49152)
WAIT = 120.0  # seconds; nothing takes so long


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's blocks."""

    name: str
    geometry: Geometry

    @property
    def block_bytes(self) -> int:
        g = self.geometry
        return g.layers * 2 * g.kv_heads * g.block_size * g.head_dim * 2

    def blocks_of(self, size: int) -> int:
        """That take at least so many bytes."""
        return -(-size // self.block_bytes)


SMALL = Shape("SmolLM2-135M", Geometry("smollm2", 30, 3, 64, 16, "bfloat16"))
LARGE = Shape("an 8B Llama", Geometry("8b", 32, 8, 128, 16, "bfloat16"))


def noise(shape: Shape, blocks: int) -> np.ndarray:
    """[blocks, block_bytes]: what is sent, the same in every process."""
    return np.random.default_rng(shape.block_bytes).integers(256, size=(blocks, shape.block_bytes), dtype=np.uint8)


def cache_of(shape: Shape, blocks: int, memory: torch.Tensor | None = None) -> KvCache:
    g = shape.geometry
    return KvCache(blocks, g.layers, g.kv_heads, g.block_size, g.head_dim, torch.bfloat16, memory=memory)


def start_of(
    shape: Shape, name: str, generation: Generation, blocks: tuple[BlockId, ...], memory: bytes = b""
) -> Start:
    """Asks for blocks full of tokens."""
    tokens = (0,) * (len(blocks) * shape.geometry.block_size)
    return Start(RequestId(name), generation, blocks, tokens, shape.geometry, arrival=0.0, memory=memory)


class Job:
    def __init__(self, source: Source, start: Start) -> None:
        self._source = source
        self._tokens = len(start.tokens)
        self.stalls = start.request.startswith(STALLED)
        self.go_on = threading.Event()
        self._cancelled = False

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.left(self)

    def progress(self) -> Iterator[int | Prefilled]:
        if self.stalls:
            yield self._tokens // 2
            if not self.go_on.wait(WAIT):
                raise TimeoutError("nobody let the stalled prompt go on")
        if self._cancelled:
            raise Revoked("the prompt was given up")
        yield self._tokens
        yield Prefilled(LOGITS)

    def cancel(self) -> None:
        self._cancelled = True
        self.go_on.set()


class Source:
    """A `PrefillSource` of one cache."""

    def __init__(self, shape: Shape, store: HostBlocks) -> None:
        self.parts = whole(store, shape.geometry)
        self.geometry = shape.geometry
        self.meter = TrafficMeter()
        self.begun = 0
        self.jobs: set[Job] = set()  # that have not been left
        self._lock = threading.Lock()

    def begin(self, start: Start) -> Job:
        self.parts[0].store.own(start.blocks, start.generation)
        job = Job(self, start)
        with self._lock:
            self.begun += 1
            self.jobs.add(job)
        return job

    def left(self, job: Job) -> None:
        with self._lock:
            self.jobs.remove(job)


@dataclass(frozen=True, slots=True)
class Offer:
    """Where a sender's bytes are to be had."""

    tcp: int
    raw: int
    servers: tuple[str, ...]  # addresses, in the order of what was asked for
    memory: bytes  # a handle of the cache


@dataclass(frozen=True, slots=True)
class Serving:
    """How a PrefillServer is made."""

    window: int = 16
    max_frame: int = MAX_PAYLOAD
    streams: int = 4


class Sender:
    """Caches of some shapes, each with all the ways out of it."""

    def __init__(self, shapes: tuple[Shape, ...], blocks: tuple[int, ...], serving: tuple[Serving, ...]) -> None:
        self._sources: list[Source] = []
        self._servers: list[PrefillServer] = []
        self._offers = [self._offer(shape, count, serving) for shape, count in zip(shapes, blocks, strict=True)]

    def offers(self) -> list[Offer]:
        return self._offers

    def go_on(self) -> None:
        """What is stalled no longer is."""
        for source in self._sources:
            for job in list(source.jobs):
                job.go_on.set()

    def settled(self) -> tuple[int, int, int]:
        """How many jobs were begun; how many of them, and how many streams, are left when all has come to rest."""
        until = time.monotonic() + WAIT
        while any(server.active for server in self._servers) and time.monotonic() < until:
            time.sleep(0.005)
        jobs, streams = (len(source.jobs) for source in self._sources), (t.streams for t in self.traffic())
        return sum(source.begun for source in self._sources), sum(jobs), sum(streams)

    def traffic(self) -> list[Traffic]:
        return [source.meter.read() for source in self._sources]

    def _offer(self, shape: Shape, blocks: int, serving: tuple[Serving, ...]) -> Offer:
        share = HostShare(blocks + 1, shape.block_bytes)
        cache = cache_of(shape, blocks, torch.from_numpy(share.blocks))
        cache.bytes[1:] = torch.from_numpy(noise(shape, blocks))
        store = HostBlocks(cache, share)
        memory, source = store.export(), Source(shape, store)
        self._sources.append(source)
        content = cache.bytes[1:].view(-1).numpy().data.toreadonly()
        addresses = []
        for each in serving:
            server = PrefillServer(source, each.streams, each.window, max_frame=each.max_frame)
            self._servers.append(server)
            addresses.append(f"127.0.0.1:{server.start()}")
        return Offer(_serve_tcp(content), _serve_raw(content), tuple(addresses), memory)


def _serve_tcp(content: memoryview) -> int:
    """Sends all of it for each byte that comes. Its port."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1):
            for begin in range(0, len(content), PIECE):
                connection.sendall(content[begin : begin + PIECE])

    threading.Thread(target=serve, daemon=True).start()
    port: int = listening.getsockname()[1]
    return port


def _serve_raw(content: memoryview) -> int:
    """Sends all of it in messages of the size that is asked for, and nothing else. Its port."""

    def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        piece = int(next(requests))
        for begin in range(0, len(content), piece):
            yield bytes(content[begin : begin + piece])  # gRPC takes nothing else: a copy, as every sender has to make

    service, method = RAW[1:].split("/")
    handler = grpc.method_handlers_generic_handler(service, {method: grpc.stream_stream_rpc_method_handler(serve)})
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler], options=channel_options(5.0))
    port: int = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _alive.append(server)
    return port


_alive: list[grpc.Server] = []  # a server that nobody holds stops
