"""One uniform number per (seed, choice, position): why a request can be resumed from its tokens alone.

Counter-based: a number is a pure function of its address, so nothing is carried from token to token, between
batches or between replicas. Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC
2011).
"""

from __future__ import annotations

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # the key's steps: golden ratio and sqrt(3) - 1, as the paper has them
_WORD = 0xFFFFFFFF
_ROUNDS = 10

Words4 = tuple[int, int, int, int]


def philox(counter: Words4, key: tuple[int, int]) -> Words4:
    """The Philox4x32-10 bijection: four 32-bit words of counter to four of output, under two words of key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1 = (product1 >> 32) ^ c1 ^ k0, product1 & _WORD
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 & _WORD
        k0 = (k0 + _WEYL[0]) & _WORD
        k1 = (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """A float in [0, 1) with 53 random bits.

    seed      any integer, of which 64 bits count
    choice    which of a request's n answers, 0 .. 2^64 - 1
    position  which token of that answer, counted the same however often the request is resumed, 0 .. 2^64 - 1
    """
    counter = (position & _WORD, position >> 32, choice & _WORD, choice >> 32)
    high, low, _, _ = philox(counter, (seed & _WORD, (seed >> 32) & _WORD))
    return ((high << 32 | low) >> 11) * 2.0**-53
