"""Requests on a decode replica: from a placement to tokens.

Opens the one Prefill stream of a request, copies the KV blocks into this replica's cache, samples from the first token
on, and goes on with continuous batching. Token ids only. Whatever ends an attempt early ends it as *resumable*.

    generate() ──▶ open leases ──▶ pull (a thread) ──▶ engine (its thread) ──▶ deltas
         └── finally: cancel the pull, abort the sequences; when both are gone, close the leases

Several choices have one prompt, computed in the blocks of the first. Then each is a sequence of its own: it shares the
prompt's full blocks, which nobody writes any more, and has a copy of the last one, if that is partly filled.

What a lease leaves in its blocks is cached: keys are filled in when the prompt is there, and once more at the end, for
the answer. Steps that only read a block need no mark, however many leases share it: it is written again only when no
open lease has it, and what a step of a closed lease still reads then is thrown away. What is not thrown away, the last
chunk of a prompt that was aborted, is settled before its lease is closed.

Knows nothing about Ray or text; lives on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

from bifolio.kv_manager.pull import PrefillClient, Pull
from bifolio.kv_manager.seldom import Seldom
from bifolio.kv_manager.tls import Tls
from bifolio.protos.errors import BifolioError, Resumable, Revoked, StalePlacement, TransferFailed
from bifolio.protos.messages import Commit, Delta, Generation, Lease, Placement, Request, Start

from .attempt import Attempt, Choice
from .core import Core
from .endings import blamed, cause, resumable
from .key_chain import KeyChain
from .sequence import Abort, Add, Closed, Computed, Event, Prefilled, Sampled

logger = logging.getLogger(__name__)

LEAVE_S = 1.0  # that the thread of a pull may take to end when that is given up: it copies a frame, at most
LONG = 4096  # tokens: the keys of more take so long that other streams would feel it


class Streams:
    """The attempts under way. `close` returns a lease; `stepped` is called on the event loop when blocks were used or
    came back, or the ledger was wrong about them."""

    def __init__(
        self,
        core: Core,
        max_sequences: int,
        close: Callable[[Generation], None],
        stepped: Callable[[], None],
    ) -> None:
        self._core = core
        self._close_lease = close
        self._stepped = stepped
        self._loop = asyncio.get_running_loop()
        self._open: dict[Generation, tuple[Attempt, Choice]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # that close leases
        self._threads = ThreadPoolExecutor(max_sequences + 2, thread_name_prefix="pull")
        self._log = Seldom(logger)
        self._left: dict[Pull, float] = {}  # pulls that were given up and whose threads have not ended, since when
        self._client = PrefillClient(
            core.parts, core.meter, tls=Tls.of(core.kv.tls), copies=core.kv.copies, vocabulary=core.vocabulary
        )

    async def stop(self) -> None:
        """After the last `generate`: returns when every lease is closed."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._client.close()
        self._threads.shutdown(wait=False)

    def deliver(self, events: list[Event]) -> None:
        """Where the engine's events go; called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._take, events)

    def revoke(self, generation: Generation) -> None:
        """End the choice whose lease the KV manager takes back, and with the last one the attempt. Harmless twice."""
        if generation not in self._open:
            return
        attempt, choice = self._open[generation]
        choice.revoked = True
        if attempt.forked:
            self._core.submit(Abort(generation))
            return
        if choice is not attempt.first:  # in whose blocks the prompt is computed, for the others too
            self._close(choice)
        if all(choice.revoked for choice in attempt.choices):
            self._stop_prompt(attempt)

    def give_up(self, why: str) -> None:
        """The engine stands still: every attempt ends, and its lease is closed when the engine has let go. Harmless
        again and again."""
        for attempt, choice in self._open.values():
            attempt.events.put_nowait((choice, Closed(choice.generation, "failed", why)))

    def stalled_s(self) -> float:
        """For how long nothing has come for a pull whose thread does not end, although it was given up."""
        now = time.monotonic()
        return max((p.silent_s() for p, since in self._left.items() if now - since > LEAVE_S), default=0.0)

    async def generate(self, placement: Placement, request: Request) -> AsyncGenerator[Delta, None]:
        """Tokens of a request from where its history ends. Closing the iterator is the cancel.

        Never raises for what another placement can mend: the last delta of a choice then names the cause in
        `resumable`. What came with the prompt is in the first delta, whichever choice it is of.
        """
        of = (self._core.geometry, request.salt, request.history)
        keys = KeyChain(*of) if len(request.history) <= LONG else await asyncio.to_thread(KeyChain, *of)
        attempt = Attempt(placement, request, keys, self._core.geometry.block_size)
        try:
            self._open_leases(attempt)
        except StalePlacement as error:
            self._stepped()
            yield resumable(error, attempt.every)
            return
        try:
            self._sample(attempt, await self._prompt(attempt))
            async for delta in self._decode(attempt):
                yield delta
        except Resumable as error:
            yield resumable(error, attempt.every)
        except Revoked as error:
            yield resumable(Resumable(error.message), attempt.every)
        finally:
            self._spawn(self._give_up(attempt))  # in the background: the caller may be a cancelled task

    def _open_leases(self, attempt: Attempt) -> None:
        """All of them, or none."""
        tags, first = self._core.tags, attempt.first
        opened: list[Generation] = []
        try:
            tags.open(first.lease, first.keys.upto(len(attempt.request.history)))
            opened.append(first.generation)
            for choice in attempt.choices[1:]:
                tags.fork(choice.lease, first.generation)
                opened.append(choice.generation)
        except StalePlacement:
            for generation in opened:
                self._close_lease(generation)
            raise
        self._open |= {choice.generation: (attempt, choice) for choice in attempt.choices}

    async def _prompt(self, attempt: Attempt) -> bytes | None:
        """Have the prompt's K and V in the first choice's blocks; its last logits. None: the engine computes it with
        the one choice there is."""
        if (source := attempt.placement.prefill) is not None:
            return await self._pulled(attempt, source)
        if len(attempt.choices) == 1:
            return None
        self._submit(attempt.first, attempt.prompt_alone())
        logits = b""
        while True:
            _, event = await attempt.events.get()
            if isinstance(event, Prefilled):
                attempt.computed_prompt(event)
                logits = event.logits
            elif isinstance(event, Closed):
                if event.reason != "finished":
                    raise cause(event, self._core.replica)
                return logits

    async def _pulled(self, attempt: Attempt, source: Lease) -> bytes:
        request, first = attempt.request, attempt.first
        start = Start(
            request.id,
            source.generation,
            source.blocks,
            request.history,
            self._core.geometry,
            request.arrival,
            skip_blocks=first.lease.cached,
            cached_blocks=source.cached,
            salt=request.salt,
            prompt_logprobs=attempt.prompt_logprobs,
            memory=attempt.placement.prefill_memory,
            secret=attempt.placement.prefill_secret,
        )
        attempt.pull = self._client.pull(attempt.placement.prefill_address, start)
        attempt.pulled = self._loop.run_in_executor(self._threads, attempt.pull.run, first.lease.blocks)
        try:
            commit = await self._heard(attempt.pull, attempt.pulled)
        except BifolioError as error:
            if not isinstance(error, Revoked):
                what = f"{self._core.replica}: the prompt of request {request.id} did not come from {source.replica}"
                self._log.warning(type(error).__name__, f"{what}: {type(error).__name__}: {error.message}")
            raise blamed(error, source.replica) from error
        attempt.pulled = None  # it has ended, and would keep the commit as long as the answer lasts
        self._core.transfer.add(attempt.pulled_prompt(commit))
        self._fill(first, len(request.history))
        return commit.logits

    async def _heard(self, pull: Pull, pulled: asyncio.Future[Commit]) -> Commit:
        """What a pull brings. TransferFailed if nothing comes for too long, whatever its thread does then."""
        most = self._core.patience_s
        while (left := most - pull.silent_s()) > 0:
            done, _ = await asyncio.wait({pulled}, timeout=left)
            if done:
                return pulled.result()
        pull.cancel()
        raise TransferFailed(f"nothing has come from the prefill replica for {most:g} s, not even a word that it works")

    def _sample(self, attempt: Attempt, logits: bytes | None) -> None:
        """Give the choices to the engine, the first one last: when it is there, the others have copied its block, and
        it may end and go whenever it likes."""
        for choice in reversed(attempt.choices):
            if choice is attempt.first or not choice.revoked:
                self._submit(choice, attempt.sampled(choice, logits))
        attempt.forked = True
        if attempt.first.revoked:
            self._core.submit(Abort(attempt.first.generation))

    async def _decode(self, attempt: Attempt) -> AsyncGenerator[Delta, None]:
        """What was sampled since the last time, until every choice has finished or ended early."""
        for choice in [choice for choice in attempt.choices if choice.generation not in self._open]:
            choice.ended = True
            yield resumable(Resumable("its lease was revoked before it began"), choice.number)
        due = 0.0
        while not all(choice.ended for choice in attempt.choices):
            events = [await attempt.events.get()]
            if (left := due - time.monotonic()) > 0:
                await asyncio.sleep(left)
            while not attempt.events.empty():
                events.append(attempt.events.get_nowait())
            if flush := self._core.flush_s:  # to times that all attempts have in common: one message has all they say
                due = (time.monotonic() // flush + 1) * flush
            for choice in dict.fromkeys(choice for choice, _ in events):
                of = [event for other, event in events if other is choice]
                if sampled := [event for event in of if isinstance(event, Sampled)]:
                    yield attempt.delta(choice, sampled)
                if not choice.ended and isinstance(closed := of[-1], Closed):
                    choice.ended = True
                    yield resumable(cause(closed, self._core.replica), choice.number)

    def _submit(self, choice: Choice, add: Add) -> None:
        choice.gone.clear()
        self._core.submit(add)

    def _take(self, events: list[Event]) -> None:
        for event in events:
            attempt, choice = self._open[event.generation]
            match event:
                case Computed(_, tokens):
                    self._fill(choice, tokens)
                case Sampled(_, token):
                    self._fill(choice, len(attempt.request.history))
                    choice.keys.append(token)
                case Closed(_, reason, computed=computed):  # the last event of every sequence
                    self._fill(choice, computed)
                    choice.gone.set()
                    if attempt.forked and reason == "finished":
                        self._close(choice)
                    elif attempt.forked:
                        self._spawn(self._settle(choice))
            attempt.events.put_nowait((choice, event))
        self._stepped()

    def _fill(self, choice: Choice, positions: int) -> None:
        """So many positions are complete: the blocks that they fill may be cached."""
        if keys := choice.keys.upto(positions, choice.filled):
            self._core.tags.fill(choice.generation, keys, choice.filled)
            choice.filled += len(keys)

    def _stop_prompt(self, attempt: Attempt) -> None:
        if attempt.pull is not None:
            attempt.pull.cancel()
        if not attempt.first.gone.is_set():
            self._core.submit(Abort(attempt.first.generation))

    async def _give_up(self, attempt: Attempt) -> None:
        """Close the leases that are left, once neither the pulling thread nor the engine can touch their blocks."""
        if attempt.pull is not None and attempt.pulled is not None:
            attempt.pull.cancel()
            self._left[attempt.pull] = time.monotonic()
            await asyncio.wait([attempt.pulled])
            del self._left[attempt.pull]
            attempt.pulled.exception()  # seen: it was raised in generate, or the attempt was cancelled before
        for choice in attempt.choices:
            if not choice.gone.is_set():
                self._core.submit(Abort(choice.generation))
        for choice in attempt.choices:
            await choice.gone.wait()
            if not attempt.forked:  # else that has closed it
                await self._settle(choice)

    async def _settle(self, choice: Choice) -> None:
        """Close a lease whose last step may be under way: it reads what is shared, and makes what is cached."""
        if choice.generation in self._open:
            own = choice.lease.blocks[choice.lease.cached :]
            try:
                await asyncio.to_thread(self._core.store.settle, own)
            except Exception as error:  # the device has ended, and the replica with it
                logger.warning("%s: closing a lease all the same: %r", self._core.replica, error)
            self._close(choice)

    def _close(self, choice: Choice) -> None:
        if self._open.pop(choice.generation, None) is not None:
            self._close_lease(choice.generation)
            self._stepped()  # blocks came back: sequences that starve may have them

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
