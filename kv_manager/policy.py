"""Which replicas serve a request: pure functions of the ask and the books.

    able    alive, of the model the request began with, and it can ever fit; not excluded, but see `able_decodes`
    room    free sequence slots, and blocks to write beyond what the replica's reserve is short of
    best    with room, and the lowest score; of equals the one with most free blocks, then by id

    score of a decode replica    blocks it lacks of the request + EVICTION x cached blocks it would forget
                                 + SEQUENCE x leases it has
    score of a prefill replica   seconds until it has computed the prompt: (tokens queued there + tokens it lacks) /
                                 its speed

A block that is lacked is computed or moved once. A sequence more slows all others of its replica for as long as they
take, so it weighs as much as several blocks. What is forgotten may have to be computed again, but most of it never is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from bifolio.protos.errors import DoesNotFit
from bifolio.protos.messages import Ask, BlockId, Key

from .book import Book
from .config import KvConfig

SEQUENCE = 8.0  # blocks
EVICTION = 0.25  # of a block
UNMEASURED = 1000.0  # prompt tokens a second, until any replica has measured

Depths = Mapping[int, int]  # by shelf's bit: leading blocks that are there
NOWHERE: Depths = {}


class Need(NamedTuple):
    """What a request takes of one replica, which has `cached` leading blocks of it."""

    book: Book
    leases: int
    cached: int
    fresh: int
    tokens: int  # of its history, not in the cache

    def shared(self, ask: Ask) -> tuple[BlockId, ...]:
        return self.book.shelf.blocks(self._keys(ask)[: self.cached])

    def _keys(self, ask: Ask) -> Sequence[Key]:
        return ask.keys.get(self.book.model, ())


class Sizes(NamedTuple):
    """What a request takes in blocks of one size, cached ones included."""

    decode: int  # of a decode replica, by its first choice
    each: int  # and by every further choice: the first one's blocks that the prompt fills are theirs too
    prefill: int
    most: int  # that it must be able to hold: one choice to its end, or all as they begin. The others may take turns
    cached: int  # that can come from a cache, at most


@lru_cache(maxsize=1024)
def sizes(tokens: int, most_tokens: int, n: int, resumed: bool, block_size: int) -> Sizes:
    """Of a history of so many tokens: of `Ask` the fields of these names. It is asked for every replica."""
    full = tokens // block_size
    # The token after the history needs a place, unless it is the last and never fed back. What was preempted waits
    # until a whole block more is there: else it would be the first to starve again
    start = max(tokens, min(tokens + (block_size if resumed else 1), most_tokens))
    decode, prefill, most = (-(-each // block_size) for each in (start, tokens, most_tokens))
    # Not the last token's block, even if it is there: the token is computed anew for its logits, and what is shared
    # is never written
    return Sizes(
        decode, decode - full, prefill, max(most, decode + (n - 1) * (decode - full)), (tokens - 1) // block_size
    )


def sizes_of(ask: Ask, block_size: int) -> Sizes:
    return sizes(ask.tokens, ask.most_tokens, ask.n, ask.resumed, block_size)


def able_decodes(ask: Ask, decodes: Iterable[Book]) -> list[Book]:
    """Exclusion is a preference here: if it leaves no one it is ignored, or a pool of one could never try
    again."""
    able = [b for b in decodes if b.alive and can_ever_hold(ask, b)]
    return [b for b in able if b.info.id not in ask.exclude] or able


def can_ever_hold(ask: Ask, book: Book) -> bool:
    return sizes_of(ask, book.block_size).most <= book.info.blocks and ask.n <= book.info.max_sequences


def refuse_what_never_fits(ask: Ask, decodes: list[Book]) -> None:
    """DoesNotFit, unless one of them can ever hold it."""
    if any(can_ever_hold(ask, b) for b in decodes):
        return
    largest = max(decodes, key=lambda b: b.info.blocks * b.block_size)
    slots = max(b.info.max_sequences for b in decodes)
    if ask.n > slots:
        raise DoesNotFit(f"n is {ask.n}; a decode replica computes at most {slots} answers at once", "n")
    size = largest.block_size
    many, lower = (f" in {ask.n} answers", ", or lower n") if ask.n > 1 else ("", "")
    raise DoesNotFit(
        f"prompt and max_tokens can take {sizes_of(ask, size).most * size} positions{many}, the largest "
        f"decode replica holds {largest.info.blocks * size}: shorten the prompt or lower max_tokens{lower}",
        "max_tokens",
    )


def able_prefills(ask: Ask, prefills: Iterable[Book], *, may_exclude: bool = True) -> list[Book]:
    """Exclusion is final here, where the decode replica can prefill itself; where it may not, a preference."""
    able = [b for b in prefills if b.alive and sizes_of(ask, b.block_size).prefill <= b.info.blocks]
    left = [b for b in able if b.info.id not in ask.exclude]
    return left if left or may_exclude else able


def decode_needs(ask: Ask, books: Iterable[Book], depths: Mapping[str, Depths]) -> list[Need]:
    """`depths` by model."""
    needs = []
    for book in books:
        size = book.block_size
        wanted = sizes_of(ask, size)
        cached = min(depths.get(book.model, NOWHERE).get(book.bit, 0), wanted.cached)
        fresh = wanted.decode - cached + (ask.n - 1) * wanted.each
        needs.append(Need(book, ask.n, cached, fresh, ask.tokens - cached * size))
    return needs


def prefill_needs(ask: Ask, books: Iterable[Book], depths: Mapping[str, Depths]) -> list[Need]:
    needs = []
    for book in books:
        wanted = sizes_of(ask, book.block_size)
        cached = min(depths.get(book.model, NOWHERE).get(book.bit, 0), wanted.cached)
        needs.append(Need(book, 1, cached, wanted.prefill - cached, ask.tokens - cached * book.block_size))
    return needs


def by_decode_score(needs: Iterable[Need]) -> list[Need]:
    """The best first, whether it has room or not."""

    def score(need: Need) -> tuple[float, int, str]:
        book, free = need.book, need.book.blocks.free
        evicted = need.fresh - free if need.fresh > free else 0
        return need.fresh + EVICTION * evicted + SEQUENCE * len(book.leases), -free, book.info.id

    return sorted(needs, key=score)


def by_prefill_score(needs: Iterable[Need], speed: float) -> list[Need]:
    """The best first, whether it has room or not. `speed` of those that have not measured."""

    def score(need: Need) -> tuple[float, int, str]:
        return prefill_seconds(need, speed), -need.book.blocks.free, need.book.info.id

    return sorted(needs, key=score)


def best_decode(ask: Ask, needs: Iterable[Need]) -> Need | None:
    return _first_with_room(ask, by_decode_score(needs))


def best_prefill(ask: Ask, needs: Iterable[Need], config: KvConfig, speed: float) -> Need | None:
    """One that has been given few enough tokens, and has room."""
    ready = (need for need in needs if not need.book.queued or prefill_seconds(need, speed) <= config.prefill_queue_s)
    return _first_with_room(ask, by_prefill_score(ready, speed))


def prefill_seconds(need: Need, speed: float) -> float:
    """Until the replica has computed this prompt after all that it has been given."""
    return seconds(need.book, need.book.queued + need.tokens, speed)


def seconds(book: Book, tokens: int, speed: float) -> float:
    """What a replica takes to compute prompt tokens; at `speed` if it has not measured its own."""
    return tokens / (book.speeds.prefill or speed)


def speed_of(books: Sequence[Book]) -> float:
    """Prompt tokens a second: the mean of those that have measured."""
    measured = [b.speeds.prefill for b in books if b.speeds.prefill]
    return sum(measured) / len(measured) if measured else UNMEASURED


def _first_with_room(ask: Ask, needs: Iterable[Need]) -> Need | None:
    """Which blocks are shared is looked up last: a history may have thousands."""
    return next(
        (n for n in needs if n.book.has_room(n.leases, n.fresh) and n.book.blocks.has_room(n.fresh, n.shared(ask))),
        None,
    )
