#!/usr/bin/env python3
"""Whether streams feel it when a replica leaves: is told to, is one too many, or is replaced by one of another setting.

    python -P benchmarks/drain.py [--times 20] [--what sigterm,scale,update] [--json FILE]

A real cluster in exact mode: two prefill replicas, two decode replicas, two ingresses. Eight clients ask again and
again, half of them over HTTP, while

    sigterm  a process of a role is sent SIGTERM, role by role: it leaves, and another one comes
    scale    the application is deployed again with one replica fewer of a role, and then as it was
    update   it is deployed again with another `engine.max_batched_tokens`: all replicas are replaced

Each event lasts until the cluster is whole again; `settled` is how long that took. Every answer is compared with that
which its request got when nothing happened. Exits with 1 if one is broken or another.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from signal import SIGTERM
from typing import Any

sys.path.append(os.path.dirname(__file__))
import measure
from chaos_target import Local, is_there
from rich.table import Table
from streams import Ask, Doors, Stream, prompt, wrong
from streams_target import NotReached, environment_of, kill, settled, target_of, written

from bifolio.cluster.gcs import command_of
from bifolio.cluster.reaper import MARK, marked
from bifolio.cluster.spawn import SpawnedCluster, spawned

CLIENTS, ASKS = 8, 16
ROLES = ("decode", "prefill", "ingress")
WHAT = ("sigterm", "scale", "update")
LEAVE_S = 150.0
GCS = b"--gcs-address="
STEPS = (256, 192)  # engine.max_batched_tokens, before and after an update

Tree = dict[str, Any]


@dataclass
class Event:
    what: str
    role: str
    settled: float  # seconds until the cluster was whole again
    answers: int = 0  # that were under way at some time of it
    resumed: int = 0  # of them, placed again
    wrong: list[str] = field(default_factory=list)


class Clients:
    """Ask again and again, each request in turn, until the context ends."""

    def __init__(self, doors: Doors, tokens: int) -> None:
        self._doors = doors
        self._asks = [Ask(prompt(24, i), tokens, seed=i if i % 2 else None) for i in range(ASKS)]
        self._undisturbed: list[Stream] = []
        self._ended: list[Stream] = []
        self._numbers = count()

    async def __aenter__(self) -> Clients:
        """After each request has been answered once, over both doors."""
        for ask in self._asks:
            over_grpc = (await self._doors.ask("grpc", ask.again()).whole()).checked()
            over_http = (await self._doors.ask("http", ask.again()).whole()).checked()
            if why := wrong(over_http, over_grpc):
                raise NotReached(f"nothing happened, and yet {why}")
            self._undisturbed.append(over_grpc)
        self._tasks = [asyncio.create_task(self._keep_asking(i)) for i in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_asking(self, client: int) -> None:
        while True:
            ask = self._asks[next(self._numbers) % ASKS]
            stream = self._doors.ask("http" if client % 2 else "grpc", ask.again())
            await stream.whole()
            self._ended.append(stream)
            if stream.error:
                await asyncio.sleep(0.5)

    def since_then(self, event: Event) -> None:
        """Adds the answers that have ended since the last time."""
        ended, self._ended = self._ended, []
        for stream in ended:
            event.answers += 1
            event.resumed += bool(stream.usage and stream.route["resumes"])
            undisturbed = self._undisturbed[next(i for i, a in enumerate(self._asks) if a.prompt == stream.ask.prompt)]
            if why := wrong(stream, undisturbed):
                event.wrong.append(f"{type(stream).__name__}: {why}")


class Driver:
    """Deploys the application again, as a program of its user's would that runs beside the cluster."""

    def __init__(self, cluster: SpawnedCluster, target: Local, tree: Tree) -> None:
        ports = {"http": {"port": cluster.http_port}, "grpc": {"port": cluster.grpc_port}}
        self.tree: Tree = {**tree, **ports}
        mark = environment_of(target.processes("manager")[0])[MARK]
        raylet = next(pid for pid in marked(mark) if command_of(pid)[0].endswith(b"/raylet"))
        self._environment = environment_of(raylet)
        (self._address,) = {p[len(GCS) :] for p in command_of(raylet) if p.startswith(GCS)}

    async def deploy(self, tree: Tree) -> None:
        """Returns when the application runs as it should. Raises NotReached."""
        command = [sys.executable, "-P", __file__, "--as-driver", self._address.decode(), json.dumps(tree)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, env=self._environment, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), LEAVE_S)
        if process.returncode:
            raise NotReached(f"it was not deployed again: {output.decode(errors='replace')[-3000:]}")


def drive(address: str, tree: Tree) -> None:
    """What the driver's process does."""
    import ray

    from bifolio.cluster.config import resolved, validated
    from bifolio.cluster.deploy import deploy
    from bifolio.cluster.models import resolve

    ray.init(address=address, log_to_driver=False, configure_logging=False)
    config = resolved(validated(tree, "the driver"))
    deploy(config, resolve(config.model.source), "", print)


