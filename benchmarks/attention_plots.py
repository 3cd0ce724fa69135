#!/usr/bin/env python3
"""Measures and draws the two plots of docs/attention.md: what decode attention costs by context, and how exact three
ways to compute attention are.

    python -P benchmarks/attention_plots.py [--only decode] [--out DIR] [--threads 1] [--repeats 25] [--json FILE]

decode          milliseconds per sequence of a step of 8 sequences, one layer of SmolLM2-135M's shape in bfloat16, by
                context. Both ways are `paged_attention`: native kernels over packed blocks, and torch, which gathers
                the blocks of a plain cache, then calls F.scaled_dot_product_attention. Each call reads another part
                of a cache that is larger than the CPU's own caches
online-softmax  the largest error against float64, by context, on numbers that bfloat16 holds: torch's softmax of whole
                rows in float32, the online softmax over tiles of 64 keys in float32, the native kernel in bfloat16
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.testing import assert_close

sys.path.append(os.path.dirname(__file__))
import measure
from attention import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, plan_of
from native_calls import begin

from bifolio.kernels import AttentionPlan, kv_layout, paged_attention, using
from bifolio.kernels.layout import read_blocks, write_slots

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
PLOTS = ("decode", "online-softmax")
BATCH, CONTEXTS = 8, [2**n for n in range(7, 14)]
POSITIONS = 2 * BATCH * CONTEXTS[-1]  # of the cache: 100 MB
QUERIES, LENGTHS, TILE = 16, [2**n for n in range(6, 15)], 64
GROUP = HEADS // KV_HEADS
NATIVE, TORCH = "native, blocks as they lie", "torch, gather + SDPA"
WHOLE, ONLINE, ROUNDED = (
    "float32, softmax of the whole row",
    "float32, online in tiles of 64",
    "bfloat16, native kernel",
)
LOOK = {
    NATIVE: ("#1b6ca8", "o"),
    TORCH: ("#c1440e", "s"),
    WHOLE: ("#c1440e", "s"),
    ONLINE: ("#1b6ca8", "o"),
    ROUNDED: ("#4c8c4a", "^"),
}
STYLE = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "bifolio", "axes.spines.top": False}

Curves = Mapping[str, list[float]]  # one number for each context


def main() -> int:
    parser = measure.arguments(__doc__, repeats=25)
    parser.add_argument("--only", action="append", choices=PLOTS, help="may be given several times")
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="DIR", help="default: docs/images")
    args = parser.parse_args()
    facts, plots = measure.machine(begin(parser, args).isa), args.only or PLOTS
    found: dict[str, Curves] = {}
    with torch.inference_mode():
        if "decode" in plots:
            found["decode"] = decode(args.repeats)
        if "online-softmax" in plots:
            found["online-softmax"] = errors()
    args.out.mkdir(parents=True, exist_ok=True)
    for plot, curves in found.items():
        TABLES[plot](measure.title(facts), curves)
        with mpl.rc_context(STYLE):  # type: ignore[arg-type]
            draw(plot, curves, args.out / f"attention-{plot}.svg")
    measure.write_json(args.json, {"machine": facts, **found})
    return 0


def decode(rounds: int) -> Curves:
    """Milliseconds per sequence at each of CONTEXTS. All points are measured in the same rounds."""
    dtype, count = torch.bfloat16, POSITIONS // BLOCK_SIZE
    layout = kv_layout(dtype, HEAD_DIM, BLOCK_SIZE)
    packed = torch.empty(count, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype).normal_()
    plain = torch.empty_like(packed)
    for half, read in enumerate(read_blocks(packed, torch.arange(count), layout)):
        plain[:, half] = read.view(KV_HEADS, -1, BLOCK_SIZE, HEAD_DIM).transpose(0, 1)
    order, q = torch.randperm(count).int(), torch.randn(BATCH, HEADS, HEAD_DIM, dtype=dtype)

    def native(step: AttentionPlan) -> Tensor:
        return paged_attention(q, packed, step, layout=layout)

    def gathered(step: AttentionPlan) -> Tensor:
        with using("torch"):
            return paged_attention(q, plain, step)

    def several(way: Callable[[AttentionPlan], Tensor], turn: Iterator[AttentionPlan], calls: int) -> None:
        for _ in range(calls):
            way(next(turn))

    ways: dict[str, measure.Way] = {}
    for context in CONTEXTS:
        plans = [plan_of(1, table, context) for table in order.view(-1, BATCH, context // BLOCK_SIZE)]
        assert_close(native(plans[0]), gathered(plans[0]), rtol=0.05, atol=0.01)
        turn = itertools.cycle(plans)
        for name, way in ((NATIVE, native), (TORCH, gathered)):
            ways[f"{name}, {context}"] = partial(several, way, turn, calls_of(context))
    measure.progress(f"decode, {rounds} rounds")
    seconds = measure.in_rounds(ways, rounds)

    def point(name: str, context: int) -> float:
        return median(seconds[f"{name}, {context}"]) / calls_of(context) / BATCH * 1e3

    return {name: [point(name, context) for context in CONTEXTS] for name in (NATIVE, TORCH)}


def calls_of(context: int) -> int:
    """How many calls are timed together: a short one alone would be lost in the clock."""
    return max(1, 2048 // context)


def errors() -> Curves:
    """The largest error of an output at each of LENGTHS, which is the number of keys; every row sees all of them."""
    curves: dict[str, list[float]] = {WHOLE: [], ONLINE: [], ROUNDED: []}
    torch.manual_seed(0)  # the same numbers whatever else is drawn
    for keys in LENGTHS:
        measure.progress(f"error, {keys} keys")
        q = torch.randn(QUERIES, HEADS, HEAD_DIM).bfloat16()
        k, v = torch.randn(2, keys, KV_HEADS, HEAD_DIM).bfloat16()
        rows, by_head = packed_rows(q), (k.transpose(0, 1), v.transpose(0, 1))
        expected = whole(rows.double(), *(x.double() for x in by_head))
        single = rows.float(), *(x.float() for x in by_head)
        results = {WHOLE: whole(*single), ONLINE: online(*single), ROUNDED: packed_rows(paged(q, k, v))}
        for name, result in results.items():
            curves[name].append((result.double() - expected).abs().max().item())
    return curves


def packed_rows(q: Tensor) -> Tensor:
    """[KV heads, rows * group, D] of q [rows, heads, D]: the query heads of one KV head are rows of one problem."""
    return q.view(len(q), KV_HEADS, GROUP, HEAD_DIM).transpose(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1) @ v


def online(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A maximum, a sum and an output that each tile of keys joins."""
    top, total, mixed = q.new_full((*q.shape[:2], 1), -torch.inf), q.new_zeros(*q.shape[:2], 1), torch.zeros_like(q)
    for k_tile, v_tile in zip(k.split(TILE, dim=1), v.split(TILE, dim=1), strict=True):
        scores = q @ k_tile.mT / math.sqrt(HEAD_DIM)
        grown = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, fade = torch.exp(scores - grown), torch.exp(top - grown)
        top, total, mixed = grown, total * fade + weights.sum(-1, keepdim=True), mixed * fade + weights @ v_tile
    return mixed / total


