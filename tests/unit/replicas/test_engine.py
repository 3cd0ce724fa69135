"""The step loop over a runner that can be made to fail, and its thread."""

from __future__ import annotations

import queue
import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bifolio.protos.messages import BlockId, Generation, Sampling
from bifolio.replicas import sampler
from bifolio.replicas.batch import Row, build_batch
from bifolio.replicas.engine import Engine, EngineThread
from bifolio.replicas.logprobs import token_logprobs
from bifolio.replicas.runner import Output
from bifolio.replicas.scheduler import Scheduler
from bifolio.replicas.sequence import Abort, Add, Closed, Computed, Event, Prefilled, Sampled

VOCABULARY = 32


class Runner:
    """The next id is the last one plus one; fails when told to."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.fail = False
        self.sound = True
        self.tried = 0
        self.done: list[tuple[int, ...]] = []  # copies, and of steps the number of rows

    def works(self) -> bool:
        return self.sound

    def copy(self, source: int, block: int) -> None:
        if self.fail:
            raise RuntimeError("out of luck")
        self.done.append((source, block))

    def compute(self, rows: list[Row]) -> Output:
        self.tried += 1
        if self.fail:
            raise RuntimeError("out of luck")
        self.done.append((len(rows),))
        batch = build_batch(rows, 16)
        logits = torch.nn.functional.one_hot((batch.tokens + 1) % VOCABULARY, VOCABULARY).float()
        scores = token_logprobs(logits[batch.scored_rows], batch.targets, batch.tops)
        return Output(logits[batch.logit_rows], scores)


def engine(draw=lambda generation, count: None) -> tuple[Engine, Runner]:
    runner = Runner()
    scheduler = Scheduler(max_batched_tokens=48, max_sequences=8, block_size=16, draw=draw)
    return Engine(runner, scheduler), runner  # type: ignore[arg-type]


def add(
    counter: int,
    tokens: tuple[int, ...],
    most: int | None = None,
    logits: bytes | None = None,
    prompt_logprobs: int | None = None,
    **sampling: Any,
) -> Add:
    blocks = tuple(BlockId(counter * 100 + i) for i in range(-(-len(tokens) // 16) + 1))
    parameters = Sampling(most, 0.0, **sampling) if most else None
    return Add(Generation(1, counter), tokens, blocks, float(counter), len(tokens), parameters, logits, prompt_logprobs)


def test_a_prompt_is_computed_and_its_tokens_follow():
    it, _ = engine()
    it.submit(add(1, (3, 4, 5), most=3))
    events = [event for _ in range(4) for event in it.step()]
    assert [e.token for e in events if isinstance(e, Sampled)] == [6, 7, 8]
    assert events[-1] == Closed(Generation(1, 1), "finished", computed=5)  # the last token's K and V never are
    assert it.idle


def test_a_handed_over_prompt_leaves_with_its_logits():
    it, _ = engine()
    it.submit(add(1, (3, 4, 5)))
    computed, prefilled, closed = it.step()
    assert closed == Closed(Generation(1, 1), "finished", computed=3)
    assert computed == Computed(Generation(1, 1), 3)
    assert isinstance(prefilled, Prefilled)
    assert np.frombuffer(prefilled.logits, np.float32).argmax() == 6
    assert it.idle


def test_logits_that_were_handed_over_are_sampled_first():
    it, _ = engine()
    row = np.zeros(VOCABULARY, np.float32)
    row[20] = 1
    it.submit(add(1, (3, 4, 5), most=2, logits=row.tobytes()))
    assert [e.token for _ in range(2) for e in it.step() if isinstance(e, Sampled)] == [20, 21]


ROW = np.eye(VOCABULARY, dtype=np.float32)[20].tobytes()


def forks() -> list[Add]:
    """The second and third of them begin with a copy of the first one's block, which is added last."""
    adds = [add(counter, (3, 4, 5), most=2, logits=ROW) for counter in (1, 2, 3)]
    return [replace(each, copy=(adds[0].blocks[0], each.blocks[0])) for each in adds[:0:-1]] + adds[:1]


