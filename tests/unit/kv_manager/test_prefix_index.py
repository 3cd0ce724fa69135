"""Which replicas have which blocks: against a search that looks at each replica alone."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from ledger_kit import keys_of

from bifolio.kv_manager.prefix_index import PrefixIndex
from bifolio.protos.messages import BlockId

ONE, TWO = keys_of((1,) * 16), keys_of((2,) * 16)


def test_each_replica_has_as_many_as_follow_without_a_gap() -> None:
    index = PrefixIndex()
    shelves = [index.add() for _ in range(4)]
    for shelf, held in zip(shelves, ((0, 1, 2, 3), (0, 1, 3), (1, 2), ()), strict=True):
        for i in held:
            shelf.add(ONE[i], BlockId(i + 1))
    assert index.match(ONE) == {shelves[0].bit: 4, shelves[1].bit: 2}
    assert index.match(ONE[:1]) == {shelves[0].bit: 1, shelves[1].bit: 1}
    assert index.match(TWO) == index.match(()) == {}
    assert shelves[0].blocks(ONE[:2]) == (1, 2)
    index.check_integrity(shelves)


def test_a_key_is_known_until_the_last_has_dropped_it() -> None:
    index = PrefixIndex()
    one, other = index.add(), index.add()
    one.add(ONE[0], BlockId(1))
    other.add(ONE[0], BlockId(2))
    one.drop([ONE[0]])
    assert (ONE[0] in one, ONE[0] in other, len(index)) == (False, True, 1)
    assert index.match(ONE) == {other.bit: 1}
    other.drop([ONE[0]])
    assert (index.match(ONE), len(index)) == ({}, 0)


def test_whoever_comes_after_one_that_left_has_nothing_of_it() -> None:
    index = PrefixIndex()
    gone, stays = index.add(), index.add()
    for shelf in (gone, stays):
        shelf.add(ONE[0], BlockId(1))
    index.remove(gone)
    comes = index.add()
    assert comes.bit == gone.bit, "bits are used again, or they would grow for ever"
    assert index.match(ONE) == {stays.bit: 1}
    comes.add(TWO[0], BlockId(1))
    assert (index.match(ONE), index.match(TWO)) == ({stays.bit: 1}, {comes.bit: 1})
    index.check_integrity([stays, comes])


def test_a_cell_may_be_large() -> None:
    index = PrefixIndex()
    shelves = [index.add() for _ in range(200)]
    for n, shelf in enumerate(shelves):
        for i in range(n % 5):
            shelf.add(ONE[i], BlockId(i + 1))
    assert index.match(ONE) == {shelf.bit: n % 5 for n, shelf in enumerate(shelves) if n % 5}


def test_integrity_sees_a_key_of_nobody() -> None:
    index = PrefixIndex()
    shelf = index.add()
    shelf.add(ONE[0], BlockId(1))
    with pytest.raises(AssertionError, match="nobody"):
        index.check_integrity([])


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(ONE + TWO), st.booleans()), max_size=60))
def test_matching_all_at_once_is_matching_one_by_one(steps: list[tuple[int, bytes, bool]]) -> None:
    index = PrefixIndex()
    shelves = [index.add() for _ in range(3)]
    held: list[set[bytes]] = [set(), set(), set()]
    for which, key, puts in steps:
        if puts and key not in held[which]:
            shelves[which].add(key, BlockId(1))
            held[which].add(key)
        elif not puts and key in held[which]:
            shelves[which].drop([key])
            held[which].remove(key)
    for keys in (ONE, TWO, TWO[2:]):
        depths = [next((i for i, key in enumerate(keys) if key not in mine), len(keys)) for mine in held]
        assert index.match(keys) == {s.bit: depth for s, depth in zip(shelves, depths, strict=True) if depth}
    index.check_integrity(shelves)
