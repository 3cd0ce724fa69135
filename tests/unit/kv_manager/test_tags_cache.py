"""The replica's own side: what is in its blocks, who shares them, and how the manager hears of it."""

from __future__ import annotations

import pytest

from bifolio.kv_manager.tags import NEVER, BlockTags
from bifolio.protos.errors import StalePlacement
from bifolio.protos.messages import BlockId, Generation, Key, Lease, Release, ReplicaId, Reply

REPLICA = ReplicaId("d")
A, B, C, D = (Key(letter * 32) for letter in (b"a", b"b", b"c", b"d"))


def generation(counter: int) -> Generation:
    return Generation(1, counter)


def lease(counter: int, *ids: int, cached: int = 0) -> Lease:
    return Lease(REPLICA, generation(counter), tuple(map(BlockId, ids)), cached=cached)


@pytest.fixture
def tags() -> BlockTags:
    """Blocks 1 and 2 hold A and B, and are unused; the manager has not heard of it."""
    tags = BlockTags(REPLICA, 8)
    tags.open(lease(1, 1, 2, 3))
    tags.fill(generation(1), (A, B))
    tags.close(generation(1))
    return tags


def keys(tags: BlockTags, *ids: int) -> list[Key | None]:
    return [tags.key(BlockId(b)) for b in ids]


def told(tags: BlockTags, reply: Reply | None = None, *, lost: bool = False) -> dict[BlockId, Key | None]:
    """What the next report says of the cache; the manager answers, unless that is lost."""
    report = tags.report(0)
    if not lost:
        tags.apply(reply or Reply(report.beat))
    return dict(report.keys)


# -- hits


def test_a_key_outlives_its_lease(tags: BlockTags) -> None:
    assert keys(tags, 1, 2, 3) == [A, B, None]
    assert tags.held == 0


def test_leases_share_what_is_cached_and_it_counts_once(tags: BlockTags) -> None:
    tags.open(lease(2, 1, 2, 4, cached=2), (A, B, C))
    tags.open(lease(3, 1, 2, 5, cached=2), (A, B))
    assert tags.users(BlockId(1)) == (generation(2), generation(3))
    assert tags.held == tags.report(0).held == 4
    tags.close(generation(2))
    assert tags.users(BlockId(1)) == (generation(3),)
    assert tags.held == 3
    tags.close(generation(3))
    assert tags.held == 0
    assert keys(tags, 1, 2) == [A, B]


def test_what_is_cached_is_not_tagged_again(tags: BlockTags) -> None:
    """Its tag says who wrote it; so an older lease than that may take it as well."""
    tags.open(lease(5, 4))
    tags.fill(generation(5), (A,))
    tags.close(generation(5))
    tags.open(lease(3, 4, cached=1), (A,))
    assert tags.tag(BlockId(4)) == generation(5)


@pytest.mark.parametrize("wrong", [(A, C), (B, A), (C, B)])
def test_another_content_is_refused_and_nothing_changes(tags: BlockTags, wrong: tuple[Key, ...]) -> None:
    told(tags)
    with pytest.raises(StalePlacement, match=r"block \d of d no longer holds what was cached there") as error:
        tags.open(lease(2, 1, 2, 4, cached=2), wrong)
    assert error.value.replica == "d"
    assert tags.held == 0
    assert (tags.tag(BlockId(4)), keys(tags, 1, 2)) == (NEVER, [A, B])
    assert tags.due
    assert told(tags) == {}
    tags.open(lease(2, 1, 2, 4, cached=2), (A, B))


def test_a_hit_of_more_than_there_are_keys_is_refused(tags: BlockTags) -> None:
    with pytest.raises(StalePlacement, match="2 blocks are to come from the cache, its tokens fill 1"):
        tags.open(lease(2, 1, 2, 4, cached=2), (A,))