def test_blocks_are_copied_before_any_step_of_whom_they_belong_to():
    it, runner = engine()
    for each in forks():
        it.submit(each)
    events = [e for _ in range(2) for e in it.step()]
    assert runner.done == [(100, 300), (100, 200), (3,)]
    assert [e.token for e in events if isinstance(e, Sampled)] == [20, 20, 20, 21, 21, 21]


def test_a_copy_that_fails_ends_its_sequence_alone():
    it, runner = engine()
    for each in forks():
        it.submit(each)
    runner.copy = lambda source, block: 1 / 0 if block == 200 else None  # type: ignore[method-assign, assignment]
    events = it.step()
    assert [e.generation.counter for e in events if isinstance(e, Sampled)] == [1, 3]
    (failed,) = [e for e in events if isinstance(e, Closed)]
    assert (failed.generation.counter, failed.reason, failed.computed) == (2, "failed", 0)
    assert not it.broken


def test_a_copy_that_ends_the_device_ends_all():
    it, runner = engine()
    runner.fail, runner.sound = True, False
    for each in forks():
        it.submit(each)
    events = [*it.step(), *it.refuse()]
    assert sorted(e.generation.counter for e in events if isinstance(e, Closed)) == [1, 2, 3]
    assert (it.broken, runner.tried, len(events)) == (True, 0, 3)


def test_the_speed_of_prompts_is_measured_in_steps_that_have_many():
    it, _ = engine()
    it.submit(add(2, (3, 4), most=1))
    it.step()
    assert it.prefill_speed.value == 0
    it.submit(add(1, tuple(range(20)), most=5))
    it.step()
    first = it.prefill_speed.value
    assert first > 0
    it.step()
    assert it.prefill_speed.value == first  # one token, decoded


def test_an_aborted_sequence_is_closed_before_the_next_step():
    it, _ = engine()
    it.submit(add(1, (3, 4, 5), most=10))
    it.step()
    it.step()
    it.submit(Abort(Generation(1, 1)))
    assert it.step() == [Closed(Generation(1, 1), "aborted", computed=4)]
    it.submit(Abort(Generation(1, 1)))
    assert it.step() == []


def test_a_step_that_fails_closes_its_sequences_and_the_engine_goes_on():
    it, runner = engine()
    it.submit(add(1, (3, 4, 5), most=2))
    runner.fail = True
    (closed,) = it.step()
    assert isinstance(closed, Closed)
    assert (closed.reason, closed.computed, "out of luck" in closed.message) == ("failed", 0, True)
    runner.fail = False
    it.submit(add(2, (8,), most=1))
    assert [e.token for e in it.step() if isinstance(e, Sampled)] == [9]


def test_only_the_faulty_sequence_of_a_step_fails():
    it, runner = engine()
    compute = runner.compute

    def faulty(rows: list[Row]) -> Output:
        if any(13 in row.tokens for row in rows):
            raise RuntimeError("unlucky")
        return compute(rows)

    runner.compute = faulty  # type: ignore[method-assign]
    for counter, tokens in enumerate(((3, 4), (13,), (8,)), 1):
        it.submit(add(counter, tokens, most=1))
    events = it.step()
    assert [e.token for e in events if isinstance(e, Sampled)] == [5, 9]
    assert {e.generation.counter: e.reason for e in events if isinstance(e, Closed)} == {
        1: "finished",
        2: "failed",
        3: "finished",
    }


def test_after_the_last_error_of_a_device_every_sequence_fails_once_and_the_thread_ends():
    """So that the replica's health says it, and it is replaced."""
    it, runner = engine()
    runner.fail, runner.sound = True, False
    for counter in (1, 2, 3):
        it.submit(add(counter, (3, 4), most=1))
    delivered: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
    thread = EngineThread(it, delivered.put)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    closed = delivered.get(timeout=10)
    assert [(e.generation.counter, e.reason) for e in closed if isinstance(e, Closed)] == [
        (n, "failed") for n in (1, 2, 3)
    ]
    assert runner.tried == 1
    thread.submit(add(4, (3, 4), most=1))
    (late,) = delivered.get(timeout=10)
    assert isinstance(late, Closed)


