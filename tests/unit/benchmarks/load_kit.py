"""What the load driver's tests share: a server that answers as it is told, a small tokenizer, and prose."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from load_text import Book
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = (
    "a and bright carries citizen crown, daughter departs. forgets from golden hides horses, in king letter; lord me "
)
WORDS += (
    "morning my never night, no of old ring said servant silent sleeps sword that the thee to torches wanted weeps!"
)
PROSE = " ".join(random.Random(0).choices(WORDS.split(), k=5000))


def tokenizer() -> Any:
    """Byte-level BPE that has read the prose."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [PROSE], trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def exact_book() -> Book:
    return Book(PROSE, tokenizer())


def event(text: str | None = None, *, finish: str | None = None, usage: dict[str, Any] | None = None) -> bytes:
    """A completion's chunk."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
COUNTED = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
WHOLE = (event("a"), event("b"), event("c", finish="length"), event(usage=COUNTED), DONE)


@dataclass
class Reply:
    pieces: Sequence[bytes] = WHOLE  # of the body, each written for itself
    status: int = 200
    kind: str = "text/event-stream"
    then: str = "end"  # or "hang", or "drop" the connection in the middle


@dataclass
class Server:
    """Answers the requests in their order with the replies; the last one again and again."""

    replies: list[Reply]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    connections: int = 0
    url: str = ""

    async def __aenter__(self) -> Server:
        self.asked = asyncio.Condition()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        self._tasks: set[asyncio.Task[None]] = set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def wait_for(self, requests: int) -> None:
        async with self.asked:
            await self.asked.wait_for(lambda: len(self.bodies) >= requests)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if head.startswith("GET /v1/models"):
                    content = b'{"data": [{"id": "the-model"}]}'
                    kind = b"application/json"
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: 31\r\n\r\n" % kind + content)
                    continue
                length = next(
                    int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line
                )
                body = json.loads(await reader.readexactly(length))
                reply = self.replies[min(len(self.bodies), len(self.replies) - 1)]
                async with self.asked:
                    self.bodies.append(body)
                    self.headers.append(head)
                    self.asked.notify_all()
                if not await self._reply(writer, reply):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()

    async def _reply(self, writer: asyncio.StreamWriter, reply: Reply) -> bool:
        """Whether the connection can be used again."""
        head = f"HTTP/1.1 {reply.status} Said\r\nContent-Type: {reply.kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        for piece in reply.pieces:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0)
        if reply.then == "hang":
            await asyncio.Event().wait()
        if reply.then == "end":
            writer.write(b"0\r\n\r\n")
        return reply.then == "end"
