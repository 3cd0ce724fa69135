#!/usr/bin/env python3
"""The faults of hosts, on a cluster of four of them under load: links cut and slowed, hosts killed, Ray's GCS away.

    python -P benchmarks/chaos_hosts.py                          each kind once; needs root
    python -P benchmarks/chaos_hosts.py --faults 40 --seed 7
    python -P benchmarks/chaos_hosts.py --kind ray               Ray nodes at one address, no root: only their deaths
    python -P benchmarks/chaos_hosts.py --list

The head has the doors, the KV manager and the load; one host has the prefill replica, two have a decode replica each.
Blocks cross the links as frames (`kv.copies` false) unless `--copies`. A host whose Ray node ends gets a new one, as
Kubernetes would start it. Judged as in `chaos.py`: no wrong id, nothing hangs, nothing leaks, and no stream breaks,
since no ingress dies.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.append(os.path.dirname(__file__))
import chaos_show
import measure
import yaml
from chaos import configuration, glassllm, say
from chaos_check import Result, judge
from chaos_faults import Fault, Hit, Planned, Scene
from chaos_load import Load, questions
from chaos_run import run
from chaos_target import Target
from hosts import Hosts, NoHosts
from hosts_netns import NetnsHosts, netns_hosts
from hosts_ray import ray_nodes
from load_text import open_book

from bifolio.cluster.local import free_ports

HOSTS = {"head": {}, "p0": {"pool": "prefill"}, "d0": {"pool": "decode"}, "d1": {"pool": "decode"}}
ROLES = {"head": ["head"], "prefill": ["p0"], "decode": ["d0", "d1"]}
SHORT_S, LONG_S = 2.0, 20.0  # of cuts: the manager forgets after kv.silence_s, Ray after ten seconds or so
NOTICE_S = 15.0  # in which a Ray node that was given up learns of it, once its link heals, and ends
RATE, SLOW_S = "1mbit", 5.0
AWAY_S = 5.0  # a host that died is there again, and a GCS
LOOK_S = 0.5
WHOLE_S = 150.0  # a node, and then replicas on it
DEPLOY_S = 180.0
NO_HOSTS = 3  # the exit status where this machine has none to give

Role = Literal["head", "prefill", "decode"]


class HostsTarget(Target):
    """It is whole when every host has its Ray node, too. Nodes that have ended are started again, but on hosts that a
    fault `holds`."""

    def __init__(self, hosts: Hosts, *, http_port: int, grpc_port: int, prefill: int, decode: int) -> None:
        super().__init__(http_port, grpc_port, prefill=prefill, decode=decode)
        self.hosts = hosts
        self._held: set[str] = set()

    async def whole(self, gone: Collection[int] = ()) -> bool:
        there = await asyncio.to_thread(lambda: all(map(self.hosts.alive, self.hosts.names)))
        return there and not self._held and await super().whole(gone)

    @contextmanager
    def holding(self, name: str) -> Iterator[None]:
        assert name not in self._held, "a host has one fault at a time"
        self._held.add(name)
        try:
            yield
        finally:
            self._held.remove(name)

    async def tend(self) -> None:
        """For as long as the load runs."""
        while True:
            await asyncio.sleep(LOOK_S)
            for name in self.hosts.names[1:]:
                if name not in self._held:
                    await asyncio.to_thread(self.hosts.revive, name)  # unless it is alive


Strike = Callable[[HostsTarget, str], Awaitable[Collection[int] | None]]


async def on_host(scene: Scene, role: Role, rank: int, strike: Strike) -> Hit:
    """`strike` may return the processes that it ended."""
    target = scene.target
    assert isinstance(target, HostsTarget)
    name = ROLES[role][rank % len(ROLES[role])]
    with target.holding(name):
        gone = await strike(target, name)
    return Hit(name, tuple(gone or ()))


@dataclass(frozen=True)
class Cut:
    """Nothing comes or goes for so long; then the link heals."""

    role: Role
    rank: int
    seconds: float

    @property
    def kind(self) -> str:
        return f"cut {self.role} {self.seconds:g} s"

    async def strike(self, scene: Scene) -> Hit:
        async def cut(target: HostsTarget, name: str) -> None:
            assert isinstance(target.hosts, NetnsHosts)
            await asyncio.to_thread(target.hosts.cut, name)
            try:
                await asyncio.sleep(self.seconds)
            finally:
                await asyncio.to_thread(target.hosts.heal, name)
            for _ in range(round(NOTICE_S / LOOK_S) if self.seconds > SHORT_S else 0):
                if not await asyncio.to_thread(target.hosts.alive, name):
                    break
                await asyncio.sleep(LOOK_S)

        return await on_host(scene, self.role, self.rank, cut)


@dataclass(frozen=True)
class Slow:
    """A narrow link in both directions."""

    role: Role
    rank: int

    @property
    def kind(self) -> str:
        return f"slow {self.role}"

    async def strike(self, scene: Scene) -> Hit:
        async def slow(target: HostsTarget, name: str) -> None:
            assert isinstance(target.hosts, NetnsHosts)
            await asyncio.to_thread(target.hosts.slow, name, RATE)
            try:
                await asyncio.sleep(SLOW_S)
            finally:
                await asyncio.to_thread(target.hosts.unslow, name)

        return await on_host(scene, self.role, self.rank, slow)


@dataclass(frozen=True)
class Die:
    """All processes of a host at once; some time later it is there again, with nothing on it."""

    role: Role
    rank: int

    @property
    def kind(self) -> str:
        return f"kill {self.role} host"

    async def strike(self, scene: Scene) -> Hit:
        async def die(target: HostsTarget, name: str) -> Collection[int]:
            gone = await asyncio.to_thread(target.hosts.kill, name)
            await asyncio.sleep(AWAY_S)
            return gone

        return await on_host(scene, self.role, self.rank, die)


@dataclass(frozen=True)
class GcsAway:
    """Ray's GCS is killed, and comes back with what it had stored."""

    kind: str = "kill gcs"

    async def strike(self, scene: Scene) -> Hit:
        async def away(target: HostsTarget, name: str) -> None:
            assert isinstance(target.hosts, NetnsHosts)
            await asyncio.to_thread(target.hosts.restart_gcs, AWAY_S)

        return await on_host(scene, "head", 0, away)


