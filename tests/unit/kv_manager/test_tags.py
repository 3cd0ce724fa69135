"""The replica's own side: what it refuses, draws, reports and applies. Its cache: `test_tags_cache.py`."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from bifolio.kv_manager.tags import NEVER, BlockTags
from bifolio.protos.errors import StalePlacement
from bifolio.protos.messages import BlockId, Generation, Lease, Release, ReplicaId, Reply, RequestId

REPLICA = ReplicaId("d")


def generation(counter: int) -> Generation:
    return Generation(1, counter)


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, ids))


def lease(counter: int, *ids: int) -> Lease:
    return Lease(REPLICA, generation(counter), blocks(*ids))


@pytest.fixture
def tags() -> BlockTags:
    return BlockTags(REPLICA, 8)


def grant(tags: BlockTags, counter: int, *ids: int, now: float = 0.0) -> None:
    tags.apply(Reply(tags.report(now).beat, granted=lease(counter, *ids)))


def test_open_uses_and_close_frees(tags: BlockTags) -> None:
    tags.open(lease(1, 1, 2))
    assert [tags.users(b) for b in blocks(1, 2, 3)] == [(generation(1),), (generation(1),), ()]
    assert tags.close(generation(1)) == Release(REPLICA, generation(1), 0)
    assert tags.users(BlockId(1)) == ()
    assert tags.close(generation(1)) is None


def test_a_tag_is_of_the_last_grant_and_only_grows(tags: BlockTags) -> None:
    assert tags.tag(BlockId(1)) == NEVER
    tags.open(lease(3, 1))
    tags.close(generation(3))
    assert tags.tag(BlockId(1)) == generation(3)
    grant(tags, 5, 1)
    assert tags.tag(BlockId(1)) == generation(5)


def test_a_block_of_another_open_lease_is_refused_and_nothing_changes(tags: BlockTags) -> None:
    tags.open(lease(1, 2))
    with pytest.raises(
        StalePlacement, match=r"block 2 of d is used by another lease; the placement under 1\.2 is stale"
    ) as error:
        tags.open(lease(2, 1, 2))
    assert pickle.loads(pickle.dumps(error.value)).replica == "d"
    assert (tags.users(BlockId(1)), tags.tag(BlockId(1))) == ((), NEVER)
    tags.open(lease(3, 1))


def test_a_newer_tag_outlives_its_lease(tags: BlockTags) -> None:
    tags.open(lease(2, 1))
    tags.close(generation(2))
    with pytest.raises(StalePlacement):
        tags.open(lease(1, 1))


def test_a_generation_opens_once(tags: BlockTags) -> None:
    tags.open(lease(1, 1))
    with pytest.raises(StalePlacement):
        tags.open(lease(1, 1))
    tags.close(generation(1))
    with pytest.raises(StalePlacement):
        tags.open(lease(1, 1))


def test_a_later_epoch_is_newer_whatever_its_counter(tags: BlockTags) -> None:
    tags.open(lease(99, 1))
    tags.close(generation(99))
    tags.open(Lease(REPLICA, Generation(2, 1), blocks(1)))


def test_blocks_in_the_reserve_are_refused(tags: BlockTags) -> None:
    tags.open(lease(1, 1))
    grant(tags, 2, 5)
    with pytest.raises(StalePlacement):
        tags.open(lease(3, 5))


def test_draw_gives_all_or_nothing(tags: BlockTags) -> None:
    tags.open(lease(1, 1))
    grant(tags, 2, 5, 6)
    assert tags.draw(generation(1), 3) is None
    assert tags.draw(generation(1), 2) == blocks(5, 6)
    assert tags.report(1).leases == (lease(1, 1, 5, 6),)


def test_a_drawn_block_keeps_the_tag_of_its_grant(tags: BlockTags) -> None:
    tags.open(lease(1, 1))
    grant(tags, 5, 2)
    tags.draw(generation(1), 1)
    tags.close(generation(1))
    with pytest.raises(StalePlacement):
        tags.open(lease(4, 2))  # an offer that expired before the block was granted for growth
    tags.open(lease(6, 2))


def test_wanted_is_a_block_for_each_open_lease(tags: BlockTags) -> None:
    assert tags.report(0).reserve_wanted == 0
    tags.open(lease(1, 1))
    tags.open(lease(2, 2))
    assert tags.report(0).reserve_wanted == 2


def test_wanted_is_the_growth_at_the_pace_of_late() -> None:
    tags = BlockTags(REPLICA, 64)
    tags.open(lease(1, 1))
    grant(tags, 2, *range(2, 12))
    for now in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        tags.draw(generation(1), 1)  # one a second: five in growth_s, from the first report on
        assert tags.report(now).reserve_wanted == 5
    assert tags.report(8.5).reserve_wanted == 3
    assert tags.report(50).reserve_wanted == 1


def test_growth_takes_no_more_than_an_eighth_of_the_cache() -> None:
    tags = BlockTags(REPLICA, 32)
    tags.open(lease(1, 1))
    grant(tags, 2, *range(2, 14))
    tags.draw(generation(1), 12)
    assert tags.report(1).reserve_wanted == 4


def test_wanted_covers_a_draw_that_failed(tags: BlockTags) -> None:
    tags.open(lease(1, 1))
    tags.draw(generation(1), 4)
    assert tags.report(0).reserve_wanted == 4


def test_a_replica_whose_leases_do_not_grow_wants_no_reserve() -> None:
    tags = BlockTags(REPLICA, 8, grows=False)
    tags.open(lease(1, 1))
    assert tags.report(0).reserve_wanted == 0
    assert not tags.due


def test_surplus_is_dropped_by_the_report(tags: BlockTags) -> None:
    tags.open(lease(1, 1))
    grant(tags, 2, 5, 6, 7)
    assert len(tags.report(0).reserve) == 1
    tags.close(generation(1))
    assert tags.report(1).reserve == ()
    assert tags.held == 0


def test_low_asks_for_one_report_not_for_a_storm(tags: BlockTags) -> None:
    assert not tags.due
    tags.open(lease(1, 1))
    assert tags.due
    tags.report(0)
    assert not tags.due  # the cell has no blocks: asking again at once would not help
    grant(tags, 2, 5)
    assert not tags.due
    tags.draw(generation(1), 1)
    assert tags.due


def test_a_reserve_that_is_not_wanted_any_more_is_given_up_at_once(tags: BlockTags) -> None:
    tags.open(lease(1, 1))
    grant(tags, 2, 5)
    tags.report(0)
    tags.close(generation(1))
    assert tags.due
    assert tags.report(1).reserve == ()
    assert not tags.due


def test_a_lease_that_is_open_is_not_opened_again(tags: BlockTags) -> None:
    tags.open(lease(1, 1))
    with pytest.raises(StalePlacement, match="open already"):
        tags.open(lease(1, 2))
    tags.close(generation(1))
    assert tags.held == 0


def test_only_the_reply_to_the_newest_report_counts_and_once(tags: BlockTags) -> None:
    tags.open(lease(1, 1))
    old, new = tags.report(0), tags.report(0)
    tags.apply(Reply(old.beat, granted=lease(2, 5)))
    assert tags.held == 1
    for _ in range(2):
        tags.apply(Reply(new.beat, granted=lease(3, 6)))
    assert tags.held == 2


def test_a_grant_does_not_take_blocks_of_a_lease_opened_since(tags: BlockTags) -> None:
    tags.open(lease(1, 1))
    report = tags.report(0)
    tags.open(lease(2, 5))  # an offer that expired, opened late
    tags.apply(Reply(report.beat, granted=lease(3, 5, 6)))
    assert tags.users(BlockId(5)) == (generation(2),)
    assert tags.report(1).reserve == blocks(6)


def test_a_refused_placement_calls_for_a_report_at_once(tags: BlockTags) -> None:
    """The ledger is wrong about these blocks; without, every placement until the next beat could be."""
    tags.open(lease(2, 1))
    tags.close(generation(2))
    tags.report(0)
    assert not tags.due
    with pytest.raises(StalePlacement):
        tags.open(lease(1, 1))
    assert tags.due
    tags.report(1)
    assert not tags.due


def test_a_lease_keeps_its_request_and_its_hit_as_it_grows(tags: BlockTags) -> None:
    one = replace(lease(1, 1), request=RequestId("r"))
    tags.open(one)
    grant(tags, 2, 5)
    tags.draw(generation(1), 1)
    assert tags.report(1).leases == (replace(one, blocks=blocks(1, 5)),)


def test_apply_returns_the_revoked_leases_that_are_open(tags: BlockTags) -> None:
    tags.open(lease(1, 1))
    beat = tags.report(0).beat
    assert tags.apply(Reply(beat, revoked=(generation(1), generation(7)))) == (generation(1),)


def test_threads_never_share_a_block() -> None:
    tags = BlockTags(REPLICA, 64)

    def turn(n: int) -> int:
        opened = 0
        for i in range(200):
            try:
                tags.open(lease(200 * n + i + 1, 1 + (n + i) % 64, 1 + (n + 2 * i + 1) % 64))
            except StalePlacement:
                continue
            opened += 1
            assert tags.close(generation(200 * n + i + 1)) is not None
        return opened

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(turn, range(8))) > 0
    assert tags.held == 0
