"""A script for `test_sanitizers.py`: every native kernel over odd shapes, in memory that is exactly as large as it must
be. Arguments: the folder of the libraries, which of them, and "all" or "short".
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from test_layer import KINDS
from test_layer import Case as LayerCase
from torch import Tensor

from bifolio.kernels import library, linear, pack_linear, paged_attention, plan, rms_norm, silu_mul, using
from bifolio.kernels.layout import LAYOUTS, Layout, write_slots

FLOATS = (torch.float32, torch.bfloat16)


def noise(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype).clone()  # of its own memory


def linears() -> None:
    for dtype, (rows, inputs, outputs) in itertools.product(
        FLOATS, [(1, 1, 1), (9, 37, 50), (17, 96, 100), (3, 4101, 7)]
    ):
        for int8, bias in itertools.product((None, "int8"), (None, noise(outputs, dtype=dtype))):
            weights = pack_linear(noise(outputs, inputs, dtype=dtype), bias, quantization=int8)  # type: ignore[arg-type]
            linear(noise(rows, inputs, dtype=dtype), weights)
            linear(noise(rows, inputs, dtype=dtype), weights, out_dtype=torch.float32)


def small() -> None:
    for dtype, width in itertools.product(FLOATS, (1, 15, 16, 333)):
        x = noise(11, width, dtype=dtype)
        rms_norm(x, noise(11, width, dtype=dtype), noise(width, dtype=dtype), 1e-5)
        rms_norm(x, None, noise(width, dtype=dtype), 1e-5)
        silu_mul(noise(11, 2 * width, dtype=dtype))


def attention(dtype: torch.dtype, layout: Layout, p: int, d: int, heads: tuple[int, int], window: int | None) -> None:
    lens = [(1, 1), (1, 70), (9, 133), (5, 5), (0, 3)]
    counts = [-(-keys // p) for _, keys in lens]
    kv = torch.full((sum(counts), 2, heads[1], p, d), torch.nan, dtype=dtype)  # no block to spare at either end
    table, first = torch.zeros(len(lens), max(counts), dtype=torch.int32), 0
    for b, (_, keys) in enumerate(lens):
        blocks = torch.arange(first, first + counts[b])
        table[b, : counts[b]], first = blocks, first + counts[b]
        at = torch.arange(keys)
        k, v = (noise(keys, heads[1], d, dtype=dtype) for _ in "kv")
        write_slots(kv, blocks[at // p] * p + at % p, k, v, layout)
    cu_q = torch.tensor([0] + [rows for rows, _ in lens]).cumsum(0).to(torch.int32)
    built = plan(cu_q, torch.tensor([keys for _, keys in lens], dtype=torch.int32), table)
    out = paged_attention(noise(int(cu_q[-1]), heads[0], d, dtype=dtype), kv, built, window=window, layout=layout)
    assert torch.isfinite(out).all()


def layers() -> None:
    for dtype, kind in itertools.product(FLOATS, KINDS):
        LayerCase(dtype=dtype, **kind).run(ISA)  # type: ignore[arg-type]


def short() -> None:
    """A bias one vector shorter than the linear believes."""
    from bifolio.kernels.backend import native_for
    from bifolio.kernels.bindings import linear_struct

    weight, bias, x = (
        noise(64, 64, dtype=torch.float32),
        noise(32, dtype=torch.float32),
        noise(2, 64, dtype=torch.float32),
    )
    native = native_for(x)
    assert native is not None
    packed = native.pack(weight)
    native.linear(x, linear_struct(packed, weight, bias, None), torch.empty(2, 64))


FOLDER, ISA, WHAT = sys.argv[1:]
library._FOLDER = Path(FOLDER)
with using(ISA):  # type: ignore[arg-type]
    if WHAT == "short":
        short()
    linears()
    small()
    shapes = [(8, 32, (9, 3)), (16, 80, (7, 1)), (24, 72, (14, 2)), (256, 64, (4, 4))]
    for dtype, layout, (p, d, heads), window in itertools.product(FLOATS, LAYOUTS, shapes, (None, 7)):
        attention(dtype, layout, p, d, heads, window)
    layers()
print(f"{ISA}: done")
