"""Does each public kernel, on this device, compute what its torch twin computes? And are bits equal that shall be?

The reference is the twin on the same inputs in float32. An error is the largest difference, divided by the reference
where that is above 1. The norm of all differences, divided by that of the reference, stays within the same tolerance:
attention over many keys gives small numbers. Whatever no sequence holds is NaN in the caches, the null block too, and
so are outputs before a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gpu_device import Bench
from gpu_rows import Case, Numbers, WrongError
from torch import Tensor

from bifolio.kernels import paged_attention, plan, rms_norm, rope_and_write, rope_tables, sample, silu_mul, using

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
FP32, FP16, BF16 = TOLERANCES
ALL = (FP32, FP16, BF16)
Lens = tuple[tuple[int, int], ...]  # rows and keys of each sequence
MIXED: Lens = ((1, 40), (17, 50), (9, 9), (1, 1), (130, 400), (33, 64))
LONG: Lens = ((1, 32768), (1, 100), (4, 5000))
CHUNKS: Lens = ((512, 2048), (700, 700))
RAGGED: Lens = tuple((1, 37 + 31 * b) for b in range(33))
EMPTY: Lens = ((0, 0), (1, 7), (1, 0), (1, 90))
INVARIANT: Lens = ((1, 3000), (20, 700), *((1, 100 + 40 * b) for b in range(30)))


@dataclass(frozen=True)
class Attention:
    """HQ / HK heads of D numbers, blocks of P positions. What a sequence holds depends on its place in `lens` and on
    the heads alone: it is the same in any company and in blocks of any size."""

    lens: Lens = MIXED
    hq: int = 8
    hk: int = 2
    d: int = 64
    p: int = 16
    sinks: bool = False

    @property
    def tiny(self) -> Attention:
        return replace(self, lens=tuple((min(rows, 9), min(keys, 70)) for rows, keys in self.lens[:4]))

    def build(self, device: torch.device, dtype: torch.dtype) -> Paged:
        return Paged(self, device, dtype)


class Paged:
    """The sequences on a device, as `paged_attention` takes them: kv is a layer of three."""

    def __init__(self, shape: Attention, device: torch.device, dtype: torch.dtype) -> None:
        counts = [-(-keys // shape.p) for _, keys in shape.lens]
        order = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(7)) + 1).split(counts)
        slab = torch.full((sum(counts) + 1, 3, 2, shape.hk, shape.p, shape.d), torch.nan, dtype=dtype)
        self.table = torch.zeros(len(counts), max([*counts, 1]), dtype=torch.int32)
        queries = []
        for b, ((rows, keys), blocks) in enumerate(zip(shape.lens, order, strict=True)):
            random = torch.Generator().manual_seed(b)
            queries.append(torch.randn(rows, shape.hq, shape.d, generator=random))
            held = torch.randn(keys, 2, shape.hk, shape.d, generator=random).to(dtype)
            at = torch.arange(keys)
            slab[:, 1].permute(0, 3, 1, 2, 4)[blocks[at // shape.p], at % shape.p] = held
            self.table[b, : len(blocks)] = blocks
        self.cu_q = torch.tensor([0, *(rows for rows, _ in shape.lens)]).cumsum(0).int()
        self.seq_lens = torch.tensor([keys for _, keys in shape.lens], dtype=torch.int32)
        self.q, self.kv = torch.cat(queries).to(device, dtype), slab.to(device)[:, 1]
        self.sinks = torch.linspace(-2, 3, shape.hq, device=device) if shape.sinks else None

    def attend(
        self, *, exactly: bool = False, invariant: bool = False, lse: bool = False, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """(output, lse) by the backend in use; `exactly` in float32."""
        q, kv = (self.q.float(), self.kv.float()) if exactly else (self.q, self.kv)
        out, logs = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=q.device)
        step = plan(self.cu_q, self.seq_lens, self.table, device=q.device, batch_invariant=invariant)
        # asked for an lse the twin writes the formula out; torch's fused attention may multiply in tf32
        wanted = logs if exactly or lse else None
        paged_attention(q, kv, step, out=out, lse=wanted, sinks=self.sinks, **options)
        return out, logs


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> Numbers:
    """The errors; WrongError where one is past the tolerance or not a number."""
    want, tolerance = want.double(), TOLERANCES[dtype]
    apart = got.double() - want
    apart[(got == want) & want.isinf()] = 0  # the lse of a row that sees nothing
    size = want.where(want.isfinite(), 0)
    error = (apart.abs() / size.abs().clamp_min(1)).amax().item() if apart.numel() else 0.0
    norm = (apart.norm() / size.norm().clamp_min(1e-30)).item()
    numbers = {"error": error, "norm": norm, "tolerance": tolerance}
    if not (error <= tolerance and norm <= tolerance):  # NaN is never close
        raise WrongError(f"error {error:.2g}, norm {norm:.2g}; allowed {tolerance:g}", **numbers)
    return numbers


def same_bits(got: Tensor, want: Tensor) -> None:
    if not torch.equal(got, want):
        raise WrongError(f"{int((got != want).sum())} of {got.numel()} numbers differ")


def cases(bench: Bench) -> list[Case]:
    return [*small(bench), *samples(bench), *attention(bench), *bits(bench)]  # the dearer rows last


def attention(bench: Bench) -> list[Case]:
    table: list[tuple[str, Attention, tuple[torch.dtype, ...], dict[str, Any]]] = [
        ("chunks and single tokens, G 4", Attention(), ALL, {}),
        ("lse", Attention(), (FP32, BF16), {"lse": True}),
        *((f"G {group}", Attention(hq=2 * group), (BF16,), {}) for group in (1, 3, 7, 8, 16)),
        ("head size 80", Attention(d=80), (BF16,), {}),
        ("head size 96", Attention(d=96), (FP16,), {}),
        ("head size 128", Attention(d=128), ALL, {}),
        ("head size 256", Attention(d=256), (FP32, BF16), {}),
        *((f"blocks of {p}", Attention(p=p), (BF16,), {}) for p in (48, 64, 128)),
        ("window 5", Attention(), (FP16,), {"window": 5}),
        ("window 100", Attention(p=64), (BF16,), {"window": 100}),
        ("not causal", Attention(), (BF16,), {"causal": False}),
        ("soft cap and sinks", Attention(sinks=True), (BF16,), {"softcap": 20.0}),
        ("no keys", Attention(EMPTY), (FP16, BF16), {}),
        ("33 ragged single tokens", Attention(RAGGED, 32, 8, 128, 64), (BF16,), {}),
        ("32k keys in parts", Attention(LONG, 8, 2, 128, 64), (FP16, BF16), {}),
        ("long chunks, 9/3", Attention(CHUNKS, 9, 3, 64, 64), (BF16,), {}),
        ("long chunks, 32/8", Attention(CHUNKS, 32, 8, 128, 64), (FP16, BF16), {}),
    ]

    def attend(dtype: torch.dtype, options: dict[str, Any], shape: Attention) -> Numbers:
        paged = shape.build(bench.device, dtype)
        with using("torch"):
            want, want_lse = paged.attend(exactly=True, **options)
        with using(bench.ours):
            got, lse = paged.attend(**options)
        errors = close(got, want, dtype)
        return close(lse, want_lse, dtype) if options.get("lse") else errors

    return [
        Case("parity", name, partial(chosen, bench, shape), {_named(t): partial(attend, t, options) for t in dtypes})
        for name, shape, dtypes, options in table
    ]


def bits(bench: Bench) -> list[Case]:
    def alone(shape: Attention) -> Numbers:
        with using(bench.ours):
            whole, _ = shape.build(bench.device, BF16).attend(invariant=True)
            rows = shape.lens[0][0]
            first, _ = replace(shape, lens=shape.lens[:1]).build(bench.device, BF16).attend(invariant=True)
            pair, _ = replace(shape, lens=shape.lens[:2]).build(bench.device, BF16).attend(invariant=True)
        same_bits(first, whole[:rows])
        same_bits(pair, whole[: len(pair)])
        return {}

    def any_blocks(shape: Attention) -> Numbers:
        with using(bench.ours):
            outs = [replace(shape, p=p).build(bench.device, BF16).attend(invariant=True)[0] for p in (16, 64, 128)]
        for out in outs[1:]:
            same_bits(out, outs[0])
        return {}

    ways = {"alone, two, all": alone, "blocks of 16, 64, 128": any_blocks}
    shapes = (Attention(INVARIANT, 9, 3, 64, 64), Attention(INVARIANT, 32, 8, 128, 64))
    return [Case("parity", f"same bits, {s.hq}/{s.hk} heads of {s.d}", partial(chosen, bench, s), ways) for s in shapes]


def small(bench: Bench) -> list[Case]:
    def norm(tokens: int, width: int, residual: bool, dtype: torch.dtype, _: None) -> Numbers:
        x, r, w = (bench.noise(*shape, dtype=dtype) for shape in ((tokens, width), (tokens, width), (width,)))
        return both(bench, lambda x, r, w: rms_norm(x, r if residual else None, w, 1e-5), (x, r, w), dtype)

    def activation(tokens: int, width: int, dtype: torch.dtype, _: None) -> Numbers:
        return both(bench, lambda x: (silu_mul(x),), (bench.noise(tokens, 2 * width, dtype=dtype),), dtype)

    def tables(_: None) -> Numbers:
        frequencies = 1e4 ** -(torch.arange(0, 64, 2) / 64)
        pairs = zip(rope_tables(frequencies.to(bench.device), 512), rope_tables(frequencies, 512), strict=True)
        return worst([close(got.cpu(), want, FP32) for got, want in pairs])

    norms = [(7, 576, True, BF16), (33, 4096, True, FP16), (5, 100, False, FP32), (3, 14336, True, BF16)]
    gates = [(7, 1536, BF16), (33, 14336, FP16), (5, 77, FP32)]
    turns = [(9, 3, 64, 16, BF16), (32, 8, 128, 64, FP16), (4, 2, 80, 48, FP32), (4, 4, 96, 64, BF16)]
    ways: dict[str, dict[str, Callable[[None], Numbers]]] = {
        "rms_norm": {f"{t} x {h} {_named(dt)}": partial(norm, t, h, r, dt) for t, h, r, dt in norms},
        "silu_mul": {f"{t} x {h} {_named(dt)}": partial(activation, t, h, dt) for t, h, dt in gates},
        "rope_and_write": {
            f"{q}/{k}/{d} P {p} {_named(dt)}": partial(turn, bench, q, k, d, p, dt) for q, k, d, p, dt in turns
        },
        "rope_tables": {"float32": tables},
    }
    return [Case("parity", name, lambda: None, each) for name, each in ways.items()]


def both(
    bench: Bench, call: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], dtype: torch.dtype
) -> Numbers:
    """Of a call that only returns: ours on the inputs against the twin on the same in float32."""
    with using("torch"):
        wants = call(*(x.float() for x in inputs))
    with using(bench.ours):
        gots = call(*inputs)
    return worst([close(got, want, dtype) for got, want in zip(gots, wants, strict=True)])


def worst(errors: list[Numbers]) -> Numbers:
    return max(errors, key=lambda numbers: numbers["error"])


def turn(bench: Bench, hq: int, hk: int, d: int, p: int, dtype: torch.dtype, _: None) -> Numbers:
    """Slices of a fused projection, a layer of three, some slots -1; nothing may change beside the slots."""
    tokens, blocks = 21, 8
    q, k, v = bench.noise(tokens, hq + 2 * hk, d, dtype=dtype).split([hq, hk, hk], dim=1)
    cos, sin = rope_tables(1e4 ** -(torch.arange(0, d, 2, device=bench.device) / d), 64)
    positions = torch.arange(tokens, device=bench.device) + 40
    slots = torch.randperm(blocks * p, device=bench.device)[:tokens]
    slots[::4] = -1
    slab = bench.noise(blocks, 3, 2, hk, p, d, dtype=dtype)
    before, exact = slab.clone(), slab.float()
    with using("torch"):
        want = rope_and_write(q.float(), k.float(), v.float(), cos, sin, positions, slots, exact[:, 1])
    with using(bench.ours):
        got = rope_and_write(q, k, v, cos, sin, positions, slots, slab[:, 1])
    written = torch.zeros(blocks, p, dtype=torch.bool, device=bench.device)
    written.view(-1)[slots[slots >= 0]] = True
    kept = ~written[:, None, None, None, :, None].expand_as(slab).clone()
    kept[:, ::2] = True
    same_bits(slab[kept], before[kept])
    return worst([close(got, want, dtype), close(slab, exact, dtype)])


def samples(bench: Bench) -> list[Case]:
    def choose(vocabulary: int, _: None) -> Numbers:
        rows = 32
        random = torch.Generator().manual_seed(vocabulary)
        logits = torch.randn(rows, vocabulary, generator=random) * 3
        logits[:, ::7] = -math.inf
        logits[5] = logits[5].round()  # ties
        columns = [_cycled(rows, *values) for values in ((0.0, 0.7, 1.0), (1.0, 0.9, 0.5, 0.95), (0, 50, 1, 0, 1000))]
        columns += [_cycled(rows, 0.0, 0.0, 0.05), torch.rand(rows, generator=random, dtype=torch.float64)]
        inputs = [x.to(bench.device) for x in (logits, *columns)]
        with using("torch"):
            want = sample(*inputs)
        with using(bench.ours):
            got = sample(*inputs)
        same_bits(got, want)
        return {}

    sizes = (1000,) if bench.tiny else (1000, 49152, 128256)
    return [Case("parity", "sample", lambda: None, {f"V {v}": partial(choose, v) for v in sizes})]


def chosen(bench: Bench, shape: Attention) -> Attention:
    return shape.tiny if bench.tiny else shape


def _cycled(rows: int, *values: float) -> Tensor:
    return torch.tensor([values[i % len(values)] for i in range(rows)])


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
