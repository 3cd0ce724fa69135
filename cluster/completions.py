"""The bodies of /v1/completions: pieces of an answer in, bytes out. Knows nothing about where pieces come from."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import JSONResponse

from bifolio.protos.errors import BifolioError

from .answer import Piece
from .openai import DONE, CompletionFormat, error_response, event

logger = logging.getLogger(__name__)


async def events(pieces: AsyncGenerator[Piece, None], words: CompletionFormat) -> AsyncGenerator[bytes, None]:
    """Server-sent events. An error before the first one is the caller's; later ones are an event of their own."""
    begun = False
    async with aclosing(pieces):
        try:
            async for piece in pieces:
                if piece.text or piece.finish:
                    yield event(words.chunk(piece.text, piece.finish))
                    begun = True
                if piece.usage is not None and words.include_usage:
                    yield event(words.usage_chunk(piece.usage))
        except BifolioError as error:
            if not begun:
                raise
            logger.warning("request %s failed while it was streamed: %s", words.id, error.message)
            yield event(error_response(error)[2])
            return
        yield DONE


async def whole(pieces: AsyncGenerator[Piece, None], words: CompletionFormat) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        taken = [piece async for piece in pieces]
    last = taken[-1]
    assert last.finish is not None
    assert last.usage is not None
    body = words.whole("".join(piece.text for piece in taken), last.finish, last.usage)
    yield bytes(JSONResponse(body).body)