def test_a_block_that_was_never_whole_is_no_hit(tags: BlockTags) -> None:
    with pytest.raises(StalePlacement):
        tags.open(lease(2, 1, 2, 3, cached=3), (A, B, C))


def test_what_was_granted_to_be_written_is_no_hit_any_more(tags: BlockTags) -> None:
    tags.open(lease(3, 1))
    assert keys(tags, 1, 2) == [None, B]
    with pytest.raises(StalePlacement):
        tags.open(lease(2, 1, 2, cached=2), (A, B))
    tags.close(generation(3))
    with pytest.raises(StalePlacement):
        tags.open(lease(2, 1, 2, cached=2), (A, B))


def test_what_is_read_is_not_granted_to_be_written(tags: BlockTags) -> None:
    tags.open(lease(2, 1, cached=1), (A,))
    with pytest.raises(StalePlacement, match="block 1 of d is used by another lease"):
        tags.open(lease(9, 1))
    assert keys(tags, 1) == [A]


# -- forks


def test_forks_share_the_prompts_blocks_until_the_last_is_closed(tags: BlockTags) -> None:
    """Before anything is in them: the caller has it written once, and nobody writes it again."""
    tags.open(lease(2, 4, 5, 6))
    tags.fork(lease(3, 4, 5, 7, cached=2), generation(2))
    assert tags.users(BlockId(5)) == (generation(2), generation(3))
    assert tags.held == 4
    tags.close(generation(2))
    with pytest.raises(StalePlacement):
        tags.open(lease(9, 5))
    tags.fill(generation(3), (C, D))
    assert keys(tags, 4, 5, 7) == [C, D, None]
    tags.close(generation(3))
    assert tags.held == 0


@pytest.mark.parametrize(
    "fork",
    [lease(3, 4, 5, 7, cached=2), lease(3, 5, 7, cached=1), lease(3, 4, 6, cached=1)],
    ids=["more than it has", "another block", "own block used"],
)
def test_a_fork_of_other_blocks_is_refused_and_nothing_changes(tags: BlockTags, fork: Lease) -> None:
    tags.open(lease(2, 4))
    tags.open(lease(1, 6))
    with pytest.raises(StalePlacement):
        tags.fork(fork, generation(2))
    assert tags.users(BlockId(4)) == (generation(2),)
    assert tags.tag(BlockId(7)) == NEVER
    assert tags.held == 2


def test_what_is_closed_is_not_forked(tags: BlockTags) -> None:
    tags.report(0)
    with pytest.raises(StalePlacement, match=r"lease 1\.1, to be forked, is not open"):
        tags.fork(lease(3, 1, 2, 7, cached=2), generation(1))
    assert tags.due


def test_a_fork_that_is_open_is_not_opened_again(tags: BlockTags) -> None:
    tags.open(lease(2, 4))
    tags.fork(lease(3, 4, cached=1), generation(2))
    with pytest.raises(StalePlacement, match="open already"):
        tags.fork(lease(3, 4, cached=1), generation(2))
    tags.close(generation(3))
    tags.close(generation(2))
    assert tags.held == 0


# -- what is whole


def test_fill_takes_as_many_as_there_are_keys_and_blocks(tags: BlockTags) -> None:
    tags.open(lease(2, 4, 5))
    tags.fill(generation(2), (C,))
    assert keys(tags, 4, 5) == [C, None]
    tags.fill(generation(2), (C, D))
    assert keys(tags, 4, 5) == [C, D]


def test_fill_goes_on_from_any_block(tags: BlockTags) -> None:
    tags.open(lease(2, 4, 5))
    tags.fill(generation(2), (D,), 1)
    assert keys(tags, 4, 5) == [None, D]


def test_what_is_closed_is_not_filled(tags: BlockTags) -> None:
    tags.open(lease(2, 4))
    tags.close(generation(2))
    tags.fill(generation(2), (C,))
    assert keys(tags, 4) == [None]


