"""One answer as text: a query in, pieces of text out, the same for every door.

Knows nothing about HTTP or gRPC. What the frontend yields in tokens becomes complete characters without any stop
string; the last piece says why the answer ends and what it cost.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from bifolio.protos import inference_pb2 as pb
from bifolio.protos.messages import FinishReason, Request, TokenLogprobs

from .detokenizer import Detokenizer
from .frontend import Account, Frontend
from .query import Query, Served, resolve


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
    resolved = await asyncio.to_thread(  # a long text takes a while, and other answers go on meanwhile
        resolve, query, served, lambda: secrets.randbits(63)
    )
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
