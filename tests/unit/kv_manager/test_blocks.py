"""Where one replica's blocks are, and in which order they are taken. The fixture's user checks integrity in the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ledger_kit import keys_of

from bifolio.kv_manager.blocks import Blocks
from bifolio.kv_manager.prefix_index import PrefixIndex
from bifolio.protos.messages import BlockId

KEYS = keys_of((1,) * 32)
COUNT = 6


@pytest.fixture
def blocks() -> Iterator[Blocks]:
    """All of them free. A test leaves none in use."""
    blocks = Blocks(COUNT, PrefixIndex().add())
    yield blocks
    blocks.check_integrity((), (), "d")


def cache(blocks: Blocks, *ids: int) -> None:
    """Block i holds key i."""
    blocks.learn([(BlockId(i), KEYS[i]) for i in ids])


def test_the_longest_free_are_taken_first(blocks: Blocks) -> None:
    assert blocks.take(3) == (1, 2, 3)
    blocks.unuse([BlockId(2), BlockId(1), BlockId(3)])
    assert blocks.take(6) == (4, 5, 6, 2, 1, 3)
    blocks.unuse(map(BlockId, range(1, 7)))


def test_then_the_least_recently_used_of_the_cached(blocks: Blocks) -> None:
    cache(blocks, 3, 1, 2)
    blocks.use([BlockId(3)])
    blocks.unuse([BlockId(3)])
    assert blocks.take(5) == (4, 5, 6, 1, 2)
    assert (blocks.evicted, KEYS[3] in blocks.shelf, KEYS[1] in blocks.shelf) == (2, True, False)
    blocks.unuse(map(BlockId, (1, 2, 4, 5, 6)))
    counts = blocks.counts()
    assert (counts.free, counts.cached, counts.leased, counts.total) == (5, 1, 0, 6)


def test_a_block_is_cached_again_with_the_last_who_reads_it(blocks: Blocks) -> None:
    cache(blocks, 1)
    for _ in range(2):
        blocks.use([BlockId(1)])
    blocks.unuse([BlockId(1)])
    assert (blocks.counts().cached, blocks.counts().leased, blocks.in_use(BlockId(1))) == (0, 1, True)
    blocks.unuse([BlockId(1)])
    assert (blocks.counts().cached, blocks.counts().leased, blocks.in_use(BlockId(1))) == (1, 0, False)


def test_what_is_read_is_no_room_to_write(blocks: Blocks) -> None:
    cache(blocks, 1, 2)
    assert blocks.has_room(6, [])
    assert not blocks.has_room(7, [])
    assert not blocks.has_room(5, [BlockId(1), BlockId(2)])
    assert blocks.has_room(4, [BlockId(1), BlockId(2)])
    blocks.use([BlockId(1)])
    assert blocks.has_room(5, [BlockId(1)])  # used already
    blocks.unuse([BlockId(1)])


def test_what_the_reserve_lacks_is_no_room_either(blocks: Blocks) -> None:
    cache(blocks, 1)
    assert blocks.refill(8) == (2, 3, 4, 5, 6, 1)
    assert (blocks.shortage, blocks.evicted, blocks.counts().reserve) == (2, 1, 6)
    blocks.set_reserve({BlockId(1)})
    assert blocks.has_room(3, [])
    assert not blocks.has_room(4, [])
    assert blocks.refill(1) == ()
    assert blocks.shortage == 0


def test_drawn_blocks_leave_the_reserve(blocks: Blocks) -> None:
    blocks.refill(2)
    blocks.use([BlockId(1)])
    assert blocks.reserve == {2}
    blocks.unuse([BlockId(1)])


def test_what_goes_to_the_reserve_is_forgotten(blocks: Blocks) -> None:
    cache(blocks, 1)
    blocks.set_reserve({BlockId(1), BlockId(2)})
    assert (KEYS[1] in blocks.shelf, blocks.counts().cached) == (False, 0)
    blocks.set_reserve(set())
    assert blocks.counts().free == 6


def test_of_two_equal_blocks_the_first_is_known(blocks: Blocks) -> None:
    blocks.learn([(BlockId(1), KEYS[0]), (BlockId(2), KEYS[0])])
    assert blocks.shelf.blocks(KEYS[:1]) == (1,)
    assert (blocks.counts().free, blocks.counts().cached) == (5, 1)
    blocks.learn([(BlockId(2), None)])
    assert blocks.shelf.blocks(KEYS[:1]) == (1,)


def test_a_block_that_holds_something_else_now(blocks: Blocks) -> None:
    cache(blocks, 1)
    blocks.learn([(BlockId(1), KEYS[2])])
    assert (KEYS[1] in blocks.shelf, blocks.shelf.blocks(KEYS[2:3])) == (False, (1,))
    blocks.learn([(BlockId(1), KEYS[2])])
    blocks.learn([(BlockId(1), None)])
    assert (blocks.counts().free, blocks.counts().cached) == (6, 0)


def test_what_is_learnt_of_a_block_in_use_counts_when_it_is_not(blocks: Blocks) -> None:
    blocks.take(1)
    cache(blocks, 1)
    assert (blocks.counts().cached, KEYS[1] in blocks.shelf) == (0, True)
    blocks.unuse([BlockId(1)])
    assert blocks.counts().cached == 1