async def sigterm(target: Local, role: str, number: int) -> None:
    pids = target.processes(role)
    pid = pids[number % len(pids)]
    kill(pid, SIGTERM)
    await whole_again(target, pid)


async def whole_again(target: Local, *gone: int) -> None:
    deadline = time.monotonic() + LEAVE_S
    while any(map(is_there, gone)) or not await target.whole():
        if time.monotonic() > deadline:
            left = [pid for pid in gone if is_there(pid)]
            raise NotReached(f"after {LEAVE_S:g} s: still there {left}; {json.dumps(await target.status())}")
        await asyncio.sleep(0.1)


async def scale(driver: Driver, target: Local, role: str) -> None:
    """Down to one, and up again."""
    where = driver.tree if role == "ingress" else driver.tree["pools"]
    fewer = {**where, role: {**where[role], "replicas": 1}}
    await driver.deploy(fewer if role == "ingress" else {**driver.tree, "pools": fewer})
    if (left := len(target.processes(role))) > 2:
        raise NotReached(f"{left} processes of {role}, where one is wanted")
    await driver.deploy(driver.tree)
    await whole_again(target)


async def update(driver: Driver, target: Local, number: int) -> None:
    before = [pid for role in ROLES for pid in target.processes(role)]
    engine = {**driver.tree["engine"], "max_batched_tokens": STEPS[(number + 1) % 2]}
    driver.tree = {**driver.tree, "engine": engine}
    await driver.deploy(driver.tree)
    await whole_again(target, *before)


async def measured(cluster: SpawnedCluster, tree: Tree, args: Namespace) -> list[Event]:
    found: list[Event] = []
    target = target_of(cluster, prefill=2, decode=2, ingress=2)
    driver = Driver(cluster, target, tree)
    async with Doors(cluster) as doors:
        await settled(target)
        async with Clients(doors, args.tokens) as clients:
            await asyncio.sleep(2.0)
            for what in args.what:
                for number in range(args.times if what != "update" else max(1, args.times // 10)):
                    role = "all" if what == "update" else ROLES[number % len(ROLES)]
                    measure.progress(f"{what} {number + 1}: {role}")
                    began = time.perf_counter()
                    if what == "sigterm":
                        await sigterm(target, role, number // len(ROLES))
                    elif what == "scale":
                        await scale(driver, target, role)
                    else:
                        await update(driver, target, number)
                    event = Event(what, role, time.perf_counter() - began)
                    await asyncio.sleep(1.0)
                    clients.since_then(event)
                    found.append(event)
                    measure.progress(str(event))
        await settled(target)
    return found


def shown(found: Sequence[Event]) -> tuple[Table, list[str], bool]:
    columns = ["times", "settled after", "answers", "placed again", "wrong or broken"]
    table = measure.table(f"{CLIENTS} clients while replicas leave", ["what", "role"], columns)
    for what, role in dict.fromkeys((event.what, event.role) for event in found):
        of = [event for event in found if (event.what, event.role) == (what, role)]
        told = f"{statistics.median(event.settled for event in of):.1f} s"
        sums = [sum(event.answers for event in of), sum(event.resumed for event in of)]
        table.add_row(what, role, str(len(of)), told, *map(str, sums), str(sum(len(event.wrong) for event in of)))
    reasons = [why for event in found for why in event.wrong]
    return table, [*dict.fromkeys(reasons)][:10], not reasons


def main() -> int:
    if sys.argv[1:2] == ["--as-driver"]:
        drive(sys.argv[2], json.loads(sys.argv[3]))
        return 0
    parser = measure.arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="of an answer; default: %(default)s")
    parser.add_argument("--times", type=int, default=20, metavar="N", help="a tenth of it for update; default: 20")
    parser.add_argument(
        "--what", type=lambda given: given.split(","), default=list(WHAT), metavar="…", help="default: all three"
    )
    args = parser.parse_args()
    tree: Tree = {
        "model": {"source": str(Path(args.model).resolve() if Path(args.model).exists() else args.model)},
        "engine": {"exact": True, "kv_memory": "4096 tokens", "threads": args.threads, "max_batched_tokens": STEPS[0]},
        "kv": {"local_blocks": 0},
        "pools": {"prefill": {"replicas": 2}, "decode": {"replicas": 2}},
        "ingress": {"replicas": 2},
    }
    with written(tree) as file, spawned([file], sys.stderr.buffer) as cluster:
        found = asyncio.run(measured(cluster, tree, args))
    table, reasons, met = shown(found)
    facts = measure.machine("no")
    measure.show(measure.title(facts), table, *reasons, "not one is broken or another: " + measure.verdict(met, "bar"))
    measure.write_json(args.json, {"machine": facts, "events": [asdict(event) for event in found]})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
