"""The checker of runs with faults: each way in which an answer can be wrong, and what is nobody's fault."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from chaos_check import Result, Strike, compare, judge
from chaos_load import Door, Outcome, Said, Status

DEATH = Strike(1, "kill ingress", "process 1", at=10.0, until=14.0, breaks=True)
KILL = Strike(2, "kill decode", "process 2", at=20.0, until=26.0)


def outcome(door: Door = "grpc", status: Status = "ok", **fields: Any) -> Outcome:
    """Whole, of two choices, from second 1 to 2."""
    ids = ([5, 6, 7], [8]) if door == "grpc" else ([], [])
    said = [Said(ids[0], "one two three", "length"), Said(ids[1], "four", "stop")]
    return Outcome(
        **({"question": 0, "door": door, "id": "a", "sent": 1.0, "said": said, "ended": 2.0} | fields), status=status
    )


def part(door: Door, status: Status, sent: float, ended: float | None) -> Outcome:
    """One that ended early."""
    made = outcome(door, status, sent=sent, ended=ended)
    made.said = [Said(made.said[0].ids[:2], "one two"), Said()]
    return made


def history(*outcomes: Outcome, **fields: Any) -> Result:
    named = [replace(each, id=f"request {number}") for number, each in enumerate(outcomes)]
    return Result({0: outcome()}, named, [DEATH, KILL], **fields)


def test_a_history_without_fault_is_met() -> None:
    verdict = judge(history(outcome(), outcome("http"), part("grpc", "left", 3, 4), part("http", "cancelled", 3, 4)))
    assert verdict.met
    assert (verdict.ok, verdict.left, verdict.complaints) == (2, 2, [])


def wrong_id(said: list[Said]) -> None:
    said[0].ids[1] = 9


def missing_last(said: list[Said]) -> None:
    said[0].ids.pop()


def missing_middle(said: list[Said]) -> None:
    del said[0].ids[1]


def doubled(said: list[Said]) -> None:
    said[0].ids.insert(1, said[0].ids[1])


def doubled_last(said: list[Said]) -> None:
    said[0].ids.append(said[0].ids[-1])


def swapped_choices(said: list[Said]) -> None:
    said.reverse()


def other_text(said: list[Said]) -> None:
    said[1].text = "five"


def text_lost(said: list[Said]) -> None:
    said[0].text = "one three"


def text_doubled(said: list[Said]) -> None:
    said[0].text = "one two two three"


def other_finish(said: list[Said]) -> None:
    said[1].finish = "length"


def no_finish(said: list[Said]) -> None:
    said[1].finish = None


MUTATIONS: list[Callable[[list[Said]], None]] = [
    wrong_id,
    missing_last,
    missing_middle,
    doubled,
    doubled_last,
    swapped_choices,
    other_text,
    text_lost,
    text_doubled,
    other_finish,
    no_finish,
]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_each_mutation_of_an_answer_is_wrong(mutate: Callable[[list[Said]], None]) -> None:
    answer = outcome()
    mutate(answer.said)
    verdict = judge(history(answer))
    assert len(verdict.wrong) == 1
    assert not verdict.met


@pytest.mark.parametrize("mutate", MUTATIONS[5:])
def test_over_http_by_its_text(mutate: Callable[[list[Said]], None]) -> None:
    answer = outcome("http")
    mutate(answer.said)
    assert compare(answer, outcome())


def test_what_came_before_a_break_must_be_how_it_begins() -> None:
    broken = part("grpc", "broken", 9.0, 10.5)
    assert compare(broken, outcome()) is None
    for mutate in (wrong_id, doubled, other_text, text_lost):
        answer = deepcopy(broken)
        mutate(answer.said)
        assert compare(answer, outcome()), mutate.__name__


def test_a_choice_that_ended_before_the_break_must_be_whole() -> None:
    broken = part("grpc", "broken", 9.0, 10.5)
    broken.said[1] = Said([], "", "stop")
    assert compare(broken, outcome())


@pytest.mark.parametrize(
    ("sent", "ended", "torn"),
    [
        (9.0, 10.5, False),
        (9.0, 13.0, False),
        (12.0, 13.0, False),
        (15.0, 16.0, True),
        (8.0, 9.0, True),
        (19.0, 21.0, True),
    ],
)
def test_streams_may_break_only_where_an_ingress_died(sent: float, ended: float, torn: bool) -> None:
    verdict = judge(history(part("http", "broken", sent, ended)))
    assert (len(verdict.torn), verdict.broken) == (int(torn), int(not torn))
    assert verdict.met != torn


@pytest.mark.parametrize(("sent", "ended", "torn"), [(9.0, 11.5, False), (9.0, 12.5, True), (11.0, 13.0, True)])
def test_where_the_death_is_known_they_break_soon_after_it(sent: float, ended: float, torn: bool) -> None:
    soon = replace(DEATH, broken_by=12.0)
    verdict = judge(replace(history(part("http", "broken", sent, ended)), strikes=[soon, KILL]))
    assert len(verdict.torn) == int(torn)


def test_an_ingress_that_never_came_back_excuses_what_follows_but_is_a_complaint() -> None:
    never = replace(DEATH, until=None)
    verdict = judge(replace(history(part("grpc", "broken", 50.0, 51.0)), strikes=[never]))
    assert (verdict.torn, len(verdict.never), verdict.met) == ([], 1, False)


@pytest.mark.parametrize("status", ["hung", "open"])
def test_a_stream_without_an_end_hangs(status: Status) -> None:
    verdict = judge(history(part("grpc", status, 3.0, None)))
    assert (len(verdict.hung), verdict.met) == (1, False)


def test_refusals_are_counted_apart_and_are_no_fault() -> None:
    verdict = judge(history(outcome(), replace(part("http", "refused", 21.0, 22.0), said=[Said(), Said()])))
    assert (verdict.refused, verdict.met) == (1, True)


def test_any_other_error_is_a_fault() -> None:
    assert not judge(history(part("http", "failed", 3.0, 4.0))).met


def test_a_leak_is_a_fault() -> None:
    assert judge(history(outcome())).met
    verdict = judge(history(outcome(), left=["decode#1: leased 2"], leaked=2))
    assert (verdict.leaks, verdict.leaked, verdict.met) == (["left at the end: decode#1: leased 2"], 2, False)


def test_rows_count_what_was_under_way_at_a_fault() -> None:
    verdict = judge(
        history(
            outcome(sent=19.0, ended=27.0, resumes=1),
            outcome(sent=19.0, ended=27.0),
            part("http", "refused", 21.0, 22.0),
            outcome(sent=30.0, ended=31.0, resumes=1),
            part("http", "broken", 9.0, 10.5),
        )
    )
    ingress, decode = verdict.rows
    assert (decode.kind, decode.open, decode.resumed, decode.refused, decode.broken) == ("kill decode", 2, 1, 1, 0)
    assert (decode.median, decode.longest) == (6.0, 6.0)
    assert (ingress.open, ingress.broken) == (1, 1)
    assert verdict.resumed == 2
