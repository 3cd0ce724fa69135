"""Nobody waits longer than they say, and a manager that begins anew is not yet taken at its word."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from bifolio.cluster.last_seen import LastSeen

SETTLE_S = 10.0


class Manager:
    """Answers with `answer`, an error or nothing for as long as it is None."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | Exception | None = None
        self.asked = 0

    @property
    def snapshot(self) -> Any:
        return self

    async def remote(self) -> dict[str, Any]:
        self.asked += 1
        while self.answer is None:
            await asyncio.sleep(0.001)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def of(epoch: int, replicas: int) -> dict[str, Any]:
    return {"epoch": epoch, "replicas": [{"id": str(number)} for number in range(replicas)]}


def run(body: Callable[[Manager, LastSeen], Any], settle_s: float = SETTLE_S) -> None:
    async def main() -> None:
        manager = Manager()
        await body(manager, LastSeen(manager, settle_s))

    asyncio.run(main())


def test_a_question_has_an_end() -> None:
    async def body(manager: Manager, seen: LastSeen) -> None:
        with pytest.raises(TimeoutError):
            await seen.ask(0.01)
        assert seen.settled is None
        manager.answer = of(1, 2)
        assert await seen.ask(1.0) == of(1, 2)
        assert seen.settled == of(1, 2)
        assert seen.heard_s < 1

    run(body)


def test_one_question_is_under_way_and_who_comes_later_waits_no_longer_for_it() -> None:
    async def body(manager: Manager, seen: LastSeen) -> None:
        await asyncio.gather(seen.refresh(0.05), seen.refresh(0.05))
        began = time.monotonic()
        await seen.refresh(0.05)
        assert time.monotonic() - began < 0.04
        assert manager.asked == 1
        manager.answer = of(1, 1)
        assert await seen.ask(1.0) == of(1, 1)
        assert manager.asked == 1

    run(body)


def test_of_a_manager_that_died_the_last_answer_is_kept() -> None:
    async def body(manager: Manager, seen: LastSeen) -> None:
        manager.answer = of(1, 2)
        await seen.refresh(1.0)
        manager.answer = ActorDiedError()
        await seen.refresh(1.0)
        assert seen.settled == of(1, 2)
        with pytest.raises(ActorDiedError):
            await seen.ask(1.0)

    run(body)


def test_a_mistake_of_ours_is_not_swallowed() -> None:
    async def body(manager: Manager, seen: LastSeen) -> None:
        manager.answer = ValueError("a bug")
        with pytest.raises(ValueError, match="a bug"):
            await seen.refresh(1.0)

    run(body)


def test_a_new_manager_is_believed_once_its_replicas_are_there() -> None:
    async def body(manager: Manager, seen: LastSeen) -> None:
        for answer, believed in (
            (of(1, 1), of(1, 1)),
            (of(1, 2), of(1, 2)),
            (of(1, 1), of(1, 1)),
            (of(1, 2), of(1, 2)),
            (of(2, 0), of(1, 2)),
            (of(2, 1), of(1, 2)),
            (of(2, 2), of(2, 2)),
            (of(2, 0), of(2, 0)),
        ):
            manager.answer = answer
            assert await seen.ask(1.0) == answer
            assert seen.settled == believed

    run(body)


def test_a_new_manager_is_believed_after_a_while() -> None:
    async def body(manager: Manager, seen: LastSeen) -> None:
        for answer in (of(1, 2), of(2, 0)):
            manager.answer = answer
            await seen.ask(1.0)
        assert seen.settled == of(1, 2)
        await asyncio.sleep(0.06)
        await seen.ask(1.0)
        assert seen.settled == of(2, 0)

    run(body, settle_s=0.05)
