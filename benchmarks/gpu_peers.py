"""The same attention by others: torch's fused attention on K and V side by side, with a gather before it, FlexAttention
over pages, and FlashInfer and FlashAttention-3 where they are installed.

Each takes a `Paged` and returns what is timed; making its own inputs is not. Whatever it returns is the output, in
its own arrangement: `Paged.rows_of` knows them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from gpu_rows import SkippedError
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

if TYPE_CHECKING:
    from gpu_attention import Paged

Call = Callable[[], Tensor]
FLEX_PAGE = 128  # what its kernels want


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of q [B, HQ, rows, D], the last rows of the keys. Of single tokens, the query heads of a KV head are the rows of
    one problem: K and V are read once."""
    rows, keys = q.shape[2], k.shape[2]
    if rows == 1:
        return sdpa(q.view(len(q), k.shape[1], -1, q.shape[3]), k, v).view(q.shape)
    if rows == keys:
        return sdpa(q, k, v, is_causal=True, enable_gqa=True)
    return sdpa(q, k, v, attn_mask=causal_lower_right(rows, keys), enable_gqa=True)


def side_by_side(backend: SDPBackend, paged: Paged) -> Call:
    if backend == SDPBackend.CUDNN_ATTENTION and paged.device.type == "cpu":
        raise SkippedError("cuDNN needs a GPU")
    q, (k, v) = paged.queries(), paged.gathered()

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return attend(q, k, v)

    return call


def gathering(paged: Paged) -> Call:
    q = paged.queries()
    return lambda: attend(q, *paged.gathered())


def flex(paged: Paged) -> Call:
    import torch._inductor.config
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tiny = paged.device.type == "cpu"  # the code alone: compiling takes longer than all else
    page, s, device = 16 if tiny else FLEX_PAGE, paged.shape, paged.device
    pages, ahead = s.sequences * -(-s.keys // page), s.keys - s.rows
    pool = PagedAttention(pages, page, s.sequences, device=str(device))
    everyone = torch.arange(s.sequences, device=device)
    for b in everyone:
        pool.reserve(b[None], torch.tensor([s.keys], device=device))
    caches = [torch.zeros(1, s.hk, pages * page, s.d, dtype=paged.kv.dtype, device=device) for _ in range(2)]
    positions = torch.arange(s.keys, device=device).expand(s.sequences, -1)
    pool.assign(everyone, positions, *paged.gathered(), *caches)

    def causal(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= row + ahead

    logical = create_block_mask(
        causal, s.sequences, None, s.rows, s.keys, device=str(device), BLOCK_SIZE=(FLEX_PAGE, page)
    )
    torch._dynamo.reset()  # each shape is compiled anew
    torch._inductor.config.compile_threads = 1  # processes that compile beside a timing disturb it
    run = flex_attention if tiny else torch.compile(flex_attention, dynamic=False)
    q, (k, v), mask = paged.queries(), caches, pool.convert_logical_block_mask(logical)
    return lambda: run(q, k, v, block_mask=mask, enable_gqa=True)


def flashinfer(paged: Paged) -> Call:
    import flashinfer

    s, p, blocks = paged.shape, paged.kv.shape[3], paged.table.shape[1]
    space = torch.empty(256 << 20, dtype=torch.uint8, device=paged.device)
    ends = torch.arange(s.sequences + 1, dtype=torch.int32)
    last = torch.full((s.sequences,), (s.keys - 1) % p + 1, dtype=torch.int32)
    lines = (ends * blocks, paged.table.flatten(), last, s.hq, s.hk, s.d, p)
    if s.rows == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True)
        wrapper.plan(*lines, q_data_type=paged.q.dtype, kv_data_type=paged.kv.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "HND")
        wrapper.plan(ends * s.rows, *lines, causal=True, q_data_type=paged.q.dtype, kv_data_type=paged.kv.dtype)
    return partial(wrapper.run, paged.q, paged.kv)


def flash_attention_3(paged: Paged) -> Call:
    from flash_attn_interface import flash_attn_with_kvcache

    s, p = paged.shape, paged.kv.shape[3]
    k, v = (x.transpose(1, 2).reshape(-1, p, s.hk, s.d) for x in paged.gathered())
    table = torch.arange(len(k), dtype=torch.int32, device=paged.device).view(s.sequences, -1)
    lens = torch.full((s.sequences,), s.keys, dtype=torch.int32, device=paged.device)
    q = paged.q.view(s.sequences, s.rows, s.hq, s.d)
    return partial(flash_attn_with_kvcache, q, k, v, cache_seqlens=lens, page_table=table, causal=True)


PEERS: dict[str, Callable[[Paged], Call]] = {
    "SDPA flash": partial(side_by_side, SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": partial(side_by_side, SDPBackend.CUDNN_ATTENTION),
    "gather + SDPA": gathering,
    "FlexAttention": flex,
    "FlashInfer": flashinfer,
    "FlashAttention-3": flash_attention_3,
}
