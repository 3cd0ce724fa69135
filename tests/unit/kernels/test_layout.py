"""Which layout a cache has. What it means is tested where caches are read (attention) and written (rope)."""

from __future__ import annotations

import pytest
import torch
from packed_layout import WORD, packed

from bifolio.kernels import Layout, kv_layout
from bifolio.kernels.layout import read_blocks


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "layout"),
    [
        (torch.bfloat16, 64, 16, "packed"),
        (torch.bfloat16, 65, 16, "plain"),
        (torch.bfloat16, 64, 9, "plain"),
        (torch.float32, 65, 9, "packed"),
        (torch.float16, 64, 16, "plain"),
        (torch.float8_e4m3fn, 64, 16, "plain"),
    ],
)
def test_what_can_be_packed_is_packed_on_cpus(
    dtype: torch.dtype, head_dim: int, block_size: int, layout: Layout
) -> None:
    assert kv_layout(dtype, head_dim, block_size) == layout
    assert kv_layout(dtype, head_dim, block_size, "cuda") == "plain"


@pytest.mark.parametrize("dtype", WORD)
@pytest.mark.parametrize("p", [8, 24])
@pytest.mark.parametrize("d", [32, 80, 96, 256])
def test_packed_blocks_are_read_bit_for_bit_as_plain_ones(dtype: torch.dtype, p: int, d: int) -> None:
    kv = torch.randn(5, 2, 3, p, d, generator=torch.Generator().manual_seed(0)).to(dtype)
    blocks = torch.tensor([4, 1, 2])
    for a, b in zip(read_blocks(kv, blocks, "plain"), read_blocks(packed(kv), blocks, "packed"), strict=True):
        assert torch.equal(a, b)


def test_a_packed_word_holds_two_dims_of_a_key_and_two_keys_of_a_dim() -> None:
    k = torch.arange(8.0 * 32).view(8, 32)  # k[p, d] = 32 p + d, and v = -1 - k
    kv = torch.stack((k, -1 - k))[None, :, None].to(torch.bfloat16)
    k, v = packed(kv)[0, :, 0].flatten(-2).tolist()
    assert k[:4] == [0, 1, 32, 33]
    assert k[16:18] == [2, 3]
    assert v[:4] == [-1, -33, -2, -34]
    assert v[64:66] == [-65, -97]
