"""Prompts computed in every way an answer can come about, and the logits compared.

The reference computes a prompt whole and alone, and each answer token by itself, nothing recorded. The other ways get
the same tokens, and compute as the engine does:

    chunks of n   the prompt in several steps
    batch         several sequences in common steps, each at another place: prompts beside answers
    resumed       prompt and half of the answer computed as one prompt, as after a preemption or a lost replica
    cached        the prompt from its last block on, the blocks before from a sequence that had the same prompt
    split         the prompt on another replica, its KV blocks moved here by the Prefill stream: as frames, and once
                  more copied out of its memory, where that can be reached
    graph         where decode steps are recorded: replayed ones against the same ones launched kernel by kernel
    float32       where a GPU or its kernels compute: the tokens through the CPU's float32 kernels (`verify_float32.py`)

Knows nothing about text, Ray or transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch

from bifolio.kv_manager.block_store import Unreached
from bifolio.kv_manager.pull import PrefillClient
from bifolio.kv_manager.secret import sign
from bifolio.kv_manager.transfer import PrefillServer
from bifolio.protos.errors import ConfigError
from bifolio.protos.messages import BlockId, Generation, Lease, ReplicaId, RequestId, Start

from .batch import Row
from .core import Core, LoadedModel, ReplicaSpec, load_model
from .differences import Logits, Way
from .jobs import Jobs
from .kv_memory import KvMemory, parse
from .runner import Runner
from .verify_float32 import Float32

BATCH = 8
INTERPRETED_BATCH = 4  # Triton's interpreter takes half a second for a step of the smallest model
CHUNKS = (32, 256)
CACHE = 8192  # tokens in each of the two replicas, where nothing else is asked for: they are on one device
WHOLE = 1 << 30  # a chunk that is all of the prompt

Tick = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A prompt, the greedy tokens after it, and the logits that each of them was chosen from: these take memory, 4
    bytes for each token of the answer and each of the vocabulary."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: tuple[Logits, ...]


@dataclass(slots=True)
class _Sequence:
    """A sequence that is computed along given tokens; without any, along those its logits choose."""

    prompt: tuple[int, ...]
    count: int  # of the rows of logits wanted
    blocks: Sequence[int]
    chunk: int
    given: tuple[int, ...] | None
    tokens: list[int] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)
    computed: int = 0

    @property
    def done(self) -> bool:
        return len(self.logits) == self.count

    def row(self) -> Row:
        prompt = len(self.prompt)
        if self.computed < prompt:
            end = min(self.computed + self.chunk, prompt)
            return Row(self.prompt[self.computed : end], self.computed, self.blocks, end == prompt)
        return Row([self.tokens[self.computed - prompt]], self.computed, self.blocks)

    def take(self, logits: Logits) -> None:
        if not np.isfinite(logits).all():
            raise ConfigError("model: its logits are not finite in this dtype; nothing can be compared, try float32")
        self.tokens.append(int(logits.argmax()) if self.given is None else self.given[len(self.logits)])
        self.logits.append(logits)


class Verifier:
    """Two replicas that share a model and a device, without Ray: one prefills, one does everything."""

    def __init__(self, spec: ReplicaSpec, model: LoadedModel | None = None) -> None:
        """Loads the model unless it is given. Raises ConfigError where a replica of `spec` would."""
        on_cpu = spec.engine.device == "cpu"
        self.interpreted = on_cpu and spec.engine.kernels == "triton"
        self.batch = INTERPRETED_BATCH if self.interpreted else BATCH  # sequences of the way of that name
        # There are never more in a step, and each size of one takes time to record
        most = min(self.batch, spec.engine.max_sequences)
        changed: dict[str, Any] = {"max_sequences": most}
        if parse(spec.engine.kv_memory) == KvMemory():
            changed["kv_memory"] = f"{CACHE} tokens"
            if (spec.engine.context or 0) > CACHE:
                changed["context"] = None  # then the cache is the limit
        spec = replace(spec, engine=spec.engine.model_copy(update=changed))
        model = model or load_model(spec)
        self._decode = Core(spec, ReplicaId("decode"), "decode", model)
        self._prefill = Core(spec, ReplicaId("prefill"), "prefill", model)
        self._most_positions = model.llama.config.max_positions
        self._graphs = self._decode.runner is not self._decode.eager
        self._recorded = 1 << (most.bit_length() - 1)  # a size of steps that is recorded
        self.float32 = Float32(spec) if self.interpreted or not on_cpu else None
        self._jobs = Jobs(self._prefill, self._close)
        self._prefill.start(self._jobs.deliver)
        self._server = PrefillServer(self._jobs, 1)
        self._address = f"127.0.0.1:{self._server.start()}"
        self._client = PrefillClient(self._decode.parts, self._decode.meter, vocabulary=self._decode.vocabulary)
        handle = self._prefill.store.export()
        self._shared = b"" if isinstance(self._decode.store.reach(handle), Unreached) else handle
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
        cache = self._decode.cache
        return min(self._most_positions, cache.blocks // self.batch * cache.block_size)

    @property
    def ways_there(self) -> int:
        """How many `ways` yields."""
        optional = (bool(self._shared), self._graphs, self.float32 is not None and not self.float32.missing)
        return len(CHUNKS) + 4 + sum(optional)

    def answer(self, prompt: Sequence[int], count: int) -> Answer:
        """The reference: `count` greedy tokens, computed alone, the prompt whole."""
        sequence = self._sequence(tuple(prompt), count, WHOLE)
        self._run([sequence], self._decode.eager)
        return Answer(sequence.prompt, tuple(sequence.tokens), tuple(sequence.logits))

    def ways(self, answers: Sequence[Answer], tick: Tick) -> Iterator[Way]:
        """Each way over all answers. `tick` is called after each answer."""
        for chunk in CHUNKS:
            yield self._alone(Way(f"in chunks of {chunk}"), answers, tick, chunk)
        yield self._batched(Way(f"in a batch of {self.batch}"), answers, tick)
        yield self._resumed(Way("resumed"), answers, tick)
        yield self._cached(Way("cached"), answers, tick)
        yield self._split(Way("split"), answers, tick, b"")
        if self._shared:
            yield self._split(Way("split, copied"), answers, tick, self._shared)
        if self._graphs:
            yield self._replayed(Way("graph", "eager"), answers, tick)
        if self.float32 is not None and not self.float32.missing:
            way = Way("float32 on the CPU", "float32")
            for a in answers:
                way.count(a.logits, self.float32.logits(a.prompt, a.tokens))
                tick()
            yield way

    def _alone(self, way: Way, answers: Sequence[Answer], tick: Tick, chunk: int) -> Way:
        for a in answers:
            self._compare(way, [self._again(a, chunk)], [a], tick)
        return way

    def _batched(self, way: Way, answers: Sequence[Answer], tick: Tick) -> Way:
        for first in range(0, len(answers), self.batch):
            group = answers[first : first + self.batch]
            self._compare(way, [self._again(a, CHUNKS[0], place) for place, a in enumerate(group)], group, tick)
        return way

    def _resumed(self, way: Way, answers: Sequence[Answer], tick: Tick) -> Way:
        for a in answers:
            half = len(a.tokens) // 2
            again = self._sequence(a.prompt + a.tokens[:half], len(a.tokens) - half, WHOLE, given=a.tokens[half:])
            self._run([again])
            way.count(again.logits, a.logits[half:])
            tick()
        return way

    def _cached(self, way: Way, answers: Sequence[Answer], tick: Tick) -> Way:
        size = self._decode.cache.block_size
        for a in answers:
            first, again = self._again(a, CHUNKS[0]), self._again(a, WHOLE, place=1)
            self._run([first])
            shared = (len(a.prompt) - 1) // size
            again.blocks, again.computed = (*first.blocks[:shared], *again.blocks[shared:]), shared * size
            self._compare(way, [again], [a], tick)
        return way

    def _split(self, way: Way, answers: Sequence[Answer], tick: Tick, memory: bytes) -> Way:
        copied = self._copied
        for a in answers:
            again = self._again(a, 1)
            self._pull(again, memory)
            self._compare(way, [again], [a], tick)
        assert self._copied - copied == (len(answers) if memory else 0), "blocks came in another way than is said"
        return way

    @property
    def _copied(self) -> int:
        """Prompts whose blocks were copied."""
        return self._decode.meter.read().ways.get("copied", 0)

    def _replayed(self, way: Way, answers: Sequence[Answer], tick: Tick) -> Way:
        """Recorded steps are as wide as eager ones, or a linear library might choose another kernel; but a part of
        their rows is padding, as in an engine. The K and V that each reads it has written itself, in blocks where
        those of another sequence were."""
        padded = self._recorded // 2 + 1
        for first in range(0, len(answers), self._recorded):
            group = answers[first : first + self._recorded]
            eager = [self._again(a, WHOLE, place) for place, a in enumerate(group)]
            self._decode_together(eager, self._decode.eager, len(group))
            replayed = [self._again(a, WHOLE, self.batch - 1 - place) for place, a in enumerate(group)]
            self._decode_together(replayed, self._decode.runner, min(padded, len(group)))
            for ours, theirs in zip(replayed, eager, strict=True):
                way.count(ours.logits[1:], theirs.logits[1:])  # the first row is the prompt's
                tick()
        return way

    def _decode_together(self, sequences: Sequence[_Sequence], runner: Runner, width: int) -> None:
        """Prompts alone and eagerly; then steps of a token each, of the first `width` sequences and of the last. Some
        may be in both: their rows are computed twice."""
        for sequence in sequences:
            self._step([sequence], self._decode.eager)
        while not all(s.done for s in sequences):
            rows = [s.row() for s in sequences]
            first = _on_host(runner.run(rows[:width]))
            last = _on_host(runner.run(rows[-width:])) if width < len(rows) else []
            self._take(sequences, rows, [*first, *last[2 * width - len(rows) :]])

    def _sequence(
        self, prompt: tuple[int, ...], count: int, chunk: int, given: tuple[int, ...] | None = None, place: int = 0
    ) -> _Sequence:
        each = self._decode.cache.blocks // self.batch
        return _Sequence(prompt, count, range(1 + place * each, 1 + (place + 1) * each), chunk, given)

    def _again(self, answer: Answer, chunk: int, place: int = 0) -> _Sequence:
        return self._sequence(answer.prompt, len(answer.tokens), chunk, answer.tokens, place)

    def _compare(self, way: Way, sequences: Sequence[_Sequence], answers: Sequence[Answer], tick: Tick) -> None:
        self._run(sequences)
        for sequence, answer in zip(sequences, answers, strict=True):
            way.count(sequence.logits, answer.logits)
            tick()

    def _run(self, sequences: Sequence[_Sequence], runner: Runner | None = None) -> None:
        """All sequences to their ends, in common steps. Each starts a step after the one before it."""
        step = 0
        while not all(s.done for s in sequences):
            step += 1
            self._step([s for s in sequences[:step] if not s.done], runner or self._decode.runner)

    def _step(self, sequences: Sequence[_Sequence], runner: Runner) -> None:
        rows = [s.row() for s in sequences]
        self._take(sequences, rows, _on_host(runner.run(rows)))

    def _take(self, sequences: Sequence[_Sequence], rows: Sequence[Row], logits: Sequence[Logits]) -> None:
        left = iter(logits)
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.computed += len(row.tokens)
            if row.want_logits:
                sequence.take(next(left))

    def _pull(self, sequence: _Sequence, memory: bytes) -> None:
        """Have the prompt prefilled by the other replica, and its blocks moved: copied, from its `memory`, or sent."""
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
            memory=memory,
            secret=sign(self._prefill.secret, lease),
        )
        commit = self._client.pull(self._address, start).run([BlockId(block) for block in sequence.blocks[:count]])
        sequence.computed = len(sequence.prompt)
        sequence.take(np.frombuffer(commit.logits, np.float32))


def _on_host(logits: torch.Tensor) -> list[Logits]:
    """Its rows, in memory of their own: the next step may overwrite it."""
    return list(logits.to("cpu", copy=True).numpy())
