"""Faults on a cluster under load, one after the other, and everything that was seen of it. Judges nothing.

result = await run(target, faults, load)
verdict = chaos_check.judge(result)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from chaos_check import Result, Strike
from chaos_faults import Hit, Planned, Scene
from chaos_load import Load, Outcome
from chaos_target import Target, is_there, settle

WHOLE_S = 120.0  # a cluster that is not whole so long after a fault never is
REST_S = 90.0  # and one that still holds anything so long after the last request never comes to rest
LOOK_S = 0.25
AT_ONCE = 4  # faults that the cluster is not over yet: the next one waits

Show = Callable[[str], None]


async def run(
    target: Target,
    faults: Sequence[Planned],
    load: Load,
    *,
    show: Show = print,
    whole_s: float = WHOLE_S,
    at_once: int = AT_ONCE,
) -> Result:
    """Asks everything once undisturbed, then strikes under load, then lets the cluster come to rest."""
    if left := await settle(target, REST_S):
        raise RuntimeError(f"the cluster was not at rest before it began: {'; '.join(left)}")
    load.expected = await _undisturbed(load)
    show(f"{len(load.expected)} distinct requests answered undisturbed")
    began, load.outcomes = time.monotonic(), []
    load.begin()
    try:
        strikes = await _strike_all(Scene(target, load), faults, show, whole_s, at_once)
    finally:
        await load.end()
    show(f"the load has ended after {len(load.outcomes)} requests; waiting for the cluster to come to rest")
    left = await settle(target, REST_S)
    status = await target.status() or {"replicas": ()}
    leaked = sum(each["leased"] for each in status["replicas"]) if left else 0
    return Result(load.expected, load.outcomes, strikes, left, leaked, time.monotonic() - began)


async def _undisturbed(load: Load, at_once: int = 4) -> dict[int, Outcome]:
    """Each question, asked once over gRPC, which brings ids and text."""
    slots = asyncio.Semaphore(at_once)

    async def one(number: int) -> Outcome:
        async with slots:
            asked = load.ask(load.questions[number], "grpc")
            await asyncio.wait({asked.task})
        if asked.outcome.status != "ok":
            raise RuntimeError(f"question {number} got no answer though nothing was amiss: {asked.outcome.error}")
        return asked.outcome

    answers = await asyncio.gather(*map(one, range(len(load.questions))))
    return dict(enumerate(answers))


async def _strike_all(
    scene: Scene, faults: Sequence[Planned], show: Show, whole_s: float, at_once: int
) -> list[Strike]:
    slots, began = asyncio.Semaphore(at_once), time.monotonic()

    async def one(number: int, planned: Planned) -> Strike:
        try:
            kind, at, open_then = planned.fault.kind, time.monotonic(), len(scene.load.open())
            hit = await planned.fault.strike(scene)
            until = await _whole_again(scene.target, hit, at + whole_s)
            took = "NEVER whole again" if until is None else f"whole again after {until - at:.1f} s"
            show(f"{number:4} {at - began:7.1f} s  {kind:24} {hit.whom:28} {open_then:3} open  {took}")
            return Strike(number, kind, hit.whom, at, until, hit.breaks, hit.broken_by)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, planned in enumerate(faults, 1):
            await asyncio.sleep(planned.after)
            await slots.acquire()
            tasks.append(group.create_task(one(number, planned)))
    return [task.result() for task in tasks]


async def _whole_again(target: Target, hit: Hit, deadline: float) -> float | None:
    """When, by time.monotonic."""
    while (now := time.monotonic()) < deadline:
        if not any(map(is_there, hit.gone)) and await target.whole(hit.gone):
            return now
        await asyncio.sleep(LOOK_S)
    return None
