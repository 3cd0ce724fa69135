"""Which replicas serve a request: pure functions of the ask and the books.

able    alive, and the request can ever fit; not excluded, but see `able_decodes`
room    a free sequence slot, and free blocks beyond what the replica's reserve is short of
best    fewest leases, then most free blocks, then the id: load first, because a sequence slows all others of its
        replica, while free blocks only matter when they run out
"""

from __future__ import annotations

from collections.abc import Iterable

from bifolio.protos.messages import Ask

from .book import Book


def decode_tokens(ask: Ask) -> int:
    """Positions a decode lease starts with: the history and the token after it, unless that one is never fed
    back."""
    return max(ask.tokens, min(ask.tokens + 1, ask.most_tokens))


def able_decodes(ask: Ask, decodes: Iterable[Book]) -> list[Book]:
    """Exclusion is a preference here: if it leaves no one it is ignored, or a pool of one could never try
    again."""
    able = [b for b in decodes if b.state == "alive" and b.blocks_for(ask.most_tokens) <= b.info.blocks]
    return [b for b in able if b.info.id not in ask.exclude] or able


def able_prefills(ask: Ask, prefills: Iterable[Book]) -> list[Book]:
    """Exclusion is final here: the decode replica can always prefill itself."""
    return [
        b
        for b in prefills
        if b.state == "alive" and b.info.id not in ask.exclude and b.blocks_for(ask.tokens) <= b.info.blocks
    ]


def best(able: Iterable[Book], tokens: int) -> Book | None:
    roomy = (b for b in able if b.has_room(b.blocks_for(tokens)))
    return min(roomy, key=lambda b: (len(b.leases), -b.free, b.info.id), default=None)
