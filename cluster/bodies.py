"""The bodies of answers: pieces in, bytes out, streamed or whole. Knows nothing about where pieces come from, or of how
an endpoint words them.

The logprobs of a prompt take a moment to word, in which other streams go on: they are worded in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import JSONResponse

from bifolio.protos.errors import BifolioError

from .answer import Piece
from .openai import DONE, error_response, event
from .words import Words

logger = logging.getLogger(__name__)


async def events(pieces: AsyncGenerator[Piece, None], words: Words) -> AsyncGenerator[bytes, None]:
    """Server-sent events. An error before the first one is the caller's; later ones are an event of their own."""
    begun = False
    async with aclosing(pieces):
        try:
            async for piece in pieces:
                if piece.prompt_logprobs:
                    parts = await asyncio.to_thread(words.events, piece)
                else:
                    parts = words.events(piece)
                for part in parts:
                    yield part
                    begun = True
        except BifolioError as error:
            if not begun:
                raise
            logger.warning("request %s failed while it was streamed: %s", words.id, error.message)
            yield event(error_response(error)[2])
            return
        yield DONE


async def whole(pieces: AsyncGenerator[Piece, None], words: Words) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        taken = [piece async for piece in pieces]
    yield await asyncio.to_thread(_whole, taken, words) if taken[0].prompt_logprobs else _whole(taken, words)


def _whole(pieces: list[Piece], words: Words) -> bytes:
    return bytes(JSONResponse(words.whole(pieces)).body)
