"""The answers of one request, its choices, while they are made: what each has so far, and their streams as one.

All choices begin in one decode stream. One that ends early there goes on as a request of its own, in a stream of its
own; whoever reads the answer sees no difference. Knows nothing about placements or text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable
from dataclasses import replace

from bifolio.protos.messages import Delta, Request, choice_id


class Choices:
    """Of a request as it came, without tokens."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.open = set(range(request.n))  # they go on, and somebody reads them
        self._tokens: dict[int, list[int]] = {choice: [] for choice in self.open}
        self._prompt_logprobs = request.prompt_logprobs  # until somebody has them, or is asked for them

    def take(self, delta: Delta) -> None:
        """What a choice brings; its end, if it says so."""
        assert delta.choice in self.open
        self._tokens[delta.choice].extend(delta.tokens)
        if delta.finish is not None:
            self.open.discard(delta.choice)

    def give_up(self, choice: int) -> None:
        """Its reader wants no more of it."""
        self.open.discard(choice)

    def alone(self, choice: int) -> Request:
        """A choice, with the tokens it has, as a request of its own. What is told of the prompt has been told with the
        first token of all."""
        request = self.request
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return replace(
            request,
            id=choice_id(request.id, choice),
            n=1,
            sampling=replace(request.sampling, choice=choice),
            generated=tuple(self._tokens[choice]),
            prompt_logprobs=None if any(self._tokens.values()) else prompt_logprobs,
        )


class Merged:
    """Streams of deltas as one: whichever has a delta next. More may be added on the way, each under a name."""

    def __init__(self, name: Hashable, stream: AsyncGenerator[Delta, None]) -> None:
        self._streams = {name: stream}
        self._waiting: dict[asyncio.Future[Delta], Hashable] = {}  # for the next of each, while there are several

    def __aiter__(self) -> Merged:
        return self

    def add(self, name: Hashable, stream: AsyncGenerator[Delta, None]) -> None:
        assert name not in self._streams
        self._streams[name] = stream

    async def __anext__(self) -> Delta:
        while self._streams:
            if len(self._streams) == 1 and not self._waiting:  # the usual case: no task for each delta
                ((name, stream),) = self._streams.items()
                try:
                    return await anext(stream)
                except StopAsyncIteration:
                    del self._streams[name]
                    continue
            for name in self._streams.keys() - self._waiting.values():
                self._waiting[asyncio.ensure_future(anext(self._streams[name]))] = name
            done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            first = done.pop()
            name = self._waiting.pop(first)
            try:
                return first.result()
            except StopAsyncIteration:
                del self._streams[name]
        raise StopAsyncIteration

    async def close(self, name: Hashable) -> None:
        """Ends a stream, if there is one of this name. All that waits for it meanwhile ends with it."""
        stream = self._streams.pop(name, None)
        for waiting in [w for w, of in self._waiting.items() if of == name]:
            del self._waiting[waiting]
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        if stream is not None:
            await stream.aclose()

    async def aclose(self) -> None:
        for name in list(self._streams):
            await self.close(name)
