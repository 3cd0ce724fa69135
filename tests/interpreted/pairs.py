"""Few cases in which any two values of different parameters meet at least once (all-pairs testing)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


def all_pairs(parameters: Mapping[str, Sequence[Any]], tries: int = 30) -> list[dict[str, Any]]:
    """Greedy: of some random cases around a pair that is missing, the one with most missing pairs. Always the same."""
    draw, names = random.Random(0), list(parameters)
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(names, 2)
        for i in range(len(parameters[a]))
        for j in range(len(parameters[b]))
    }
    cases = []
    while missing:
        fixed = dict(min(missing))
        options = [
            {name: fixed.get(name, draw.randrange(len(parameters[name]))) for name in names} for _ in range(tries)
        ]
        best = max(options, key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        cases.append({name: parameters[name][i] for name, i in best.items()})
    return cases


def _pairs(case: Mapping[str, int]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    return set(combinations(case.items(), 2))
