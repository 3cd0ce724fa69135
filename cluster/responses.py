"""HTTP bodies: requests of bounded size, and responses that end when the client leaves.

Knows nothing about models. Starlette's own streaming response does not listen for a disconnect while the body is
silent, and leaves the body suspended when a cancel lands in `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from bifolio.protos.errors import InvalidRequest

from .json_body import BODY
from .openai import error_response


async def body_of(request: Request, most: int) -> bytes:
    """A request's body. Raises InvalidRequest as soon as it has more than `most` bytes, or if it is encoded."""
    if (encoding := request.headers.get("content-encoding", "identity")).lower() != "identity":
        raise InvalidRequest(f"the body's Content-Encoding is {encoding[:80]!r}; allowed: none, plain JSON", BODY)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise InvalidRequest(f"the body has more than {most} bytes; allowed: at most {most}", BODY)
    return bytes(body)


def refusal(error: BaseException) -> JSONResponse:
    """The response to a request that ends with an error before its answer has begun."""
    status, headers, content = error_response(error)
    return JSONResponse(content, status, headers)


class StreamedResponse(Response):
    """Sends `body` as it comes. An error before its first bytes becomes an error response with its own status."""

    def __init__(self, body: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]  # of the empty body it was made with
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._body):
            sending = asyncio.create_task(self._send(scope, receive, send))
            leaving = asyncio.create_task(_disconnected(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                done = sending.done()
                sending.cancel()
                leaving.cancel()
                await asyncio.gather(sending, leaving, return_exceptions=True)
            if done:
                sending.result()  # raises what went wrong

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            part = await anext(self._body)
        except Exception as error:
            response = refusal(error)
            await response(scope, receive, send)
            if response.status_code >= 500:
                raise  # the log shall have it
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": part, "more_body": True})
        async for part in self._body:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
