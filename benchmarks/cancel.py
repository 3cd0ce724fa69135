#!/usr/bin/env python3
"""How long what a request holds stays held after its client has left, by the request's stage and how the client leaves.

    python -P benchmarks/cancel.py [--requests 50] [--stages decoding,waiting] [--json FILE]

A real cluster, one prefill and one decode replica. So many requests are brought to one stage, all of them are left at
once, and the ledger is looked at as often as it answers: the k-th lease, or waiter, that is gone ended the k-th cancel.
A request has a lease in both pools while it is prefilled; both count, and the last one decides. The rest of the cluster
is at work meanwhile, where the stage needs it: requests that wait do so behind 64 that are decoding.

Exits with 1 if the bar is missed, or if a block has not come back in the end.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

sys.path.append(os.path.dirname(__file__))
import measure
from chaos_target import Local
from load_percentiles import percentile
from rich.table import Table
from streams import WAYS, Ask, Doors, Stream, StreamEnded, Way, fresh, leave_all, prompt
from streams_target import (
    cpu_seconds,
    drills,
    leases,
    of_role,
    settled,
    standing_still,
    target_of,
    wait_until,
    written,
)

from bifolio.cluster.spawn import SpawnedCluster, spawned

Stage = Literal["waiting", "queued", "prefilling", "transferring", "decoding", "last tokens"]
STAGES: dict[Stage, str] = {
    "waiting": "waits for admission",
    "queued": "queued at the prefill replica",
    "prefilling": "in the step that computes it",
    "transferring": "computed, its blocks on their way",
    "decoding": "two tokens are there",
    "last tokens": "four tokens before the end",
}
BAR_S = 1.0
SLOTS = 64  # sequences of a replica
LOOK_S, MOST_LOOKS = 2.0, 10  # at a replica that computes
LAST = 40  # tokens of an answer that is left near its end
CONFIG: dict[str, Any] = {
    "engine": {"kv_memory": "49152 tokens", "max_sequences": SLOTS, "stall_s": 120.0},
    "kv": {"split": "always", "prefill_queue_s": 600.0, "stall_s": 120.0},
}


class Look(NamedTuple):
    at: float  # when the answer was there
    left: int  # leases and waiters


@dataclass
class Found:
    """Of one stage and one way, over all rounds."""

    freed: list[float] = field(default_factory=list)  # seconds
    ended: int = 0  # by themselves, before they were left: these do not count


class Ledger:
    """Looks at the ledger, in a thread of its own, as often as that answers. `ask` says what there is to be left."""

    def __init__(self, cluster: SpawnedCluster) -> None:
        self._cluster = cluster
        self.looks: list[Look] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Ledger:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def until(self, left: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.looks or self.looks[-1].left > left:
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(0.01)

    def _watch(self) -> None:
        connection = self._cluster.connect(10.0)
        while not self._stop.is_set():
            try:
                connection.request("GET", "/status")
                status = json.loads(connection.getresponse().read())
                left = status["waiting"] + leases(status, "prefill") + leases(status, "decode")
                self.looks.append(Look(time.perf_counter(), left))
            except (OSError, http.client.HTTPException, KeyError, ValueError):
                connection.close()
            self._stop.wait(0.005)


def freed(cancels: Sequence[float], looks: Sequence[Look], stays: int) -> list[float]:
    """Seconds from each cancel until what it held was gone, `stays` being what others hold; infinity if it never was.

    Leases of both pools are counted together, so those of a request that has two keep it here until both are gone.
    """
    most, gone = 0, list[Look]()
    for look in reversed(looks):  # from the end: what comes back for a moment had not gone
        most = max(most, look.left - stays)
        gone.append(Look(look.at, most))
    gone.reverse()
    found = []
    for number, cancel in enumerate(sorted(cancels), 1):
        left = len(cancels) - number
        found.append(next((look.at for look in gone if look.left <= left and look.at >= cancel), float("inf")) - cancel)
    return found


class Stages:
    """Brings requests to a stage, each in a context that yields them and how many leases others hold meanwhile."""

    def __init__(self, doors: Doors, target: Local, drills: Path) -> None:
        self._doors, self._target, self._drills = doors, target, drills

    @asynccontextmanager
    async def reached(self, stage: Stage, way: Way, requests: int) -> AsyncIterator[tuple[list[Stream], int]]:
        self._door, self._requests, self._salt = WAYS[way], requests, fresh()
        async with AsyncExitStack() as stack:
            stay = await BRING[stage](self, stack)
            try:
                yield self._streams, stay
            finally:
                await leave_all(self._others)

    def _ask(self, tokens: int, max_tokens: int, *, counted: bool = False) -> None:
        prompts = [prompt(tokens, (self._salt, i)) for i in range(self._requests)]
        asks = [Ask(each, max_tokens, salt=self._salt, counted=counted) for each in prompts]
        self._streams = [self._doors.ask(self._door, ask) for ask in asks]

    def _beside(self, *sizes: tuple[int, int]) -> None:
        """Others, which stay: tokens of prompt and answer of each."""
        asks = [Ask(prompt(tokens, (self._salt, "other", i)), most) for i, (tokens, most) in enumerate(sizes)]
        self._others = [self._doors.ask("grpc", ask) for ask in asks]

    async def _pids(self) -> dict[str, int]:
        status = await wait_until(self._target, "a replica of each", lambda s: of_role(s, "prefill"))
        return {replica["role"]: replica["pid"] for replica in status["replicas"]}

    async def waiting(self, stack: AsyncExitStack) -> int:
        self._beside(*[(8, 600)] * SLOTS)
        await asyncio.gather(*(stream.until(1) for stream in self._others))
        self._ask(60, 100)
        await wait_until(self._target, "all wait", lambda s: s["waiting"] == self._requests)
        self._none_has_begun()
        return SLOTS

    async def queued(self, stack: AsyncExitStack) -> int:
        """Behind two: one is long, and of the step's budget it takes what does not go to the one with the least
        left, which is shorter than all that wait."""
        self._beside((7000, 2), (690, 2))
        await wait_until(self._target, "both are there", lambda s: leases(s, "prefill") == 2)
        self._ask(700, 20)
        await wait_until(self._target, "all are there", lambda s: leases(s, "prefill") == 2 + self._requests)
        self._none_has_begun()
        if any(stream.chunks for stream in self._others):
            raise RuntimeError("they did not wait long enough: those before them are done")
        return 4

    async def prefilling(self, stack: AsyncExitStack) -> int:
        """Small ones that one step computes together: it begins when the engine may go on."""
        self._beside()
        pid = (await self._pids())["prefill"]
        go_on = stack.enter_context(standing_still(self._drills, pid, "engine"))
        self._ask(5, 20)
        await wait_until(self._target, "all are there", lambda s: leases(s, "prefill") == self._requests)
        await self._streams_are(pid)
        go_on()
        await asyncio.sleep(0.06)
        self._none_has_begun()
        return 0

    async def transferring(self, stack: AsyncExitStack) -> int:
        """Each stream stands still before its next message, until the moment at which its client leaves."""
        self._beside()
        pid = (await self._pids())["prefill"]
        go_on = stack.enter_context(standing_still(self._drills, pid, "transfer"))
        self._ask(20, 20)
        await self._streams_are(pid)
        for _ in range(MOST_LOOKS):  # until it computes no more: streams that stand still take some CPU as well
            busy = cpu_seconds(pid)
            await asyncio.sleep(LOOK_S)
            if cpu_seconds(pid) - busy < LOOK_S / 2:
                break
        self._none_has_begun()
        asyncio.get_running_loop().call_later(0.01, go_on)  # once they have left
        return 0

    async def decoding(self, stack: AsyncExitStack) -> int:
        self._beside()
        self._ask(8, 2000)
        await asyncio.gather(*(stream.until(2) for stream in self._streams))
        return 0

    async def last_tokens(self, stack: AsyncExitStack) -> int:
        self._beside()
        self._ask(8, LAST, counted=True)
        return 0

    async def _streams_are(self, pid: int) -> None:
        """At the prefill replica: each request's transfer has been opened."""

        def open_there(status: Any) -> bool:
            (replica,) = of_role(status, "prefill")
            return bool(replica["transfer"]["streams"] == self._requests)

        await wait_until(self._target, "all transfers are open", open_there)

    def _none_has_begun(self) -> None:
        if any(stream.chunks or stream.ended for stream in self._streams):
            told = next((stream.error for stream in self._streams if stream.ended), "some have tokens")
            raise RuntimeError(f"not the stage that was wanted: {told}")


