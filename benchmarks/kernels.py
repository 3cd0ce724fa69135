#!/usr/bin/env python3
"""How fast are the native kernels? Each against its torch twin, and against the best that torch has for the same work.

    python -P benchmarks/kernels.py [--only decode] [--dtype bfloat16] [--threads 1] [--repeats 15] [--kernels avx2]
                                    [--json FILE]

The sizes are SmolLM2-135M's. A time is that of all 30 layers of a step; of prefill attention that of one layer. A ratio
is the other's time by the native one's: above 1 the native kernel is faster. Native times are of the C functions, as in
a step, where the Python around a kernel is paid once a layer at most; what the public function takes, with its checks
and its allocation, stands beside them.

decode   attention of single tokens over paged blocks at random places, on caches of all layers, so that K and V come
         from memory: where a batch needs less than the whole cache, every call takes another part. Against
           twin            the torch twin on the same cache, packed
           gather + SDPA   what one writes in torch: the blocks of a plain cache gathered by the block table, then
                           F.scaled_dot_product_attention; the fastest of four ways to write it
           stream read     as many bytes side by side, read by the fastest of three torch reductions: the floor
prefill  1,600 tokens in chunks of 256 over paged blocks, against SDPA on contiguous tensors, where it is fastest: whole
         with is_causal, or in the same chunks with masks made before; heads of K and V repeated before, or by SDPA
linears  all of the model's, by rows; oneDNN has its weights packed before, with the two hints for a number of rows
small    norm with residual, activation, RoPE with the cache write: two, one and one a layer
layer    `decoder_layer`; 1 and 8 rows are sequences at context 512, 256 rows a chunk that ends there. The twin computes
         on the same packed cache, as it is served

The lines with a bar are our own demands, for bfloat16 and the best ISA; one that is missed makes the exit status 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

sys.path.append(os.path.dirname(__file__))
import measure
import onednn
from attention import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, LAYERS, Caches, decode, plan_of, prefill
from measure import PUBLIC, Case, Way
from native_calls import Tape, begin

from bifolio.kernels import (
    LayerWeights,
    Step,
    decoder_layer,
    linear,
    pack_linear,
    rms_norm,
    rope_and_write,
    rope_tables,
    silu_mul,
    using,
)
from bifolio.kernels.bindings import Native

HIDDEN, INNER, VOCABULARY, CONTEXT = 576, 1536, 49152, 512
LINEARS = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}  # outputs, inputs
PARTS = ("decode", "prefill", "linears", "small", "layer")
BARS = {  # bfloat16; case, other: the least ratio
    ("decode, 8 x 512", "gather + SDPA"): 5.0,
    ("decode, 8 x 512", "stream read"): 0.7,
    ("decode, 8 x 2048", "gather + SDPA"): 5.0,
    ("decode, 8 x 2048", "stream read"): 0.7,
    ("prefill, 1600 in chunks of 256", "SDPA"): 0.85,
}


def main() -> int:
    parser = measure.arguments(__doc__, repeats=15)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of all but the linears")
    parser.add_argument("--only", action="append", choices=PARTS, help="may be given several times")
    args = parser.parse_args()
    native = begin(parser, args)
    facts, cases = measure.machine(native.isa), []
    with torch.inference_mode():
        for case in cases_of(args.only or PARTS, native, getattr(torch, args.dtype), args.repeats):
            measure.progress(case.name)
            cases.append(case)
    missed = report(cases, args.dtype, measure.title(facts))
    measure.write_json(args.json, {"machine": facts, "dtype": args.dtype, "cases": [vars(case) for case in cases]})
    return 1 if missed else 0


def report(cases: list[Case], dtype: str, title: str) -> int:
    """Print them. Returns how many bars were missed."""
    table = measure.table(f"kernels, {dtype}", ("what", "against"), ("native ms", "other ms", "ratio", "bar"))
    missed, bars = 0, BARS if dtype == "bfloat16" else {}
    for case in cases:
        native, name = case.seconds["native"], case.name
        for other, seconds in case.seconds.items():
            if other == "native":
                continue
            ratio, least = measure.ratio(seconds, native), bars.get((case.name, other))
            missed += least is not None and ratio < least
            bar = "" if least is None else measure.verdict(ratio >= least, f">= {least:g}")
            note = f" ({case.notes[other]})" if other in case.notes else ""
            ours, theirs = measure.milliseconds(native), measure.milliseconds(seconds)
            table.add_row(name, other + note, ours, theirs, f"{ratio:.2f}", bar)
            name = ""
        table.add_section()
    measure.show(title, table)
    return missed


def cases_of(parts: Sequence[str], native: Native, dtype: torch.dtype, rounds: int) -> Iterator[Case]:
    if set(parts) - {"linears"}:
        caches = Caches(dtype)
    if "decode" in parts:
        for batch, context in ((1, 512), (8, 512), (32, 512), (8, 2048)):
            yield decode(native, caches, batch, context, rounds)
    if "prefill" in parts:
        yield prefill(native, caches, rounds)
    if "linears" in parts:
        yield from linears(native, rounds)
    if "small" in parts:
        for rows in (1, 8, 256):
            yield from small(native, caches, rows, rounds)
    if "layer" in parts:
        weights = {"native": layer_weights(dtype), "twin": twin(layer_weights, dtype)}
        for rows in (1, 8, 256):
            yield layer(native, caches, weights, rows, rounds)


def linears(native: Native, rounds: int) -> Iterator[Case]:
    shapes = [shape for _ in range(LAYERS) for shape in LINEARS.values()] + [(VOCABULARY, HIDDEN)]
    weights = [torch.randn(shape) * shape[1] ** -0.5 for shape in shapes]
    halves = [w.bfloat16() for w in weights]
    ours = {  # weights and the dtype of what is multiplied
        "native": ([pack_linear(w) for w in halves], torch.bfloat16),
        "native int8": ([pack_linear(w, quantization="int8") for w in halves], torch.bfloat16),
        "native float32": ([pack_linear(w) for w in weights], torch.float32),
    }
    theirs: dict[str, tuple[list[Tensor], Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
        "F.linear": (halves, F.linear, torch.bfloat16),
        "F.linear float32": (weights, F.linear, torch.float32),
    }
    for hint in onednn.HINTS:
        theirs[f"oneDNN, packed for {hint}"] = [onednn.pack(w, hint) for w in halves], onednn.linear, torch.bfloat16

    def multiplied(multiply: Callable[..., Tensor], xs: dict[int, Tensor], packed: Sequence[object]) -> list[Tensor]:
        return [multiply(xs[inputs], w) for (_, inputs), w in zip(shapes, packed, strict=True)]

    for rows in (1, 8, 32, 256):
        noise = {inputs: torch.randn(rows, inputs) for _, inputs in shapes}
        x = {dtype: {k: v.to(dtype) for k, v in noise.items()} for dtype in (torch.float32, torch.bfloat16)}
        public = {name: partial(multiplied, linear, x[dtype], packed) for name, (packed, dtype) in ours.items()}
        torchs = {name: partial(multiplied, call, x[dtype], packed) for name, (packed, call, dtype) in theirs.items()}
        for way in (*public.values(), *torchs.values()):
            for y, expected in zip(way(), torchs["F.linear float32"](), strict=True):
                assert_close(y.float(), expected, rtol=0.05, atol=0.12)
        tapes: dict[str, Way] = {name: Tape(native, way) for name, way in public.items()}
        yield Case(
            f"linears, {measure.rows(rows)}",
            measure.in_rounds({"native": tapes.pop("native"), PUBLIC: public["native"], **tapes, **torchs}, rounds),
        )


def small(native: Native, caches: Caches, rows: int, rounds: int) -> Iterator[Case]:
    dtype = caches.dtype
    x, residual, gain = (torch.randn(shape, dtype=dtype) for shape in ((rows, HIDDEN), (rows, HIDDEN), (HIDDEN,)))
    gate_up = torch.randn(rows, 2 * INNER, dtype=dtype)
    qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=dtype)
    q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    positions, slots = places(caches, 1, rows)
    cos, sin = tables()

    def norms() -> list[Tensor]:
        return [y for _ in range(2 * LAYERS) for y in rms_norm(x, residual, gain, 1e-5)]

    def activations() -> list[Tensor]:
        return [silu_mul(gate_up) for _ in range(LAYERS)]

    def turns() -> list[Tensor]:
        return [rope_and_write(q, k, v, cos, sin, positions, slots, kv, layout=caches.layout) for kv in caches.packed]

    ways: dict[str, Callable[[], list[Tensor]]] = {"norm": norms, "activation": activations, "RoPE and write": turns}
    for name, way in ways.items():
        assert_close(way(), twin(way), rtol=0.02, atol=0.02)
        seconds = measure.in_rounds({"native": Tape(native, way), PUBLIC: way, "twin": partial(twin, way)}, rounds)
        yield Case(f"{name}, {measure.rows(rows)}", seconds)


def layer_weights(dtype: torch.dtype) -> list[LayerWeights]:
    generator = torch.Generator().manual_seed(1)  # both backends get the same
    norm = torch.ones(HIDDEN, dtype=dtype)

    def one() -> LayerWeights:
        qkv, o, gate_up, down = (
            pack_linear((torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype))
            for shape in LINEARS.values()
        )
        return LayerWeights(norm, qkv, None, None, o, norm, gate_up, down, HEAD_DIM, 1e-5)

    return [one() for _ in range(LAYERS)]


def layer(native: Native, caches: Caches, weights: dict[str, list[LayerWeights]], rows: int, rounds: int) -> Case:
    sequences = rows if rows <= 8 else 1
    plan = plan_of(rows // sequences, caches.table(sequences, CONTEXT), CONTEXT)
    step = Step(*tables(), *places(caches, sequences, rows), plan)
    start = torch.randn(rows, HIDDEN, dtype=caches.dtype)

    def run(backend: str) -> list[Tensor]:
        x, residual = start.clone(), torch.zeros_like(start)
        for each, kv in zip(weights[backend], caches.packed, strict=True):
            decoder_layer(x, residual, each, step, kv, layout=caches.layout)
        return [x, residual]

    public, other = partial(run, "native"), partial(twin, partial(run, "twin"))
    ours, theirs = (sum(way(), torch.zeros(())).float() for way in (public, other))
    assert F.cosine_similarity(ours, theirs).min() > 0.99
    seconds = measure.in_rounds({"native": Tape(native, public), PUBLIC: public, "twin": other}, rounds)
    return Case(f"layer, {measure.rows(rows)}", seconds)


def twin(call: Callable[..., list], *arguments: object) -> list:  # type: ignore[type-arg]
    with using("torch"):
        return call(*arguments)


def tables() -> tuple[Tensor, Tensor]:
    return rope_tables(1e5 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), CONTEXT)


def places(caches: Caches, sequences: int, rows: int) -> tuple[Tensor, Tensor]:
    """Positions and slots of so many rows in all, the last ones of sequences of CONTEXT positions."""
    each = rows // sequences
    positions = (torch.arange(each) + CONTEXT - each).repeat(sequences)
    lines = caches.table(sequences, CONTEXT).long().repeat_interleave(each, 0)
    blocks = lines.gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0]
    return positions, blocks * BLOCK_SIZE + positions % BLOCK_SIZE


if __name__ == "__main__":
    sys.exit(main())
