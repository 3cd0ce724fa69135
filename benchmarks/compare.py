#!/usr/bin/env python3
"""Us and other engines, in turns on the same cores, with the same weights and prompts.

    benchmarks/compare.sh [--quick] [--only steady] [--engines bifolio,vllm] [--rounds 3] [--append] [--report]

memory   how fast memory is read, and the step time that it alone would allow
steady   tokens a second of 1, 8, 16 and 32 streams that decode, both cores, one replica
mixed    8 streams, by turns without and with a prompt of 1,600 tokens every few seconds
goodput  two recorded traces at several speeds: the share of requests that keep the SLO

Every part goes round by round; in a round each engine has one turn, in an order that turns, and measures its points.
Only one is there to compute: ours is started for its turn and ended after it, as its clocks would take a stop for a
loss; others stay up, stopped (SIGSTOP), because some take minutes to start. Medians of rounds, ratios round by round.
Everything is kept in a JSON file, to which --append adds rounds, and from which --report makes tables, plots and docs
again. Ctrl-C shows what there is. compare.sh makes the peers' environments; an engine that is not there, or does not
start, is skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.append(os.path.dirname(__file__))
import compare_show
import measure
from compare_engines import MODEL, Engine, Server, Skipped, Where, engines, family, serving
from compare_load import Door, Recorded, mixed_point, steady_point, trace_point
from compare_memory import bandwidth
from compare_parts import GOODPUT, MIXED, MOST, PARTS, SLO, STEADY, Size, full, quick
from compare_weights import hf_directory
from load import uvloop_runner
from load_text import ROOT, Book, InputError, open_book

from bifolio.cluster import models
from bifolio.kernels import use

Point = dict[str, Any]
Measure = Callable[[Door], Coroutine[Any, Any, Point]]
DATA = Path("shared/data/traces")


class Comparison:
    """What has been measured, and the servers that are up."""

    def __init__(self, args: argparse.Namespace, book: Book, where: Where, size: Size) -> None:
        self._args, self._book, self._where, self._size = args, book, where, size
        self._runner = uvloop_runner()
        self._all = engines(where)
        self._stack = ExitStack()
        self._up: dict[str, Server] = {}  # those that are stopped between their turns
        self._skipped: set[str] = set()
        self.file: Path = args.json
        kept: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        facts = {"machine": measure.machine(use("auto")), "cores": where.cores}
        self.results: dict[str, Any] = {"engines": {}, "memory": {}} | kept | facts
        self.results["points"] = [
            point for point in kept.get("points", []) if args.append or point["part"] not in args.parts
        ]

    def run(self) -> None:
        parts = {"memory": self._memory, "steady": self._steady, "mixed": self._mixed, "goodput": self._goodput}
        with self._stack:
            for part in self._args.parts:
                parts[part]()

    def _memory(self) -> None:
        cores = len(self._where.cores)
        for threads in sorted({1, cores}):
            self.results["memory"][str(threads)] = found = bandwidth(threads)
            say(f"memory, {threads} thread{'s' * (threads > 1)}: {found:.1f} GB/s")

    def _steady(self) -> None:
        size = self._size

        def measured(streams: int, seed: int) -> Measure:
            return lambda door: steady_point(self._book, door, streams, size.output, seed)

        for turn, server in self._turns("steady", STEADY):
            for streams in size.streams:
                self._take(server, {"part": "steady", "round": turn, "streams": streams}, measured(streams, turn))

    def _mixed(self) -> None:
        size, every = self._size, self._args.long_every

        def measured(seed: int) -> Measure:
            return lambda door: mixed_point(
                self._book, door, long_every=every, seconds=size.phase, phases=size.phases, seed=seed
            )

        for turn, server in self._turns("mixed", MIXED):
            self._take(server, {"part": "mixed", "round": turn, "long_every": every}, measured(1000 + turn))

    def _goodput(self) -> None:
        size = self._size
        traces = [each for each in recorded(self._args.traces) if each.path.exists()]
        if not traces:
            say(f"goodput: skipped, no traces in {self._args.traces}; --traces says where they are")
            return

        def measured(of: Recorded, scale: float, seed: int) -> Measure:
            return lambda door: trace_point(
                self._book, door, of, scale=scale, seconds=size.trace_seconds, context=MOST, slo=SLO, seed=seed
            )

        for turn, server in self._turns("goodput", GOODPUT):
            for of in traces:
                for scale in size.scales.get(of.name, ()):
                    key = {"part": "goodput", "round": turn, "trace": of.name, "scale": scale}
                    self._take(server, key, measured(of, scale, turn))

    def _turns(self, part: str, wanted: Sequence[str]) -> Iterator[tuple[int, Server]]:
        """Round by round each engine's turn, in an order that turns; what cannot be started once is not tried again."""
        listed = {*STEADY, *MIXED, *GOODPUT}  # others have been asked for by name, for every part
        names = [name for name in self._args.engines or wanted if name in wanted or name not in listed]
        first = 1 + max((point["round"] for point in self.results["points"] if point["part"] == part), default=-1)
        for turn in range(first, first + (self._args.rounds or self._size.rounds[part])):
            say(f"{part}: round {turn + 1}")
            shift = turn % max(1, len(names))
            for name in names[shift:] + names[:shift]:
                if name not in self._skipped:
                    with ExitStack() as stack:
                        if (server := self._start(name, stack)) is not None:
                            yield turn, server

    def _start(self, name: str, stack: ExitStack) -> Server | None:
        """The engine, until the stack ends: then ours has ended, and others are stopped until their next turn."""
        engine = self._all.get(name)
        if (server := self._up.get(name)) is None:
            try:
                if engine is None:
                    raise Skipped(f"there is no such engine; there are {', '.join(self._all)}")
                if engine.slow and not self._args.engines:
                    raise Skipped(f"{engine.slow}; --engines takes it all the same")
                say(f"  {name} starts")
                until = stack if engine.config is not None else self._stack
                server = until.enter_context(serving(engine, self._where))
                until.callback(_signal, server, signal.SIGCONT)
                door = Door(server.url, engine.model, engine.vllm)
                warm = self._runner.run(steady_point(self._book, door, 4, 24, -1))
                if warm["failed"]:
                    raise Skipped(f"its first requests failed: {warm['errors']}")
            except Skipped as error:
                say(f"  {name}: SKIPPED, {error}")
                self._skipped.add(name)
                if engine is not None:
                    self.results["engines"].setdefault(name, described(engine) | {"skipped": str(error)})
                return None
            self._look(server)
            if engine.config is None:
                self._up[name] = server
        _signal(server, signal.SIGCONT)
        if server.engine.config is None:
            stack.callback(_signal, server, signal.SIGSTOP)
        return server

    def _look(self, server: Server) -> None:
        """What it takes when it has nothing to do."""
        time.sleep(1.0)
        before = server.cpu_seconds()
        time.sleep(3.0)
        idle, resident = (server.cpu_seconds() - before) / 3.0, server.resident()
        of = described(server.engine) | {"version": server.engine.version()}
        self.results["engines"][server.engine.name] = of | {"idle_share": idle, "resident_mb": resident}

    def _take(self, server: Server, key: Point, measured: Measure) -> None:
        cpu, began = server.cpu_seconds(), time.monotonic()
        found = self._runner.run(measured(Door(server.url, server.engine.model, server.engine.vllm)))
        seconds = time.monotonic() - began
        point = key | {"engine": server.engine.name} | found
        point |= {"seconds": seconds, "cpu_share": (server.cpu_seconds() - cpu) / seconds}
        self.results["points"].append(point)
        say(compare_show.line(point))
        self.save()

    def save(self) -> None:
        self.results["time"] = time.strftime("%Y-%m-%d", time.gmtime())
        measure.write_json(self.file, self.results)


