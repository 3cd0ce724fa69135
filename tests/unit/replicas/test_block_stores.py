"""What every store of a cache does alike, and what becomes of the staging buffers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from staging_kit import block_of, large_cache, small_cache
from transfer_kit import content, put

from bifolio.kv_manager.wire import MAX_PAYLOAD
from bifolio.protos.messages import Generation
from bifolio.replicas.block_stores import Blocks, HostBlocks, StagedBlocks
from bifolio.replicas.delayed_device import DelayedDevice
from bifolio.replicas.device import HostDevice
from bifolio.replicas.host_share import HostShare
from bifolio.replicas.kv_cache import KvCache


def shared_host(cache: KvCache) -> HostBlocks:
    """Others see its owners; its blocks may as well be here."""
    return HostBlocks(cache, HostShare(len(cache.bytes), cache.block_bytes))


STORES: dict[str, Callable[[KvCache], Blocks]] = {
    "host": HostBlocks,
    "shared": shared_host,
    "staged": lambda cache: StagedBlocks(cache, HostDevice()),
    **{f"delayed-{seed}": lambda cache, seed=seed: StagedBlocks(cache, DelayedDevice(seed)) for seed in range(4)},
}


class CountingDevice(HostDevice):
    buffers = 0

    def pinned(self, size):
        self.buffers += 1
        return super().pinned(size)


@pytest.fixture(params=STORES)
def store_of(request):
    return STORES[request.param]


@pytest.fixture
def cache() -> KvCache:
    """Its blocks 1 .. 6 have something in them."""
    cache = small_cache()
    cache.bytes[1:] = torch.randint(0, 256, (6, cache.block_bytes), dtype=torch.uint8)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_moves_as_bytes_with_all_its_layers(store_of, dtype):
    source, target = small_cache(dtype=dtype), small_cache(dtype=dtype)
    for i in range(2):
        source.layer(i)[2] = torch.randn(2, 2, 4, 8)
    put(store_of(target), 3, content(store_of(source), 2))
    for i in range(2):
        assert torch.equal(target.layer(i)[3], source.layer(i)[2])
        assert not target.layer(i)[:3].any()
        assert not target.layer(i)[4:].any()


def test_cuts_come_in_turn_as_flat_read_only_bytes(store_of, cache):
    store, size = store_of(cache), cache.block_bytes
    cuts = [
        [(3, 0, size)],
        [(1, 4, 20), (6, size - 8, size), (1, 20, 21)],
        [(2, 0, size), (4, 0, size), (3, 0, 5)],
        [(2, 5, 5)],
        [],
        [(5, 1, size)],
    ]
    with closing(store.read(cuts)) as read:
        for cut, views in zip(cuts, read, strict=True):
            for view in views:
                assert (view.format, view.ndim, view.contiguous, view.readonly) == ("B", 1, True, True)
            assert b"".join(views) == b"".join(block_of(cache, block)[begin:end] for block, begin, end in cut)


def test_views_hold_until_the_next_are_asked_for(store_of, cache):
    store, size = store_of(cache), cache.block_bytes
    with closing(store.read([[(1, 0, size), (3, 0, 9)], [(2, 0, size)], [(3, 0, size)]])) as read:
        for cut, views in zip(((1, 3), (2,), (3,)), read, strict=True):
            for other in (4, 5, 6):
                content(store, other)
                put(store, other, bytes(size))
            assert b"".join(views) == b"".join(block_of(cache, block) for block in cut)[: sum(map(len, views))]


def test_parts_of_blocks_are_written_where_they_belong(store_of, cache):
    expected = [bytearray(block_of(cache, block)) for block in range(7)]
    with store_of(cache).writing() as write:
        for block, offset, data in [(2, 3, b"abc"), (5, 0, memoryview(b"de")), (2, 4, b"f"), (1, 250, b"ghi")]:
            write(block, offset, data)
            expected[block][offset : offset + len(data)] = data
        write(3, cache.block_bytes, b"")
    assert [block_of(cache, block) for block in range(7)] == expected


def test_what_was_written_before_an_error_has_landed(store_of, cache):
    error = RuntimeError("in the middle")
    with pytest.raises(RuntimeError) as caught, store_of(cache).writing() as write:  # noqa: PT012
        for block in (1, 2, 3):
            write(block, 0, bytes(cache.block_bytes))
        raise error
    assert caught.value is error
    assert not cache.bytes[1:4].any()
    assert cache.bytes[4:].any()


def test_the_null_block_and_blocks_that_do_not_exist_are_refused(store_of, cache):
    store = store_of(cache)
    for block in (-1, 0, 7):
        with pytest.raises(IndexError, match="allowed is 1 to 6"):
            next(store.read([[(1, 0, 8)], [(2, 0, 8), (block, 0, 8)]]))
        with pytest.raises(IndexError, match="allowed is 1 to 6"), store.writing() as write:
            write(block, 0, b"x")
        with pytest.raises(IndexError, match="allowed is 1 to 6"):
            store.owner(block)
        with pytest.raises(IndexError, match="allowed is 1 to 6"):
            store.own([1, block], Generation(1, 2))
    assert store.owner(1) == (0, 0)
    assert not cache.bytes[0].any()


def test_bytes_beyond_a_blocks_ends_are_refused(store_of, cache):
    store, size, before = store_of(cache), cache.block_bytes, cache.bytes.clone()
    for begin in (-1, size - 1, size):
        with pytest.raises(ValueError, match="2 bytes"):
            next(store.read([[(1, 0, 8)], [(1, begin, begin + 2)]]))
        with pytest.raises(ValueError, match="2 bytes"), store.writing() as write:
            write(1, begin, b"xx")
    with pytest.raises(ValueError, match="-1 bytes"):
        next(store.read([[(1, 8, 7)]]))
    assert torch.equal(cache.bytes, before)


def test_more_than_a_frame_at_once_is_refused(store_of):
    cache = large_cache(2)
    store = store_of(cache)
    for cut in ([(1, 0, MAX_PAYLOAD + 1)], [(1, 0, MAX_PAYLOAD), (2, 0, 1)]):
        with pytest.raises(ValueError, match=f"at most {MAX_PAYLOAD}"):
            next(store.read([cut]))
    with pytest.raises(ValueError, match=f"at most {MAX_PAYLOAD}"), store.writing() as write:
        write(1, 0, bytes(MAX_PAYLOAD + 1))
    new = bytes(range(256)) * (cache.block_bytes // 256)
    put(store, 1, new)
    assert content(store, 1) == new


def test_nothing_to_read_is_nothing(store_of, cache):
    assert list(store_of(cache).read([])) == []


def test_a_block_is_of_the_lease_under_which_it_is_written_last(store_of, cache):
    store = store_of(cache)
    assert store.owner(3) == (0, 0)
    store.own(iter([1, 3]), Generation(2, 9))
    store.own([3], Generation(3, 1))
    assert [store.owner(block) for block in (1, 2, 3)] == [(2, 9), (0, 0), (3, 1)]


def test_buffers_are_kept_however_their_user_ends(cache):
    device, size = CountingDevice(), cache.block_bytes
    store = StagedBlocks(cache, device)
    for taken in range(5):
        with closing(store.read([[(b, 0, size)] for b in (1, 2, 3)])) as views:
            for _ in range(taken):
                next(views, None)
        put(store, 4, bytes(size))
        with pytest.raises(IndexError), store.writing() as write:
            write(0, 0, b"x")
    assert device.buffers == 2


def test_no_two_have_the_same_buffers(cache):
    device, size = CountingDevice(), cache.block_bytes
    store = StagedBlocks(cache, device)
    cuts = [[(b, 0, size)] for b in (1, 2, 3)]
    with closing(store.read(cuts)) as some, closing(store.read(cuts)) as others, store.writing() as write:
        for block, [one], [other] in zip((1, 2, 3), some, others, strict=True):
            write(block + 3, 0, bytes(size))
            assert bytes(one) == bytes(other) == block_of(cache, block)
        assert device.buffers == 6
    assert not cache.bytes[4:].any()


def test_buffers_go_to_nobody_else_before_their_copies_have_happened(cache):
    class Nosy(CountingDevice):
        """While a copy is waited for, a block is read."""

        looked = False

        def copy(self, into, source):
            super().copy(into, source)
            return self

        def wait(self):
            if not self.looked:
                self.looked = True
                content(store, 5)

    device = Nosy()
    store = StagedBlocks(cache, device)
    put(store, 4, bytes(cache.block_bytes))
    assert device.looked
    assert device.buffers == 4
