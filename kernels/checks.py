"""Layout, shape and dtype checks of the public functions: the wrapper checks, the kernel trusts.

Every failure is a ValueError that names the argument, what was given and what is allowed. Only metadata is
looked at, never the values of a tensor: a check must not make a GPU wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .layout import LAYOUTS, PACKABLE, numbers_in_word

HEAD_DIMS = range(32, 257)
BLOCK_SIZES = range(8, 257)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn,)  # a KV cache may be stored in these; queries never are


def shape(name: str, x: Tensor, want: Sequence[int | None], axes: str) -> None:
    """`want` has one entry per axis, None where any size will do. `axes` names them, for the message."""
    got = x.shape
    if len(got) == len(want):  # a plain loop, because every layer of every step comes here
        for w, size in zip(want, got, strict=True):
            if w is not None and w != size:
                break
        else:
            return
    allowed = ", ".join("any" if w is None else str(w) for w in want)
    raise ValueError(f"{name}: shape {list(x.shape)}; allowed is [{axes}] = [{allowed}]")


def dtype(name: str, x: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if x.dtype not in allowed:
        raise ValueError(f"{name}: dtype {x.dtype}; allowed: {', '.join(map(str, allowed))}")


def rows_contiguous(name: str, x: Tensor) -> None:
    """The last axis must be contiguous; other strides are free, as in a slice of a fused projection."""
    if x.stride(-1) != 1:
        raise ValueError(f"{name}: stride {x.stride()}; the last axis must have stride 1")


def contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{name}: stride {x.stride()}; allowed is contiguous")


def exact(name: str, x: Tensor, in_torch: bool = True) -> None:
    """For torch, which keeps `exact` for float32 on the CPU."""
    dtype(name, x, (torch.float32,))
    if x.device.type != "cpu" or not in_torch:
        where = x.device if in_torch else "the triton kernels"
        raise ValueError(f"{name}: on {where}; exact is for the CPU, in native kernels or torch")


def places(positions: Tensor, max_positions: int, slots: Tensor, num_slots: int) -> None:
    """That they are in range. On the CPU alone, where nobody waits for the look."""
    if positions.device.type != "cpu" or not len(positions):
        return
    for name, x, lowest, end in (("positions", positions, 0, max_positions), ("slots", slots, -1, num_slots)):
        low, high = map(int, x.aminmax())
        if low < lowest or high >= end:
            raise ValueError(f"{name}: {low} to {high}; allowed is {lowest} to {end - 1}")


def heads(query_heads: int, kv_heads: int) -> None:
    if kv_heads == 0 or query_heads % kv_heads:
        raise ValueError(f"q: {query_heads} heads; allowed is a multiple of the {kv_heads} KV heads")


def kv_layer(kv: Tensor, head_dim: int) -> None:
    """One layer of a cache, with any stride between blocks and between heads."""
    shape("kv", kv, (None, 2, None, None, head_dim), "num_blocks, 2, kv_heads, block_size, head_dim")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"kv: head_dim {head_dim}; allowed: {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}")
    if kv.shape[3] not in BLOCK_SIZES:
        raise ValueError(f"kv: block_size {kv.shape[3]}; allowed: {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}")
    if kv.stride()[3:] != (head_dim, 1):
        raise ValueError(f"kv: stride {kv.stride()}; the positions of one head in a block must be contiguous")


def layout(name: str, kv: Tensor) -> None:
    """That a cache which passed `kv_layer` can be laid out so."""
    if name not in LAYOUTS:
        raise ValueError(f"layout: {name!r}; allowed: {', '.join(LAYOUTS)}")
    if name == "plain":
        return
    if kv.dtype not in PACKABLE:
        raise ValueError(f"layout: {name} with dtype {kv.dtype}; allowed: {', '.join(map(str, PACKABLE))}, or plain")
    w = numbers_in_word(kv.dtype)
    if kv.shape[3] % w or kv.shape[4] % w:
        raise ValueError(
            f"layout: {name} with block_size {kv.shape[3]} and head_dim {kv.shape[4]}; allowed with {kv.dtype} are "
            f"multiples of {w}, or plain"
        )


def plain(name: str) -> None:
    """For Triton's kernels: a packed cache is the CPU's."""
    if name != "plain":
        raise ValueError(f"layout: {name} with the triton kernels; allowed is plain")


def same_device(first: Tensor, **others: Tensor | None) -> None:
    for name, x in others.items():
        if x is not None and x.device != first.device:
            raise ValueError(f"{name}: on {x.device}; allowed is {first.device}, where the first argument is")
