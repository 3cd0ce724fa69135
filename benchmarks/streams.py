"""What the benchmarks of recovery share: answers that stream over both doors with the time of each piece, and clients
that leave in every way there is.

An answer is read in the event loop, whatever else happens there: nothing that blocks may be done in it. Knows nothing
of what is measured.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import random
import socket
import struct
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import grpc
from load_client import Events

from bifolio.cluster.convert import usage_to_json
from bifolio.cluster.spawn import SpawnedCluster
from bifolio.protos import inference_pb2 as pb
from bifolio.protos.inference_pb2_grpc import InferenceStub

Door = Literal["http", "grpc"]
Way = Literal["HTTP, FIN", "HTTP, RST", "gRPC cancel", "Cancel(id)"]
WAYS: dict[Way, Door] = {"HTTP, FIN": "http", "HTTP, RST": "http", "gRPC cancel": "grpc", "Cancel(id)": "grpc"}

METADATA = (("application", "bifolio"),)
PLAIN_IDS = 1000  # from 4 on, ids below are plain tokens of every model that is served here
PATIENCE_S = 90.0


def fresh() -> str:
    """A name, or a cache salt, that nobody had before."""
    return uuid.uuid4().hex


def prompt(tokens: int, seed: object = 0) -> tuple[int, ...]:
    noise = random.Random(f"{tokens} {seed}")
    return tuple(noise.randrange(4, PLAIN_IDS) for _ in range(tokens))


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None  # None is greedy
    salt: str = ""
    counted: bool = False  # over HTTP too it is told how many tokens a piece has
    id: str = field(default_factory=fresh)

    def again(self) -> Ask:
        """The same, by another name."""
        return replace(self, id=fresh())

    def body(self) -> bytes:
        content: dict[str, Any] = {"prompt": self.prompt, "max_tokens": self.max_tokens, "ignore_eos": True}
        content |= {"temperature": 0.0} if self.seed is None else {"temperature": 0.9, "seed": self.seed}
        content |= {"cache_salt": self.salt} if self.salt else {}
        content |= {"logprobs": 0} if self.counted else {}
        return json.dumps(content | {"stream": True, "stream_options": {"include_usage": True}}).encode()

    def message(self) -> pb.GenerateRequest:
        sampling = pb.Sampling(max_tokens=self.max_tokens, ignore_eos=True, temperature=0.0)
        if self.seed is not None:
            sampling = pb.Sampling(max_tokens=self.max_tokens, ignore_eos=True, temperature=0.9, seed=self.seed)
        ids = pb.TokenIds(ids=self.prompt)
        return pb.GenerateRequest(
            token_ids=ids, sampling=sampling, request_id=self.id, cache_salt=self.salt if self.salt else None
        )


class StreamEnded(RuntimeError):
    """Before it had what was waited for."""


class Chunk(NamedTuple):
    at: float  # by time.perf_counter
    tokens: int  # over HTTP an event counts as one, though it may bring several, unless they are `counted`


class Stream(abc.ABC):
    """One answer, read by a task. What goes wrong becomes its `error`."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.sent = time.perf_counter()
        self.chunks: list[Chunk] = []
        self.text, self.ids = "", list[int]()  # ids over gRPC alone
        self.finish = ""
        self.usage: dict[str, Any] = {}
        self.error = ""
        self._more = asyncio.Event()
        self.task = asyncio.create_task(self._kept())

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def ended(self) -> bool:
        return self.task.done()

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.chunks[0].at - self.sent

    @property
    def route(self) -> dict[str, Any]:
        return dict(self.usage["route"])

    async def until(self, tokens: int) -> None:
        """Until it has so many. Raises StreamEnded if it ends before."""
        while self.tokens < tokens:
            if self.ended:
                raise StreamEnded(f"a stream ended after {self.tokens} tokens: {self.error or self.finish}")
            self._more.clear()
            await asyncio.wait_for(self._more.wait(), PATIENCE_S)

    async def whole(self) -> Stream:
        await asyncio.wait_for(asyncio.shield(self.task), 10 * PATIENCE_S)
        return self

    def checked(self) -> Stream:
        """Raises RuntimeError if it broke."""
        if self.error:
            raise RuntimeError(f"a stream broke after {self.tokens} tokens: {self.error}")
        return self

    @abc.abstractmethod
    def leave(self, *, reset: bool = False) -> None:
        """As a client does that wants no more."""

    @abc.abstractmethod
    async def _read(self) -> None:
        """Takes all that comes, until it ends."""

    async def _kept(self) -> None:
        try:
            await self._read()
            self.error = self.error or ("" if self.finish else "it ended without a finish reason")
        except asyncio.CancelledError:
            self.error = "left"
        except grpc.aio.AioRpcError as error:
            self.error = f"{error.code().name}: {error.details()}"
        except (OSError, EOFError, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._more.set()

    def _take(self, tokens: int, text: str, finish: str) -> None:
        if tokens:
            self.chunks.append(Chunk(time.perf_counter(), tokens))
        self.text += text
        self.finish = finish or self.finish
        self._more.set()


class HttpStream(Stream):
    def __init__(self, ask: Ask, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None
        super().__init__(ask)

    def leave(self, *, reset: bool = False) -> None:
        if self._writer is not None:
            connection = self._writer.get_extra_info("socket")
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                with contextlib.suppress(OSError):  # it has ended
                    connection.shutdown(socket.SHUT_RDWR)
            self._writer.transport.abort()
        self.task.cancel()

    async def _read(self) -> None:
        reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        try:
            body = self.ask.body()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: {self.ask.id}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            self._writer.write(head.encode() + body)
            status = (await reader.readuntil(b"\r\n")).split()[1]
            headers = (await reader.readuntil(b"\r\n\r\n")).lower()
            if status != b"200":
                self.error = f"HTTP {status.decode()}: {(await reader.read(1000)).decode(errors='replace')}"
                return
            if b"transfer-encoding: chunked" not in headers:
                raise ValueError(f"no chunks: {headers!r}")
            await self._read_events(reader)
        finally:
            self._writer.transport.abort()

    async def _read_events(self, reader: asyncio.StreamReader) -> None:
        events = Events()
        while size := int(await reader.readuntil(b"\r\n"), 16):
            for data in events.feed((await reader.readexactly(size + 2))[:-2]):
                if data == b"[DONE]":
                    return
                content = json.loads(data)
                if content.get("error"):
                    raise ValueError(str(content["error"]))
                self.usage = content.get("usage") or self.usage
                for choice in content["choices"]:
                    tokens = len((choice["logprobs"] or {"tokens": ()})["tokens"]) if self.ask.counted else 1
                    self._take(tokens, choice["text"], choice["finish_reason"] or "")
        self.error = "the stream ended without [DONE]"


class GrpcStream(Stream):
    def __init__(self, ask: Ask, address: str) -> None:
        # A connection of its own, as clients have: a proxy bounds the streams of one
        options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
        self._channel = grpc.aio.insecure_channel(address, options=options)
        generate: Any = InferenceStub(self._channel).Generate  # type: ignore[no-untyped-call]
        self._call = generate(ask.message(), metadata=METADATA)
        super().__init__(ask)

    def leave(self, *, reset: bool = False) -> None:
        self._call.cancel()

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self.ids += message.token_ids
                if message.HasField("usage"):
                    self.usage = usage_to_json(message.usage)
                self._take(len(message.token_ids), message.text, message.finish_reason)
        finally:
            await self._channel.close()


class Doors:
    """Where a cluster is asked. Leaving the context leaves all streams."""

    def __init__(self, cluster: SpawnedCluster) -> None:
        self.cluster = cluster
        self._streams: list[Stream] = []

    async def __aenter__(self) -> Doors:
        options = (("grpc.enable_http_proxy", 0),)
        self._channel = grpc.aio.insecure_channel(self.cluster.grpc_address, options=options)
        self._cancel: Any = InferenceStub(self._channel).Cancel  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(self, *_: object) -> None:
        await leave_all(self._streams)
        await self._channel.close()

    def ask(self, door: Door, ask: Ask) -> Stream:
        self._streams = [stream for stream in self._streams if not stream.ended]
        port = self.cluster.http_port
        stream = HttpStream(ask, port) if door == "http" else GrpcStream(ask, self.cluster.grpc_address)
        self._streams.append(stream)
        return stream

    async def cancel(self, way: Way, stream: Stream) -> float:
        """When it was cancelled."""
        now = time.perf_counter()
        if way == "Cancel(id)":
            await self._cancel(pb.CancelRequest(request_id=stream.ask.id), metadata=METADATA)
        else:
            stream.leave(reset=way == "HTTP, RST")
        return now


async def leave_all(streams: Sequence[Stream]) -> None:
    open_ones = [stream for stream in streams if not stream.ended]
    for stream in open_ones:
        stream.leave()
    await asyncio.gather(*(stream.task for stream in open_ones), return_exceptions=True)


def pauses(stream: Stream, since: float, until: float) -> list[float]:
    """Seconds between its pieces, of those pauses that lie in this time, at least in part."""
    return [b.at - a.at for a, b in pairwise(stream.chunks) if b.at >= since and a.at <= until]


def wrong(stream: Stream, undisturbed: Stream) -> str:
    """What is not as it was when nothing happened; empty if nothing is."""
    if stream.error:
        return f"broken: {stream.error}"
    if stream.text != undisturbed.text or (stream.ids and undisturbed.ids and stream.ids != undisturbed.ids):
        return f"another answer than before: {stream.text[:60]!r}, not {undisturbed.text[:60]!r}"
    return ""
