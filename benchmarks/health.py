#!/usr/bin/env python3
"""Each loop of a real cluster stands still in turn: how soon /health names it, how soon all is well again, and whether
a client noticed.

    python -P benchmarks/health.py                          all of them, in some minutes
    python -P benchmarks/health.py --only "engine of decode,process"

One prefill and one decode replica of a tiny model, under a light load of streams. A loop is held by its drill
(`kv_manager/drill.py`) or its process by SIGSTOP, until it is named; then it goes on. The exit status is 0 if each was
named in its time, all was well soon after, and no answer was wrong or lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(os.path.dirname(__file__))
import aiohttp
import measure
import yaml
from chaos import glassllm
from chaos_check import compare
from chaos_load import Load, Outcome, questions
from chaos_target import Local, settle
from load_text import open_book
from rich.table import Table

from bifolio.cluster.health import OK, Part
from bifolio.cluster.spawn import spawned
from bifolio.kv_manager.drill import DIRECTORY, Loop

PATIENCE_S = 5.0  # N: engine.stall_s, kv.stall_s and kv.silence_s
RED_S = PATIENCE_S + 2.0  # the bars
GREEN_S = 5.0
POLL_S = 0.1
HOLD_S = 0.5  # what stands still does so for so long after it was named, by default
STEADY_S = 2.0  # green is what stays green for so long
GIVE_UP_S = 60.0
LANES = 2


@dataclass(frozen=True)
class Stall:
    process: str  # as in chaos_target.TITLES
    stage: Part  # which should be named
    loop: Loop | None = None  # None: the whole process, by SIGSTOP

    @property
    def name(self) -> str:
        if self.loop is None:
            return f"process of {self.process}"
        what = {"engine": "engine", "transfer": "transfer thread", "loop": "event loop", "manager": "lock"}[self.loop]
        return f"{what} of {self.process}"


STALLS = (
    Stall("decode", "decode", "engine"),
    Stall("prefill", "prefill", "engine"),
    Stall("prefill", "transfer", "transfer"),
    Stall("decode", "decode", "loop"),
    Stall("prefill", "prefill", "loop"),
    Stall("manager", "manager", "manager"),
    Stall("decode", "decode"),
    Stall("prefill", "prefill"),
    Stall("manager", "manager"),
    Stall("redis", "redis"),
)


@dataclass(frozen=True)
class Look:
    """One answer of /health; without stages it was none of ours."""

    at: float  # when it came, by time.monotonic
    took: float
    status: str
    stages: Mapping[str, str] = field(default_factory=dict)

    @property
    def red(self) -> list[str]:
        return [stage for stage, sentence in self.stages.items() if sentence != OK]


@dataclass(frozen=True)
class Row:
    """Of one stall. `red` and `green` are seconds, None where it did not come to it. `green` is from the stall's end:
    below 0 where another process took the place of the one that stood still."""

    stall: Stall
    red: float | None
    named: Look | None
    green: float | None
    slowest: float
    asked: int
    amiss: Sequence[str]  # answers that were wrong or lost

    @property
    def misses(self) -> Iterator[str]:
        if self.red is None or self.red > RED_S:
            yield f"{self.stall.name}: {self.stall.stage} was named after {_seconds(self.red)}; bar {RED_S:g} s"
        if self.green is None or self.green > GREEN_S:
            yield f"{self.stall.name}: all was well after {_seconds(self.green)}; bar {GREEN_S:g} s"
        yield from (f"{self.stall.name}: {each}" for each in self.amiss)


class Watch:
    """Looks at /health all the time."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/health"
        self.looks: list[Look] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            task = asyncio.create_task(self._look(session))
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _look(self, session: aiohttp.ClientSession) -> None:
        while True:
            began = time.monotonic()
            try:
                async with session.get(self._url) as response:
                    body = await response.json(content_type=None)
                look = Look(time.monotonic(), time.monotonic() - began, body["status"], body["stages"])
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError) as error:
                look = Look(time.monotonic(), time.monotonic() - began, f"no answer: {error!r}")
            self.looks.append(look)
            await asyncio.sleep(max(0.0, POLL_S - look.took))

    async def red(self, stage: str, since: float) -> Look | None:
        async with _until(since + GIVE_UP_S):
            while True:
                for look in self.looks:
                    if look.at >= since and stage in look.red:
                        return look
                await asyncio.sleep(POLL_S / 2)
        return None

    async def green(self, since: float) -> Look | None:
        """The first of those since when all has been well, and stayed so."""
        async with _until(time.monotonic() + GIVE_UP_S):
            while True:
                first = None
                for look in self.looks:
                    first = (first or look) if look.at >= since and look.status == OK else None
                if first is not None and time.monotonic() - first.at >= STEADY_S:
                    return first
                await asyncio.sleep(POLL_S / 2)
        return None


@asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):  # the loop's clock is time.monotonic
            yield


