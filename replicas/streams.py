"""Requests on a decode replica: from a placement to tokens.

Opens the one Prefill stream of a request, copies the KV blocks into this replica's cache, samples from the first token
on, and goes on with continuous batching. Token ids only. Whatever ends an attempt early ends it as *resumable*.

    generate() ──▶ open lease ──▶ pull (a thread) ──▶ engine (its thread) ──▶ deltas
         └── finally: cancel the pull, abort the sequence; when both are gone, close the lease

Knows nothing about Ray or text; lives on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from bifolio.kv_manager.pull import PrefillClient, Pull
from bifolio.protos.errors import BifolioError, Resumable, Revoked
from bifolio.protos.messages import (
    Commit,
    Delta,
    Generation,
    Moved,
    Placement,
    Request,
    Start,
    Timings,
)

from .core import Core
from .endings import blamed, cause, resumable
from .sequence import Abort, Add, Closed, Event, Sampled

FLUSH_S = 0.02  # later tokens leave at most this often per stream; the first leaves at once


@dataclass(slots=True, eq=False)
class Stream:
    """One attempt at a request on this replica."""

    placement: Placement
    began: float = field(default_factory=time.monotonic)
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    in_engine: bool = False
    pull: Pull | None = None
    pulled: asyncio.Future[Commit] | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the engine has let go

    @property
    def generation(self) -> Generation:
        return self.placement.decode.generation


class Streams:
    """The attempts under way. `close` returns a lease; `stepped` is called on the event loop when blocks were used or
    came back."""

    def __init__(
        self, core: Core, max_sequences: int, close: Callable[[Generation], None], stepped: Callable[[], None]
    ) -> None:
        self._core = core
        self._close_lease = close
        self._stepped = stepped
        self._loop = asyncio.get_running_loop()
        self._streams: dict[Generation, Stream] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(max_sequences + 2, thread_name_prefix="pull")
        self._client = PrefillClient(core.store)

    async def stop(self) -> None:
        """After the last `generate`: returns when every lease is closed."""
        await asyncio.gather(*self._retiring, return_exceptions=True)
        self._client.close()
        self._threads.shutdown(wait=False)

    def deliver(self, events: list[Event]) -> None:
        """Where the engine's events go; called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._take, events)

    def revoke(self, generation: Generation) -> None:
        """End an attempt whose lease the KV manager takes back."""
        if stream := self._streams.get(generation):
            if stream.pull is not None:
                stream.pull.cancel()
            self._core.submit(Abort(generation))

    async def generate(self, placement: Placement, request: Request) -> AsyncGenerator[Delta, None]:
        """Tokens of a request from where its history ends. Closing the iterator is the cancel.

        Never raises for what another placement can mend: the last delta then names the cause in `resumable`.
        """
        stream = Stream(placement)
        try:
            self._core.tags.open(placement.decode)
        except Resumable as error:
            yield resumable(error)
            return
        self._streams[stream.generation] = stream
        try:
            commit = await self._prefill(stream, request)
            committed = time.monotonic()
            first = True
            async for sampled in self._decode(stream):
                delta = _delta(sampled)
                if first:
                    delta = replace(
                        delta,
                        timings=self._timings(stream, sampled[0], commit, committed),
                        moved=_moved(commit),
                        prompt_logprobs=commit.prompt_logprobs if commit else sampled[0].prompt_logprobs,
                    )
                    first, commit = False, None  # a commit may be large, and the answer long
                yield delta
        except Resumable as error:
            yield resumable(error)
        except Revoked as error:
            yield resumable(Resumable(error.message))
        finally:
            self._retire(stream)

    async def _prefill(self, stream: Stream, request: Request) -> Commit | None:
        """Have the prompt's K and V in our blocks and the sequence in the engine. None: the engine prefills it."""
        commit = None
        # they left with the first token: an attempt that goes on from there does not send them again
        prompt_logprobs = None if request.generated else request.prompt_logprobs
        if (source := stream.placement.prefill) is not None:
            stream.pull = self._client.pull(
                stream.placement.prefill_address,
                Start(
                    request.id,
                    source.generation,
                    source.blocks,
                    request.history,
                    self._core.geometry,
                    request.arrival,
                    prompt_logprobs=prompt_logprobs,
                    memory=stream.placement.prefill_memory,
                ),
            )
            stream.pulled = asyncio.get_running_loop().run_in_executor(
                self._threads, stream.pull.run, stream.placement.decode.blocks
            )
            try:
                commit = await asyncio.shield(stream.pulled)
            except BifolioError as error:
                raise blamed(error, source.replica) from error
            stream.pulled = None  # it has ended, and would keep the commit as long as the answer lasts
        stream.in_engine = True
        self._core.submit(
            Add(
                stream.generation,
                request.history,
                stream.placement.decode.blocks,
                request.arrival,
                len(request.prompt),
                request.sampling,
                commit.logits if commit else None,
                None if commit else prompt_logprobs,
            )
        )
        return commit

    async def _decode(self, stream: Stream) -> AsyncGenerator[list[Sampled], None]:
        """What was sampled since the last time, until the sequence finishes; raises Resumable if it ends early."""
        finished = False
        due = 0.0
        while not finished:
            events = [await stream.events.get()]
            await asyncio.sleep(due - time.monotonic())
            while not stream.events.empty():
                events.append(stream.events.get_nowait())
            due = time.monotonic() + FLUSH_S
            sampled = [e for e in events if isinstance(e, Sampled)]
            if sampled:
                yield sampled
                finished = sampled[-1].finish is not None
            if not finished:
                for event in events:
                    if isinstance(event, Closed):
                        raise cause(event, self._core.replica)

    def _timings(self, stream: Stream, first: Sampled, commit: Commit | None, committed: float) -> Timings:
        now = time.monotonic()
        elapsed = now - stream.began
        if commit is None or stream.pull is None:
            queue, prefill, transfer = first.queue_seconds, first.prefill_seconds, 0.0
            return Timings(queue, prefill, transfer, elapsed - queue - prefill, elapsed)
        queue = stream.pull.began - stream.began + commit.queue_seconds
        transfer = committed - stream.pull.began - commit.queue_seconds - commit.prefill_seconds
        return Timings(queue, commit.prefill_seconds, transfer, now - committed, elapsed)

    def _take(self, events: list[Event]) -> None:
        for event in events:
            stream = self._streams[event.generation]
            stream.events.put_nowait(event)
            if isinstance(event, Closed):  # the last event of every sequence
                stream.gone.set()
        self._stepped()

    def _retire(self, stream: Stream) -> None:
        """Give the attempt up, in the background: the caller may be a cancelled task."""
        task = asyncio.create_task(self._close(stream))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _close(self, stream: Stream) -> None:
        """Close the lease once neither the pulling thread nor the engine can touch its blocks."""
        if stream.pull is not None and stream.pulled is not None:
            stream.pull.cancel()
            await asyncio.wait([stream.pulled])
            stream.pulled.exception()  # seen: it was raised in generate, or the attempt was cancelled before
        if stream.in_engine:
            self._core.submit(Abort(stream.generation))
            await stream.gone.wait()
        del self._streams[stream.generation]
        self._close_lease(stream.generation)
        self._stepped()  # blocks came back: sequences that starve may have them


def _delta(sampled: list[Sampled]) -> Delta:
    return Delta(
        tuple(event.token for event in sampled),
        sampled[-1].finish,
        logprobs=tuple(event.logprobs for event in sampled if event.logprobs is not None),
    )


def _moved(commit: Commit | None) -> Moved:
    return Moved(commit.block_count, commit.payload_bytes) if commit else Moved()
