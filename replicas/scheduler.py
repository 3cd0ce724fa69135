"""Which tokens the next step computes. Pure: no torch, ray or clock; time is an argument.

Decode tokens first, one for each decoding sequence; what is left of `max_batched_tokens` goes to prompt chunks, but
where tokens are decoded only as much as makes the step no longer than `prompt_stretch` times what it takes without:
a prompt may be late by a few steps, but no stream may stand still. A quarter of the prompt budget goes to the prompt
with the least left, the rest in order of arrival, so that one huge prompt stalls nobody. Chunks end on block edges,
except at the end of a prompt, and where a step has not room for a block.

    position:   0 .... cached .... computed ............ len(tokens)
                K and V in blocks      | chunk | later chunks
                shared | own: written

Where no prompt waits, a decoding sequence may have a draft behind its token (`drafts.py`): guesses of what follows,
computed with it. They take only positions of blocks that the sequence has, and what is wrong of them is never
`computed`: its K and V are written over by the tokens that come instead.

A decoding sequence that needs a block draws it from the replica's reserve. When the reserve is empty it skips steps;
once one has starved for `starve_s`, the latest arrival is preempted. The earliest never is: it waits for what others
leave.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from bifolio.protos.messages import BlockId, Generation, TokenLogprobs

from .drafts import Lookup, RowCost, worth
from .sequence import (
    Add,
    Choice,
    Closed,
    CloseReason,
    Computed,
    Event,
    Prefilled,
    Sampled,
    Sequence,
    in_arrival_order,
)

Draw = Callable[[Generation, int], tuple[BlockId, ...] | None]
DRAFT_ROWS = 8  # of a step with drafts: its tokens come together, but no later than those of eight sequences


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of a sequence from position `sequence.computed` on. A decode token is a chunk of one, and may have
    a draft behind it, which does not count."""

    sequence: Sequence
    count: int
    draft: tuple[int, ...] = ()

    @property
    def completes(self) -> bool:
        return self.count == self.sequence.left