@contextmanager
def held(target: Local, stall: Stall) -> Iterator[None]:
    (pid,) = target.processes(stall.process)
    if stall.loop is not None:
        assert target.drills is not None
        (file := target.drills / f"{pid}-{stall.loop}").touch()
        try:
            yield
        finally:
            file.unlink()
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def drill(target: Local, stall: Stall, hold_s: float, load: Load, expected: Mapping[int, Outcome]) -> Row:
    load.outcomes = []
    load.begin()
    watch = Watch(target.url)
    async with watch.running():
        await watch.green(time.monotonic())  # the load is there by then
        began = time.monotonic()
        with held(target, stall):
            named = await watch.red(stall.stage, began)
            await asyncio.sleep(hold_s)
        ended = time.monotonic()
        well = await watch.green(named.at if named else ended)
    await load.end()
    amiss = []
    for outcome in load.outcomes:
        if outcome.status != "ok":
            amiss.append(f"question {outcome.question} over {outcome.door} is {outcome.status}: {outcome.error}")
        elif difference := compare(outcome, expected[outcome.question]):
            amiss.append(f"question {outcome.question} over {outcome.door} is wrong: {difference}")
    return Row(
        stall,
        named and named.at - began,
        named,
        well and well.at - ended,
        max(look.took for look in watch.looks),
        len(load.outcomes),
        amiss,
    )


async def all_of(target: Local, stalls: Sequence[Stall], hold_s: float, load: Load) -> list[Row]:
    await _settled(target)
    expected = {}
    for question in load.questions:
        asked = load.ask(question, "grpc")
        await asked.task
        expected[question.number] = asked.outcome
    rows = []
    for stall in stalls:
        await _settled(target)
        row = await drill(target, stall, hold_s, load, expected)
        print(f"{stall.name}: named after {_seconds(row.red)}, well after {_seconds(row.green)}", file=sys.stderr)
        rows.append(row)
    return rows


async def _settled(target: Local) -> None:
    if left := await settle(target, GIVE_UP_S):
        raise RuntimeError(f"the cluster does not come to rest: {'; '.join(left)}")


@contextmanager
def cluster(model: Path, log: Path | None) -> Iterator[Local]:
    configuration = {
        "model": {"source": str(model), "served_name": "glassllm"},
        "engine": {"exact": True, "kv_memory": "4096 tokens", "stall_s": PATIENCE_S},
        "kv": {"split": "always", "silence_s": PATIENCE_S, "stall_s": PATIENCE_S},
    }
    with tempfile.TemporaryDirectory(prefix="health-") as place:
        directory = Path(place)
        (drills := directory / "drills").mkdir()
        (directory / "cluster.yaml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
        os.environ[DIRECTORY] = str(drills)
        with (
            (log or directory / "output.txt").open("wb") as output,
            spawned([str(directory / "cluster.yaml")], output) as made,
        ):
            ports = (made.http_port, made.grpc_port, made.process.pid)
            yield Local(*ports, prefill=1, decode=1, ingress=1, drills=drills)


def shown(rows: Sequence[Row]) -> list[Table | str]:
    heading = f"what stands still, and when /health says so; N = {PATIENCE_S:g} s; seconds"
    table = measure.table(
        heading, ["held", "named", "status"], ["red", "N", "green", "slowest answer", "asked", "wrong or lost"]
    )
    for row in rows:
        named = ", ".join(row.named.red) if row.named else "nothing"
        table.add_row(
            row.stall.name,
            named,
            row.named.status if row.named else "",
            _seconds(row.red),
            f"{PATIENCE_S:g}",
            _seconds(row.green),
            f"{row.slowest:.2f}",
            str(row.asked),
            str(len(row.amiss)),
        )
    misses = [miss for row in rows for miss in row.misses]
    bar = f"bar: named within {RED_S:g} s, well within {GREEN_S:g} s after, no answer wrong or lost:"
    said = [f"{row.stall.name}: {row.named.stages[row.stall.stage]}" for row in rows if row.named]
    return [table, *said, measure.verdict(not misses, bar), *misses]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="NAME,...", help="of these alone, by the beginnings of their names")
    parser.add_argument(
        "--hold",
        type=float,
        default=HOLD_S,
        metavar="SECONDS",
        help="go on to stand still for so long when it is named; 20 are enough to be replaced; default: %(default)s",
    )
    parser.add_argument("--model", type=Path, metavar="DIRECTORY", help="default: glassllm, as in the tests")
    parser.add_argument("--log", type=Path, metavar="FILE", help="what the cluster prints")
    args = parser.parse_args()
    names = tuple(args.only.split(",")) if args.only else ("",)
    stalls = [stall for stall in STALLS if stall.name.startswith(names)]
    if not stalls:
        parser.error(f"--only {args.only}: allowed: {'; '.join(stall.name for stall in STALLS)}")
    model = args.model or glassllm()
    book, _ = open_book(None, model)
    with cluster(model, args.log) as target:
        load = Load(target, questions(book, seed=9, streams=12, long=4), lanes=LANES, long_every=2.0)
        rows = asyncio.run(all_of(target, stalls, args.hold, load))
    measure.show(*shown(rows))
    return int(any(True for row in rows for _ in row.misses))


if __name__ == "__main__":
    sys.exit(main())
