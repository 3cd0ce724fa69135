#!/usr/bin/env python3
"""What exactness costs: a prompt's chunk and decode steps, in every way that keeps a row's bits its own, against plain
float32 in torch.

    python -P benchmarks/exact.py [--model smollm2-135m] [--threads 1] [--repeats 7] [--kernels avx2] [--json FILE]

The native kernels know no other way: exact or not, they compute the same. In torch exactness is padded rows and another
attention; a plain replica has no MKL_CBWR besides, but MKL reads that once, so here both have it. The ratio is a way's
time by that of torch's plain float32.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.append(os.path.dirname(__file__))
import measure
from native_calls import begin

from bifolio.cluster.models import resolve
from bifolio.kernels import kv_layout, using
from bifolio.replicas.batch import Row
from bifolio.replicas.block_stores import HostBlocks
from bifolio.replicas.kv_cache import KvCache
from bifolio.replicas.llama import Llama
from bifolio.replicas.runner import Runner
from bifolio.replicas.weights import load

BLOCK_SIZE, SEQUENCES, BLOCKS = 16, 8, 34  # blocks of each sequence
STEPS = {  # sequences, tokens of each, positions before them
    "a prompt's chunk of 256": (1, 256, 256),
    "decode, batch 1, context 512": (1, 1, 511),
    "decode, batch 8, context 512": (8, 1, 511),
}
PLAIN = "torch float32, plain"
WAYS = (PLAIN, "torch float32, exact", "native float32", "native bfloat16", "native int8")


def main() -> int:
    parser = measure.arguments(__doc__, repeats=7)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    native = begin(parser, args, exact=True)
    facts, source = measure.machine(native.isa), resolve(args.model)
    runners = {way: make_runner(source, way) for way in WAYS}
    table = measure.table(f"exact steps, {args.model}", ("what", "computed by"), ("ms", "ratio"))
    results = {}
    for what, step in STEPS.items():
        rows = make_rows(*step)
        ways = {way: partial(compute, way, runner, rows) for way, runner in runners.items()}
        results[what] = seconds = measure.in_rounds(ways, args.repeats)
        for way in WAYS:
            ratio = measure.ratio(seconds[way], seconds[PLAIN])
            table.add_row(what if way == PLAIN else "", way, measure.milliseconds(seconds[way]), f"{ratio:.2f}")
        table.add_section()
    measure.show(measure.title(facts), table)
    measure.write_json(args.json, {"machine": facts, "model": args.model, "steps": results})
    return 0


def make_runner(source: Path, way: str) -> Runner:
    dtype = torch.float32 if "float32" in way else torch.bfloat16
    config, weights = load(source, dtype)
    with backend(way):
        model = Llama(config, weights, quantization="int8" if "int8" in way else None, exact=way != PLAIN)
    layout = kv_layout(dtype, config.head_dim, BLOCK_SIZE)
    sizes = (SEQUENCES * BLOCKS, config.layers, config.kv_heads, BLOCK_SIZE, config.head_dim)
    cache = KvCache(*sizes, dtype, layout)
    return Runner(model, cache, HostBlocks(cache))


def make_rows(count: int, tokens: int, start: int) -> list[Row]:
    return [
        Row([1 + i * 7 + j for j in range(tokens)], start, range(1 + BLOCKS * i, 1 + BLOCKS * (i + 1)))
        for i in range(count)
    ]


def compute(way: str, runner: Runner, rows: list[Row]) -> None:
    with backend(way):
        runner.run(rows)


def backend(way: str) -> contextlib.AbstractContextManager[object]:
    return using("torch") if way.startswith("torch") else contextlib.nullcontext()


if __name__ == "__main__":
    sys.exit(main())