def catalogue(*, links: bool) -> dict[str, Callable[[int], Fault]]:
    """By kind; what is made is told a rank. Without links only what a Ray node can have."""
    kinds: list[Callable[[int], Fault]] = [lambda rank: Die("decode", rank), lambda rank: Die("prefill", rank)]
    if links:
        kinds += [
            lambda rank: Cut("decode", rank, SHORT_S),
            lambda rank: Cut("prefill", rank, SHORT_S),
            lambda rank: Cut("decode", rank, LONG_S),
            lambda rank: Cut("prefill", rank, LONG_S),
            lambda rank: Slow("decode", rank),
            lambda rank: Slow("prefill", rank),
            lambda rank: Slow("head", rank),
            lambda rank: GcsAway(),
        ]
    return {make(0).kind: make for make in kinds}


def plan(seed: int, count: int, *, links: bool, only: Sequence[str] = ()) -> list[Planned]:
    """Every kind as often as any other, one more at most, in an order by chance."""
    kinds = catalogue(links=links)
    if unknown := set(only) - kinds.keys():
        raise ValueError(f"no such faults: {', '.join(sorted(unknown))}; allowed: {', '.join(kinds)}")
    rng, names, order = random.Random(seed), [name for name in kinds if not only or name in only], list[str]()
    while len(order) < count:
        order += rng.sample(names, len(names))
    return [Planned(kinds[name](rng.randrange(1000)), round(rng.uniform(2.0, 6.0), 2)) for name in order[:count]]


def settings(model: Path, *, copies: bool) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(json.dumps(configuration(model)))
    tree["pools"] = {
        "prefill": {"replicas": 1, "labels": HOSTS["p0"]},
        "decode": {"replicas": 2, "labels": HOSTS["d0"]},
    }
    tree["ingress"] = {"replicas": 1}
    tree["kv"]["copies"] = copies
    return tree


