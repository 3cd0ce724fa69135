"""One attempt at a request on a decode replica: its choices, each with a lease of its own, and how far they are.

    one choice     open ──▶ prompt: pulled, or computed with it ──▶ decoding ──▶ gone: its lease is closed
    several        open ──▶ prompt: once, in the first one's blocks ──▶ forked: each decodes, and goes, by itself

Makes commands and deltas of what happened. Knows nothing about tasks, threads or who reads them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bifolio.kv_manager.pull import Pull
from bifolio.protos.measures import Moved, Timings
from bifolio.protos.messages import Commit, Delta, Generation, Lease, Placement, Request, TokenLogprobs

from .key_chain import KeyChain
from .sequence import Add, Event, Prefilled, Sampled


@dataclass(slots=True, eq=False)
class Choice:
    """One answer, from the opening of its lease until that is closed."""

    number: int  # in its deltas
    lease: Lease
    keys: KeyChain  # of its history, which grows
    filled: int = 0  # leading blocks that have their keys, shared ones included
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # clear while the engine has its blocks
    revoked: bool = False
    ended: bool = False  # its last delta has been made

    def __post_init__(self) -> None:
        self.gone.set()
        self.filled = self.lease.cached

    @property
    def generation(self) -> Generation:
        return self.lease.generation


@dataclass(frozen=True, slots=True)
class Prompt:
    """What computing a prompt took, and what else came of it."""

    queue: float
    prefill: float
    transfer: float
    moved: Moved
    logprobs: tuple[TokenLogprobs, ...]


class Attempt:
    def __init__(self, placement: Placement, request: Request, keys: KeyChain, block_size: int) -> None:
        assert request.n == 1 + len(placement.forks), "a lease for each choice"
        self.placement = placement
        self.request = request
        local = placement.prefill is None
        assert not (local and placement.decode.cached) or self.prompt_logprobs is None, (
            "of cached tokens there are none"
        )
        self.choices = [Choice(0, placement.decode, keys)]
        self.choices += [Choice(k, fork, keys.fork()) for k, fork in enumerate(placement.forks, 1)]
        self.events: asyncio.Queue[tuple[Choice, Event]] = asyncio.Queue()
        self.pull: Pull | None = None
        self.pulled: asyncio.Future[Commit] | None = None
        self.forked = False  # each choice goes its own way
        self._block_size = block_size
        self._began = time.monotonic()
        self._prompt: Prompt | None = None
        self._told = False  # what a prompt took leaves once, with the first token of all

    @property
    def first(self) -> Choice:
        """The one whose blocks the prompt is computed in."""
        return self.choices[0]

    @property
    def every(self) -> int | None:
        """`choice` of a delta about all choices."""
        return 0 if len(self.choices) == 1 else None

    @property
    def prompt_logprobs(self) -> int | None:
        """As in Request. They left with the first token: an attempt that goes on from there sends none."""
        return None if self.request.generated else self.request.prompt_logprobs

    def pulled_prompt(self, commit: Commit) -> float:
        """It has come from a prefill replica. Gives the seconds that this added to the computing."""
        assert self.pull is not None
        transfer = time.monotonic() - self.pull.began - commit.queue_seconds - commit.prefill_seconds
        queue = self.pull.began - self._began + commit.queue_seconds
        moved = Moved(commit.block_count, commit.payload_bytes, self._cached)
        self._prompt = Prompt(queue, commit.prefill_seconds, transfer, moved, commit.prompt_logprobs)
        return transfer

    def computed_prompt(self, event: Prefilled | Sampled) -> None:
        """It has been computed here; `event` is the first to say so."""
        moved = Moved(cached=self._cached)
        self._prompt = Prompt(event.queue_seconds, event.prefill_seconds, 0.0, moved, event.prompt_logprobs)

    def prompt_alone(self) -> Add:
        """Has the prompt of several choices computed here, for its logits."""
        return replace(self.sampled(self.first, None), sampling=None)

    def sampled(self, choice: Choice, logits: bytes | None) -> Add:
        """Has a choice sampled; without logits its history is computed first, as far as it is not cached."""
        request, first = self.request, self.first
        full, rest = divmod(len(request.history), self._block_size)
        return Add(
            choice.generation,
            request.history,
            choice.lease.blocks,
            request.arrival,
            len(request.prompt),
            request.sampling if len(self.choices) == 1 else replace(request.sampling, choice=choice.number),
            logits,
            None if logits is not None else self.prompt_logprobs,
            0 if logits is not None else choice.lease.cached * self._block_size,
            (first.lease.blocks[full], choice.lease.blocks[full]) if rest and choice is not first else None,
        )

    def delta(self, choice: Choice, sampled: Sequence[Sampled]) -> Delta:
        """What was sampled of a choice since its last delta."""
        finish = sampled[-1].finish
        choice.ended = finish is not None
        delta = Delta(
            tuple(event.token for event in sampled),
            finish,
            logprobs=tuple(event.logprobs for event in sampled if event.logprobs is not None),
            choice=choice.number,
        )
        if self._told:
            return delta
        if self._prompt is None:
            self.computed_prompt(sampled[0])
        prompt, self._prompt, self._told = self._prompt, None, True  # its logprobs may be many, and the answer long
        assert prompt is not None
        elapsed = time.monotonic() - self._began
        first_decode = elapsed - prompt.queue - prompt.prefill - prompt.transfer
        return replace(
            delta,
            timings=Timings(prompt.queue, prompt.prefill, prompt.transfer, first_decode, elapsed),
            moved=prompt.moved,
            prompt_logprobs=prompt.logprobs,
        )

    @property
    def _cached(self) -> int:
        """Tokens of the history that nobody had to compute."""
        return (self.placement.prefill or self.placement.decode).cached * self._block_size
