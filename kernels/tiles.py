"""How large the tiles of Triton's attention are, and how many warps compute each: looked up, never tuned at run time,
so that the same deployment computes the same bits tomorrow.

The rows were chosen by what the compiler makes of them: no spills, HGMMA on sm_90, several tiles of K and V on their
way (`make aot` looks at it again). No clock has chosen any.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    programs: int  # that share a processor: what its shared memory and registers allow, with a cache of 16-bit numbers


# By architecture and phase: for heads of up to 64, up to 128 and up to 256 dims, 16-bit numbers
_TABLE: dict[str, dict[Phase, tuple[Tiles, Tiles, Tiles]]] = {
    "sm_80": {
        "decode": (Tiles(16, 64, 4, 4, 3), Tiles(16, 32, 4, 4, 3), Tiles(16, 32, 4, 3, 2)),
        "prefill": (Tiles(128, 64, 8, 3, 1), Tiles(64, 32, 4, 3, 2), Tiles(64, 32, 8, 2, 1)),
    },
    # 128 rows: HGMMA takes 64 of each four warps
    "sm_90": {
        "decode": (Tiles(16, 64, 4, 4, 4), Tiles(16, 32, 4, 4, 4), Tiles(16, 32, 4, 3, 3)),
        "prefill": (Tiles(128, 64, 8, 3, 2), Tiles(128, 64, 8, 3, 1), Tiles(128, 32, 8, 2, 1)),
    },
    "sm_100": {
        "decode": (Tiles(16, 64, 4, 4, 4), Tiles(16, 32, 4, 4, 4), Tiles(16, 32, 4, 3, 3)),
        "prefill": (Tiles(128, 64, 8, 3, 2), Tiles(128, 64, 8, 2, 1), Tiles(128, 32, 8, 2, 1)),
    },
    "gfx942": {
        "decode": (Tiles(16, 64, 4, 2, 4), Tiles(16, 64, 4, 2, 2), Tiles(16, 32, 4, 2, 2)),
        "prefill": (Tiles(128, 64, 4, 2, 2), Tiles(128, 64, 8, 2, 1), Tiles(64, 32, 8, 2, 1)),
    },
}
_WIDTHS = (64, 128, 256)
# float32 is multiplied number by number: large tiles would not fit into the registers of any
_FLOAT32: dict[Phase, Tiles] = {"decode": Tiles(16, 16, 4, 2, 4), "prefill": Tiles(32, 16, 8, 2, 2)}
# numpy, which pays by the operation, whatever its size
_INTERPRETER: dict[Phase, Tiles] = {"decode": Tiles(16, 64, 4, 1, 2), "prefill": Tiles(128, 64, 4, 1, 1)}


def tiles(architecture: str, phase: Phase, head_dim: int, group: int, itemsize: int) -> Tiles:
    """Those of `architecture`: "sm_90", "gfx942", "interpreter". One that is not in the table takes the newest of its
    family that is older, and a family that is not takes sm_80's, which asks for least.

    group     query heads of one KV head: a tile holds at least one token's
    itemsize  bytes of a number of the queries
    """
    if architecture == "interpreter":
        found = _INTERPRETER[phase]
    elif itemsize == 4:
        found = _FLOAT32[phase]
    else:
        size = next(i for i, width in enumerate(_WIDTHS) if head_dim <= width)
        found = _TABLE[_listed(architecture)][phase][size]
    return replace(found, rows=max(found.rows, 1 << (group - 1).bit_length()))


def _listed(architecture: str) -> str:
    if architecture in _TABLE:
        return architecture
    if architecture.startswith("gfx"):
        return "gfx942"
    number = int(architecture.removeprefix("sm_")) if architecture.removeprefix("sm_").isdigit() else 0
    # sm_12x, the small Blackwells, have less shared memory than sm_90
    return "sm_80" if number < 90 or number >= 120 else "sm_90" if number < 100 else "sm_100"