def described(engine: Engine) -> dict[str, Any]:
    """As a reader can repeat it: without this machine's paths."""

    def short(part: str) -> str:
        return Path(part).name if part.startswith("/") else part

    command = " ".join(short(part) for part in engine.command.replace("-m bifolio.cluster.cli", "bifolio").split())
    return {
        "what": engine.what,
        "command": command[command.find("bifolio") :] if engine.config is not None else command,
        "environment": engine.environment,
        "binding": engine.binding,
        "config": engine.config,
    }


def _once(number: int, frame: object) -> None:
    """A second Ctrl-C would leave servers behind that the first one is stopping."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _signal(server: Server, which: signal.Signals) -> None:
    """To it and all that it has started."""
    for pid in family(server.process.pid):
        try:
            os.kill(pid, which)
        except ProcessLookupError:
            pass


def recorded(folder: Path) -> list[Recorded]:
    return [
        Recorded("conversation", folder / "mooncake_conversation.jsonl.gz", 32, True),
        Recorded("azure", folder / "azure2023_conv.csv.gz", 4, False),
    ]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    args = parser().parse_args()
    args.parts = args.only or list(PARTS)
    size = quick() if args.quick else full()
    args.out.mkdir(parents=True, exist_ok=True)
    args.json = args.out / "results.json"
    if not args.report:
        where = Where(args.peers.resolve(), args.out.resolve(), tuple(sorted(os.sched_getaffinity(0))))
        try:
            gguf = models.resolve(MODEL)
            hf_directory(gguf, where.hf)
            book, _ = open_book(args.text, gguf)
        except (InputError, Exception) as error:
            print(f"compare.py: {error}", file=sys.stderr)
            return 2
        signal.signal(signal.SIGINT, _once)
        comparison = Comparison(args, book, where, size)
        try:
            comparison.run()
        except (KeyboardInterrupt, asyncio.CancelledError):
            say("interrupted: what there is so far")
        comparison.save()
    results = json.loads(args.json.read_text())
    compare_show.show(results)
    if args.report or not args.quick:
        import compare_plots

        compare_plots.draw(results, args.images)
        compare_show.write_section(args.docs, results, args.images)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--quick", action="store_true", help="fewer points, one round; docs stay as they are")
    made.add_argument("--only", action="append", choices=PARTS, help="may be given several times")
    made.add_argument("--engines", type=lambda text: text.split(","), metavar="LIST", help="names, with commas")
    made.add_argument("--rounds", type=int, metavar="N", help="of each part")
    made.add_argument("--long-every", type=float, default=3.0, metavar="SECONDS", help="default: %(default)s")
    made.add_argument("--append", action="store_true", help="add rounds to those that the JSON has")
    made.add_argument("--report", action="store_true", help="measure nothing: tables, plots and docs from the JSON")
    made.add_argument("--peers", type=Path, default=Path("build/peers"), metavar="DIR", help="default: %(default)s")
    made.add_argument("--out", type=Path, default=Path("build/compare"), metavar="DIR", help="JSON, logs, configs")
    made.add_argument("--text", type=Path, metavar="FILE", help="as load.py has it")
    inside = next((each for each in (ROOT / DATA, ROOT.parent / DATA) if each.exists()), ROOT / DATA)
    made.add_argument("--traces", type=Path, default=inside, metavar="DIR")
    made.add_argument("--docs", type=Path, default=ROOT / "docs" / "performance.md", metavar="FILE")
    made.add_argument("--images", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
    return made


if __name__ == "__main__":
    sys.exit(main())
