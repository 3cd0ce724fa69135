"""Plans as they are sent, to somebody who answers when the test wants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from load_client import Answer
from load_plan import Closed, Plan, Request
from load_run import Ask, Run, chains, drive
from load_text import Prompt


def request(i: int, at: float | None = None, session: str = "") -> Request:
    return Request(i, Prompt(str(i), ()), 1, at, session)


def run_of(plan: Plan, ask: Ask, stop: Callable[[], asyncio.Event] = asyncio.Event) -> Run:
    run = Run()

    async def test() -> None:
        await asyncio.wait_for(drive(plan, ask, run, stop()), 60)

    asyncio.run(test())
    return run


class Friend:
    """Answers at once, after everybody else had a turn, and remembers who was under way when."""

    def __init__(self, fails: bool = False) -> None:
        self.log: list[tuple[str, int]] = []
        self.under_way = self.most = 0
        self.fails = fails

    async def __call__(self, prompt: Prompt, tokens: int, answer: Answer) -> None:
        self.log.append(("begins", int(prompt.text)))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        self.log.append(("ends", int(prompt.text)))
        answer.status = "failed" if self.fails else "ok"


def test_an_open_loop_does_not_wait_for_answers() -> None:
    all_here = asyncio.Event()
    under_way = 0

    async def answers_once_all_are_here(prompt: Prompt, tokens: int, answer: Answer) -> None:
        nonlocal under_way
        under_way += 1
        if under_way == 5:
            all_here.set()
        await all_here.wait()
        answer.status = "ok"

    run = run_of(Plan("", tuple(request(i, i / 1000) for i in range(5))), answers_once_all_are_here)
    assert run.counts()["ok"] == 5


@pytest.mark.parametrize("fails", [False, True])
def test_a_session_keeps_its_order_and_each_waits_for_the_one_before(fails: bool) -> None:
    friend = Friend(fails)
    plan = Plan("", tuple(request(i, 0.0, "ab"[i % 2]) for i in range(8)))
    run = run_of(plan, friend)
    for session in (0, 1):
        log = [entry for entry in friend.log if entry[1] % 2 == session]
        assert log == [(what, i) for i in range(session, 8, 2) for what in ("begins", "ends")]
    assert friend.most == 2  # the sessions do not wait for each other
    assert len(run.asked) == 8


def test_a_request_is_due_when_the_one_before_it_has_ended_if_that_is_later_than_its_time() -> None:
    ended = []

    async def ask(prompt: Prompt, tokens: int, answer: Answer) -> None:
        await asyncio.sleep(0.01)
        ended.append(time.perf_counter())
        answer.status = "ok"

    run = run_of(Plan("", (request(0, 0.0, "a"), request(1, 0.001, "a"))), ask)
    first, second = (answer.due for _, answer in run.asked)
    assert first == run.began
    assert second >= ended[0]


def test_a_closed_loop_keeps_its_lanes_busy_and_sends_each_request_once() -> None:
    friend = Friend()
    run = run_of(Plan("", closed=Closed(3, request, 10)), friend)
    assert [asked.index for asked, _ in run.asked] == list(range(10))
    assert friend.most == 3


def test_a_closed_loop_sends_nothing_after_its_time() -> None:
    assert run_of(Plan("", closed=Closed(3, request), until=0.0), Friend()).asked == []


def test_timed_requests_go_beside_a_closed_loop() -> None:
    plan = Plan("", (request(100, 0.0), request(101, 0.001)), Closed(2, request, 4))
    assert sorted(asked.index for asked, _ in run_of(plan, Friend()).asked) == [0, 1, 2, 3, 100, 101]


def test_a_stop_cuts_what_is_under_way_and_keeps_what_there_is() -> None:
    stop: list[asyncio.Event] = []

    def make() -> asyncio.Event:
        stop.append(asyncio.Event())
        return stop[0]

    async def ask(prompt: Prompt, tokens: int, answer: Answer) -> None:
        if prompt.text == "0":
            answer.status = "ok"
            return
        stop[0].set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            answer.status = "cut"
            raise

    run = run_of(Plan("", (request(0, 0.0), request(1, 0.001), request(2, 3600.0))), ask, make)
    assert run.interrupted
    assert run.counts() == {"ok": 1, "failed": 0, "waiting": 0, "cut": 1}


def test_a_mistake_of_ours_is_raised() -> None:
    async def ask(prompt: Prompt, tokens: int, answer: Answer) -> None:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):
        run_of(Plan("", (request(0, 0.0),)), ask)


def test_chains_are_sessions_and_single_requests_by_time() -> None:
    timed = (request(0, 0.0, "a"), request(1, 1.0), request(2, 2.0, "b"), request(3, 3.0, "a"), request(4, 4.0))
    assert [[each.index for each in chain] for chain in chains(timed)] == [[0, 3], [1], [2], [4]]