def test_drawn_blocks_are_filled_as_well(tags: BlockTags) -> None:
    tags.open(lease(2, 4))
    tags.apply(Reply(tags.report(0).beat, granted=lease(3, 1)))
    assert keys(tags, 1) == [None], "granted to be written"
    tags.draw(generation(2), 1)
    tags.fill(generation(2), (C, D))
    assert keys(tags, 4, 1) == [C, D]


def test_a_grant_leaves_a_hit_that_was_opened_since(tags: BlockTags) -> None:
    report = tags.report(0)
    tags.open(lease(2, 1, cached=1), (A,))
    tags.apply(Reply(report.beat, granted=lease(3, 1, 2)))
    assert keys(tags, 1, 2) == [A, None]
    assert tags.held == 2


def test_a_release_tells_what_the_manager_may_not_know(tags: BlockTags) -> None:
    told(tags)
    tags.open(lease(2, 1, 4, 5, cached=1), (A,))
    tags.fill(generation(2), (A, C))
    tags.report(0)  # tells of C too, but may be lost
    assert tags.close(generation(2)) == Release(REPLICA, generation(2), tags.beat, ((BlockId(4), C),))


# -- what the manager hears


def test_a_report_tells_what_changed_since_the_last_that_was_answered(tags: BlockTags) -> None:
    assert told(tags) == {1: A, 2: B}
    assert told(tags) == {}
    tags.open(lease(2, 1, 4))
    tags.fill(generation(2), (C,))
    assert told(tags) == {1: C}
    tags.close(generation(2))
    tags.open(lease(3, 1))
    assert told(tags) == {1: None}
    assert told(tags) == {}


def test_what_was_lost_is_told_again(tags: BlockTags) -> None:
    first = told(tags, lost=True)
    tags.open(lease(2, 4))
    tags.fill(generation(2), (C,))
    assert told(tags, lost=True) == told(tags) == first | {4: C}
    assert told(tags) == {}


def test_since_and_version_say_what_a_report_covers(tags: BlockTags) -> None:
    first = tags.report(0)
    tags.open(lease(2, 4))
    tags.fill(generation(2), (C,))  # after the report, before its reply: the next tells it
    tags.apply(Reply(first.beat))
    second, third = tags.report(0), tags.report(0)
    assert first.since == 0 < first.version
    assert (second.since, third.since) == (first.version, first.version)
    assert second.version == third.version > first.version
    assert dict(second.keys) == dict(third.keys) == {4: C}


def test_a_complete_report_tells_all_and_confirms_nothing(tags: BlockTags) -> None:
    every = told(tags)
    tags.open(lease(2, 4))
    tags.fill(generation(2), (C,))
    complete = tags.report(0, complete=True)
    assert complete.since == 0
    assert dict(complete.keys) == every | {4: C}
    assert told(tags) == {4: C}


def test_an_unknown_replica_tells_all(tags: BlockTags) -> None:
    every = told(tags)
    assert told(tags, Reply(tags.beat + 1, known=False)) == {}
    assert tags.report(0).since == 0
    assert told(tags) == every


@pytest.mark.parametrize("known", [True, False])
def test_a_late_or_repeated_reply_confirms_nothing(tags: BlockTags, known: bool) -> None:
    old, new = tags.report(0), tags.report(0)
    tags.apply(Reply(old.beat, known))
    assert tags.report(0).since == 0
    tags.apply(Reply(tags.beat, known=True))
    tags.apply(Reply(tags.beat, known=False))
    assert tags.report(0).since == new.version


def test_leases_are_reported_with_their_hits_and_each_block_is_held_once(tags: BlockTags) -> None:
    one, other = lease(2, 1, 2, 4, cached=2), lease(3, 1, cached=1)
    tags.open(one, (A, B))
    tags.open(other, (A,))
    tags.apply(Reply(tags.report(0).beat, granted=lease(4, 5, 6)))
    report = tags.report(0)
    assert (report.leases, len(report.reserve), report.held) == ((one, other), 2, 5)
