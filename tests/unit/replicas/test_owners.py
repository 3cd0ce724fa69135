"""Owners that change while somebody reads them: a pair that was never there must not look right."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

from bifolio.protos.messages import Generation
from bifolio.replicas.owners import COUNTER, EPOCH, Owners

BEFORE = Generation(1, 5)
LATER = [Generation(1, 6), Generation(2, 5), Generation(2, 7), Generation(3, 5)]


class Recorder:
    """Notes which half is stored."""

    def __init__(self) -> None:
        self.stores: list[tuple[int, int]] = []

    def __setitem__(self, place: tuple[Any, int], value: int) -> None:
        self.stores.append((place[1], value))


class Changing:
    """A row to which stores come meanwhile: so many of them have come at its first load, so many at its second."""

    def __init__(self, stores: list[tuple[int, int]], first: int, second: int) -> None:
        self._stores = stores
        self._times = [first, second]

    def __getitem__(self, place: tuple[int, int]) -> int:
        return self.at(self._times.pop(0))[place[1]]

    def at(self, time: int) -> dict[int, int]:
        return {EPOCH: BEFORE.epoch, COUNTER: BEFORE.counter} | dict(self._stores[:time])


def test_a_row_has_the_owner_that_was_set_last() -> None:
    owners = Owners.of(4)
    assert owners.of_row(1) == (0, 0)
    owners.set([1, 3], BEFORE)
    owners.set(iter([3]), Generation(2**64 - 1, 2**63))
    assert [owners.of_row(row) for row in range(4)] == [(0, 0), BEFORE, (0, 0), (2**64 - 1, 2**63)]


def test_no_torn_read_looks_right() -> None:
    recorder: Any = Recorder()
    for generation in LATER:
        Owners(recorder).set([1], generation)
    stores = recorder.stores
    assert len(stores) == 2 * len(LATER)
    for first, second in combinations_with_replacement(range(len(stores) + 1), 2):
        changing: Any = Changing(stores, first, second)
        if Owners(changing).of_row(1) == BEFORE:
            # When the first half was read nothing could have been written under a later owner: none was quite there
            assert first < 2
