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
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from bifolio.kv_manager import drill
from bifolio.protos.messages import Generation, TokenLogprobs

from .batch import Row
from .cores import Cores
from .penalties import SamplingState
from .rates import Rate
from .runner import Runner
from .sampler import sample_tokens
from .scheduler import Chunk, Outcome, Scheduler, Step
from .sequence import Abort, Add, Choice, Closed, Command, Event

logger = logging.getLogger(__name__)

ENDED = "the engine has ended"
MEASURED = 4  # a step with so small a part of what it could hold tells nothing about the speed of long prompts


class Engine:
    """Computes sequences. Not thread-safe but for `submit`."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.broken = False  # the device computes nothing more for this process: there is no next step
        self.prefill_speed = Rate()  # prompt tokens, by the time of the steps that had many of them
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def submit(self, command: Command) -> None:
        self._commands.put(command)

    @property
    def idle(self) -> bool:
        return self._commands.empty() and self.scheduler.idle

    def step(self) -> list[Event]:
        """Everything that happened in one step, in order; empty when there was nothing to do."""
        events: list[Event] = list(self._obey())
        if self.broken:
            return events
        step = self.scheduler.schedule(time.monotonic())
        events.extend(step.closed)
        if not step.work:
            return events
        for part in self._parts(step):
            events.extend(part)
        return events

    def _parts(self, step: Step) -> Iterator[list[Event]]:
        """The events of a step; if it raises, of each of its sequences alone, so that only the faulty one fails. After
        an error that ends all work of the device every one fails, and the engine is broken."""
        began = time.monotonic()
        outcome = self._tried(step)
        if isinstance(outcome, Outcome):
            now = time.monotonic()
            prompts = sum(c.count for c in step.chunks if not c.sequence.first_sampled)
            if prompts * MEASURED >= self.scheduler.max_batched_tokens:
                self.prefill_speed.add(prompts, now - began)
            if not step.handed:
                self.scheduler.row_cost.add(sum(c.count + len(c.draft) for c in step.chunks), now - began)
            yield self.scheduler.record(step, outcome, now)
            return
        alone = [Step((replace(chunk, draft=()),)) for chunk in step.chunks] + [Step(handed=(s,)) for s in step.handed]
        self.broken = self.broken or not self.runner.works()
        if (len(alone) > 1 or step.chunks != alone[0].chunks) and not self.broken:  # a draft must not make one fail
            for single in alone:
                yield from self._parts(single)
            return
        for sequence in [*(c.sequence for c in step.chunks), *step.handed]:
            closed = self.scheduler.close(sequence.generation, "failed", outcome)
            yield [closed] if closed else []

    def _tried(self, step: Step) -> Outcome | str:
        """What computing it brought, or its error in words: the error itself would keep the step's tensors, and what is
        tried next may need their memory."""
        try:
            return self._compute(step)
        except Exception as error:
            logger.error("an engine step failed\n%s", traceback.format_exc())  # words here too: handlers may keep it
            return repr(error)

    def _obey(self) -> list[Closed]:
        closed = []
        while not self._commands.empty():
            match self._commands.get():
                case Add() as add if error := self._uncopied(add):
                    closed.append(Closed(add.generation, "failed", error))
                case Add() as add:
                    self.scheduler.add(add, time.monotonic())
                case Abort(generation) if gone := self.scheduler.close(generation, "aborted"):
                    closed.append(gone)
        return closed

    def _uncopied(self, add: Add) -> str:
        """Copy what a sequence begins with; why that could not be, in words."""
        try:
            if add.copy is not None:
                self.runner.copy(*add.copy)
        except Exception as error:
            logger.error("a block was not copied\n%s", traceback.format_exc())
            self.broken = self.broken or not self.runner.works()
            return repr(error)
        return ""

    def refuse(self) -> list[Event]:
        """Close what is here and what waits to be added: there will be no more steps."""
        closed = [self.scheduler.close(g, "failed", ENDED) for g in list(self.scheduler.sequences)]
        waiting: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(command := self._commands.get_nowait(), Add):
                    waiting.append(Closed(command.generation, "failed", ENDED))
        return [*(c for c in closed if c), *waiting]

    def _compute(self, step: Step) -> Outcome:
        """Changes no sequence: a step that raises is repeated."""
        logits, scores = self._logits(step)
        ready = [*((c.sequence, c.draft) for c in step.chunks if c.completes), *((s, ()) for s in step.handed)]
        first = np.cumsum([0, *(1 + len(draft) for _, draft in ready)]).tolist()  # each one's rows of logits
        assert first[-1] == len(logits)
        leaving, going = {}, []
        for row, (s, draft) in zip(first, ready, strict=False):
            if s.sampling is None:
                leaving[s.generation] = logits[row].cpu().numpy().tobytes()
            else:
                going.append((s, s.sampling, draft, row))
        sampled: dict[Generation, list[Choice]] = {s.generation: [] for s, _, _, _ in going}
        right = 0  # guesses of the drafts that are left
        while going:  # one place of each after the other: behind a wrong guess nothing is looked at
            states = [
                SamplingState(sampling, [*s.tokens, *draft[:right]] if right else s.tokens, s.prompt_length)
                for s, sampling, draft, _ in going
            ]
            rows = logits if len(going) == len(logits) else logits[[row + right for _, _, _, row in going]]
            choices = sample_tokens(rows, states)
            for (s, _, _, _), choice in zip(going, choices, strict=True):
                sampled[s.generation].append(choice)
            going = [g for g, (id, _) in zip(going, choices, strict=True) if g[2][right : right + 1] == (id,)]
            right += 1
        return Outcome(sampled, leaving, scores)

    def _logits(self, step: Step) -> tuple[torch.Tensor, dict[Generation, list[TokenLogprobs]]]:
        """A row for each sequence that has one coming and for each guess of its draft, those with chunks first; and the
        prompt's logprobs."""
        rows = [_row(chunk) for chunk in step.chunks]
        parts: list[torch.Tensor] = []
        if step.handed:  # one copy
            handed = np.frombuffer(bytearray().join(s.logits or b"" for s in step.handed), np.float32)
            parts.append(torch.from_numpy(handed.reshape(len(step.handed), -1)).to(self.runner.device))
        scores: dict[Generation, list[TokenLogprobs]] = {}
        if rows:
            output = self.runner.compute(rows)
            parts.insert(0, output.logits)
            left = iter(output.scores)
            scores = {
                c.sequence.generation: list(islice(left, len(row.targets)))
                for c, row in zip(step.chunks, rows, strict=True)
            }
        return parts[0] if len(parts) == 1 else torch.cat(parts), scores


