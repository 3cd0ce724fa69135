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

from .ops import linear, paged_attention, rms_norm, silu_mul
from .plan import plan
from .torch_exact import MOST_ROWS

_BLOCK_SIZE = 16
_KEYS = 150  # of the attention that is tried: three tiles, the last one cut


def self_check(
    weights: Iterable[Tensor], heads: int, kv_heads: int, head_dim: int, windows: Iterable[int | None] = (None,)
) -> str:
    """8 hexadecimal digits that name the bits this machine computes: replicas whose digits differ are not to share
    an answer. Takes about as long as some 2,000 tokens take in one layer.

    weights  float32 [N, K] on the CPU: those of the linears, one for each shape
    heads, kv_heads, head_dim, windows  of the attention; its queries and keys may have norms of their own

    Raises ArithmeticError, naming the operation and the number of rows, if a row's bits depend on its company.
    """
    digest, random = hashlib.sha256(), torch.Generator().manual_seed(0)
    sizes = {head_dim}
    for weight in weights:
        outputs, inputs = weight.shape
        sizes.add(inputs)
        x = torch.randn(MOST_ROWS, inputs, generator=random)
        digest.update(_rows_alike(f"linear {inputs} to {outputs}", x, partial(linear, weight=weight, exact=True)))
    for size in sorted(sizes):
        x, gain = torch.randn(MOST_ROWS, 2 * size, generator=random), torch.randn(size, generator=random)
        digest.update(_rows_alike(f"norm of {size}", x[:, :size], partial(_norm, gain=gain)))
        digest.update(_rows_alike(f"activation of {size}", x, partial(silu_mul, exact=True)))
    x, gain = torch.randn(MOST_ROWS * heads, head_dim, generator=random), torch.randn(head_dim, generator=random)
    digest.update(_rows_alike(f"norm of {heads} heads of {head_dim}", x, partial(_norm, gain=gain)))
    angles = torch.arange(4096.0)  # RoPE: row by row anyway, but another machine may round otherwise
    digest.update(torch.cat([angles.cos(), angles.sin()]).numpy().tobytes())
    for window in set(windows):
        digest.update(_attention(heads, kv_heads, head_dim, window, random))
    return digest.hexdigest()[:8]


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return rms_norm(x, None, gain, 1e-5)[0]


def _attention(heads: int, kv_heads: int, head_dim: int, window: int | None, random: torch.Generator) -> bytes:
    blocks = -(-_KEYS // _BLOCK_SIZE)
    kv = torch.randn(blocks, 2, kv_heads, _BLOCK_SIZE, head_dim, generator=random)
    q = torch.randn(MOST_ROWS, heads, head_dim, generator=random)
    table = torch.arange(blocks, dtype=torch.int32)[None]

    def attend(q: Tensor, keys: int) -> Tensor:
        lens, cu_q = torch.tensor([keys], dtype=torch.int32), torch.tensor([0, len(q)], dtype=torch.int32)
        step = plan(cu_q, lens, table)
        return paged_attention(q, kv, table, lens, cu_q, step, window=window, exact=True)

    whole = attend(q, _KEYS)
    for rows in range(1, MOST_ROWS):
        first, last = attend(q[:rows], _KEYS - MOST_ROWS + rows), attend(q[-rows:], _KEYS)
        if not (torch.equal(first, whole[:rows]) and torch.equal(last, whole[-rows:])):
            raise ArithmeticError(f"attention of {heads}/{kv_heads} heads of {head_dim} differs with {rows} rows")
    return whole.numpy().tobytes()


def _rows_alike(what: str, x: Tensor, f: Callable[[Tensor], Tensor]) -> bytes:
    whole = f(x)
    for rows in range(1, len(x), len(x) // MOST_ROWS):  # the last rows come first then: size and place vary at once
        if not torch.equal(f(x[-rows:]), whole[-rows:]):
            raise ArithmeticError(f"{what} differs with {rows} rows")
    return whole.numpy().tobytes()
