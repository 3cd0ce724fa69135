"""The step loop over a runner that can be made to fail, and its thread."""

from __future__ import annotations

import queue
import threading

import numpy as np
import torch

from bifolio.protos.messages import BlockId, Generation, Sampling
from bifolio.replicas.batch import Batch
from bifolio.replicas.engine import Engine, EngineThread
from bifolio.replicas.scheduler import Scheduler
from bifolio.replicas.sequence import Abort, Add, Closed, Computed, Prefilled, Sampled

VOCABULARY = 32


class Runner:
    """The next id is the last one plus one; fails when told to."""

    block_size = 16

    def __init__(self) -> None:
        self.fail = False

    def run(self, batch: Batch) -> torch.Tensor:
        if self.fail:
            raise RuntimeError("out of luck")
        return torch.nn.functional.one_hot((batch.tokens[batch.logit_rows] + 1) % VOCABULARY, VOCABULARY).float()


def engine(draw=lambda generation, count: None) -> tuple[Engine, Runner]:
    runner = Runner()
    scheduler = Scheduler(max_batched_tokens=48, max_sequences=8, block_size=16, draw=draw)
    return Engine(runner, scheduler), runner  # type: ignore[arg-type]


def add(counter: int, tokens: tuple[int, ...], most: int | None = None, logits: bytes | None = None) -> Add:
    blocks = tuple(BlockId(counter * 100 + i) for i in range(-(-len(tokens) // 16) + 1))
    sampling = Sampling(most, 0.0) if most else None
    return Add(Generation(1, counter), tokens, blocks, float(counter), len(tokens), sampling, logits)


def test_a_prompt_is_computed_and_its_tokens_follow():
    it, _ = engine()
    it.submit(add(1, (3, 4, 5), most=3))
    events = [event for _ in range(4) for event in it.step()]
    assert [e.token for e in events if isinstance(e, Sampled)] == [6, 7, 8]
    assert events[-1] == Closed(Generation(1, 1), "finished")
    assert it.idle


def test_a_handed_over_prompt_leaves_with_its_logits():
    it, _ = engine()
    it.submit(add(1, (3, 4, 5)))
    computed, prefilled, closed = it.step()
    assert closed == Closed(Generation(1, 1), "finished")
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


def test_an_aborted_sequence_is_closed_before_the_next_step():
    it, _ = engine()
    it.submit(add(1, (3, 4, 5), most=10))
    it.step()
    it.submit(Abort(Generation(1, 1)))
    assert it.step() == [Closed(Generation(1, 1), "aborted")]
    it.submit(Abort(Generation(1, 1)))
    assert it.step() == []


def test_a_step_that_fails_closes_its_sequences_and_the_engine_goes_on():
    it, runner = engine()
    it.submit(add(1, (3, 4, 5), most=2))
    runner.fail = True
    (closed,) = it.step()
    assert isinstance(closed, Closed)
    assert (closed.reason, "out of luck" in closed.message) == ("failed", True)
    runner.fail = False
    it.submit(add(2, (8,), most=1))
    assert [e.token for e in it.step() if isinstance(e, Sampled)] == [9]


def test_only_the_faulty_sequence_of_a_step_fails():
    it, runner = engine()
    compute = runner.run

    def faulty(batch: Batch) -> torch.Tensor:
        if 13 in batch.tokens:
            raise RuntimeError("unlucky")
        return compute(batch)

    runner.run = faulty  # type: ignore[method-assign]
    for counter, tokens in enumerate(((3, 4), (13,), (8,)), 1):
        it.submit(add(counter, tokens, most=1))
    events = it.step()
    assert [e.token for e in events if isinstance(e, Sampled)] == [5, 9]
    assert {e.generation.counter: e.reason for e in events if isinstance(e, Closed)} == {
        1: "finished",
        2: "failed",
        3: "finished",
    }


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
        assert any(e == Closed(Generation(1, counter), "finished") for e in delivered.get(timeout=20))
    thread.stop()
    assert not thread.is_alive()
    assert thread not in threading.enumerate()
