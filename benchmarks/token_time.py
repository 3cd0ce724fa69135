#!/usr/bin/env python3
"""Where a token's time goes, from the weights to the client's socket, in one table.

    python -P benchmarks/token_time.py [--streams 8] [--context 256]

Runs `step.py`, whose parts of a decode step are divided by the sequences of its batch, and then `tokens.py`, at one
token a message; what they measure stands there. The first lines are time in which the engine computes, those after
them CPU time of other threads and processes, which have cores of their own where there are enough.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(os.path.dirname(__file__))
import measure

HERE = Path(__file__).parent
ENGINE = {
    "linears": "linears",
    "attention": "attention",
    "small": "norms, RoPE and cache write, activations",
    "choice": "choice of tokens",
    "Python": "the engine's Python",
    "rest": "rest of a step",
}
STREAMING = {
    "decode: event loop": "decode replica's event loop, with Serve's handles",
    "decode: other threads": "decode replica's other threads: gRPC, Ray",
    "ingress: event loop": "ingress' event loop, with Serve's handles and HTTP",
    "ingress: other threads": "ingress' other threads: gRPC, Ray",
    "HAProxy": "HAProxy",
}
OTHERS = "all other processes"
COMPUTED = "decode: engine"  # is what `step.py` takes apart


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--context", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="of tokens.py; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=400, metavar="N", help="likewise; default: %(default)s")
    args = parser.parse_args()
    batch = str(args.streams)
    step = run("step.py", "--dtype", "bfloat16", "--batch", batch, "--context", str(args.context))
    streamed = run("tokens.py", "--streams", batch, "--rounds", str(args.rounds), "--tokens", str(args.tokens))
    rows = engine_rows(step["batches"][batch]["bfloat16"], args.streams)
    cost = streamed["costs"][0]
    rows += streaming_rows(cost["of"])
    whole = sum(seconds for _, seconds in rows)
    heading = f"a token at {batch} streams, {cost['tokens'] / cost['messages']:.2f} tokens a message"
    table = measure.table(heading, ("",), ("µs", "share"))
    for name, seconds in rows:
        end = name in (ENGINE["rest"], OTHERS)
        table.add_row(name, f"{seconds * 1e6:.0f}", f"{seconds / whole:.1%}", end_section=end)
    table.add_row("in all", f"{whole * 1e6:.0f}", "")
    measure.show(measure.title(step["machine"]), table)
    return 0


def engine_rows(seconds: dict[str, list[float]], batch: int) -> list[tuple[str, float]]:
    return [(name, median(seconds[part]) / batch) for part, name in ENGINE.items()]


def streaming_rows(of: dict[str, list[float]]) -> list[tuple[str, float]]:
    rows = [(name, median(of.get(part, [0.0]))) for part, name in STREAMING.items()]
    others = [median(seconds) for part, seconds in of.items() if part not in STREAMING and part != COMPUTED]
    return [*rows, (OTHERS, sum(others))]


def run(script: str, *arguments: str) -> dict[str, Any]:
    """What it measured; its own tables are shown too. It may exit with 1, as it does where a demand is missed."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "measured.json"
        command = [sys.executable, "-P", str(HERE / script), *arguments, "--json", str(file)]
        subprocess.run(command, check=False)
        measured: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return measured


if __name__ == "__main__":
    sys.exit(main())
