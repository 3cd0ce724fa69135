"""Figures of timelines that were written by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from load_client import Answer, Chunk
from load_figures import BY_TOKENIZER, EVENTS, IN_EVERY_CHUNK, ONE_EACH, Slo, figures, latencies, records, timeline
from load_kit import exact_book
from load_percentiles import percentile, spread
from load_plan import Phases, Plan, Request
from load_run import Run
from load_text import Prompt


def answer(sent: float, *at: float, events: list[int] | None = None, **fields: Any) -> Answer:
    chunks = [Chunk(when, count, "") for when, count in zip(at, events or [1] * len(at), strict=True)]
    ended = at[-1] if at else sent
    return Answer(**{"due": sent, "sent": sent, "chunks": chunks, "status": "ok", "ended": ended} | fields)


def request(i: int = 0, kind: str = "") -> Request:
    return Request(i, Prompt("", (1, 2, 3, 4)), 5, kind=kind)


def figures_of(*answers: Answer, seconds: float = 10.0, slo: Slo | None = None) -> dict[str, Any]:
    asked = [(request(i), each) for i, each in enumerate(answers)]
    return figures(Plan(""), Run(seconds=seconds, cpu_seconds=1.0, asked=asked, ticks=[0.0, 0.5]), slo or Slo())


def test_a_percentile_is_a_value_that_enough_others_do_not_exceed() -> None:
    hundred = [float(i) for i in range(1, 101)]
    assert [percentile(hundred, p) for p in (0, 1, 50, 90, 99, 100)] == [1, 1, 50, 90, 99, 100]
    assert [percentile([1.0, 2.0, 3.0], p) for p in (33, 34, 50, 66, 67, 99)] == [1, 2, 2, 2, 3, 3]
    assert spread([3.0, 1.0]) == {"count": 2, "mean": 2.0, "p50": 1.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert spread([]) == {"count": 0}


def test_a_gap_counts_once_and_per_token_as_often_as_there_are_tokens() -> None:
    line = timeline(answer(0.0, 1.0, 1.5, 3.5, events=[1, 1, 4], output_tokens=6))
    assert (line.source, line.total) == (ONE_EACH, 6)
    assert line.lengths() == [0.5, 2.0]
    assert line.per_token() == [0.5, 0.5, 0.5, 0.5, 0.5]
    assert line.mean_per_token() == 0.5


def test_a_single_chunk_has_no_time_per_token() -> None:
    line = timeline(answer(0.0, 1.0, events=[3]))
    assert (line.lengths(), line.mean_per_token(), line.total) == ([], None, 3)
    assert timeline(answer(0.0)).mean_per_token() is None


def test_usage_in_every_chunk_says_what_each_has() -> None:
    said = Answer(chunks=[Chunk(1.0, 1, "", 2), Chunk(2.0, 1, "", 5)], output_tokens=5)
    assert (timeline(said).tokens, timeline(said).source) == ((2, 3), IN_EVERY_CHUNK)


def test_the_token_that_ends_an_answer_may_have_no_text() -> None:
    line = timeline(answer(0.0, 1.0, 2.0, output_tokens=3, bare_finish=4.0))
    assert (line.at, line.tokens, line.source) == ((1.0, 2.0, 4.0), (1, 1, 1), ONE_EACH)
    line = timeline(answer(0.0, 1.0, 2.0, output_tokens=2, bare_finish=4.0))
    assert line.at == (1.0, 2.0)


def test_the_tokenizer_counts_where_the_server_does_not_say() -> None:
    book = exact_book()
    text = " the sword never sleeps"
    chunks = [Chunk(1.0, 1, text[:10]), Chunk(2.0, 1, text[10:16]), Chunk(3.0, 1, text[16:])]
    line = timeline(Answer(chunks=chunks), book)
    assert line.source == BY_TOKENIZER
    assert line.total == len(book.read(text).ids)
    assert line.tokens[0] == len(book.read(" the sword").ids)
    assert timeline(Answer(chunks=chunks, output_tokens=99)).source == EVENTS
    assert timeline(Answer(chunks=chunks, output_tokens=99)).total == 99


def test_latencies_are_those_of_each_request() -> None:
    each = [answer(1.0, 3.0, 4.0, 6.0), answer(10.0, 11.0, 15.0)]
    found = latencies([(one, timeline(one)) for one in each])
    assert (found["ttft"]["p50"], found["ttft"]["max"]) == (1.0, 2.0)
    assert (found["gap"]["count"], found["gap"]["p50"], found["gap"]["max"]) == (3, 2.0, 4.0)
    assert (found["tpot"]["p50"], found["tpot"]["max"]) == (1.5, 4.0)
    assert (found["whole"]["p50"], found["whole"]["max"]) == (5.0, 5.0)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), 3),
        (Slo(ttft=1.0), 2),
        (Slo(itl=1.0), 2),
        (Slo(ttft=1.0, itl=1.0), 1),
        (Slo(ttft=0.1, itl=9.0), 0),
    ],
)
def test_goodput_is_of_requests_that_keep_both(slo: Slo, good: int) -> None:
    fast = answer(0.0, 1.0, 2.0, 3.0)
    late = answer(0.0, 1.5, 2.0)
    stalled = answer(0.0, 0.5, 1.0, 2.5)
    failed, empty = answer(0.0, 0.5, status="failed"), answer(0.0)
    goodput = figures_of(fast, late, stalled, failed, empty, slo=slo)["goodput"]
    assert (goodput["good"], goodput["per_s"]) == (good, good / 10)


def test_one_of_a_hundred_gaps_may_be_long_but_not_two() -> None:
    times = [float(i) for i in range(101)]
    slow = [times[0], *(at + 5 for at in times[1:])]
    slower = [*slow[:50], *(at + 5 for at in slow[50:])]
    assert Slo(itl=1.0).kept(answer(0.0, *slow), timeline(answer(0.0, *slow)))
    assert not Slo(itl=1.0).kept(answer(0.0, *slower), timeline(answer(0.0, *slower)))


def test_totals_count_tokens_errors_and_caches() -> None:
    told = answer(0.0, 1.0, 2.0, output_tokens=2, prompt_tokens=10, cached_tokens=4)
    quiet = answer(0.0, 1.0, 2.0, 3.0)
    cut = answer(0.0, 1.0, status="cut")
    refused = [answer(0.0, status="failed", error="HTTP 429", message=f"busy {i}") for i in range(7)]
    broken = answer(0.0, 1.0, status="failed", error="broken off")
    found = figures_of(told, quiet, cut, *refused, broken)
    assert found["requests"] == {"ok": 2, "failed": 8, "waiting": 0, "cut": 1, "no_tokens": 0}
    assert found["errors"]["kinds"] == {"HTTP 429": 7, "broken off": 1}
    assert [each["message"] for each in found["errors"]["first"]] == ["busy 0", "", "busy 1", "busy 2", "busy 3"]
    tokens = found["tokens"]
    assert (tokens["in"], tokens["in_planned"], tokens["in_by_usage"], tokens["in_per_s"]) == (14, 8, 1, 1.4)
    assert (tokens["out"], tokens["out_planned"], tokens["out_per_s"]) == (6, 10, 0.6)
    assert tokens["sources"] == {ONE_EACH: 1, EVENTS: 2}
    assert found["cached"] == {"requests_told": 1, "prompt_tokens": 10, "cached_tokens": 4}


def test_the_clients_own_delays_are_apart() -> None:
    late = answer(3.0, 4.0, due=1.0)
    client = figures_of(late, answer(0.0, 1.0))["client"]
    assert (client["late"]["p50"], client["late"]["max"]) == (0.0, 2.0)
    assert client["loop"]["max"] == 0.5
    assert (client["cpu_seconds"], client["cpu_share"]) == (1.0, 0.1)
    assert figures_of(late)["latency"][""]["ttft"]["max"] == 1.0


def test_gaps_of_streams_fall_into_their_phases() -> None:
    began = 100.0
    phases = Phases(start=10.0, seconds=10.0, count=4)  # without, with, without, with
    stream = answer(100.0, *(began + at for at in (5, 9, 12, 13, 19.5, 21, 24, 29, 31, 36, 39, 41, 49, 51)))
    # From 22 to 32.5: a little into the third phase
    long = answer(began + 22.0, began + 32.0, ended=began + 32.5)
    asked = [(request(0, "stream"), stream), (request(1, "long"), long)]
    run = Run(began=began, seconds=60.0, asked=asked)
    found = figures(Plan("", phases=phases), run, Slo())
    phased = found["phases"]
    # Those that end in 10-20 are 3, 1, 6.5; in 20-30: 1.5, 3, 5; in 30-40: 2 and 5 (set apart), 3; in 40-50: 2, 8
    assert (phased["without"]["count"], phased["without"]["max"]) == (4, 6.5)
    assert (phased["with"]["count"], phased["with"]["max"]) == (5, 8.0)
    assert phased["set_apart"] == 2
    assert phased["p99_ratio"] == 8.0 / 6.5
    assert phased["p99_ratios"] == [5.0 / 6.5, 8.0 / 3.0]
    assert [phase["count"] for phase in phased["by_phase"]] == [3, 3, 1, 2]
    assert set(found["latency"]) == {"stream", "long"}


def test_without_gaps_there_is_no_ratio() -> None:
    run = Run(seconds=1.0, asked=[(request(0, "stream"), answer(0.0, 0.5))])
    phases = figures(Plan("", phases=Phases(0.0, 1.0, 2)), run, Slo())["phases"]
    assert (phases["p99_ratio"], phases["p99_ratios"], phases["with"]) == (None, [None], {"count": 0})


def test_records_have_each_requests_times_since_the_beginning() -> None:
    one = answer(12.0, 13.0, 13.5, due=11.0, headers=12.5, output_tokens=2)
    none = Answer(due=12.0, status="cut")
    found = records(Run(began=10.0, asked=[(request(3), one), (request(4), none)]))
    assert json.loads(json.dumps(found)) == found
    assert (found[0]["index"], found[0]["due"], found[0]["sent"], found[0]["headers"]) == (3, 1.0, 2.0, 2.5)
    assert found[0]["chunks"] == [[3.0, 1], [3.5, 1]]
    assert (found[1]["sent"], found[1]["chunks"]) == (None, [])
