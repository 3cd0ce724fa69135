"""Whether single values make sense: numbers in a range, token ids of the vocabulary. Pure; knows no request.

Every real number comes out as 32 bits hold it: that is what gRPC carries, and one seed must give one answer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from bifolio.protos.errors import InvalidRequest

from .mistakes import short


def whole(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {short(str(value))}; allowed: {low} to {high}", name)
    return value


def real(name: str, value: float | None, low: float, high: float, *, default: float, above: bool = False) -> float:
    """`value`, or `default` when it is open. `above`: `low` itself is not allowed. NaN is in no range."""
    given = default if value is None else float32(value)
    if not float32(low) <= given <= high or (above and given == low):
        raise InvalidRequest(f"{name} is {value}; allowed: {'above ' * above}{low:g} to {high:g}", name)
    return given


def token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        place, id = next((place, id) for place, id in enumerate(ids) if not 0 <= id < vocab_size)
        raise InvalidRequest(f"{name}[{place}] is {short(str(id))}; token ids are 0 to {vocab_size - 1}", name)


def float32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
