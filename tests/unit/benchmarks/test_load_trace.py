"""Traces of each kind as plans, from small files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from load_kit import exact_book
from load_plan import Plan, seen_before
from load_text import InputError
from load_trace import trace

BOOK = exact_book()
MOONCAKE = [
    # ms, input, output, ids: the second goes on after the first's two full blocks, the third shares one
    (0, 1100, 320, [0, 1, 2]),
    (0, 1536, 33, [0, 1, 3]),
    (3000, 600, 32, [0, 4]),
    (9000, 513, 1, [5, 6]),
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,320,10
2023-11-16 18:17:04.0319600,64,64
2023-11-16 18:17:05.9799600,33,1
"""
AGENTS = [
    (5_000_000, "My lord sees", "the crown", "a"),
    (6_000_000, "The king", "", "b"),
    (7_500_000, "My lord sees the crown and departs.", "alas", "a"),
    (9_000_000, "The king hides", "wine", "b"),
]


def mooncake(folder: Path) -> Path:
    rows = [dict(zip(("timestamp", "input_length", "output_length", "hash_ids"), row, strict=True)) for row in MOONCAKE]
    file = folder / "mooncake.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return file


def azure(folder: Path) -> Path:
    file = folder / "azure.csv"
    file.write_text(AZURE, encoding="utf-8")
    return file


def agents(folder: Path) -> Path:
    rows = [dict(zip(("timestamp", "input", "output", "session_id"), row, strict=True)) for row in AGENTS]
    file = folder / "agents.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


def times(plan: Plan) -> list[float | None]:
    return [request.at for request in plan.timed]


def lengths(plan: Plan) -> list[tuple[int, int]]:
    return [(len(request.prompt.ids), request.output_tokens) for request in plan.timed]


@pytest.mark.parametrize("write", [mooncake, azure, agents])
def test_a_plan_is_the_same_each_time(write: Any, tmp_path: Path) -> None:
    file = write(tmp_path)
    assert trace(exact_book(), file) == trace(exact_book(), file)


def test_a_mooncake_id_is_a_block_and_equal_prefixes_are_equal_text(tmp_path: Path) -> None:
    plan = trace(BOOK, mooncake(tmp_path), divide=32)
    assert times(plan) == [0, 0, 3, 9]
    assert lengths(plan) == [(35, 10), (48, 2), (19, 1), (17, 1)]
    first, second, third, other = (request.prompt for request in plan.timed)
    assert first.ids[:32] == second.ids[:32]
    assert second.ids[:16] == third.ids[:16]
    assert third.ids[16:] != first.ids[16:19]
    assert other.ids[:16] != first.ids[:16]
    assert first.text.startswith(third.text[:20])
    assert seen_before(request.prompt.ids for request in plan.timed)[:2] == (3, 7)
    for request in plan.timed:
        assert BOOK.read(request.prompt.text) == request.prompt


def test_undivided_a_mooncake_block_has_its_512_tokens(tmp_path: Path) -> None:
    plan = trace(BOOK, mooncake(tmp_path), limit=2)
    assert lengths(plan) == [(1100, 320), (1536, 33)]
    first, second = (request.prompt.ids for request in plan.timed)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1100]
    with pytest.raises(InputError, match="allowed: 1, 2, 4"):
        trace(BOOK, mooncake(tmp_path), divide=3)


def test_the_clock_is_slowed_after_the_window_was_cut(tmp_path: Path) -> None:
    file = mooncake(tmp_path)
    plan = trace(BOOK, file, divide=32, window=5, clock_scale=10)
    assert times(plan) == [0, 0, 30]
    assert plan.clock_scale == 10
    assert times(trace(BOOK, file, divide=32, spread_batches=True)) == [0, 1.5, 3, 9]


def test_what_does_not_fit_the_context_is_left_out_and_counted(tmp_path: Path) -> None:
    plan = trace(BOOK, mooncake(tmp_path), divide=32, context=45)
    assert lengths(plan) == [(35, 10), (19, 1), (17, 1)]
    assert plan.left_out == 1
    assert [request.index for request in plan.timed] == [0, 1, 2]
    plan = trace(BOOK, agents(tmp_path), context=len(BOOK.read(AGENTS[3][1]).ids) + 4)
    assert plan.left_out + len(plan.timed) == 4
    assert plan.left_out > 0


def test_azure_has_lengths_and_times_and_no_shared_prefix(tmp_path: Path) -> None:
    plan = trace(BOOK, azure(tmp_path), divide=4)
    assert times(plan) == [0, pytest.approx(0.052), pytest.approx(2.0)]
    assert lengths(plan) == [(80, 3), (16, 16), (9, 1)]
    assert seen_before(request.prompt.ids for request in plan.timed)[0] == 0
    assert trace(BOOK, azure(tmp_path), seed=1).timed[0].prompt != trace(BOOK, azure(tmp_path)).timed[0].prompt


def test_agents_keep_their_texts_and_sessions(tmp_path: Path) -> None:
    plan = trace(BOOK, agents(tmp_path))
    assert [request.prompt.text for request in plan.timed] == [row[1] for row in AGENTS]
    assert [request.session for request in plan.timed] == ["a", "b", "a", "b"]
    assert times(plan) == [0, 1, 2.5, 4]
    assert plan.timed[0].output_tokens == len(BOOK.read("the crown").ids)
    assert plan.timed[1].output_tokens == 1
    with pytest.raises(InputError, match="leave --divide out"):
        trace(BOOK, agents(tmp_path), divide=2)


def test_sessions_can_begin_at_other_times(tmp_path: Path) -> None:
    plan = trace(BOOK, agents(tmp_path), session_every=2.0)
    assert [(request.session, request.at) for request in plan.timed] == [("a", 0), ("b", 2), ("a", 2.5), ("b", 5)]
    with pytest.raises(InputError, match="has no sessions"):
        trace(BOOK, azure(tmp_path), session_every=2.0)


@pytest.mark.parametrize("content", ["", "hello", "[1]", '{"timestamp": 1}', '{"timestamp": 1, "hash_ids": [1]}'])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match="is no known trace"):
        trace(BOOK, tmp_path / "file")