@dataclass(frozen=True, slots=True)
class Step:
    """What one engine step does; `handed` are sequences whose logits came with the hand-over: only sampled."""

    chunks: tuple[Chunk, ...] = ()
    handed: tuple[Sequence, ...] = ()
    closed: tuple[Closed, ...] = ()

    @property
    def work(self) -> bool:
        return bool(self.chunks or self.handed)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What computing a step has brought, by sequence."""

    sampled: dict[Generation, list[Choice]]  # of each that samples and ends its chunk; several by a draft
    logits: dict[Generation, bytes] = field(default_factory=dict)  # a row of each that is handed over
    scores: dict[Generation, list[TokenLogprobs]] = field(default_factory=dict)  # of the chunk's `targets`


class Scheduler:
    """Owns the sequences of one engine."""

    def __init__(
        self,
        *,
        max_batched_tokens: int,
        max_sequences: int,
        block_size: int,
        draw: Draw,
        starve_s: float = 0.25,
        speculate: int = 0,
        prompt_stretch: float = 0.0,
        row_share: float = RowCost.FIRST,
    ) -> None:
        assert max_batched_tokens >= max_sequences + block_size, "decode tokens would leave no room for a prompt chunk"
        self.max_batched_tokens = max_batched_tokens
        self.max_sequences = max_sequences
        self.block_size = block_size
        self.draw = draw
        self.starve_s = starve_s
        self.speculate = speculate  # guesses behind a decode token, at most; 0 makes none
        self.draft_rows = DRAFT_ROWS
        self.prompt_stretch = prompt_stretch  # 0: however long a step gets
        self.row_cost = RowCost(row_share)  # whoever runs steps tells it
        self.sequences: dict[Generation, Sequence] = {}

    def add(self, add: Add, now: float) -> None:
        assert add.generation not in self.sequences
        assert 0 < len(add.tokens) <= len(add.blocks) * self.block_size
        assert add.computed % self.block_size == 0 <= add.computed < len(add.tokens), "cached blocks are full, not all"
        assert not add.computed or add.prompt_logprobs is None, "what is not computed here has no logprobs"
        complete = len(add.tokens) if add.logits is not None else add.computed
        self.sequences[add.generation] = Sequence(
            add.generation,
            list(add.tokens),
            array("i", add.blocks),
            add.arrival,
            add.prompt_length,
            add.sampling,
            added=now,
            computed=complete,
            cached=complete,
            logits=add.logits,
            prompt_logprobs=add.prompt_logprobs,
        )

    def close(self, generation: Generation, reason: CloseReason, message: str = "") -> Closed | None:
        """Forget a sequence; None if it is not here (any more)."""
        if (gone := self.sequences.pop(generation, None)) is None:
            return None
        return Closed(generation, reason, message, 0 if reason == "failed" else gone.computed)

    @property
    def idle(self) -> bool:
        return not self.sequences

    def schedule(self, now: float) -> Step:
        ordered = in_arrival_order(list(self.sequences.values()))[: self.max_sequences]
        handed = tuple(s for s in ordered if s.logits is not None)
        decoding = [s for s in ordered if s.logits is None and s.first_sampled]
        fed = [s for s in decoding if self._has_room(s, now)]
        closed = self._preempt(ordered, now) if len(fed) < len(decoding) else ()
        gone = {c.generation for c in closed}
        decode = [Chunk(s, 1) for s in fed if s.generation not in gone]
        prompts = [s for s in ordered if s.left and not s.first_sampled and s.generation not in gone]
        if self.speculate and not prompts and 0 < len(decode) < self.draft_rows:
            decode = self._with_drafts(decode)
        budget = self.max_batched_tokens - len(decode)
        if decode and self.prompt_stretch:
            budget = min(budget, self.row_cost.rows_within(self.prompt_stretch, len(decode)))
        chunks = [*decode, *self._prompt_chunks(prompts, budget)]
        for chunk in chunks:
            assert chunk.sequence.computed >= chunk.sequence.cached, "a block that others may share would be written"
            if chunk.sequence.started is None:
                chunk.sequence.started = now
        return Step(tuple(chunks), tuple(s for s in handed if s.generation not in gone), closed)

    def _has_room(self, sequence: Sequence, now: float) -> bool:
        """Whether the sequence holds a block for its next position, drawing one from the reserve if it must."""
        if sequence.computed >= len(sequence.blocks) * self.block_size:
            drawn = self.draw(sequence.generation, 1)
            if drawn is None:
                sequence.starved_since = now if sequence.starved_since is None else sequence.starved_since
                return False
            sequence.blocks.extend(drawn)
        sequence.starved_since = None
        return True

    def _with_drafts(self, decode: list[Chunk]) -> list[Chunk]:
        """With as many guesses as are worth their time."""
        odds = []
        for sequence in (chunk.sequence for chunk in decode):
            if sequence.lookup is None:
                sequence.lookup = Lookup()
            sequence.lookup.follow(sequence.tokens)
            odds.append(sequence.lookup.odds(self._most_guesses(sequence)))
        most = min(self.max_batched_tokens, self.draft_rows)
        counts = worth(odds, len(decode), most, self.row_cost.share)
        return [Chunk(c.sequence, c.count, draft_of(c.sequence, n)) for c, n in zip(decode, counts, strict=True)]

    def _most_guesses(self, sequence: Sequence) -> int:
        """Where its blocks end; and one more token comes than guesses are right, but not more than it may have."""
        assert sequence.sampling is not None
        room = len(sequence.blocks) * self.block_size - sequence.computed - 1
        return max(0, min(self.speculate, room, sequence.sampling.max_tokens - sequence.generated - 1))

    def _preempt(self, ordered: list[Sequence], now: float) -> tuple[Closed, ...]:
        """Close the latest arrival once a sequence has starved too long; its blocks go to those who came before."""
        starved = any(s.starved_since is not None and now - s.starved_since >= self.starve_s for s in ordered)
        if not starved or len(ordered) < 2:
            return ()
        victim = ordered[-1]
        for sequence in ordered:  # what the victim leaves takes a moment to come back: nobody else pays meanwhile
            sequence.starved_since = None
        closed = self.close(victim.generation, "preempted", "out of KV blocks; an earlier request keeps them")
        assert closed is not None
        return (closed,)

    def _prompt_chunks(self, prompts: list[Sequence], budget: int) -> Iterable[Chunk]:
        if not prompts:
            return []
        counts = dict.fromkeys(prompts, 0)
        shortest = min(prompts, key=lambda s: s.left)
        quarter = max(budget // 4, self.block_size)
        for sequence, limit in [(shortest, quarter), *((s, budget) for s in prompts)]:
            spare = min(limit, budget - sum(counts.values()))
            counts[sequence] = self._chunk(sequence, counts[sequence] + spare, budget)
        return [Chunk(s, n) for s, n in counts.items() if n]

    def _chunk(self, sequence: Sequence, count: int, budget: int) -> int:
        """How many of the next `count` tokens: up to a block's edge, or all where no step's budget brings one."""
        if count >= sequence.left:
            return sequence.left
        end = (sequence.computed + count) // self.block_size * self.block_size
        if end <= sequence.computed and budget < self.block_size:
            return count
        return max(0, end - sequence.computed)

    def record(self, step: Step, outcome: Outcome, now: float) -> list[Event]:
        """Enter a computed step into the sequences: the only place where one changes, so a step may be repeated."""
        events: list[Event] = []
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.computed += chunk.count
            sequence.scores += outcome.scores.get(sequence.generation, ())
            if sequence.left == 0 and sequence.prefilled is None:
                sequence.prefilled = now
            if sequence.sampling is None:
                events.append(Computed(sequence.generation, sequence.computed))
                if sequence.left == 0:
                    events.extend(self._prefilled(sequence, outcome.logits[sequence.generation]))
        for sequence in [*(c.sequence for c in step.chunks), *step.handed]:
            if sequence.generation in outcome.sampled:
                choices = outcome.sampled[sequence.generation]
                sequence.computed += len(choices) - 1  # guesses that were right; what else was drafted never counts
                for choice in choices:
                    events.extend(self._sampled(sequence, *choice))
        return events

    def _prefilled(self, sequence: Sequence, logits: bytes) -> list[Event]:
        event = Prefilled(sequence.generation, logits, *_prefill_times(sequence), sequence.take_scores())
        return [event, *self._finished(sequence)]

    def _sampled(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> list[Event]:
        sequence.tokens.append(token)
        sequence.logits = None
        queue, prefill = _prefill_times(sequence) if not sequence.first_sampled else (0.0, 0.0)
        sequence.first_sampled = True
        finish = sequence.finish_reason()
        event = Sampled(sequence.generation, token, finish, queue, prefill, logprobs, sequence.take_scores())
        return [event, *(self._finished(sequence) if finish else ())]

    def _finished(self, sequence: Sequence) -> list[Event]:
        closed = self.close(sequence.generation, "finished")
        return [closed] if closed else []


def draft_of(sequence: Sequence, count: int) -> tuple[int, ...]:
    """What the sequence is guessed to go on with. No stop id: behind one nothing comes, so none is ever a guess that
    was right, and the last token of an answer is always one that was sampled."""
    if not count:
        return ()
    assert sequence.lookup is not None
    assert sequence.sampling is not None
    guessed = sequence.lookup.guess(sequence.tokens, count)
    stops = sequence.sampling.stop_token_ids
    return tuple(takewhile(lambda token: token not in stops, guessed))


def _prefill_times(sequence: Sequence) -> tuple[float, float]:
    """Seconds waited for the first chunk, and from there to the last; (0, 0) if the prompt was prefilled elsewhere."""
    if sequence.started is None or sequence.prefilled is None:
        return 0.0, 0.0
    return sequence.started - sequence.added, sequence.prefilled - sequence.started