def test_what_is_tried_again_does_not_keep_the_memory_of_what_failed():
    it, runner = engine()
    kept: list[weakref.ref[torch.Tensor]] = []
    compute = runner.compute

    def greedy(rows: list[Row]) -> Output:
        if len(rows) > 1:
            large = torch.zeros(8)
            kept.append(weakref.ref(large))
            raise RuntimeError("out of memory")
        assert kept[0]() is None
        return compute(rows)

    runner.compute = greedy  # type: ignore[method-assign]
    for counter in (1, 2):
        it.submit(add(counter, (3, 4), most=1))
    assert [e.token for e in it.step() if isinstance(e, Sampled)] == [5, 5]


def test_a_step_that_is_repeated_records_nothing_twice():
    """The second prompt fails in its last chunk: penalties, tokens and logprobs of the first go on."""
    alone, _ = engine()
    together, runner = engine(lambda generation, count: (BlockId(1000 + generation.counter),))
    compute = runner.compute

    def faulty(rows: list[Row]) -> Output:
        if any(31 in row.tokens for row in rows):
            raise RuntimeError("unlucky")
        return compute(rows)

    runner.compute = faulty  # type: ignore[method-assign]
    wanted = add(
        1, tuple(i % 31 for i in range(40)), 12, None, 3, logprobs=2, frequency_penalty=0.7, repetition_penalty=1.5
    )
    for it in (alone, together):
        it.submit(wanted)
    together.submit(add(2, (*[1] * 30, 31), most=1))
    for counter in (3, 4, 5):
        together.submit(add(counter, (5, 6), most=1))
    events = [[e for _ in range(40) for e in it.step() if e.generation.counter == 1] for it in (alone, together)]
    assert tokens_and_logprobs(events[0]) == tokens_and_logprobs(events[1])
    first = next(e for e in events[1] if isinstance(e, Sampled))
    assert [one.token for one in first.prompt_logprobs] == [i % 31 for i in range(1, 40)]


def tokens_and_logprobs(events: list[Event]) -> list[tuple[Any, ...]]:
    return [(e.token, e.logprobs, e.prompt_logprobs) for e in events if isinstance(e, Sampled)]


def test_a_step_that_fails_after_sampling_draws_the_same_again(monkeypatch):
    """Penalties change rows in place: a repeated step begins from the model's own again."""
    row = np.linspace(3, 0, VOCABULARY, dtype=np.float32).tobytes()

    def play(fail: bool) -> list[tuple[Any, ...]]:
        it, _ = engine()
        for counter in (1, 2):
            it.submit(add(counter, (0, 1, 2), most=2, logits=row, repetition_penalty=1.3, logprobs=1))
        if fail:
            with monkeypatch.context() as patch:
                patch.setattr(sampler, "token_logprobs", fails_once(sampler.token_logprobs))
                return tokens_and_logprobs(it.step())
        return tokens_and_logprobs(it.step())

    assert play(True) == play(False)
    assert len(play(True)) == 2


def fails_once(function: Any) -> Any:
    calls = []

    def wrapped(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("once")
        return function(*args)

    return wrapped


def test_a_thread_that_ends_by_a_bug_leaves_nobody_waiting():
    it, _ = engine()
    delivered: queue.Queue = queue.Queue()
    thread = EngineThread(it, delivered.put)
    it.scheduler.schedule = lambda now: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    thread.start()
    thread.submit(add(1, (3,), most=1))
    (closed,) = delivered.get(timeout=20)
    assert (closed.generation, closed.reason) == (Generation(1, 1), "failed")
    thread.join(20)
    assert not thread.is_alive()
    thread.submit(add(2, (3,), most=1))
    thread.submit(Abort(Generation(1, 2)))
    assert delivered.get(timeout=20) == [Closed(Generation(1, 2), "failed", "the engine has ended")]


def test_the_thread_sleeps_until_something_is_submitted_and_stops_when_told():
    it, _ = engine()
    delivered: queue.Queue = queue.Queue()
    thread = EngineThread(it, delivered.put)
    thread.start()
    for counter in (1, 2, 3):
        thread.submit(add(counter, (counter,), most=1))
        assert any(e == Closed(Generation(1, counter), "finished", computed=1) for e in delivered.get(timeout=20))
    thread.stop()
    assert not thread.is_alive()
    assert thread not in threading.enumerate()
