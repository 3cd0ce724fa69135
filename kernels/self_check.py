"""Whether exact arithmetic is exact on this machine, with these weights and so many threads: tried, not believed.

Which order of sums a BLAS takes is its own business, and differs between machines. So before `exact` is promised,
everything that mixes values of a row is computed with 1 to 64 rows and compared bit by bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from .layout import kv_layout
from .linear import LinearWeights, linear
from .ops import paged_attention, rms_norm, silu_mul
from .plan import plan
from .torch_exact import MOST_ROWS

_BLOCK_SIZE = 16
_KEYS = 150  # of the attention that is tried: three tiles, the last one cut


def self_check(
    linears: Iterable[LinearWeights],
    heads: int,
    kv_heads: int,
    head_dim: int,
    windows: Iterable[int | None] = (None,),
) -> str:
    """8 hexadecimal digits that name the bits this machine computes: replicas whose digits differ are not to share
    an answer. Takes about as long as some 2,000 tokens take in one layer.

    linears  packed with `exact`, on the CPU, of one dtype: one for each shape
    heads, kv_heads, head_dim, windows  of the attention; its queries and keys may have norms of their own

    Raises ArithmeticError, naming the operation and the number of rows, if a row's bits depend on its company.
    """
    digest, random = hashlib.sha256(), torch.Generator().manual_seed(0)
    sizes, dtype = {head_dim}, torch.float32

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    for weights in linears:
        inputs, dtype = weights.inputs, weights.dtype
        sizes.add(inputs)
        multiply = partial(linear, weights=weights, out_dtype=torch.float32)
        digest.update(_rows_alike(f"linear {inputs} to {weights.outputs}", noise(MOST_ROWS, inputs), multiply))
    for size in sorted(sizes):
        x, gain = noise(MOST_ROWS, 2 * size), noise(size)
        digest.update(_rows_alike(f"norm of {size}", x[:, :size], partial(_norm, gain=gain)))
        digest.update(_rows_alike(f"activation of {size}", x, partial(silu_mul, exact=True)))
    x, gain = noise(MOST_ROWS * heads, head_dim), noise(head_dim)
    digest.update(_rows_alike(f"norm of {heads} heads of {head_dim}", x, partial(_norm, gain=gain)))
    angles = torch.arange(4096.0)  # RoPE: row by row anyway, but another machine may round otherwise
    digest.update(torch.cat([angles.cos(), angles.sin()]).numpy().tobytes())
    blocks = -(-_KEYS // _BLOCK_SIZE)
    q, kv = noise(MOST_ROWS, heads, head_dim), noise(blocks, 2, kv_heads, _BLOCK_SIZE, head_dim)
    for window in set(windows):
        digest.update(_attention(q, kv, window))
    return digest.hexdigest()[:8]


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return rms_norm(x, None, gain, 1e-5)[0]


def _attention(q: Tensor, kv: Tensor, window: int | None) -> bytes:
    head_dim = kv.shape[4]
    layout = kv_layout(kv.dtype, head_dim, _BLOCK_SIZE)  # what will be served
    table = torch.arange(len(kv), dtype=torch.int32)[None]

    def attend(q: Tensor, keys: int) -> Tensor:
        lens, cu_q = torch.tensor([keys], dtype=torch.int32), torch.tensor([0, len(q)], dtype=torch.int32)
        step = plan(cu_q, lens, table)
        return paged_attention(q, kv, step, window=window, exact=True, layout=layout)

    whole = attend(q, _KEYS)
    for rows in range(1, MOST_ROWS):
        first, last = attend(q[:rows], _KEYS - MOST_ROWS + rows), attend(q[-rows:], _KEYS)
        if not (torch.equal(first, whole[:rows]) and torch.equal(last, whole[-rows:])):
            heads = f"{q.shape[1]}/{kv.shape[2]} heads of {head_dim}"
            raise ArithmeticError(f"attention of {heads} differs with {rows} rows")
    return _bits(whole)


def _rows_alike(what: str, x: Tensor, f: Callable[[Tensor], Tensor]) -> bytes:
    whole = f(x)
    for rows in range(1, len(x), len(x) // MOST_ROWS):  # the last rows come first then: size and place vary at once
        if not torch.equal(f(x[-rows:]), whole[-rows:]):
            raise ArithmeticError(f"{what} differs with {rows} rows")
    return _bits(whole)


def _bits(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()
