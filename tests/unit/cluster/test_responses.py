"""Streamed responses at the ASGI level: what is sent, and what becomes of the body when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request

from bifolio.cluster.responses import StreamedResponse, body_of
from bifolio.protos.errors import InvalidRequest


class Client:
    """Receives what is sent; leaves when told to."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self.got = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.got.set()

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)


async def respond(body: AsyncGenerator[bytes, None], client: Client) -> None:
    await StreamedResponse(body, "text/event-stream")({"type": "http"}, client.receive, client.send)


def test_parts_are_sent_as_they_come():
    async def run() -> None:
        async def body() -> AsyncGenerator[bytes, None]:
            yield b"a"
            assert client.body == b"a"
            yield b"b"

        client = Client()
        await respond(body(), client)
        assert client.sent[0]["status"] == 200
        assert client.body == b"ab"
        assert client.sent[-1]["more_body"] is False

    asyncio.run(run())


def test_an_error_before_the_first_part_has_its_own_status():
    async def run() -> None:
        async def body() -> AsyncGenerator[bytes, None]:
            raise InvalidRequest("max_tokens is 0; allowed: 1 to 128", "max_tokens")
            yield b""

        client = Client()
        await respond(body(), client)
        assert client.sent[0]["status"] == 400
        assert json.loads(client.body)["error"]["param"] == "max_tokens"

    asyncio.run(run())


def test_a_body_is_refused_as_soon_as_it_is_too_long():
    async def run() -> None:
        async def receive() -> dict[str, Any]:
            received.append(1)
            return {"type": "http.request", "body": b"x" * 10, "more_body": len(received) < 100}

        received: list[int] = []
        with pytest.raises(InvalidRequest, match="more than 25 bytes"):
            await body_of(Request({"type": "http", "headers": []}, receive), 25)
        assert len(received) == 3
        received.clear()
        assert len(await body_of(Request({"type": "http", "headers": []}, receive), 1000)) == 1000

    asyncio.run(run())


def test_an_encoded_body_is_refused_unread():
    async def run() -> None:
        request = Request({"type": "http", "headers": [(b"content-encoding", b"gzip")]}, receive=None)
        with pytest.raises(InvalidRequest, match="Content-Encoding is 'gzip'") as caught:
            await body_of(request, 1000)
        assert caught.value.field == "body"

    asyncio.run(run())


@pytest.mark.parametrize("parts", [0, 1])
def test_when_the_client_leaves_the_body_is_closed_at_once(parts):
    async def run() -> None:
        closed = asyncio.Event()

        async def body() -> AsyncGenerator[bytes, None]:
            try:
                for _ in range(parts):
                    yield b"a"
                await asyncio.Event().wait()  # computing, for ever
            finally:
                closed.set()

        client = Client()
        response = asyncio.create_task(respond(body(), client))
        if parts:
            await client.got.wait()
        await asyncio.sleep(0)
        client.left.set()
        await response
        assert closed.is_set()

    asyncio.run(run())


def test_when_the_server_cancels_the_response_the_body_is_closed():
    async def run() -> None:
        closed = asyncio.Event()

        async def body() -> AsyncGenerator[bytes, None]:
            try:
                yield b"a"
                await asyncio.Event().wait()
            finally:
                closed.set()

        client = Client()
        response = asyncio.create_task(respond(body(), client))
        await client.got.wait()
        response.cancel()
        with pytest.raises(asyncio.CancelledError):
            await response
        assert closed.is_set()

    asyncio.run(run())