BRING: dict[Stage, Callable[[Stages, AsyncExitStack], Any]] = {
    "waiting": Stages.waiting,
    "queued": Stages.queued,
    "prefilling": Stages.prefilling,
    "transferring": Stages.transferring,
    "decoding": Stages.decoding,
    "last tokens": Stages.last_tokens,
}


async def left(doors: Doors, stages: Stages, stage: Stage, way: Way, requests: int, found: Found) -> None:
    """One round: adds what it took."""
    async with stages.reached(stage, way, requests) as (streams, stay):
        with Ledger(doors.cluster) as ledger:

            async def leave(stream: Stream) -> float | None:
                if stage == "last tokens":
                    with suppress(StreamEnded):  # one piece brought all that was left
                        await stream.until(LAST - 4)
                return None if stream.ended else await doors.cancel(way, stream)

            cancels = [at for at in await asyncio.gather(*map(leave, streams)) if at is not None]
            await ledger.until(stay, 30.0)
        found.freed += freed(cancels, ledger.looks, stay)
        found.ended += requests - len(cancels)


async def measured(cluster: SpawnedCluster, directory: Path, args: Namespace) -> dict[Stage, dict[Way, Found]]:
    found: dict[Stage, dict[Way, Found]] = {stage: {way: Found() for way in WAYS} for stage in args.stages}
    target = target_of(cluster, prefill=1, decode=1)
    async with Doors(cluster) as doors:
        stages = Stages(doors, target, directory)
        for number in range(args.repeats):
            for stage, ways in found.items():
                for way, each in ways.items():
                    measure.progress(f"round {number + 1}: {stage}, {way}")
                    await settled(target)
                    await left(doors, stages, stage, way, args.requests, each)
        await settled(target)
    return found


