"""Scheduling decisions, one claim a test: no model, no clock."""

from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.protos.messages import BlockId, Generation, Sampling, TokenLogprobs
from bifolio.replicas.scheduler import Outcome, Scheduler, Step
from bifolio.replicas.sequence import Add, Closed, Computed, Event, Prefilled, Sampled

P = 16


class Reserve:
    """Blocks to draw from, as the tags of a replica hand them out."""

    def __init__(self, blocks: int) -> None:
        self.left = [BlockId(1000 + i) for i in range(blocks)]

    def draw(self, generation: Generation, count: int) -> tuple[BlockId, ...] | None:
        if len(self.left) < count:
            return None
        return tuple(self.left.pop() for _ in range(count))


def scheduler(reserve: int = 100, budget: int = 64, most: int = 8) -> Scheduler:
    return Scheduler(
        max_batched_tokens=budget, max_sequences=most, block_size=P, draw=Reserve(reserve).draw, starve_s=0.25
    )


def add(
    counter: int,
    tokens: int,
    *,
    most: int | None = None,
    arrival: float | None = None,
    spare: int = 0,
    **more: object,
) -> Add:
    blocks = -(-tokens // P) + spare
    sampling = Sampling(most, 0.0, stop_token_ids=(99,)) if most else None
    return Add(
        Generation(1, counter),
        tuple(range(tokens)),
        tuple(BlockId(counter * 100 + i) for i in range(blocks)),
        float(counter) if arrival is None else arrival,
        tokens,
        sampling,
        **more,  # type: ignore[arg-type]
    )


def play(s: Scheduler, now: float = 0.0, token: int = 7) -> tuple[Step, list[Event]]:
    """One step in which every sequence that samples gets `token`, again and again where that was guessed."""
    step = s.schedule(now)
    for c in step.chunks:
        assert c.sequence.computed + c.count + len(c.draft) <= len(c.sequence.blocks) * P
    ready = [c.sequence for c in step.chunks if c.completes] + list(step.handed)
    right = {c.sequence.generation: len(list(takewhile(token.__eq__, c.draft))) for c in step.chunks}
    sampled = {q.generation: [(token, None)] * (1 + right.get(q.generation, 0)) for q in ready if q.sampling}
    logits = {q.generation: b"row!" for q in ready if not q.sampling}
    scores = {c.sequence.generation: [TokenLogprobs(t, -1.0) for t in c.sequence.targets(c.count)] for c in step.chunks}
    return step, [*step.closed, *s.record(step, Outcome(sampled, logits, scores), now)]


def counts(step: Step) -> dict[int, int]:
    return {c.sequence.generation.counter: c.count for c in step.chunks}


def test_a_prompt_is_cut_into_chunks_that_end_on_block_edges():
    s = scheduler(budget=40)
    s.add(add(1, 100), 0.0)
    assert [counts(play(s)[0])[1] for _ in range(3)] == [32, 32, 36]


def test_a_handed_over_sequence_reports_each_chunk_and_then_its_logits():
    s = scheduler(budget=32)
    s.add(add(1, 40), 0.0)
    g = Generation(1, 1)
    assert play(s)[1] == [Computed(g, 32)]
    assert play(s)[1] == [Computed(g, 40), Prefilled(g, b"row!", 0.0, 0.0), Closed(g, "finished", computed=40)]
    assert s.idle


def test_decode_tokens_come_before_prompt_chunks():
    s = scheduler(budget=32)
    s.add(add(1, 16, most=50), 0.0)
    play(s)
    s.add(add(2, 100), 0.0)
    step, _ = play(s)
    assert counts(step) == {1: 1, 2: 16}  # 31 tokens are left, one whole block fits


def test_beside_decode_tokens_a_prompt_makes_a_step_no_longer_than_it_may():
    s = scheduler()
    s.prompt_stretch, s.row_cost.share = 1.5, 0.1
    s.add(add(1, 10, most=50, spare=1), 0.0)
    play(s)
    s.add(add(2, 40, most=50), 0.0)
    assert [[(c.sequence.generation.counter, c.count) for c in play(s)[0].chunks] for _ in range(2)] == [
        [(1, 1), (2, 5)],
        [(1, 1), (2, 5)],
    ]


def test_what_is_left_of_a_steps_budget_is_no_part_of_a_block():
    s = scheduler()
    s.add(add(1, 58), 0.0)
    s.add(add(2, 100), 0.0)
    assert [(c.sequence.generation.counter, c.count) for c in play(s)[0].chunks] == [(1, 58)]


def test_where_nothing_is_decoded_a_prompt_has_the_whole_step():
    s = scheduler()
    s.prompt_stretch, s.row_cost.share = 1.5, 0.1
    s.add(add(1, 100, most=50), 0.0)
    assert [c.count for c in play(s)[0].chunks] == [64]


def test_a_quarter_of_the_prompt_budget_goes_to_the_shortest_prompt():
    s = scheduler(budget=128)
    s.add(add(1, 1000), 0.0)
    s.add(add(2, 64), 0.0)
    assert counts(s.schedule(0.0)) == {1: 96, 2: 32}


def test_the_rest_of_the_prompt_budget_goes_by_arrival():
    s = scheduler(budget=128)
    s.add(add(1, 1000, arrival=5.0), 0.0)
    s.add(add(2, 1000, arrival=1.0), 0.0)
    s.add(add(3, 32, arrival=9.0), 0.0)
    assert counts(s.schedule(0.0)) == {2: 96, 3: 32}


def test_a_sequence_with_logits_is_sampled_without_being_computed():
    s = scheduler()
    s.add(add(1, 20, most=5, logits=b"row!"), 0.0)
    step, events = play(s)
    assert step.chunks == ()
    assert events == [Sampled(Generation(1, 1), 7, None)]
    assert counts(play(s)[0]) == {1: 1}


def test_the_stop_token_ends_the_sequence():
    s = scheduler()
    s.add(add(1, 20, most=5), 0.0)
    _, events = play(s, token=99)
    assert events == [Sampled(Generation(1, 1), 99, "stop"), Closed(Generation(1, 1), "finished", computed=20)]


def test_max_tokens_counts_from_the_original_prompt():
    s = scheduler()
    resumed = add(1, 20, most=3)
    s.add(Add(resumed.generation, resumed.tokens, resumed.blocks, 0.0, 18, resumed.sampling), 0.0)  # 2 tokens before
    _, events = play(s)
    assert events[0] == Sampled(Generation(1, 1), 7, "length")


@pytest.mark.parametrize("most", [None, 5], ids=["handed over", "prefilled here"])
@pytest.mark.parametrize("tokens", [1, 33, 100])
def test_the_prompts_logprobs_come_once_with_the_end_of_its_prefill(tokens, most):
    s = scheduler(budget=32)
    s.add(add(1, tokens, most=most, prompt_logprobs=0), 0.0)
    events = [event for _ in range(8) for event in play(s)[1]]
    first, *later = [e.prompt_logprobs for e in events if isinstance(e, Prefilled | Sampled)]
    assert [one.token for one in first] == list(range(1, tokens))
    assert not any(later)


def test_a_history_that_was_generated_has_no_prompt_logprobs():
    s = scheduler()
    resumed = add(1, 20, most=9)
    s.add(replace(resumed, prompt_length=5, prompt_logprobs=0), 0.0)
    _, events = play(s)
    assert isinstance(events[0], Sampled)
    assert [one.token for one in events[0].prompt_logprobs] == [1, 2, 3, 4]


def test_what_is_cached_is_not_computed_and_chunks_go_on_from_there():
    s = scheduler(budget=40)
    s.add(add(1, 100, computed=48), 0.0)
    steps = [play(s) for _ in range(2)]
    assert [counts(step)[1] for step, _ in steps] == [32, 20]
    assert steps[0][1] == [Computed(Generation(1, 1), 80)]


@pytest.mark.parametrize("most", [None, 1])
def test_the_last_token_alone_is_computed_when_all_before_is_cached(most):
    s = scheduler()
    s.add(add(1, 33, most=most, computed=32), 0.0)
    step, events = play(s)
    assert counts(step) == {1: 1}
    assert events[-1] == Closed(Generation(1, 1), "finished", computed=33)


@pytest.mark.parametrize("wrong", [{"computed": 33}, {"computed": 48}, {"computed": -16}, {"computed": 20}])
def test_cached_positions_are_full_blocks_and_never_all(wrong):
    with pytest.raises(AssertionError):
        scheduler().add(add(1, 48, **wrong), 0.0)


def test_logprobs_of_a_prompt_want_it_computed():
    with pytest.raises(AssertionError, match="logprobs"):
        scheduler().add(add(1, 48, most=3, computed=16, prompt_logprobs=1), 0.0)


@pytest.mark.parametrize("logits", [None, b"row!"])
def test_nothing_writes_below_what_was_complete(logits):
    s = scheduler()
    s.add(add(1, 40, most=5, computed=16, logits=logits), 0.0)
    play(s)
    s.sequences[Generation(1, 1)].computed = 8
    with pytest.raises(AssertionError, match="share"):
        s.schedule(0.0)


def test_what_ends_says_how_far_it_was_unless_it_failed():
    s = scheduler(budget=32)
    for reason, computed in (("aborted", 32), ("preempted", 32), ("failed", 0)):
        s.add(add(1, 100), 0.0)
        play(s)
        assert s.close(Generation(1, 1), reason) == Closed(Generation(1, 1), reason, computed=computed)


def test_a_growing_sequence_draws_blocks():
    s = scheduler()
    s.add(add(1, 16, most=40), 0.0)
    for _ in range(18):
        play(s)
    assert len(s.sequences[Generation(1, 1)].blocks) == 3


def test_a_starved_sequence_skips_steps_and_goes_on_when_blocks_come():
    reserve = Reserve(0)
    s = Scheduler(max_batched_tokens=64, max_sequences=8, block_size=P, draw=reserve.draw, starve_s=0.25)
    s.add(add(1, 16, most=40), 0.0)
    play(s)
    assert not play(s, 0.1)[0].work
    reserve.left.append(BlockId(5))
    assert counts(play(s, 0.2)[0]) == {1: 1}


def test_after_starving_too_long_the_latest_arrival_is_preempted():
    s = scheduler(reserve=0)
    s.add(add(1, 16, most=40), 0.0)
    s.add(add(2, 16, most=40, spare=1), 0.0)
    play(s)
    play(s, 1.0)
    _, events = play(s, 1.3)
    assert [(e.generation.counter, e.reason, e.computed) for e in events if isinstance(e, Closed)] == [
        (2, "preempted", 17)
    ]
    assert list(s.sequences) == [Generation(1, 1)]


def test_the_earliest_is_never_preempted():
    s = scheduler(reserve=0)
    s.add(add(1, 16, most=40), 0.0)
    for tick in range(100):
        _, events = play(s, tick * 1.0)
        assert not any(isinstance(e, Closed) for e in events)


def test_queue_and_prefill_times_are_measured_from_add_and_first_chunk():
    s = scheduler(budget=32)
    s.add(add(1, 40), 10.0)
    play(s, 12.0)
    _, events = play(s, 15.0)
    assert events[1] == Prefilled(Generation(1, 1), b"row!", 2.0, 3.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40)), min_size=1, max_size=8),
    st.integers(24, 200),
    st.integers(3, 12),
    st.sampled_from((0, 4, 63)),
    st.sampled_from((0.0, 1.0, 1.5, 4.0)),
)
def test_every_sequence_ends_and_no_step_exceeds_its_budget(requests, budget, blocks, speculate, stretch):
    """With a reserve that suffices for the growth of one: 40 tokens take 3 blocks."""
    reserve = Reserve(blocks)
    s = scheduler(budget=budget)
    s.prompt_stretch = stretch
    s.draw, s.speculate, said = reserve.draw, speculate, dict.fromkeys(range(1, len(requests) + 1), 0)
    drawn: dict[int, set[BlockId]] = {}
    for i, (tokens, most) in enumerate(requests, 1):
        s.add(add(i, tokens, most=most), 0.0)
    ended: set[int] = set()
    for tick in range(2000):
        step, events = play(s, tick * 0.1)
        assert sum(c.count + len(c.draft) for c in step.chunks) <= budget
        for chunk in step.chunks:
            sequence = chunk.sequence
            assert sequence.computed <= min(len(sequence.tokens), len(sequence.blocks) * P)
            drawn[sequence.generation.counter] = {b for b in sequence.blocks if b >= 1000}
        for event in events:
            if isinstance(event, Closed):
                reserve.left += drawn.pop(event.generation.counter, ())
            elif isinstance(event, Sampled):
                said[event.generation.counter] += 1
                assert said[event.generation.counter] <= requests[event.generation.counter - 1][1]
        ended |= {e.generation.counter for e in events if isinstance(e, Closed | Prefilled)}
        if len(ended) == len(requests):
            return
    pytest.fail(f"only {sorted(ended)} of {len(requests)} ended")
