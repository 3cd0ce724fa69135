#!/usr/bin/env python3
"""What moving the KV cache from one process to another costs, beside what it is made of.

    python -P benchmarks/transfer.py                          memcpy, TCP, raw gRPC, frames, copies: GB/s and CPU
    python -P benchmarks/transfer.py sweep [--plot FILE.svg]  frames by window and size
    python -P benchmarks/transfer.py soak                     2,000 transfers, some cut off: is anything left behind?
    python -P benchmarks/transfer.py stall                    64 at once, of which one stalls: do the others wait?
    python -P benchmarks/transfer.py ttft                     the first token of split and single pools, in real cells
    python -P benchmarks/transfer.py timeline [--plot FILE.svg]  when each chunk was computed, sent and landed

The first four need no model: caches full of noise, in two processes that have a replica's environment. GB is 1e9 bytes.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(os.path.dirname(__file__))
import measure

MODEL = "smollm2-135m"


def main() -> int:
    if not sys.flags.safe_path:  # a script here is named like a package that others import
        os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]])
    args = _parser().parse_args()
    measure.become_a_replica(args.threads)
    facts = measure.machine("no")
    measure.show(measure.title(facts))
    results = WHAT[args.what](args)
    measure.write_json(args.json, {"machine": facts, **results})
    return 0


def rates(args: Namespace) -> dict[str, Any]:
    import transfer_rates
    from transfer_source import LARGE, SMALL

    mib = args.mib or 256
    samples = transfer_rates.rates(mib, args.repeats or 25)
    found = {name: transfer_rates.figures(each) for name, each in samples.items()}
    for shape in (SMALL, LARGE):
        measure.show(*transfer_rates.shown(shape, mib, found[shape.name]))
    return {"figures": found}


def sweep(args: Namespace) -> dict[str, Any]:
    import transfer_sweep

    speed, cpu = transfer_sweep.sweep(args.mib or 128, args.repeats or 7)
    measure.show(
        transfer_sweep.shown("GB/s by window and frame", speed),
        transfer_sweep.shown("seconds of CPU for a GB, both sides together", cpu),
    )
    if args.plot is not None:
        transfer_sweep.draw(speed, args.plot)
    return {"gb_s": speed, "cpu": cpu}


def soak(args: Namespace) -> dict[str, Any]:
    import transfer_soak

    looks, found = transfer_soak.soak(args.transfers, args.kills)
    measure.show(*transfer_soak.shown(looks, found))
    return found | {"looks": [asdict(look) for look in looks]}


def stall(args: Namespace) -> dict[str, Any]:
    import transfer_stall

    found = transfer_stall.stall(args.repeats or 7)
    measure.show(*transfer_stall.shown(found))
    return found


def ttft(args: Namespace) -> dict[str, Any]:
    import transfer_ttft

    found = transfer_ttft.ttft(args.model, args.tokens, args.repeats or 11, args.threads)
    measure.show(*transfer_ttft.shown(args.tokens, found))
    return found


def timeline(args: Namespace) -> dict[str, Any]:
    import transfer_timeline

    found = transfer_timeline.timelines(args.model, args.tokens, args.threads, args.repeats or 7)
    measure.show(*transfer_timeline.shown(args.tokens, found))
    if args.plot is not None:
        transfer_timeline.draw(args.tokens, found, args.plot)
    return {way: [asdict(each) for each in of] for way, of in found.items()}


WHAT: dict[str, Callable[[Namespace], dict[str, Any]]] = {
    "rates": rates,
    "sweep": sweep,
    "soak": soak,
    "stall": stall,
    "ttft": ttft,
    "timeline": timeline,
}


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=WHAT, default="rates", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of a replica; default: %(default)s")
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds; each has a default of its own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything that was measured")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="sweep, timeline: also draw it")
    parser.add_argument("--mib", type=int, metavar="N", help="of a transfer; default: 256 for rates, 128 for sweep")
    parser.add_argument("--transfers", type=int, default=2000, metavar="N", help="soak; default: %(default)s")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="soak: and so many that lose their process")
    parser.add_argument("--model", default=MODEL, help="ttft, timeline; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=1600, metavar="N", help="ttft, timeline: of a prompt")
    return parser


if __name__ == "__main__":
    sys.exit(main())
