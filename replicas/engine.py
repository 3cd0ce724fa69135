"""The step loop of one replica: schedule -> batch -> run -> sample -> record. A role is only what is added to it.

Knows nothing about text, leases, gRPC or Ray. Reached by messages alone (`submit` in, the events of `step` out), so
the caller decides in which thread it runs; `EngineThread` is the usual one.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bifolio.protos.messages import Generation

from .batch import Row, build_batch
from .runner import Runner
from .sampler import sample_tokens
from .scheduler import Scheduler, Step
from .sequence import Abort, Add, Closed, Command, Event, Sequence

logger = logging.getLogger(__name__)

ENDED = "the engine has ended"


class Engine:
    """Computes sequences. Not thread-safe but for `submit`."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def submit(self, command: Command) -> None:
        self._commands.put(command)

    @property
    def idle(self) -> bool:
        return self._commands.empty() and self.scheduler.idle

    def step(self) -> list[Event]:
        """Everything that happened in one step, in order; empty when there was nothing to do."""
        events: list[Event] = list(self._obey())
        step = self.scheduler.schedule(time.monotonic())
        events.extend(step.closed)
        if not step.work:
            return events
        for part in self._parts(step):
            events.extend(part)
        return events

    def _parts(self, step: Step) -> Iterator[list[Event]]:
        """The events of a step; if it raises, of each of its sequences alone, so that only the faulty one fails."""
        try:
            sampled, logits = self._compute(step)
        except Exception as error:
            alone = [Step((chunk,)) for chunk in step.chunks] + [Step(handed=(s,)) for s in step.handed]
            if len(alone) > 1:
                for single in alone:
                    yield from self._parts(single)
                return
            logger.exception("an engine step failed")
            (sequence,) = [*(c.sequence for c in step.chunks), *step.handed]
            closed = self.scheduler.close(sequence.generation, "failed", repr(error))
            yield [closed] if closed else []
        else:
            yield self.scheduler.record(step, sampled, logits, time.monotonic())

    def _obey(self) -> list[Closed]:
        closed = []
        while not self._commands.empty():
            match self._commands.get():
                case Add() as add:
                    self.scheduler.add(add, time.monotonic())
                case Abort(generation) if gone := self.scheduler.close(generation, "aborted"):
                    closed.append(gone)
        return closed

    def refuse(self) -> list[Event]:
        """Close what is here and what waits to be added: there will be no more steps."""
        closed = [self.scheduler.close(g, "failed", ENDED) for g in list(self.scheduler.sequences)]
        waiting: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(command := self._commands.get_nowait(), Add):
                    waiting.append(Closed(command.generation, "failed", ENDED))
        return [*(c for c in closed if c), *waiting]

    def _compute(self, step: Step) -> tuple[dict[Generation, int], dict[Generation, bytes]]:
        ready: list[Sequence] = [c.sequence for c in step.chunks if c.completes]
        rows = [
            Row(c.sequence.tokens[c.sequence.computed : c.sequence.computed + c.count],
                c.sequence.computed, c.sequence.blocks, c.completes)
            for c in step.chunks
        ]  # fmt: skip
        parts = [self.runner.run(build_batch(rows, self.runner.block_size))] if rows else []
        parts += [torch.from_numpy(np.frombuffer(s.logits or b"", np.float32).copy())[None] for s in step.handed]
        logits = torch.cat(parts)
        ready += step.handed
        sampling = [(i, s, s.sampling) for i, s in enumerate(ready) if s.sampling is not None]
        tokens = sample_tokens(logits[[i for i, _, _ in sampling]], [(p, s.generated) for _, s, p in sampling])
        sampled = {s.generation: token for (_, s, _), token in zip(sampling, tokens, strict=True)}
        leaving = {s.generation: logits[i].numpy().tobytes() for i, s in enumerate(ready) if s.sampling is None}
        return sampled, leaving


class EngineThread(threading.Thread):
    """Runs an engine until `stop`; every step's events go to `deliver`, called in this thread."""

    def __init__(self, engine: Engine, deliver: Callable[[list[Event]], None]) -> None:
        super().__init__(name="engine", daemon=True)
        self._engine = engine
        self._deliver = deliver
        self._wake = threading.Event()
        self._stopping = False
        self._ended = False

    def submit(self, command: Command) -> None:
        """From any thread. A sequence that is added is closed in the end, also when the engine has ended."""
        self._engine.submit(command)
        self._wake.set()
        if self._ended and (closed := self._engine.refuse()):
            self._deliver(closed)

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        self.join()

    def run(self) -> None:
        try:
            while not self._stopping:
                if self._engine.idle:
                    self._wake.wait()
                self._wake.clear()
                if events := self._engine.step():
                    self._deliver(events)
                elif not self._engine.idle:
                    self._wake.wait(0.002)  # every sequence waits for blocks: the reserve is being refilled
        except Exception:  # a bug of ours: nobody may wait for an engine that has ended
            logger.exception("the engine has ended")
        self._ended = True
        if closed := self._engine.refuse():
            self._deliver(closed)
