"""A plan as it is sent: timed requests at their time, closed loops lane by lane, and what this process took for it.

No answer is waited for but by those whose turn it is: the next of a lane, the next of a session. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from load_client import Answer
from load_plan import Plan, Request
from load_text import Prompt

Ask = Callable[[Prompt, int, Answer], Awaitable[None]]
TICK = 0.05  # seconds; how late it comes is how late anything may have come
AFTER_FAILURE = 0.25  # seconds that a lane waits: a server that refuses at once would be asked without end


@dataclass(slots=True)
class Run:
    """What has been sent so far, each request with its answer."""

    began: float = 0.0  # by time.perf_counter
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    interrupted: bool = False
    asked: list[tuple[Request, Answer]] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)  # how late each was

    def counts(self) -> dict[str, int]:
        counts = {"ok": 0, "failed": 0, "waiting": 0, "cut": 0}
        for _, answer in self.asked:
            counts[answer.status] += 1
        return counts


async def drive(plan: Plan, ask: Ask, run: Run, stop: asyncio.Event) -> None:
    """Until all of the plan has ended, or `stop` is set: then what is under way is cut."""
    run.began, cpu = time.perf_counter(), time.process_time()
    driver = _Driver(plan, ask, run)
    work = asyncio.create_task(driver.all())
    stopped = asyncio.create_task(stop.wait())
    try:
        async with _ticking(run.ticks):
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        run.interrupted = not work.done()
    finally:
        stopped.cancel()
        work.cancel()
        await asyncio.gather(work, stopped, return_exceptions=True)
        run.seconds, run.cpu_seconds = time.perf_counter() - run.began, time.process_time() - cpu
    if not run.interrupted:
        work.result()  # raises what went wrong here


class _Driver:
    def __init__(self, plan: Plan, ask: Ask, run: Run) -> None:
        self._plan = plan
        self._ask = ask
        self._run = run

    async def all(self) -> None:
        async with asyncio.TaskGroup() as group:
            if self._plan.closed is not None:
                requests = self._plan.closed.requests()
                for _ in range(self._plan.closed.lanes):
                    group.create_task(self._lane(requests))
            for chain in chains(self._plan.timed):
                await self._until(chain[0].at or 0.0)
                group.create_task(self._chain(chain))

    async def _lane(self, requests: Iterator[Request]) -> None:
        until = float("inf") if self._plan.until is None else self._run.began + self._plan.until
        while (due := time.perf_counter()) < until and (request := next(requests, None)) is not None:
            answer = await self._send(request, due)
            if answer.status == "failed":
                await asyncio.sleep(AFTER_FAILURE)

    async def _chain(self, chain: Sequence[Request]) -> None:
        free = 0.0
        for request in chain:
            await self._until(request.at or 0.0)
            due = max(self._run.began + (request.at or 0.0), free)
            await self._send(request, due)
            free = time.perf_counter()

    async def _until(self, at: float) -> None:
        await asyncio.sleep(self._run.began + at - time.perf_counter())

    async def _send(self, request: Request, due: float) -> Answer:
        answer = Answer(due=due)
        self._run.asked.append((request, answer))
        await self._ask(request.prompt, request.output_tokens, answer)
        return answer


def chains(timed: Sequence[Request]) -> list[list[Request]]:
    """Requests without a session are alone; those of a session are one chain. By the time of their first."""
    found: dict[str | int, list[Request]] = {}
    for request in timed:
        found.setdefault(request.session or request.index, []).append(request)
    return sorted(found.values(), key=lambda chain: chain[0].at or 0.0)


@contextlib.asynccontextmanager
async def _ticking(ticks: list[float]) -> AsyncIterator[None]:
    async def tick() -> None:
        while True:
            wanted = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            ticks.append(max(0.0, time.perf_counter() - wanted))

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
