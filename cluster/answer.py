"""An answer as text: a query in, pieces of text out, the same for every door. Of several choices, whichever goes on.

Knows nothing about HTTP or gRPC. What the frontend yields in tokens becomes complete characters without any stop
string; the last piece of a choice says why it ends, the last of all what the answer cost.

Reading a query takes a while, in a thread. Chats have threads of their own: their template comes with the model, and
may be slow with all of them while everything else goes on.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from bifolio.protos import inference_pb2 as pb
from bifolio.protos.errors import Overloaded
from bifolio.protos.messages import FinishReason, Request, TokenLogprobs

from .account import Account
from .chat import Chat
from .choices import Choices
from .detokenizer import Detokenizer
from .frontend import Frontend
from .query import Query, Served, resolve

PATIENCE = 2.0  # seconds that a chat waits for a thread
CHAT_THREADS = 4  # few: a template at work shares Python's lock with everything else
_chat_threads = ThreadPoolExecutor(CHAT_THREADS, "chat")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """Text and tokens of a choice since its last piece; `finish` only in the last one of it, `usage` of the answer.

    `logprobs` are those of just these tokens, whatever of their text is held back or cut off.
    """

    text: str
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    usage: pb.Usage | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # in the first one
    choice: int = 0


async def answer(query: Query, served: Served, frontend: Frontend) -> AsyncGenerator[Piece, None]:
    """The pieces of one answer. Closing the generator is the cancel. Raises what `resolve` and the frontend raise."""
    account = Account()
    chat = isinstance(query.prompt, Chat)
    resolved = await in_thread(chat, lambda: resolve(query, served, lambda: secrets.randbits(63)))
    request = Request(
        query.id,
        resolved.prompt,
        resolved.sampling,
        arrival=time.time(),
        prompt_logprobs=resolved.prompt_logprobs,
        n=resolved.n,
        salt=resolved.salt,
        tenant=resolved.tenant,
        priority=resolved.priority,
    )
    choices = Choices(request)
    least = resolved.sampling.min_tokens
    texts = [Detokenizer(served.tokenizer, resolved.stops, least) for _ in range(resolved.n)]
    count = 0
    async with aclosing(frontend.generate(choices, account)) as stream:
        async for delta in stream:
            assert delta.choice is not None
            tokens, finish, text_of = delta.tokens, delta.finish, texts[delta.choice]
            taken = text_of.tokens
            # The token that ends the answer is counted, but is no part of its text
            text = text_of.push(tokens[:-1] if finish == "stop" else tokens)
            if text_of.stopped:
                tokens, finish = tokens[: text_of.tokens - taken], "stop"
                choices.give_up(delta.choice)
            count += len(tokens)
            if finish is not None:
                text += text_of.finish()
            usage = None if choices.open else account.usage(request, count)
            logprobs = delta.logprobs[: len(tokens)]
            yield Piece(text, tokens, finish, usage, logprobs, delta.prompt_logprobs, delta.choice)
            if usage is not None:
                return


async def in_thread(chat: bool, work: Callable[[], T]) -> T:
    """What `work` returns or raises; Overloaded if chats before this one keep all their threads."""
    if not chat:
        return await asyncio.to_thread(work)
    job = _chat_threads.submit(work)
    result = asyncio.wrap_future(job)
    try:
        await asyncio.wait({result}, timeout=PATIENCE)
        if job.cancel():  # it has not begun
            raise Overloaded(
                "too many chats are being read, and the model's chat template is slow with them; try again later",
                retry_after=PATIENCE,
            )
        return await result
    finally:
        result.cancel()