def shown(found: dict[Stage, dict[Way, Found]], requests: int) -> tuple[Table, bool]:
    """And whether the bar is met, of all stages and ways together and of each."""
    heading = f"time to free, {requests} requests left at once: milliseconds"
    table = measure.table(heading, ["stage", "", "way"], ["left", "p50", "p99", "max", f"p99 <= {BAR_S:g} s"])
    met = True
    for stage, ways in found.items():
        for way, each in ways.items():
            ordered = sorted(each.freed)
            numbers = [percentile(ordered, 50), percentile(ordered, 99), ordered[-1]]
            met = met and numbers[1] <= BAR_S
            first = way == "HTTP, FIN"
            told = [f"{number * 1e3:.0f}" for number in numbers]
            words = [stage, STAGES[stage]] if first else ["", ""]
            table.add_row(*words, way, str(len(ordered)), *told, "met" if numbers[1] <= BAR_S else "MISSED")
        table.add_section()
    return table, met


def main() -> int:
    parser = measure.arguments(__doc__, repeats=1)
    parser.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=50, metavar="N", help="at most 60; default: %(default)s")
    parser.add_argument(
        "--stages", type=lambda given: given.split(","), default=list(STAGES), help=f"of {', '.join(STAGES)}"
    )
    args = parser.parse_args()
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"--stages: {', '.join(unknown)}; there are {', '.join(STAGES)}")
    options = ["--model", args.model, "--threads", str(args.threads)]
    with drills() as directory, written(CONFIG) as file, spawned([file, *options], sys.stderr.buffer) as cluster:
        found = asyncio.run(measured(cluster, directory, args))
    table, met = shown(found, args.requests)
    facts = measure.machine("no")
    measure.show(measure.title(facts), table, measure.verdict(met, f"bar p99 {BAR_S:g} s"))
    measure.write_json(
        args.json, {"machine": facts, "freed": {s: {w: f.freed for w, f in ways.items()} for s, ways in found.items()}}
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
