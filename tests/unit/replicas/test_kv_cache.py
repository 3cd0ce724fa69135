from __future__ import annotations

import pytest
import torch

from bifolio.replicas.kv_cache import KvCache

DTYPES = [torch.float32, torch.bfloat16]


def cache(dtype: torch.dtype = torch.bfloat16) -> KvCache:
    return KvCache(blocks=3, layers=2, kv_heads=2, block_size=8, head_dim=32, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_is_a_view_of_every_block(dtype: torch.dtype) -> None:
    c = cache(dtype)
    assert c.layer(1).shape == (4, 2, 2, 8, 32)
    assert c.layer(1).dtype == dtype
    c.layer(1)[3] = 1
    assert (c.layer(1)[3] == 1).all()
    assert not c.layer(0).any()
    assert not c.layer(1)[:3].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_moves_as_bytes_with_all_its_layers(dtype: torch.dtype) -> None:
    source, target = cache(dtype), cache(dtype)
    for i in range(2):
        source.layer(i)[2] = torch.randn(2, 2, 8, 32)
    block = source.read(2)
    assert (block.nbytes, block.format, block.ndim, block.contiguous) == (source.block_bytes, "B", 1, True)
    assert source.block_bytes == KvCache.bytes_per_block(2, 2, 8, 32, dtype)
    half = source.block_bytes // 2
    target.write(3, 0, block[:half])
    target.write(3, half, bytes(block[half:]))
    for i in range(2):
        assert torch.equal(target.layer(i)[3], source.layer(i)[2])
        assert not target.layer(i)[:3].any()


def test_what_is_read_is_the_cache_itself_and_read_only() -> None:
    c = cache()
    block = c.read(1)
    c.layer(0)[1] = 1
    assert any(block)
    with pytest.raises(TypeError):
        block[0] = 1


@pytest.mark.parametrize("block", [-1, 0, 4])
def test_the_null_block_and_blocks_that_do_not_exist_are_refused(block: int) -> None:
    with pytest.raises(IndexError, match="allowed is 1 to 3"):
        cache().read(block)
    with pytest.raises(IndexError, match="allowed is 1 to 3"):
        cache().write(block, 0, b"x")


def test_a_write_past_a_blocks_ends_is_refused() -> None:
    c = cache()
    for offset in (-1, c.block_bytes - 1, c.block_bytes):
        with pytest.raises(ValueError, match="2 bytes"):
            c.write(1, offset, b"xx")
    assert not c.layer(0).any()
    c.write(1, c.block_bytes - 2, b"xx")
    c.write(1, c.block_bytes, b"")


def test_a_cache_says_its_layout() -> None:
    assert cache().layout == "plain"
    assert KvCache(3, 2, 2, 8, 32, torch.bfloat16, "packed").layout == "packed"
