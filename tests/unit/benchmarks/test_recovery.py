"""What is made of the measurements of recovery: figures and verdicts of samples that were written by hand."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import outage
import pytest
from cancel import Look, freed
from failover import Kill
from failover import shown as failovers
from load_kit import COUNTED, DONE, WHOLE, Reply, Server, event
from outage import AFTERWARDS, WITH, WITHOUT, Found, grown
from streams import Ask, Chunk, HttpStream, Stream, pauses, wrong

SHORT = Ask((5, 6, 7), 3)


def looks(*left: int) -> list[Look]:
    """One in each second, from 1 on."""
    return [Look(float(at), each) for at, each in enumerate(left, 1)]


def test_the_last_lease_that_goes_ends_the_last_cancel() -> None:
    assert freed([0.0, 0.5], looks(2, 1, 1, 0), 0) == [2.0, 3.5]


def test_what_others_hold_does_not_count() -> None:
    assert freed([0.0, 0.0], looks(7, 6, 5), 5) == [2.0, 3.0]


def test_a_request_with_two_leases_is_there_until_both_are_gone() -> None:
    assert freed([0.0, 0.0], looks(4, 3, 2, 1, 0), 0) == [4.0, 5.0]


def test_what_comes_back_had_not_gone() -> None:
    assert freed([0.0], looks(1, 0, 1, 0), 0) == [4.0]


def test_what_never_goes_takes_for_ever() -> None:
    assert freed([0.0, 0.0], looks(2, 1, 1), 0) == [2.0, math.inf]


def test_a_look_from_before_the_cancel_frees_nothing() -> None:
    assert freed([2.5], looks(0, 0, 0), 0) == [0.5]


@pytest.mark.parametrize(("gap", "met"), [(0.39, True), (0.41, False)])
def test_the_gap_is_held_against_detection_and_a_prefill(gap: float, met: bool) -> None:
    kill = Kill(64, gap=gap, paused=gap - 0.1, steps=0.02, reference=0.1)
    assert kill.detection == pytest.approx(0.1)
    assert failovers([kill])[2] == met


def test_pauses_are_told_in_steps_and_by_their_medians() -> None:
    found = Found({WITH: [[0.1, 0.2], [0.2]], WITHOUT: [[0.3, 0.3], [9.0]], AFTERWARDS: [[0.1]]}, steps=[0.1, 0.1])
    assert grown(found) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "met"),
    [
        ({}, True),
        ({"served": [5.1], "returned": [2.0]}, False),
        ({"served": [1.0], "returned": [-1.0]}, True),
        ({"broken": ["it ended"]}, False),
    ],
)
def test_an_outage_has_three_bars(change: dict[str, Any], met: bool) -> None:
    found = Found({WITH: [[0.1]], WITHOUT: [[0.2]], AFTERWARDS: [[0.1]]}, steps=[0.1], served=[5.0], returned=[2.0])
    for name, value in change.items():
        setattr(found, name, value)
    assert outage.shown(found, "kill")[1] == met


def one(*pieces: bytes, **how: Any) -> Stream:
    """What came of a stream over HTTP."""

    async def ask() -> Stream:
        async with Server([Reply(pieces, **how)]) as server:
            port = int(server.url.split(":")[2].split("/")[0])
            stream = HttpStream(SHORT, port)
            return await asyncio.wait_for(stream.whole(), 30)

    return asyncio.run(ask())


def test_a_stream_has_its_text_and_the_time_of_each_piece() -> None:
    stream = one(*WHOLE)
    assert (stream.error, stream.text, stream.finish, stream.usage) == ("", "abc", "length", COUNTED)
    assert [chunk.tokens for chunk in stream.chunks] == [1, 1, 1]
    assert stream.sent <= stream.chunks[0].at <= stream.chunks[-1].at


@pytest.mark.parametrize(
    ("pieces", "how", "said"),
    [
        (WHOLE[:2], {}, "DONE"),
        (WHOLE[:2], {"then": "drop"}, "Incomplete"),
        ((event("a"), b'data: {"error": {"message": "no"}}\n\n', DONE), {}, "no"),
        ((b"nobody is there",), {"status": 503}, "HTTP 503"),
    ],
)
def test_a_stream_that_breaks_says_how(pieces: tuple[bytes, ...], how: dict[str, Any], said: str) -> None:
    stream = one(*pieces, **how)
    assert said in stream.error
    assert wrong(stream, stream).startswith("broken: ")


def test_another_answer_is_wrong() -> None:
    whole = one(*WHOLE)
    assert wrong(whole, one(*WHOLE)) == ""
    assert "'abb'" in wrong(whole, one(event("a"), event("b"), event("b", finish="length"), DONE))


def test_a_pause_counts_where_it_is_at_least_in_part() -> None:
    stream = one(*WHOLE)
    stream.chunks = [Chunk(at, 1) for at in (1.0, 2.0, 5.0, 6.0, 7.0)]
    assert pauses(stream, 3.0, 4.0) == [3.0]
    assert pauses(stream, 1.5, 5.5) == [1.0, 3.0, 1.0]
