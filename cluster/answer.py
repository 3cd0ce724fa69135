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
from bifolio.protos.messages import FinishReason, Request

from .detokenizer import Detokenizer
from .frontend import Account, Frontend
from .query import Query, check_model, resolve
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind the ingress."""

    name: str
    tokenizer: Tokenizer
    context_length: int
    vocab_size: int
    created: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text and tokens since the last piece; `finish` and `usage` only in the last one."""

    text: str
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    usage: pb.Usage | None = None


async def answer(query: Query, served: Served, frontend: Frontend) -> AsyncGenerator[Piece, None]:
    """The pieces of one answer. Closing the generator is the cancel. Raises what `resolve` and the frontend raise."""
    account = Account()
    check_model(query.model, served.name)
    prompt, sampling, stops = await asyncio.to_thread(  # a long text takes a while, and other answers go on meanwhile
        resolve, query, served.tokenizer, served.context_length, served.vocab_size, lambda: secrets.randbits(63)
    )
    request = Request(query.id, prompt, sampling, arrival=time.time())
    detokenizer = Detokenizer(served.tokenizer, stops)
    count = 0
    async with aclosing(frontend.generate(request, account)) as stream:
        async for tokens, finish in stream:
            taken = detokenizer.tokens
            # The token that ends the answer is counted, but is no part of its text
            text = detokenizer.push(tokens[:-1] if finish == "stop" else tokens)
            if detokenizer.stopped:
                tokens, finish = tokens[: detokenizer.tokens - taken], "stop"
            count += len(tokens)
            if finish is None:
                yield Piece(text, tokens)
            else:
                text += detokenizer.finish()
                yield Piece(text, tokens, finish, _usage(request, count, account))
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
