"""Steady and mixed plans, and what is said of plans before they are sent."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

import pytest
from load_kit import exact_book
from load_plan import Lengths, Phases, Plan, Request, mixed, seen_before, statistics, steady
from load_text import InputError, Prompt

BOOK = exact_book()
SHORT = {"prompt_tokens": Lengths(20, 20), "output_tokens": Lengths(5, 9)}
MIXED: dict[str, Any] = {
    "streams": 4,
    "stream_prompt": 10,
    "stream_output": 80,
    "long_prompt": 100,
    "long_output": 2,
    "long_every": 3.0,
    "phase_seconds": 8.0,
    "phases": 4,
    "settle": 1.0,
}


def test_a_plan_is_the_same_each_time_and_another_with_another_seed() -> None:
    def plans(seed: int) -> tuple[list[Request], list[Request]]:
        book = exact_book()
        return steady(book, rate=5, requests=20, seed=seed, **SHORT).known(), mixed(book, seed=seed, **MIXED).known()

    assert plans(0) == plans(0)
    for one, other in zip(plans(0), plans(1), strict=True):
        assert [request.prompt for request in one] != [request.prompt for request in other]


def test_uniform_arrivals_are_even_and_poisson_ones_have_the_rate() -> None:
    even = steady(BOOK, rate=4, uniform=True, duration=2.0, **SHORT)
    assert [request.at for request in even.timed] == [i / 4 for i in range(8)]
    drawn = steady(BOOK, rate=4, requests=400, **SHORT)
    times = [request.at or 0.0 for request in drawn.timed]
    assert times == sorted(times)
    assert 80 < times[-1] < 120
    gaps = [b - a for a, b in pairwise(times)]
    assert 0.2 < sum(gap < 0.25 * 0.3567 for gap in gaps) / len(gaps) < 0.4  # exp: 30% are below 0.3567 means


def test_lengths_are_drawn_from_their_range() -> None:
    lengths = {request.output_tokens for request in steady(BOOK, concurrency=1, requests=100, **SHORT).known()}
    assert lengths == {5, 6, 7, 8, 9}
    assert Lengths.parse("7") == Lengths(7, 7)
    for wrong in ("0", "9-5", "x", "-3"):
        with pytest.raises(ValueError):
            Lengths.parse(wrong)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"requests": 3}, "one of --concurrency"),
        ({"requests": 3, "rate": 1.0, "concurrency": 1}, "one of --concurrency"),
        ({"rate": 1.0}, "--requests N or --duration"),
    ],
)
def test_a_steady_plan_needs_a_loop_and_an_end(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        steady(BOOK, **SHORT, **options)


def test_long_prompts_come_in_every_second_phase() -> None:
    plan = mixed(BOOK, **MIXED)
    assert [request.at for request in plan.timed] == [9, 12, 15, 25, 28, 31]
    assert plan.phases is not None
    assert [plan.phases.index(request.at or 0.0) for request in plan.timed] == [1, 1, 1, 3, 3, 3]
    assert plan.until == plan.phases.end == 33
    assert {len(request.prompt.ids) for request in plan.timed} == {100}
    assert plan.closed is not None
    first = list(islice(plan.closed.requests(), 6))
    assert [request.output_tokens for request in first] == [20, 40, 60, 80, 80, 80]
    assert len({request.index for request in (*plan.timed, *first)}) == 12
    with pytest.raises(InputError, match="an even number"):
        mixed(BOOK, **MIXED | {"phases": 3})


def test_phases_take_turns_between_their_start_and_end() -> None:
    phases = Phases(start=1.0, seconds=2.0, count=2)
    assert [phases.index(at) for at in (0.9, 1.0, 2.9, 3.0, 4.9, 5.0)] == [None, 0, 0, 1, 1, None]


def test_blocks_seen_before_are_those_of_whole_prefixes() -> None:
    a, b, c = (tuple(range(k, k + 16)) for k in (0, 100, 200))
    assert seen_before([a + b, a + b + c[:15], c + b, (*a[:15], 9, *b), a + c]) == (3, 10, 32 + 47 + 32 + 32 + 32)


def test_statistics_count_what_is_planned() -> None:
    prompt = Prompt("x", tuple(range(40)))
    times = [0.0, 9.0, 11.0, 12.0, 13.0]
    plan = Plan("", tuple(Request(i, prompt, 3, at, session=str(i % 2)) for i, at in enumerate(times)), left_out=2)
    counts = statistics(plan)
    assert (counts["requests"], counts["left_out"], counts["sessions"]) == (5, 2, 2)
    assert (counts["span_s"], counts["busiest_10_s"]) == (13.0, 3)
    assert (counts["tokens_in"]["sum"], counts["tokens_out"]["sum"]) == (200, 15)
    assert (counts["blocks_seen_before"], counts["blocks"], counts["tokens_in_seen_blocks"]) == (8, 10, 128)


def test_of_an_endless_loop_statistics_say_so() -> None:
    assert statistics(mixed(BOOK, **MIXED))["endless"]
    assert not statistics(steady(BOOK, concurrency=2, requests=3, **SHORT))["endless"]
