"""The bodies of answers: pieces in, bytes out, streamed or whole. Knows nothing about where pieces come from, or of how
an endpoint words them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from starlette.responses import JSONResponse

from bifolio.protos.errors import BifolioError

from .answer import Piece
from .openai import DONE, error_response, event
from .words import Words

logger = logging.getLogger(__name__)

Worded = TypeVar("Worded")


async def events(pieces: AsyncGenerator[Piece, None], words: Words) -> AsyncGenerator[bytes, None]:
    """Server-sent events. An error before the first one is the caller's; later ones are an event of their own."""
    begun = False
    async with aclosing(pieces):
        try:
            async for piece in pieces:
                for part in await _off_the_loop_if_long(piece, partial(_events_of, piece, words)):
                    yield part
                    begun = True
        except BifolioError as error:
            if not begun:
                raise
            logger.warning("request %s failed while it was streamed: %s", words.id, error.message)
            yield event(error_response(error)[2])
            return
        yield DONE


def _events_of(piece: Piece, words: Words) -> list[bytes]:
    return [event(chunk) for chunk in words.chunks(piece)]


async def whole(pieces: AsyncGenerator[Piece, None], words: Words) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        taken = [piece async for piece in pieces]
    yield await _off_the_loop_if_long(taken[0], lambda: bytes(JSONResponse(words.whole(taken)).body))


async def _off_the_loop_if_long(piece: Piece, word: Callable[[], Worded]) -> Worded:
    """The logprobs of a prompt take a moment to word, in which other streams go on."""
    return await asyncio.to_thread(word) if piece.prompt_logprobs else word()
