"""Heads that are divided differently on the two sides: the blocks are equal all the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from transfer_kit import DONE, ScriptedSource, content, ids, no_threads_left, put, serving, start

from bifolio.kv_manager.heads import Part, common, cover, narrowed, whole
from bifolio.kv_manager.memory_store import MemoryStore
from bifolio.kv_manager.pull import PrefillClient
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.protos.errors import TransferFailed
from bifolio.protos.messages import Geometry, Heads

LAYERS, HEADS, BLOCK, DIM = 3, 8, 4, 5
GEOMETRY = Geometry("model", LAYERS, HEADS, DIM, BLOCK, "uint8")
BYTES = LAYERS * 2 * HEADS * BLOCK * DIM


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_threads_left():
        yield


def parts_of(counts: Sequence[int], blocks: int = 4) -> list[Part]:
    """A cache for each rank, empty."""
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    heads = [Heads(first, count) for first, count in zip(firsts, counts, strict=True)]
    return [Part(each, MemoryStore(blocks, BYTES * each.count // HEADS)) for each in heads]


def block_of(parts: Sequence[Part], block: int) -> np.ndarray:
    """[layers, 2, heads, block_size, head_dim], put together from the ranks' caches."""
    slabs = [
        np.frombuffer(content(store, block), np.uint8).reshape(LAYERS, 2, heads.count, BLOCK, DIM)
        for heads, store in parts
    ]
    return np.concatenate(slabs, axis=2)


def fill(parts: Sequence[Part], block: int, slab: np.ndarray) -> None:
    for heads, store in parts:
        put(store, block, slab[:, :, heads.first : heads.first + heads.count].tobytes())


def noise(seed: int) -> np.ndarray:
    return np.frombuffer(random.Random(seed).randbytes(BYTES), np.uint8).reshape(LAYERS, 2, HEADS, BLOCK, DIM)


@pytest.mark.parametrize("max_frame", [1 << 20, 100, 7])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [((8,), (4, 4)), ((4, 4), (8,)), ((4, 4), (4, 4)), ((4, 4), (2, 2, 2, 2)), ((3, 5), (5, 3)), ((8,), (8,))],
)
def test_blocks_are_equal_however_each_side_divides_its_heads(theirs, ours, max_frame):
    prefill, decode = parts_of(theirs), parts_of(ours)
    for block in (1, 2, 3):
        fill(prefill, block, noise(block))
    fill(decode, 3, noise(33))
    source = ScriptedSource(prefill[0].store, 4, DONE)
    source.geometry, source.several = replace(GEOMETRY, tensor_parallel=len(theirs)), tuple(prefill)
    asked = replace(start(), geometry=replace(GEOMETRY, tensor_parallel=len(ours)))
    with serving(source, max_frame=max_frame) as address:
        client = PrefillClient(decode, TrafficMeter())
        commit = client.pull(address, asked).run(ids(2, 4, 1))
        client.close()
    assert commit.payload_bytes == 3 * BYTES
    assert cover(commit.heads, HEADS)
    for here, there in ((2, 3), (4, 1), (1, 2)):
        np.testing.assert_array_equal(block_of(decode, here), noise(there))
    np.testing.assert_array_equal(block_of(decode, 3), noise(33))  # was not asked for


def test_a_sender_that_ignores_how_we_divide_our_heads_is_refused():
    class Deaf(ScriptedSource):
        def begin(self, start):
            object.__setattr__(start, "heads", ())
            return super().begin(start)

    [whole_part] = parts_of((8,))
    source = Deaf(whole_part.store, DONE)
    source.geometry = GEOMETRY
    with serving(source) as address:
        client = PrefillClient(parts_of((4, 4)), TrafficMeter())
        pull = client.pull(address, replace(start(), geometry=GEOMETRY))
        with pytest.raises(TransferFailed, match=r"heads 0\.\.7 are in no cache of ours together"):
            pull.run(ids(1, 2, 3))
        client.close()


def test_nothing_is_cut_where_both_sides_have_one_cache():
    parts = whole(MemoryStore(1, BYTES), GEOMETRY)
    assert common(parts, (), GEOMETRY) == parts
    assert common(parts, (Heads(0, HEADS),), GEOMETRY)[0].store is parts[0].store


def test_parts_are_those_that_lie_in_one_cache_of_each_side():
    parts = common(parts_of((4, 4)), (Heads(0, 3), Heads(3, 3), Heads(6, 2)), GEOMETRY)
    assert [part.heads for part in parts] == [Heads(0, 3), Heads(3, 1), Heads(4, 2), Heads(6, 2)]


@pytest.mark.parametrize("heads", [Heads(3, 2), Heads(0, 8), Heads(7, 2), Heads(8, 1), Heads(0, 0), Heads(5, -1)])
def test_heads_that_are_in_no_cache_together_have_no_store(heads):
    with pytest.raises(KeyError):
        narrowed(parts_of((4, 4)), heads, GEOMETRY)


@pytest.mark.parametrize(
    ("parts", "all_there"),
    [
        ([Heads(0, 8)], True),
        ([Heads(4, 4), Heads(0, 4)], True),
        ([], False),
        ([Heads(0, 7)], False),
        ([Heads(0, 9)], False),
        ([Heads(0, 4), Heads(3, 5)], False),
        ([Heads(0, 4), Heads(5, 3)], False),
        ([Heads(0, 8), Heads(8, 0)], False),
    ],
)
def test_every_head_is_in_one_part(parts, all_there):
    assert cover(parts, HEADS) is all_there
