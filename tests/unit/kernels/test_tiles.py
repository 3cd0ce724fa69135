from __future__ import annotations

import pytest

from bifolio.kernels.tiles import PHASES, Phase, tiles


@pytest.mark.parametrize(
    ("architecture", "listed"),
    [
        *(("sm_80", "sm_80"), ("sm_86", "sm_80"), ("sm_89", "sm_80"), ("sm_90", "sm_90"), ("sm_103", "sm_100")),
        *(("sm_120", "sm_80"), ("sm_75", "sm_80"), ("gfx950", "gfx942"), ("elsewhere", "sm_80")),
    ],
)
@pytest.mark.parametrize("phase", PHASES)
def test_an_architecture_that_is_not_listed_takes_its_familys(architecture: str, listed: str, phase: Phase) -> None:
    for head_dim in (64, 128, 256):
        assert tiles(architecture, phase, head_dim, 4, 2) == tiles(listed, phase, head_dim, 4, 2)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "gfx942", "interpreter"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_tile_holds_the_heads_of_a_token_whatever_their_number(architecture: str, phase: Phase) -> None:
    for itemsize in (2, 4):
        for group in (1, 3, 16, 24, 71, 200):
            rows = tiles(architecture, phase, 128, group, itemsize).rows
            assert rows >= group
            assert rows & (rows - 1) == 0  # a power of 2


def test_hopper_gets_rows_enough_for_its_matrix_units() -> None:
    assert [tiles("sm_90", "prefill", head_dim, 3, 2).rows for head_dim in (32, 64, 80, 128, 256)] == [128] * 5


def test_any_head_size_has_tiles() -> None:
    assert tiles("sm_90", "decode", 65, 1, 2) == tiles("sm_90", "decode", 128, 1, 2)
    assert tiles("sm_90", "decode", 32, 1, 2) == tiles("sm_90", "decode", 64, 1, 2)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_on_their_way_fit_into_shared_memory(phase: Phase, itemsize: int) -> None:
    """Of K and V together: 227 KiB of sm_90's processors, 163 KiB of sm_80's, 64 KiB of gfx942's."""
    for architecture, room in (("sm_90", 227), ("sm_80", 163), ("sm_100", 227), ("gfx942", 64)):
        for head_dim in (64, 128, 256):
            found = tiles(architecture, phase, head_dim, 4, itemsize)
            assert found.stages * found.keys * head_dim * 2 * itemsize <= room * 1024, (architecture, head_dim)