def paged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The native kernel, with K and V at random places of a packed cache."""
    layout, blocks = kv_layout(k.dtype, HEAD_DIM, BLOCK_SIZE), len(k) // BLOCK_SIZE
    kv, order = k.new_empty(blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM), torch.randperm(blocks)
    slots = (order[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
    write_slots(kv, slots, k, v, layout)
    return paged_attention(q, kv, plan_of(len(q), order.int()[None], len(k)), causal=False, layout=layout)


def show_decode(title: str, curves: Curves) -> None:
    heading = f"decode attention, batch {BATCH}, one layer, bfloat16: milliseconds per sequence"
    table = measure.table(heading, (), ("context", "native", "gather + SDPA", "ratio", "native GB/s"))
    for i, context in enumerate(CONTEXTS):
        ours, theirs = curves[NATIVE][i], curves[TORCH][i]
        speed = context * 2 * KV_HEADS * HEAD_DIM * 2 / ours / 1e6
        table.add_row(str(context), f"{ours:.4f}", f"{theirs:.4f}", f"{theirs / ours:.1f}", f"{speed:.1f}")
    measure.show(title, table)


def show_errors(title: str, curves: Curves) -> None:
    heading = f"largest error against float64, {QUERIES} rows, {HEADS} query heads of {HEAD_DIM}"
    table = measure.table(heading, (), ("keys", *curves))
    for keys, *each in zip(LENGTHS, *curves.values(), strict=True):
        table.add_row(str(keys), *(f"{error:.1e}" for error in each))
    measure.show(title, table)


TABLES = {"decode": show_decode, "online-softmax": show_errors}


def draw(plot: str, curves: Curves, path: Path) -> None:
    figure = Figure(figsize=(5.6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    contexts = CONTEXTS if plot == "decode" else LENGTHS
    for name, values in curves.items():
        colour, marker = LOOK[name]
        axes.plot(contexts, values, color=colour, marker=marker, markersize=4, linewidth=1.4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [str(context) for context in contexts])
    axes.minorticks_off()
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines["right"].set_visible(False)
    label(axes, plot)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def label(axes: Axes, plot: str) -> None:
    if plot == "decode":
        axes.set_xlabel("context, positions")
        axes.set_ylabel("milliseconds per sequence")
        axes.set_title(
            f"Decode attention of one layer, batch {BATCH}, bfloat16, threads: {torch.get_num_threads()}", fontsize=9
        )
    else:
        axes.set_xlabel("keys")
        axes.set_ylabel("largest error against float64")
        axes.set_title("Three ways to compute the same attention", fontsize=9)


if __name__ == "__main__":
    sys.exit(main())
