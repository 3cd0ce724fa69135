"""Prefills under way: what the Prefill stream's server asks of an engine.

Each stream has a thread of its own that waits on its job's queue; the engine's thread fills the queues. Knows nothing
about Ray, sampling or text.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from bifolio.kv_manager.heads import Part
from bifolio.kv_manager.secret import proves
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.kv_manager.transfer import Prefilled
from bifolio.protos.errors import Draining, EngineFailed, GeometryMismatch, InvalidRequest, Revoked, StalePlacement
from bifolio.protos.messages import MOST_LOGPROBS, Generation, Geometry, Lease, Start

from . import sequence
from .core import Core
from .key_chain import KeyChain
from .sequence import Abort, Add, Closed, Computed, Event

WORD_S = 1.0  # between two words that the engine goes on


class Job:
    """One prompt, seen from its stream's thread. Leaving it closes the lease, after the engine has let go."""

    def __init__(self, core: Core, lease: Lease, keys: KeyChain, close: Callable[[Generation], None]) -> None:
        self._core = core
        self._lease = lease
        self._keys = keys
        self._close = close
        self._closed: Closed | None = None
        self._filled = lease.cached  # leading blocks that have their keys
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: cancelled
        if lease.cached:  # those blocks can be sent at once
            self.events.put(Computed(lease.generation, lease.cached * core.geometry.block_size))

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        generation = self._lease.generation
        self._core.submit(Abort(generation))  # nothing, if it is finished
        while self._closed is None:
            event = self.events.get()
            self._closed = event if isinstance(event, Closed) else None
        try:
            self._fill(self._closed.computed)
            if self._closed.reason != "finished":  # its last chunk may be under way, and reads what it had here
                self._core.store.settle(self._lease.blocks[self._lease.cached :])
        finally:
            self._close(generation)

    def progress(self) -> Iterator[int | Prefilled | None]:
        generation = self._lease.generation
        while True:
            try:
                event = self.events.get(timeout=WORD_S)
            except queue.Empty:
                if self._core.standing_s() < WORD_S:
                    yield None
                continue
            match event:
                case Computed(_, tokens):
                    self._fill(tokens)
                    yield tokens
                case sequence.Prefilled(_, logits, queue_seconds, prefill_seconds, prompt_logprobs):
                    yield Prefilled(logits, queue_seconds, prefill_seconds, prompt_logprobs)
                    return
                case None:
                    raise Revoked(f"prefill {generation} was cancelled")
                case Closed(_, reason, message) as closed:
                    self._closed = closed
                    raise EngineFailed(f"prefill {generation} {reason}: {message}", self._core.replica)

    def cancel(self) -> None:
        self.events.put(None)

    def _fill(self, computed: int) -> None:
        keys = self._keys.upto(computed, self._filled)
        self._core.tags.fill(self._lease.generation, keys, self._filled)
        self._filled += len(keys)


class Jobs:
    """The PrefillSource of a replica. `close` returns a lease, `refused` is told when a placement was stale: both are
    called in the stream's thread."""

    def __init__(
        self, core: Core, close: Callable[[Generation], None], refused: Callable[[], None] = lambda: None
    ) -> None:
        self._core = core
        self._close = close
        self._refused = refused
        self._jobs: dict[Generation, Job] = {}
        self.draining = False  # take no new prompt

    @property
    def geometry(self) -> Geometry:
        return self._core.geometry

    @property
    def parts(self) -> Sequence[Part]:
        return self._core.parts

    @property
    def meter(self) -> TrafficMeter:
        return self._core.meter

    def begin(self, start: Start) -> Job:
        """Open the lease and queue the prompt.

        Raises Draining, GeometryMismatch, InvalidRequest, or StalePlacement when the lease was not granted, a block
        went to another one, or a block from the cache holds something else.
        """
        core = self._core
        lease = Lease(core.replica, start.generation, start.blocks, start.request, start.cached_blocks)
        try:
            _require_proof(start.secret, core.secret, lease)  # first: nobody else is told anything
        except StalePlacement:
            self._refused()
            raise
        if self.draining:
            raise Draining(f"prefill replica {core.replica} is leaving and takes no new prompt")
        if not core.geometry.fits(start.geometry):
            raise GeometryMismatch(
                f"decode asks for blocks of [{start.geometry}], prefill replica {core.replica} has "
                f"[{core.geometry}]: deploy both pools with one model and one configuration"
            )
        _check(start, core)
        keys = KeyChain(core.geometry, start.salt, start.tokens)
        try:
            core.tags.open(lease, keys.upto(len(start.tokens)))
        except StalePlacement:
            self._refused()
            raise
        core.store.own(start.blocks[start.cached_blocks :], start.generation)  # no copy of what was in them counts
        job = self._jobs[start.generation] = Job(core, lease, keys, self._close)
        core.submit(
            Add(
                start.generation,
                start.tokens,
                start.blocks,
                start.arrival,
                len(start.tokens),
                prompt_logprobs=start.prompt_logprobs,
                computed=start.cached_blocks * core.geometry.block_size,
            )
        )
        return job

    def deliver(self, events: list[Event]) -> None:
        """Where the engine's events go."""
        for event in events:
            self._jobs[event.generation].events.put(event)
            if isinstance(event, Closed):  # the last event of every sequence
                del self._jobs[event.generation]

    def revoke(self, generation: Generation) -> None:
        if job := self._jobs.get(generation):
            job.cancel()


def _require_proof(secret: bytes, key: bytes, lease: Lease) -> None:
    if not proves(secret, key, lease):
        raise StalePlacement(
            f"the start's secret does not prove that lease {lease.generation} with these {len(lease.blocks)} blocks, "
            f"{lease.cached} of them cached, was granted at {lease.replica}: its placement is of another replica, or "
            "of one that was here before"
        )


def _check(start: Start, core: Core) -> None:
    """InvalidRequest for what could not be computed here."""
    if len(start.tokens) > core.positions:
        raise InvalidRequest(f"{len(start.tokens)} tokens; allowed: at most {core.positions}", "token_ids")
    needed, blocks = -(-len(start.tokens) // core.geometry.block_size), set(start.blocks)
    if not start.tokens or len(start.blocks) != needed:
        raise InvalidRequest(f"{len(start.tokens)} tokens do not take {len(start.blocks)} blocks", "blocks")
    if len(blocks) != needed or not 0 < min(blocks) <= max(blocks) <= core.cache.blocks:
        raise InvalidRequest(f"blocks must be distinct, from 1 to {core.cache.blocks}", "blocks")
    if not all(0 <= token < core.vocabulary for token in start.tokens):
        raise InvalidRequest(f"token ids must be from 0 to {core.vocabulary - 1}", "token_ids")
    if not 0 <= (start.prompt_logprobs or 0) <= MOST_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs is {start.prompt_logprobs}; allowed: 0 to {MOST_LOGPROBS}", "prompt_logprobs"
        )
    most = 0 if start.prompt_logprobs is not None else (len(start.tokens) - 1) // core.geometry.block_size
    if not 0 <= start.cached_blocks <= most:
        raise InvalidRequest(
            f"cached_blocks is {start.cached_blocks}; allowed for {len(start.tokens)} tokens: 0 to {most}, since the "
            "last one is always computed, and all are for prompt_logprobs",
            "cached_blocks",
        )
