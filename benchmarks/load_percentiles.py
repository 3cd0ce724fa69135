"""Percentiles, as every figure of the load driver has them: by nearest rank, so each is a value that was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed; `ordered` is not empty."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """How many there are and, if any, their mean, p50, p90, p99 and max."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    at = {f"p{percent}": percentile(ordered, percent) for percent in (50, 90, 99)}
    return {"count": len(ordered), "mean": math.fsum(ordered) / len(ordered), **at, "max": ordered[-1]}
