"""One prompt computed in every way an answer can come about, and the logits compared bit by bit.

The reference computes a prompt whole and alone, and each answer token by itself. The other ways get the same tokens:

    chunks of n   the prompt in several steps
    batch         eight sequences in common steps, each at another place: prompts beside answers
    resumed       prompt and half of the answer computed as one prompt, as after a preemption or a lost replica
    split         the prompt on another replica, its KV blocks moved here by the Prefill stream

Knows nothing about text, Ray or transformers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import numpy.typing as npt

from bifolio.kv_manager.pull import PrefillClient
from bifolio.kv_manager.transfer import PrefillServer
from bifolio.protos.errors import ConfigError
from bifolio.protos.messages import BlockId, Generation, Lease, ReplicaId, RequestId, Start

from .batch import Row, build_batch
from .core import Core, ReplicaSpec, load_model
from .jobs import Jobs

BATCH = 8
CHUNKS = (32, 256)


@dataclass(frozen=True, slots=True)
class RowDigest:
    """What is kept of one row of logits: all its bits as a digest, and the token it chooses."""

    digest: bytes
    token: int

    @classmethod
    def of(cls, logits: npt.NDArray[np.float32]) -> RowDigest:
        if not np.isfinite(logits).all():
            raise ConfigError("model: its logits are not finite in this dtype; nothing can be compared, try float32")
        return cls(hashlib.blake2b(logits.tobytes(), digest_size=16).digest(), int(logits.argmax()))


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt, the greedy tokens after it, and the logits that each of them was chosen from."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    digests: tuple[RowDigest, ...]


@dataclass(slots=True)
class Way:
    """How often a way of computing came to the reference's logits."""

    name: str
    compared: int = 0
    equal: int = 0  # all bits of the row
    flips: int = 0  # rows that choose another token

    def count(self, ours: Sequence[RowDigest], reference: Sequence[RowDigest]) -> None:
        for a, b in zip(ours, reference, strict=True):
            self.compared += 1
            self.equal += a.digest == b.digest
            self.flips += a.token != b.token


@dataclass(slots=True)
class _Sequence:
    """A sequence that is computed along given tokens; without any, along those its logits choose."""

    prompt: tuple[int, ...]
    count: int  # of the rows of logits wanted
    blocks: range
    chunk: int
    given: tuple[int, ...] | None
    tokens: list[int] = field(default_factory=list)
    digests: list[RowDigest] = field(default_factory=list)
    computed: int = 0

    @property
    def done(self) -> bool:
        return len(self.digests) == self.count

    def row(self) -> Row:
        prompt = len(self.prompt)
        if self.computed < prompt:
            end = min(self.computed + self.chunk, prompt)
            return Row(self.prompt[self.computed : end], self.computed, self.blocks, end == prompt)
        return Row([self.tokens[self.computed - prompt]], self.computed, self.blocks)

    def take(self, logits: npt.NDArray[np.float32]) -> None:
        here = RowDigest.of(logits)
        self.tokens.append(here.token if self.given is None else self.given[len(self.digests)])
        self.digests.append(here)


class Verifier:
    """Two replicas that share a model, without Ray: one that prefills and one that does everything."""

    def __init__(self, spec: ReplicaSpec) -> None:
        model = load_model(spec)
        self._decode = Core(spec, ReplicaId("decode"), "decode", model)
        self._prefill = Core(spec, ReplicaId("prefill"), "prefill", model)
        self._jobs = Jobs(self._prefill, self._close)
        self._prefill.start(self._jobs.deliver)
        self._server = PrefillServer(self._jobs, 1)
        self._address = f"127.0.0.1:{self._server.start()}"
        self._client = PrefillClient(self._decode.cache)
        self._leases = 0

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self._server.stop(0.1)
        self._prefill.stop()

    def _close(self, generation: Generation) -> None:
        self._prefill.tags.close(generation)

    @property
    def most_tokens(self) -> int:
        """Positions that each sequence of a batch may have."""
        return self._decode.cache.blocks // BATCH * self._decode.cache.block_size

    def answer(self, prompt: Sequence[int], count: int) -> Answer:
        """The reference: `count` greedy tokens, computed alone, the prompt whole."""
        sequence = self._sequence(tuple(prompt), count, len(prompt))
        self._run([sequence])
        return Answer(sequence.prompt, tuple(sequence.tokens), tuple(sequence.digests))

    def ways(self, answers: Sequence[Answer], tick: Callable[[], None]) -> Iterator[Way]:
        """Each way over all answers. `tick` is called after each answer."""
        for chunk in CHUNKS:
            way = Way(f"in chunks of {chunk}")
            for a in answers:
                self._compare(way, [self._again(a, chunk)], [a], tick)
            yield way
        way = Way(f"in a batch of {BATCH}")
        for first in range(0, len(answers), BATCH):
            group = answers[first : first + BATCH]
            self._compare(way, [self._again(a, CHUNKS[0], place) for place, a in enumerate(group)], group, tick)
        yield way
        way = Way("resumed")
        for a in answers:
            half = len(a.tokens) // 2
            again = self._sequence(a.prompt + a.tokens[:half], len(a.tokens) - half, 1 << 30, given=a.tokens[half:])
            self._run([again])
            way.count(again.digests, a.digests[half:])
            tick()
        yield way
        way = Way("split")
        for a in answers:
            again = self._again(a, 1)
            self._pull(again)
            self._compare(way, [again], [a], tick)
        yield way

    def _sequence(
        self, prompt: tuple[int, ...], count: int, chunk: int, given: tuple[int, ...] | None = None, place: int = 0
    ) -> _Sequence:
        each = self._decode.cache.blocks // BATCH
        return _Sequence(prompt, count, range(1 + place * each, 1 + (place + 1) * each), chunk, given)

    def _again(self, answer: Answer, chunk: int, place: int = 0) -> _Sequence:
        return self._sequence(answer.prompt, len(answer.tokens), chunk, answer.tokens, place)

    def _compare(
        self, way: Way, sequences: Sequence[_Sequence], answers: Sequence[Answer], tick: Callable[[], None]
    ) -> None:
        self._run(sequences)
        for sequence, answer in zip(sequences, answers, strict=True):
            way.count(sequence.digests, answer.digests)
            tick()

    def _run(self, sequences: Sequence[_Sequence]) -> None:
        """All sequences to their ends, in common steps. Each starts a step after the one before it."""
        step = 0
        while not all(s.done for s in sequences):
            step += 1
            now = [s for s in sequences[:step] if not s.done]
            rows = [s.row() for s in now]
            logits = iter(self._decode.runner.run(build_batch(rows, self._decode.cache.block_size)).numpy())
            for sequence, row in zip(now, rows, strict=True):
                sequence.computed += len(row.tokens)
                if row.want_logits:
                    sequence.take(next(logits))

    def _pull(self, sequence: _Sequence) -> None:
        """Have the prompt prefilled by the other replica, and its blocks moved."""
        self._leases += 1
        count = -(-len(sequence.prompt) // self._decode.cache.block_size)
        blocks = tuple(BlockId(block) for block in range(1, count + 1))
        lease = Lease(self._prefill.replica, Generation(1, self._leases), blocks)
        start = Start(
            RequestId(f"verify-{self._leases}"),
            lease.generation,
            lease.blocks,
            sequence.prompt,
            self._decode.geometry,
            arrival=0.0,
        )
        commit = self._client.pull(self._address, start).run([BlockId(block) for block in sequence.blocks[:count]])
        sequence.computed = len(sequence.prompt)
        sequence.take(np.frombuffer(commit.logits, np.float32))
