#!/usr/bin/env python3
"""Faults on a real cluster under load, and whether every client got what it gets when nothing is amiss.

    python -P benchmarks/chaos.py                              200 faults of all kinds, in half an hour
    python -P benchmarks/chaos.py --seed 7 --faults 30         others; the same seed and count, the same faults
    python -P benchmarks/chaos.py --only "kill decode,burst"   of these kinds alone
    python -P benchmarks/chaos.py --list                       which kinds there are

The cluster is two prefill, two decode and two ingress replicas of a tiny model, with caches far too small for the load.
The plan is printed first and no answer changes it: to replay a run is to give its seed and count again. The exit status
is 0 if no answer was wrong, none hung or broke without its ingress, and nothing was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(os.path.dirname(__file__))
import chaos_show
import measure
import yaml
from chaos_check import Result, judge
from chaos_faults import Planned
from chaos_load import Load, questions
from chaos_plan import Times, catalogue, plan, shown
from chaos_run import AT_ONCE, run
from chaos_target import Local
from load_text import open_book

from bifolio.cluster.spawn import spawned
from bifolio.kv_manager.drill import DIRECTORY

TIMES = Times(stall_s=3.0, silence_s=5.0, transfer_s=5.0)
PREFILL = DECODE = INGRESS = 2


def configuration(model: Path) -> dict[str, object]:
    return {
        "model": {"source": str(model), "served_name": "glassllm"},
        "engine": {
            "exact": True,
            "block_size": 8,
            "kv_memory": "640 tokens",  # five sequences as long as the context: much fewer than are asked for
            "max_batched_tokens": 32,
            "max_sequences": 8,
            "stall_s": TIMES.stall_s,
        },
        "kv": {
            "local_blocks": 1,
            "silence_s": TIMES.silence_s,
            "stall_s": TIMES.transfer_s,
            "growth_s": 1.0,  # or the reserves would be most of the caches
            "confirm_s": 10.0,
            "admission_wait_s": 60.0,
        },
        "pools": {"prefill": {"replicas": PREFILL}, "decode": {"replicas": DECODE}},
        "ingress": {"replicas": INGRESS},
    }


@contextmanager
def cluster(model: Path, log: Path | None = None) -> Iterator[Local]:
    """One with that configuration, for the time of the context; what it prints goes to `log`."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as place:
        directory = Path(place)
        (drills := directory / "drills").mkdir()
        (directory / "cluster.yaml").write_text(yaml.safe_dump(configuration(model)), encoding="utf-8")
        os.environ[DIRECTORY] = str(drills)
        try:
            with (
                (log or directory / "output.txt").open("wb") as output,
                spawned([str(directory / "cluster.yaml")], output) as made,
            ):
                yield Local(
                    made.http_port,
                    made.grpc_port,
                    made.process.pid,
                    prefill=PREFILL,
                    decode=DECODE,
                    ingress=INGRESS,
                    drills=drills,
                )
        finally:
            del os.environ[DIRECTORY]


def strike(target: Local, model: Path, faults: list[Planned], seed: int, *, lanes: int, at_once: int) -> Result:
    """Under so many `lanes` of load, with `at_once` faults at most that the cluster is not over yet."""
    book, _ = open_book(None, model)

    async def all_of_it() -> Result:
        load = Load(target, questions(book, seed), lanes=lanes, seed=seed)
        return await run(target, faults, load, show=say, at_once=at_once)

    return asyncio.run(all_of_it())


def main() -> int:
    if not sys.flags.safe_path:  # a script here is named like a package that others import
        os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]])
    args = _parser().parse_args()
    if args.list:
        measure.show(*catalogue(TIMES))
        return 0
    try:
        faults = plan(args.seed, args.faults, TIMES, args.only, args.pace)
    except ValueError as error:
        print(f"chaos.py: {error}", file=sys.stderr)
        return 2
    for number, planned in enumerate(faults, 1):
        say(shown(planned, number))
    model = args.model or glassllm()
    with cluster(model, args.log) as target:
        result = strike(target, model, faults, args.seed, lanes=args.lanes, at_once=AT_ONCE)
    verdict = judge(result)
    measure.show(*chaos_show.shown(result, verdict))
    if args.markdown is not None:
        chaos_show.write_markdown(args.markdown, "chaos", _command(args), result, verdict)
    return int(not verdict.met)


def glassllm() -> Path:
    """Where the tests keep it; made as they make it if it is not there."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from glassllm import directory

    return directory()


def say(line: str) -> None:
    print(line, flush=True)


def _command(args: argparse.Namespace) -> str:
    only = f" --only {shlex.quote(','.join(args.only))}" if args.only else ""
    return f"python -P benchmarks/chaos.py --seed {args.seed} --faults {args.faults} --pace {args.pace:g}{only}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=9, metavar="S", help="default: %(default)s")
    parser.add_argument("--faults", type=int, default=205, metavar="N", help="default: %(default)s")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="KIND,...")
    parser.add_argument("--pace", type=float, default=4.5, metavar="SECONDS", help="between two; default: %(default)s")
    parser.add_argument("--lanes", type=int, default=20, metavar="N", help="requests at a time; default: %(default)s")
    parser.add_argument("--list", action="store_true", help="the kinds of faults, and strike nothing")
    parser.add_argument("--model", type=Path, metavar="DIRECTORY", help="default: glassllm, as in the tests")
    parser.add_argument("--log", type=Path, metavar="FILE", help="what the cluster prints")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table between its two marks there, too"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