def _row(chunk: Chunk) -> Row:
    s, end = chunk.sequence, chunk.sequence.computed + chunk.count
    return Row(
        [*s.tokens[s.computed : end], *chunk.draft],
        s.computed,
        s.blocks,
        chunk.completes,
        s.targets(chunk.count),
        s.prompt_logprobs or 0,
        len(chunk.draft),
    )


class EngineThread(threading.Thread):
    """Runs an engine until `stop`; every step's events go to `deliver`, called in this thread."""

    def __init__(self, engine: Engine, deliver: Callable[[list[Event]], None], cores: Cores | None = None) -> None:
        super().__init__(name="engine", daemon=True)
        self._engine = engine
        self._cores = cores
        self._deliver = deliver
        self._wake = threading.Event()
        self._stopping = False
        self._ended = False
        self._since: float | None = None  # when this pass of the loop began; None while there is nothing to do

    def standing_s(self) -> float:
        """For how long no pass has ended, with work at hand. From any thread."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

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
            if self._cores is not None:
                self._cores.bind_engine()
            while not (self._stopping or self._engine.broken):
                if self._engine.idle:
                    self._since = None
                    self._wake.wait()
                self._since = time.monotonic()
                self._wake.clear()
                drill.point("engine")
                if events := self._engine.step():
                    self._deliver(events)
                elif not self._engine.idle:
                    self._wake.wait(0.002)  # every sequence waits for blocks: the reserve is being refilled
        except Exception:  # a bug of ours: nobody may wait for an engine that has ended
            logger.exception("the engine has ended")
        self._ended = True
        if closed := self._engine.refuse():
            self._deliver(closed)
