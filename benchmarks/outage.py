#!/usr/bin/env python3
"""Whether streams feel it when the KV manager is away, and how long after its return new requests are served.

    python -P benchmarks/outage.py [kill|stop|gcs] [--rounds 4] [--json FILE]

    kill   its process is killed, and each process that follows it, for 10 s (default)
    stop   its process stands still for 10 s: whoever waits for it does not see it end
    gcs    the same as kill, of Ray's own control process in place of the manager's

A real cluster, one prefill and one decode replica. In each round eight streams decode through 10 s with the manager and
through 10 s without it, in turns first and second, and each second another request comes. A stream's pause is its
longest one in those 10 s, and a step its median one with the manager. Without the manager no request is admitted, so
streams are alone then, and afterwards all that waited come at once: hence the pauses of the 5 s after it are told for
themselves.

Exits with 1 if a bar is missed: the median of all streams' longest pauses grows by more than a step; a stream broke; or
new requests are not served within 3 s of the manager's return.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from signal import SIGCONT, SIGSTOP
from typing import Any

sys.path.append(os.path.dirname(__file__))
import measure
from chaos_target import Local
from load_percentiles import percentile
from rich.table import Table
from streams import Ask, Doors, Stream, fresh, leave_all, pauses, prompt
from streams_target import environment_of, kill, settled, target_of, written

from bifolio.cluster.gcs import PROCESS, command_of
from bifolio.cluster.reaper import MARK, marked
from bifolio.cluster.spawn import SpawnedCluster, spawned

AWAY_S, AFTER_S = 10.0, 5.0
OLD_S = 16.0  # what streams draw in kv.growth_s is what the reserve holds: so old they are when a round begins
SERVED_S = 30.0  # after which nobody waits any more for a new request to be served
STREAMS = 8
SERVED_BAR_S = 3.0
WITH, WITHOUT, AFTERWARDS = "with it", "without it", "after that"
CONFIG: dict[str, Any] = {"engine": {"kv_memory": "32768 tokens"}, "kv": {"split": "always"}}
WANTED = {"prefill": 1, "decode": 1}


@dataclass
class Found:
    pauses: dict[str, list[list[float]]] = field(default_factory=lambda: {WITH: [], WITHOUT: [], AFTERWARDS: []})
    steps: list[float] = field(default_factory=list)
    served: list[float] = field(default_factory=list)  # seconds from the end of the outage to the first new token
    returned: list[float] = field(default_factory=list)  # and to the first answer of the manager
    late: list[float] = field(default_factory=list)  # of requests that came while it was away, from its end on
    broken: list[str] = field(default_factory=list)
    resumes: dict[str, int] = field(default_factory=dict)  # by cause, of all requests


class Away:
    """An outage: a context in which the manager is away, for as long as it lasts."""

    def __init__(self, target: Local) -> None:
        self._target = target

    def kill(self) -> AbstractAsyncContextManager[None]:
        return self._killed(lambda: self._target.processes("manager"))

    def gcs(self) -> AbstractAsyncContextManager[None]:
        mark = environment_of(self._target.processes("manager")[0])[MARK]
        return self._killed(lambda: [pid for pid in marked(mark) if command_of(pid)[0].endswith(PROCESS)])

    @asynccontextmanager
    async def _killed(self, which: Callable[[], list[int]]) -> AsyncIterator[None]:
        """Again and again: another begins each time."""
        task = asyncio.create_task(self._keep_killing(which))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _keep_killing(self, which: Callable[[], list[int]]) -> None:
        while True:
            for pid in await asyncio.to_thread(which):
                kill(pid)
            await asyncio.sleep(0.1)

    @asynccontextmanager
    async def stop(self) -> AsyncIterator[None]:
        pids = self._target.processes("manager")
        for pid in pids:
            kill(pid, SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                kill(pid, SIGCONT)


Outage = Callable[[], AbstractAsyncContextManager[None]]


class Round:
    """Eight streams, and other requests each second, until the context ends."""

    def __init__(self, doors: Doors, number: int) -> None:
        self._doors, self._number = doors, number
        self.others: list[Stream] = []

    async def __aenter__(self) -> Round:
        asks = [Ask(prompt(32, (self._number, i)), 4000, salt=fresh()) for i in range(STREAMS)]
        self.streams = [self._doors.ask("http" if i % 2 else "grpc", ask) for i, ask in enumerate(asks)]
        await asyncio.gather(*(stream.until(8) for stream in self.streams))
        await asyncio.sleep(OLD_S)
        self._asking = asyncio.create_task(self._ask())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._asking.cancel()
        await leave_all([*self.streams, *self.others])

    async def _ask(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.others.append(self._doors.ask("grpc", Ask(prompt(48, len(self.others)), 4, salt=fresh())))

    def served_since(self, time: float) -> list[float]:
        """When others got their first tokens."""
        return [stream.chunks[0].at for stream in self.others if stream.chunks and stream.chunks[0].at > time]

    def longest(self, since: float, until: float) -> list[float]:
        """Of each stream, the pauses in this time, at least in part; one that has not ended counts as far as it is."""
        found = []
        for stream in self.streams:
            lasting = time.perf_counter() - stream.chunks[-1].at if stream.chunks[-1].at <= until else 0.0
            found.append(max([lasting, *pauses(stream, since, until)]))
        return found


async def with_and_without(doors: Doors, target: Local, away: Outage, number: int, found: Found) -> None:
    """One round: adds what it brought."""
    async with Round(doors, number) as round:
        if number % 2 == 0:
            await _with(round, found)
        began = time.perf_counter()
        async with away():
            await asyncio.sleep(AWAY_S)
        ended = time.perf_counter()
        returned = await _returned(target)
        await asyncio.sleep(max(0.0, AFTER_S - (time.perf_counter() - ended)))
        while not round.served_since(ended) and time.perf_counter() < ended + SERVED_S:
            await asyncio.sleep(0.1)
        found.pauses[WITHOUT].append(round.longest(began, ended))
        found.pauses[AFTERWARDS].append(round.longest(ended, ended + AFTER_S))
        found.returned.append(returned - ended)
        found.served.append(min(round.served_since(ended), default=float("inf")) - ended)
        waited = [stream for stream in round.others if began + 1.0 < stream.sent < ended]
        found.late += [stream.chunks[0].at - ended if stream.chunks else float("inf") for stream in waited]
        if number % 2:
            await _with(round, found)
        for stream in [*round.streams, *round.others]:
            if stream.ended and stream.error:
                found.broken.append(stream.error)


async def _with(round: Round, found: Found) -> None:
    began = time.perf_counter()
    await asyncio.sleep(AWAY_S)
    ended = time.perf_counter()
    found.pauses[WITH].append(round.longest(began, ended))
    found.steps += [statistics.median(pauses(stream, began, ended)) for stream in round.streams]


async def _returned(target: Local) -> float:
    while await target.status() is None:
        await asyncio.sleep(0.02)
    return time.perf_counter()


async def measured(cluster: SpawnedCluster, args: Namespace) -> Found:
    found = Found()
    target = target_of(cluster, **WANTED)
    away = Away(target)
    async with Doors(cluster) as doors:
        for number in range(args.rounds):
            await settled(target)
            measure.progress(f"round {number + 1} of {args.rounds}")
            await with_and_without(doors, target, getattr(away, args.what), number, found)
        await settled(target)
        found.resumes = dict((await target.status() or {}).get("resumes", {}))
    return found


def grown(found: Found) -> float:
    """By how many steps the longest pause is longer without the manager: the median over all streams of all rounds."""
    step = statistics.median(found.steps)
    medians = {case: statistics.median(pause for of in found.pauses[case] for pause in of) for case in (WITH, WITHOUT)}
    return (medians[WITHOUT] - medians[WITH]) / step


def shown(found: Found, what: str) -> tuple[list[Table | str], bool]:
    step = statistics.median(found.steps)
    heading = (
        f"{STREAMS} streams, {len(found.returned)} rounds of {AWAY_S:g} s ({what}); a step takes {step * 1e3:.1f} ms"
    )
    columns = ["median", "p99", "max", "median in steps", "max in steps"]
    table = measure.table(f"{heading}: a stream's longest pause in ms", ["the KV manager"], columns)
    for case, rounds in found.pauses.items():
        ordered = sorted(pause for of in rounds for pause in of)
        numbers = [percentile(ordered, 50), percentile(ordered, 99), ordered[-1]]
        told = [f"{number * 1e3:.0f}" for number in numbers]
        table.add_row(case, *told, f"{numbers[0] / step:.1f}", f"{numbers[-1] / step:.1f}")
    more, back = grown(found), [a - max(b, 0.0) for a, b in zip(found.served, found.returned, strict=True)]
    seconds = {"answers": found.returned, "serves a new request": found.served, "and since it answers": back}
    lines = [
        f"longest pauses grow by {more:+.2f} steps; " + measure.verdict(more <= 1, "bar one step"),
        "seconds after the outage until the manager "
        + "; ".join(f"{name}: {statistics.median(each):.2f}, at most {max(each):.2f}" for name, each in seconds.items())
        + "; "
        + measure.verdict(max(back) <= SERVED_BAR_S, f"bar {SERVED_BAR_S:g} s after its return"),
        f"requests that came meanwhile: {len(found.late)}, the last of them got its first token "
        f"{max(found.late, default=0.0):.2f} s after the outage",
        f"placed again: {found.resumes or 'none'}",
        f"broken: {len(found.broken)} {found.broken[:3]}; " + measure.verdict(not found.broken, "bar none"),
    ]
    return [table, *lines], more <= 1 and max(back) <= SERVED_BAR_S and not found.broken


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("what", nargs="?", choices=("kill", "stop", "gcs"), default="kill", help="default: %(default)s")
    parser.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    options = ["--model", args.model, "--threads", str(args.threads)]
    with written(CONFIG) as file, spawned([file, *options], sys.stderr.buffer) as cluster:
        found = asyncio.run(measured(cluster, args))
    tables, met = shown(found, args.what)
    facts = measure.machine("no")
    measure.show(measure.title(facts), *tables)
    measure.write_json(args.json, {"machine": facts, "what": args.what, **asdict(found)})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