@contextmanager
def deployed(hosts: Hosts, config: dict[str, Any], ports: tuple[int, int], output: Any) -> Iterator[None]:
    """Bifolio on them, from a process on the head. What it prints goes to `output`."""
    head = hosts.names[0]
    config = {**config, "http": {"port": ports[0]}, "grpc": {"port": ports[1]}}
    with tempfile.TemporaryDirectory(prefix="chaos-") as place:
        (file := Path(place) / "cluster.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        driver = [
            sys.executable,
            "-P",
            str(Path(__file__).resolve().with_name("hosts_driver.py")),
            str(file),
            hosts.address,
            head,
        ]
        with subprocess.Popen(
            driver,
            env=hosts.environment(head) | {"TMPDIR": place},  # it is killed in the end
            cwd=place,  # what Ray starts looks for modules there, too
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
        ) as process:
            late = threading.Timer(DEPLOY_S, process.kill)
            late.start()
            assert process.stdout is not None
            ready = process.stdout.readline()
            late.cancel()
            if not ready:
                raise RuntimeError("Bifolio did not come to serve on these hosts; its output says more (--log)")
            try:
                yield
            finally:
                process.kill()


async def strike(target: HostsTarget, faults: Sequence[Planned], load: Load) -> Result:
    async with asyncio.TaskGroup() as group:  # if hosts cannot be tended, there is no run
        tending = group.create_task(target.tend())
        result = await run(target, faults, load, show=say, whole_s=WHOLE_S, at_once=1)
        tending.cancel()
    return result


def main() -> int:
    if not sys.flags.safe_path:  # a script here is named like a package that others import
        os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]])
    args = _parser().parse_args()
    links = args.kind == "netns"
    if args.list:
        measure.show(*catalogue(links=links))
        return 0
    try:
        count = len(args.only or catalogue(links=links)) if args.faults is None else args.faults
        faults = plan(args.seed, count, links=links, only=args.only)
        for number, planned in enumerate(faults, 1):
            say(f"{number:4}  after {planned.after:5.2f} s  {planned.fault}")
        result = everything(args, faults)
    except ValueError as error:
        print(f"chaos_hosts.py: {error}", file=sys.stderr)
        return 2
    except NoHosts as error:
        print(f"chaos_hosts.py: left out: {error}", file=sys.stderr)
        return NO_HOSTS
    verdict = judge(result)
    measure.show(*chaos_show.shown(result, verdict))
    longest = max((each.ended - each.sent for each in result.outcomes if each.ended is not None), default=0.0)
    measure.show(f"the longest answer took {longest:.1f} s")
    if args.markdown is not None:
        given = f" --faults {args.faults}" if args.faults is not None else ""
        command = f"python -P benchmarks/chaos_hosts.py --kind {args.kind} --seed {args.seed}{given}"
        chaos_show.write_markdown(args.markdown, "hosts", command, result, verdict)
    if args.json is not None:
        args.json.write_text(json.dumps({**dataclasses.asdict(verdict), "met": verdict.met}), encoding="utf-8")
    return int(not verdict.met)


def everything(args: argparse.Namespace, faults: Sequence[Planned]) -> Result:
    model = args.model or glassllm()
    book, _ = open_book(None, model)
    config = settings(model, copies=args.copies)
    make = netns_hosts if args.kind == "netns" else ray_nodes
    http, grpc = ports = free_ports(2)
    with (
        make(HOSTS, ports) as hosts,
        open(args.log or os.devnull, "wb") as output,
        hosts.inside("head"),
        deployed(hosts, config, (http, grpc), output),
    ):
        target = HostsTarget(hosts, http_port=http, grpc_port=grpc, prefill=1, decode=2)

        async def all_of_it() -> Result:
            return await strike(target, faults, Load(target, questions(book, args.seed), args.lanes, seed=args.seed))

        return asyncio.run(all_of_it())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=9, metavar="S", help="default: %(default)s")
    parser.add_argument("--faults", type=int, metavar="N", help="default: each kind once")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="KIND,...")
    parser.add_argument("--kind", choices=["netns", "ray"], default="netns", help="of hosts; default: %(default)s")
    parser.add_argument("--copies", action="store_true", help="let blocks be copied out of memory between hosts")
    parser.add_argument("--lanes", type=int, default=8, metavar="N", help="requests at a time; default: %(default)s")
    parser.add_argument("--list", action="store_true", help="the kinds of faults, and strike nothing")
    parser.add_argument("--model", type=Path, metavar="DIRECTORY", help="default: glassllm, as in the tests")
    parser.add_argument("--log", type=Path, metavar="FILE", help="what the cluster prints")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict there, too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="and the table into this page, between its marks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
