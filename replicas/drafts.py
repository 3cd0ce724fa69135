"""Drafts: what a sequence is likely to go on with, found in what it has said, and how much of it is worth computing.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): who said the same last few tokens before may go on as then. A
step that computes a token and k guesses after it brings the token and as many of the guesses as are right. Whether they
are is decided by sampling each place as ever, so a draft changes how fast an answer comes, never what it is.

    history   ... a b c D E F ...... a b c          the last three tokens were here before: D E F is the draft
    a step            computes  c  D  E  F          one row of logits for each
                      samples   D  E  X             E's row says X, not F: D, E and X are kept, F's row is not looked at

Pure: plain numbers, no torch, no clock, no sequences. Each `Lookup` watches how often its guesses are right, computed
or not: one that is not worth computing now costs nothing, and is counted all the same. So no tries are needed to find
out that a text has begun to repeat.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

LONG, SHORT = 3, 2  # tokens that are looked for, the longer first
SLOTS = 1 << 14  # places of the latest n-grams that are kept, for each length: what collides is forgotten
_SHIFT, _FACTORS = 16, (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # of multiplicative hashing, in 64 bits

# Guesses are told apart by how many tokens before them were the same: 2, 3, 4 to 7, 8 to 15, 16 or more
FIRST_RATES = (0.35, 0.5, 0.7, 0.8, 0.9)  # that are right, until a sequence has shown its own
FIRST_WEIGHT = 8.0  # guesses that these stand for
FADING = 0.97  # weight of what was seen, with each further guess of its kind


def _kind(same: int) -> int:
    return min(same.bit_length(), 5) - 1 if same > SHORT + 1 else same - SHORT


class Lookup:
    """The n-grams of one sequence's history, and what they foretell. Its memory has a fixed size."""

    def __init__(self) -> None:
        self._seen = 0  # tokens of the history
        self._places = {n: np.zeros(SLOTS, np.int32) for n in (LONG, SHORT)}  # of what followed an n-gram; 0 is none
        self._next = 0  # the place of the token that should come next, 0 if none is foretold
        self._same = 0  # tokens before it that were the same here and there
        self._right = [rate * FIRST_WEIGHT for rate in FIRST_RATES]
        self._all = [FIRST_WEIGHT] * len(FIRST_RATES)

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in what has come. `tokens` is the whole history, which only grows at its end."""
        if not self._seen:
            self._take_in_all(tokens)
            return
        for place in range(self._seen, len(tokens)):
            if self._next:
                self._judge(tokens[self._next] == tokens[place])
            self._seen = place + 1
            self._find(tokens)

    def odds(self, most: int) -> list[float]:
        """How probable it is that the first 1, 2, ... `most` guesses are all right; empty if nothing is foretold."""
        if not self._next:
            return []
        odds, all_right = [], 1.0
        for i in range(most):
            kind = _kind(self._same + i)
            all_right *= self._right[kind] / self._all[kind]
            odds.append(all_right)
        return odds

    def guess(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """The next `count` tokens, as foretold. A text that repeats itself up to its end is taken to go on so."""
        period = len(tokens) - self._next
        return tuple(tokens[self._next + i % period] for i in range(count))

    def _judge(self, right: bool) -> None:
        kind = _kind(self._same)
        self._right[kind] = self._right[kind] * FADING + right
        self._all[kind] = self._all[kind] * FADING + 1
        self._next, self._same = (self._next + 1, self._same + 1) if right else (0, 0)

    def _find(self, tokens: Sequence[int]) -> None:
        """Look for the last n-gram, unless one is being followed; then it is where it was last."""
        end = self._seen
        for n, places in self._places.items():
            if end < n:
                continue
            slot = _slot(tokens[end - n : end])
            before = int(places[slot])
            if not self._next and before and all(tokens[before - 1 - i] == tokens[end - 1 - i] for i in range(n)):
                self._next, self._same = before, n
            places[slot] = end

    def _take_in_all(self, tokens: Sequence[int]) -> None:
        """As `_find` for one token after the other, but for the last, at once."""
        history = np.asarray(tokens[:-1], np.int64)
        for n, places in self._places.items():
            if len(history) >= n:
                ends = np.arange(n, len(history) + 1)
                columns = [history[i : len(history) - n + 1 + i] for i in range(n)]
                places[_slot(columns)] = ends  # of places given twice numpy keeps the last
        self._seen = len(tokens)
        self._find(tokens)


def _slot(ngram: Iterable[Any]) -> Any:
    """Of an n-gram; or of many, given as one array for each of their places."""
    return (sum(t * f for t, f in zip(ngram, _FACTORS, strict=False)) >> _SHIFT) % SLOTS


class RowCost:
    """What a row more adds to a step, as a share of a step of one row: the median of what was seen lately.

    Two steps one after the other differ in little but their rows: their times tell it, if one has half as many more.
    """

    FIRST, FIRST_COUNT = 0.15, 16  # what is taken to have been seen before; that is a CPU's
    COUNT = 63
    LEAST = 1e-6  # that a row costs when steps are planned: some of a GPU's cost nothing that can be measured

    def __init__(self, first: float = FIRST) -> None:
        self._seen = deque([first] * self.FIRST_COUNT, maxlen=self.COUNT)
        self._last = (0, 0.0)
        self.share = first

    def rows_within(self, stretch: float, rows: int) -> int:
        """How many more rows make a step of `rows` take `stretch` times as long; at least one."""
        longer = (stretch - 1) * (1 + self.share * (rows - 1))
        return max(1, int(longer / max(self.share, self.LEAST)))

    def add(self, rows: int, seconds: float) -> None:
        """A step has taken so long that computed `rows` tokens, and nothing else."""
        before, then = self._last
        self._last = rows, seconds
        if not before or 2 * abs(rows - before) < min(rows, before):
            return
        each = (seconds - then) / (rows - before)
        one = seconds - (rows - 1) * each
        self._seen.append(min(max(each / one, 0.0), 1.0) if one > 0 else 1.0)
        self.share = median(self._seen)


MARGIN = 1.2  # by how much a guess must be worth more than it costs: its odds are an estimate


def worth(odds: Sequence[Sequence[float]], rows: int, most_rows: int, share: float) -> list[int]:
    """How many guesses of each sequence to compute in a step of `rows` tokens that are computed anyhow.

    odds       of each sequence, as `Lookup.odds`: falling
    most_rows  that the step may have
    share      as in `RowCost`

    The likeliest first, as long as one brings more tokens for its time than the step does without it:

        odds / share  >  MARGIN * (tokens that the step brings) / (its time, in steps of one row)
    """
    counts = [0] * len(odds)
    tokens, time = float(rows), 1 + share * (rows - 1)
    candidates = [(-each[0], i) for i, each in enumerate(odds) if each]
    heapq.heapify(candidates)
    while candidates and rows < most_rows:
        negative, i = heapq.heappop(candidates)
        if -negative * time <= MARGIN * share * tokens:
            break
        counts[i] += 1
        rows, tokens, time = rows + 1, tokens - negative, time + share
        if counts[i] < len(odds[i]):
            heapq.heappush(candidates, (-odds[i][counts[i]], i))
    return counts
