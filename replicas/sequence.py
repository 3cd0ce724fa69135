"""A request while an engine computes it, and the messages by which an engine is reached.

Knows nothing about tensors, text, leases or transport. A sequence is named by the generation of its lease on this
replica: no two sequences of a cell ever share one.

    Add ──▶ prefilling ──all positions computed──▶ decoding ──last token──▶ Closed("finished")
                │     └── handed over: Prefilled ──▶ Closed("finished")
                ▼                                      ▼
         Closed("aborted" | "failed")        Closed("aborted" | "preempted" | "failed")

After `Closed` the engine launches nothing that touches the sequence's blocks. On a CPU nothing does then; on a GPU what
was launched before may still run: whoever copies to or from the blocks next waits for their marks (`block_stores.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal

from bifolio.protos.messages import BlockId, FinishReason, Generation, Sampling, TokenLogprobs

from .drafts import Lookup

Choice = tuple[int, TokenLogprobs | None]  # a token, and its logprobs if the request asks for them

CloseReason = Literal["finished", "aborted", "preempted", "failed"]


# To the engine
@dataclass(frozen=True, slots=True)
class Add:
    """Compute this. Without `sampling` the sequence is handed over: its logits leave and nothing is sampled here."""

    generation: Generation
    tokens: tuple[int, ...]  # the history; at least one token
    blocks: tuple[BlockId, ...]  # cover the history
    arrival: float
    prompt_length: int
    sampling: Sampling | None = None
    logits: bytes | None = None  # fp32 row of the last position, when K and V of the whole history are in the blocks
    prompt_logprobs: int | None = None  # as in Request; wants the whole history to be computed here
    computed: int = 0  # leading positions that are complete already, in full blocks, not all: shared, never written
    # (source, own): before anything else the content of one block is copied. Fork: the source is the prompt's last
    # block, partly filled, of another sequence that has not been added yet
    copy: tuple[BlockId, BlockId] | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    generation: Generation


Command = Add | Abort


# From the engine
@dataclass(frozen=True, slots=True)
class Computed:
    """A chunk has been launched, on a CPU it is done: K and V of the first `tokens` positions are complete once the
    marks of their blocks have happened, and will not change from then on."""

    generation: Generation
    tokens: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The last chunk of a handed-over sequence is done; `logits` is the fp32 row of its last position."""

    generation: Generation
    logits: bytes
    queue_seconds: float
    prefill_seconds: float
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    generation: Generation
    token: int
    finish: FinishReason | None
    queue_seconds: float = 0.0  # with the first token of a prompt prefilled here
    prefill_seconds: float = 0.0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first token of a prompt prefilled here


@dataclass(frozen=True, slots=True)
class Closed:
    generation: Generation
    reason: CloseReason
    message: str = ""
    computed: int = 0  # positions complete as after `Computed`; none of a failed sequence is to be trusted


Event = Computed | Prefilled | Sampled | Closed


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's own state of one request."""

    generation: Generation
    tokens: list[int]
    blocks: array[int]  # as 32-bit numbers: a long list would take longer to become a tensor than a step
    arrival: float
    prompt_length: int
    sampling: Sampling | None
    added: float
    computed: int = 0  # positions whose K and V are in the blocks, or will be by steps that were launched
    cached: int = 0  # positions that were complete when it was added: nothing here writes below
    logits: bytes | None = None
    prompt_logprobs: int | None = None
    scores: list[TokenLogprobs] = field(default_factory=list)  # of the prompt, until they leave with an event
    started: float | None = None  # first chunk scheduled
    prefilled: float | None = None
    starved_since: float | None = None
    first_sampled: bool = field(default=False)
    lookup: Lookup | None = None  # what it may go on with; made with its first draft

    @property
    def left(self) -> int:
        """Positions still to compute before the next token can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens produced since the original prompt, over all placements of the request."""
        return len(self.tokens) - self.prompt_length

    def targets(self, count: int) -> list[int]:
        """The prompt's tokens whose logprobs the next `count` positions give: each that of the token after it."""
        if self.prompt_logprobs is None:
            return []
        return self.tokens[self.computed + 1 : min(self.computed + count + 1, self.prompt_length)]

    def take_scores(self) -> tuple[TokenLogprobs, ...]:
        scores, self.scores = tuple(self.scores), []
        return scores

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ends with the token just appended, if it does."""
        assert self.sampling is not None
        if self.tokens[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if self.generated >= self.sampling.max_tokens else None


def in_arrival_order(sequences: SequenceOf[Sequence]) -> list[Sequence]:
    return sorted(sequences, key=lambda s: (s.arrival, s.generation))
