"""One answer as text: a query in, pieces of text out, the same for every door.

Knows nothing about HTTP or gRPC. What the frontend yields in tokens becomes complete characters without any stop
string; the last piece says why the answer ends and what it cost.

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

from .chat import Chat
from .detokenizer import Detokenizer
from .frontend import Account, Frontend
from .query import Query, Served, resolve

PATIENCE = 2.0  # seconds that a chat waits for a thread
CHAT_THREADS = 4  # few: a template at work shares Python's lock with everything else
_chat_threads = ThreadPoolExecutor(CHAT_THREADS, "chat")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """Text and tokens since the last piece; `finish` and `usage` only in the last one.

    `logprobs` are those of just these tokens, whatever of their text is held back or cut off.
    """

    text: str
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    usage: pb.Usage | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # in the first one


async def answer(query: Query, served: Served, frontend: Frontend) -> AsyncGenerator[Piece, None]:
    """The pieces of one answer. Closing the generator is the cancel. Raises what `resolve` and the frontend raise."""
    account = Account()
    chat = isinstance(query.prompt, Chat)
    resolved = await in_thread(chat, lambda: resolve(query, served, lambda: secrets.randbits(63)))
    sampling = resolved.sampling
    request = Request(
        query.id, resolved.prompt, sampling, arrival=time.time(), prompt_logprobs=resolved.prompt_logprobs
    )
    detokenizer = Detokenizer(served.tokenizer, resolved.stops, sampling.min_tokens)
    count = 0
    async with aclosing(frontend.generate(request, account)) as stream:
        async for delta in stream:
            tokens, finish = delta.tokens, delta.finish
            taken = detokenizer.tokens
            # The token that ends the answer is counted, but is no part of its text
            text = detokenizer.push(tokens[:-1] if finish == "stop" else tokens)
            if detokenizer.stopped:
                tokens, finish = tokens[: detokenizer.tokens - taken], "stop"
            count += len(tokens)
            usage = None
            if finish is not None:
                text += detokenizer.finish()
                usage = _usage(request, count, account)
            yield Piece(text, tokens, finish, usage, delta.logprobs[: len(tokens)], delta.prompt_logprobs)
            if finish is not None:
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


def _usage(request: Request, completion_tokens: int, account: Account) -> pb.Usage:
    parts, placement = account.timings, account.placement
    assert placement is not None
    return pb.Usage(
        prompt_tokens=len(request.prompt),
        completion_tokens=completion_tokens,
        seed=request.sampling.seed,
        timings=pb.Timings(
            ttft=account.ttft,
            queue=account.waited + parts.queue,
            prefill=parts.prefill,
            transfer=parts.transfer,
            first_decode=parts.first_decode,
            # Durations, each of one clock: what the ingress waited for the first token, less what decode spent on it
            overhead=account.ttft - account.waited - parts.elapsed,
            total=account.elapsed(),
        ),
        route=pb.Route(
            prefill_replica=placement.prefill.replica if placement.prefill else "",
            decode_replica=placement.decode.replica,
            blocks=account.moved.blocks,
            bytes=account.moved.bytes,
            resumes=account.resumes,
        ),
    )
