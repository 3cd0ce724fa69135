"""Which replicas serve a request. Books are made here, without a ledger."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ledger_kit import CONFIG, ask, info, keys_of

from bifolio.kv_manager import policy
from bifolio.kv_manager.book import Book
from bifolio.kv_manager.prefix_index import PrefixIndex
from bifolio.protos.measures import Speeds
from bifolio.protos.messages import Ask, BlockId, Generation, Role

TEXT = 1


class Pool:
    """Books over one index."""

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._leases = 0

    def book(self, name: str, role: Role = "decode", blocks: int = 100, slots: int = 16) -> Book:
        return Book(info(name, role, blocks, slots), self._index.add())

    def cache(self, book: Book, blocks: int, first: int = 1, text: int = TEXT) -> None:
        keys = keys_of((text,) * (4 * blocks))
        book.blocks.learn((BlockId(first + i), key) for i, key in enumerate(keys))

    def lease(self, book: Book, blocks: int = 1, tokens: int = 0) -> None:
        self._leases += 1
        book.offer(ask("x").request, Generation(1, self._leases), (), blocks, 0, 10, tokens)

    def decode(self, ask: Ask, books: Sequence[Book]) -> str | None:
        depths = self._index.match(ask.keys.get("m", ()))
        need = policy.best_decode(ask, policy.decode_needs(ask, books, {"m": depths}))
        return need and need.book.info.id

    def prefill(self, ask: Ask, books: Sequence[Book]) -> str | None:
        depths = self._index.match(ask.keys.get("m", ()))
        need = policy.best_prefill(ask, policy.prefill_needs(ask, books, {"m": depths}), CONFIG, policy.speed_of(books))
        return need and need.book.info.id


@pytest.fixture
def pool() -> Pool:
    return Pool()


# -- what it takes


@pytest.mark.parametrize(
    ("tokens", "most", "resumed", "blocks"),
    [
        (7, 20, False, 2),
        (8, 20, False, 3),  # the token after them needs a place
        (8, 8, False, 2),  # which is never fed back
        (7, 20, True, 3),  # a whole block more, where it was preempted
        (7, 8, True, 2),  # but never more than it can take
    ],
)
def test_what_a_decode_lease_starts_with(tokens: int, most: int, resumed: bool, blocks: int) -> None:
    assert policy.sizes(tokens, most, 1, resumed, 4).decode == blocks


@pytest.mark.parametrize(
    ("n", "tokens", "most", "blocks"),
    [(1, 6, 9, 3), (1, 6, 6, 2), (3, 6, 9, 4), (3, 6, 30, 8), (2, 8, 8, 2)],
)
def test_what_must_fit_is_one_choice_to_its_end_or_all_as_they_begin(
    n: int, tokens: int, most: int, blocks: int
) -> None:
    assert policy.sizes(tokens, most, n, False, 4).most == blocks


def test_a_need_is_what_is_not_cached(pool: Pool) -> None:
    book = pool.book("d")
    pool.cache(book, 5)
    depths = {"m": {book.bit: 5}}
    (need,) = policy.decode_needs(ask("a", 22, n=3, text=TEXT), [book], depths)
    assert (need.leases, need.cached, need.fresh, need.tokens) == (3, 5, 1 + 2, 2)
    assert need.shared(ask("a", 22, text=TEXT)) == (1, 2, 3, 4, 5)
    (need,) = policy.prefill_needs(ask("a", 20, n=3, text=TEXT), [book], depths)
    assert (need.leases, need.cached, need.fresh, need.tokens) == (1, 4, 1, 4)  # never the last token's block


# -- who is able


def test_able_decodes(pool: Pool) -> None:
    small, few, leaves, fits = pool.book("a", blocks=3), pool.book("b", slots=1), pool.book("c"), pool.book("d")
    leaves.draining = True
    every = [small, few, leaves, fits]
    assert policy.able_decodes(ask("x", 4, 16, n=2), every) == [fits]
    assert policy.able_decodes(ask("x", 4, 16, ("b",)), every) == [fits]
    assert policy.able_decodes(ask("x", 4, 16, ("b", "d")), every) == [few, fits]  # a pool of one could never try again
    fits.shunned_until = 1.0
    assert policy.able_decodes(ask("x", 4, 16, n=2), every) == []


def test_able_prefills(pool: Pool) -> None:
    small, leaves, fits = (pool.book(name, "prefill", blocks) for name, blocks in (("a", 1), ("b", 100), ("c", 100)))
    leaves.draining = True
    assert policy.able_prefills(ask("x", 5), [small, leaves, fits]) == [fits]
    assert policy.able_prefills(ask("x", 5, exclude=("c",)), [small, leaves, fits]) == []  # decode can do it


# -- who is best to decode


def test_the_prefix_decides_between_equals(pool: Pool) -> None:
    books = [pool.book(name) for name in "abc"]
    pool.cache(books[1], 2)
    pool.cache(books[2], 3)
    assert pool.decode(ask("x", 20, text=TEXT), books) == "c"
    assert pool.decode(ask("x", 9, text=TEXT), books) == "b"  # both have all of it; b has more free
    assert pool.decode(ask("x", 20, text=2), books) == "a"


def test_a_sequence_more_weighs_as_much_as_some_blocks(pool: Pool) -> None:
    idle, busy = pool.book("a"), pool.book("b")
    pool.lease(busy)
    pool.cache(busy, 20, first=10)
    blocks = int(policy.SEQUENCE)
    assert pool.decode(ask("x", 4 * (blocks - 1) + 1, text=TEXT), [idle, busy]) == "a"
    assert pool.decode(ask("x", 4 * (blocks + 1) + 1, text=TEXT), [idle, busy]) == "b"


def test_what_must_be_forgotten_weighs_little(pool: Pool) -> None:
    full, empty = pool.book("a", blocks=20), pool.book("b", blocks=20)
    pool.cache(full, 20, text=2)
    assert pool.decode(ask("x", 12), [full, empty]) == "b"
    pool.lease(empty)
    assert pool.decode(ask("x", 12), [full, empty]) == "a"


def test_most_free_blocks_then_the_id(pool: Pool) -> None:
    books = [pool.book("a", blocks=20), pool.book("c", blocks=30), pool.book("b", blocks=30)]
    assert pool.decode(ask("x"), books) == "b"


def test_who_has_no_room_is_passed_over(pool: Pool) -> None:
    best, slots, second = pool.book("a", slots=4), pool.book("b", slots=1), pool.book("c")
    pool.cache(best, 2)
    best.blocks.refill(98)
    best.blocks.shortage = 1
    pool.lease(slots)
    for _ in range(2):
        pool.lease(second)
    assert pool.decode(ask("x", 9, text=TEXT), [best, slots, second]) == "c"
    assert pool.decode(ask("x", 9, text=TEXT), [best, slots]) is None


# -- who is best to prefill


def test_who_is_done_first_prefills(pool: Pool) -> None:
    slow, fast, cached = (pool.book(name, "prefill") for name in "abc")
    slow.speeds, fast.speeds, cached.speeds = Speeds(100), Speeds(200), Speeds(100)
    pool.cache(cached, 8)
    assert pool.prefill(ask("x", 40, text=TEXT), [slow, fast, cached]) == "c"  # 0.08 s, others 0.4 and 0.2
    pool.lease(cached, tokens=20)
    assert pool.prefill(ask("x", 40, text=TEXT), [slow, fast, cached]) == "b"  # 0.28 s by now
    assert pool.prefill(ask("x", 4), [slow, fast, cached]) == "b"


def test_who_has_not_measured_is_taken_for_the_mean(pool: Pool) -> None:
    new, slow, fast = (pool.book(name, "prefill") for name in "abc")
    slow.speeds, fast.speeds = Speeds(100), Speeds(300)
    assert policy.speed_of([new, slow, fast]) == 200
    assert pool.prefill(ask("x", 40), [new, slow]) == "a"  # taken for equal
    assert pool.prefill(ask("x", 40), [new, slow, fast]) == "c"
    assert policy.speed_of([new]) == policy.UNMEASURED


def test_a_prefill_replica_is_given_some_seconds_unless_it_is_idle(pool: Pool) -> None:
    book = pool.book("p", "prefill", blocks=1000)
    book.speeds = Speeds(100)
    most = int(100 * CONFIG.prefill_queue_s)
    assert pool.prefill(ask("x", 2 * most), [book]) == "p"
    pool.lease(book, tokens=most - 50)
    assert pool.prefill(ask("x", 50), [book]) == "p"
    assert pool.prefill(ask("x", 51), [book]) is None
    other = pool.book("q", "prefill", blocks=1000)
    other.speeds = Speeds(1)
    assert pool.prefill(ask("x", 51), [book, other]) == "q"  # 51 s there, but at once
