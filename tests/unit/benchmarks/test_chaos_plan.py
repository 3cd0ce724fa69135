"""Plans of faults: from the seed alone, every kind as often; and what a cluster is asked meanwhile."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import chaos_show
import pytest
from chaos_check import Result, Strike, judge
from chaos_load import http_status, questions
from chaos_plan import Times, catalogue, plan, shown
from chaos_target import at_rest, leaked
from load_kit import exact_book

TIMES = Times(stall_s=3.0, silence_s=5.0, transfer_s=5.0)
REST = {
    "id": "decode#1",
    "role": "decode",
    "state": "alive",
    "free": 3,
    "cached": 2,
    "leased": 0,
    "total": 5,
    "offered": 0,
    "active": 0,
    "revoked": 0,
    "reported": 0,
    "held": 0,
}


def test_equal_seeds_are_equal_plans() -> None:
    one, same, other = (plan(seed, 60, TIMES) for seed in (4, 4, 5))
    assert [shown(each, 1) for each in one] == [shown(each, 1) for each in same]
    assert one != other


def test_every_kind_comes_as_often_as_any_other() -> None:
    kinds = list(catalogue(TIMES))
    counts = Counter(planned.fault.kind for planned in plan(0, 3 * len(kinds) + 5, TIMES))
    assert set(counts) == set(kinds)
    assert sorted(counts.values()) == [3] * (len(kinds) - 5) + [4] * 5


def test_only_some_kinds() -> None:
    assert {planned.fault.kind for planned in plan(0, 9, TIMES, ["burst", "kill redis"])} == {"burst", "kill redis"}
    with pytest.raises(ValueError, match="no such faults: kill all; allowed: kill prefill,"):
        plan(0, 1, TIMES, ["kill all"])


def test_questions_are_distinct_and_fit_the_context() -> None:
    made = questions(exact_book(), 3)
    assert made == questions(exact_book(), 3)
    assert [question.number for question in made] == list(range(len(made)))
    assert len({question.prompt for question in made}) == len(made)
    assert all(len(each.prompt) + each.sampling["max_tokens"] <= 128 for each in made)
    assert {each.n for each in made} == {1, 3}
    assert {each.kind for each in made} == {"stream", "long"}
    assert {each.fresh for each in made} == {True, False}
    assert len({each.prompt[:16] for each in made}) < len(made), "some share their first blocks"


@pytest.mark.parametrize(
    ("status", "body", "is_"),
    [
        (429, '{"error": {"type": "rate_limit_error", "message": "m"}}', "refused"),
        (503, '{"error": {"type": "service_unavailable", "message": "m"}}', "refused"),
        (499, '{"error": {"type": "request_cancelled", "message": "m"}}', "cancelled"),
        (500, '{"error": {"type": "server_error", "message": "m"}}', "failed"),
        (500, "Internal Server Error", "broken"),  # HAProxy's, of an ingress that has died
        (503, "[]", "broken"),
    ],
)
def test_only_our_own_words_are_a_refusal(status: int, body: str, is_: str) -> None:
    assert http_status(status, body) == is_


@pytest.mark.parametrize("name", ["leased", "offered", "active", "revoked", "reported", "held"])
def test_whatever_a_replica_still_holds_is_a_leak(name: str) -> None:
    assert at_rest({"waiting": 0, "replicas": [REST]}, {"decode": 1, "prefill": 0})
    status = {"waiting": 0, "replicas": [REST | {name: 1}]}
    assert any(f"decode#1: {name} 1" in line for line in leaked(status))
    assert not at_rest(status, {"decode": 1, "prefill": 0})


def test_lost_blocks_waiters_and_lost_replicas_are_no_rest() -> None:
    for status in (
        {"waiting": 0, "replicas": [REST | {"free": 2}]},
        {"waiting": 1, "replicas": [REST]},
        {"waiting": 0, "replicas": [REST | {"state": "draining"}]},
    ):
        assert not at_rest(status, {"decode": 1, "prefill": 0})


BEGIN, END = "<!-- chaos: begin -->", "<!-- chaos: end -->"


def test_the_table_is_written_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    result = Result({}, [], [Strike(1, "burst", "24 requests", 0.0, 2.0)])
    chaos_show.write_markdown(page, "chaos", "a command", result, judge(result))
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n`a command`\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "| burst | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 2.0 | 2.0 |" in text
    assert "old" not in text
