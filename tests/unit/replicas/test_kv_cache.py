from __future__ import annotations

import pytest
import torch

from bifolio.replicas.kv_cache import KvCache
from bifolio.replicas.kv_memory import BlockShape

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
def test_a_block_is_bytes_with_all_its_layers(dtype: torch.dtype) -> None:
    source, target = cache(dtype), cache(dtype)
    assert source.block_bytes == BlockShape(2, 2, 8, 32, dtype.itemsize).bytes
    assert source.bytes.shape == (4, source.block_bytes)
    assert source.bytes.dtype == torch.uint8
    for i in range(2):
        source.layer(i)[2] = torch.randn(2, 2, 8, 32)
    target.bytes[3] = source.bytes[2]
    for i in range(2):
        assert torch.equal(target.layer(i)[3], source.layer(i)[2])
        assert not target.layer(i)[:3].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_is_copied_with_all_its_layers(dtype: torch.dtype) -> None:
    c = cache(dtype)
    for i in range(2):
        c.layer(i)[1:] = torch.randn(3, 2, 2, 8, 32)
    before = c.bytes.clone()
    c.copy(1, 3)
    assert torch.equal(c.bytes[3], before[1])
    assert torch.equal(c.bytes[:3], before[:3])
    for source, block in ((0, 1), (1, 0), (4, 1), (1, 4)):
        with pytest.raises(AssertionError):
            c.copy(source, block)


def test_a_cache_says_its_layout_and_lies_on_its_device() -> None:
    assert cache().layout == "plain"
    assert cache().device == torch.device("cpu")
    sizes = (3, 2, 2, 8, 32, torch.bfloat16)
    assert KvCache(*sizes, "packed").layout == "packed"
    elsewhere = KvCache(*sizes, device=torch.device("meta"))
    assert (elsewhere.device, elsewhere.bytes.device) == (torch.device("meta"),) * 2


def test_a_cache_lives_in_memory_that_it_is_given() -> None:
    c = cache()
    memory = torch.zeros(c.bytes.numel(), dtype=torch.uint8)
    there = KvCache(3, 2, 2, 8, 32, torch.bfloat16, memory=memory)
    assert (there.bytes.data_ptr(), there.bytes.shape) == (memory.data_ptr(), c.bytes.shape)
    there.layer(1)[2] = 1
    assert (there.layer(1)[2] == 1).all()
    assert memory.view(4, -1)[2].any()
    with pytest.raises(RuntimeError, match="shape"):
        KvCache(4, 2, 2, 8, 32, torch.bfloat16, memory=memory)
