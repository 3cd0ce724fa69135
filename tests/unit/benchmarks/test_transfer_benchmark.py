"""What is made of the transfer's measurements: figures and verdicts of samples that were written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transfer_partner import Taken
from transfer_rates import COPIES, FRAMES, GRPC, MEMCPY, Sample, figures, verdicts
from transfer_soak import FLAT_RSS, FLAT_THREADS, Look, flat
from transfer_source import LARGE, SMALL
from transfer_stall import WITH, WITHOUT, ratios
from transfer_timeline import timeline, typical
from transfer_ttft import Seconds, added, beyond

LOOK = Look(10, 1, 1, Taken(500 << 20, 18, 16), Taken(900 << 20, 16, 13))


def samples(*seconds: float) -> list[Sample]:
    return [Sample(each, 2 * each, 3 * each) for each in seconds]


def test_shapes_have_the_block_sizes_of_their_models() -> None:
    assert SMALL.block_bytes == 368_640
    assert LARGE.block_bytes == 2 << 20
    assert LARGE.blocks_of((256 << 20) + 1) == 129


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    found = figures({MEMCPY: samples(1.0, 1.0, 1.0), GRPC: samples(2.0, 4.0, 8.0), FRAMES: samples(4.0, 4.0, 16.0)})
    assert found[FRAMES]["of_grpc"] == 0.5  # of 0.5, 1 and 0.5; the ratio of the medians is 1
    assert found[FRAMES]["gb_s"] == 0.25
    assert (found[GRPC]["receive"], found[GRPC]["send"]) == (8.0, 12.0)


@pytest.mark.parametrize(("frames", "copies", "met"), [(0.8, 0.5, [True, True]), (0.79, 0.49, [False, False])])
def test_each_way_has_a_bar_of_its_own(frames: float, copies: float, met: list[bool]) -> None:
    lines = verdicts({FRAMES: {"of_grpc": frames, "of_memcpy": 0.0}, COPIES: {"of_grpc": 9.0, "of_memcpy": copies}})
    assert ["MISSED" not in line for line in lines] == met


def test_what_stays_within_the_bounds_is_flat() -> None:
    more = Taken(LOOK.sender.rss + FLAT_RSS, LOOK.sender.files, LOOK.sender.threads + FLAT_THREADS)
    assert flat([LOOK, LOOK, LOOK, replace(LOOK, sender=more)])


@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize(("what", "more"), [("rss", FLAT_RSS + 1), ("files", 1), ("threads", FLAT_THREADS + 1)])
def test_growth_on_either_side_is_not_flat(side: str, what: str, more: int) -> None:
    was: Taken = getattr(LOOK, side)
    grown = replace(was, **{what: getattr(was, what) + more})
    assert not flat([LOOK, LOOK, LOOK, replace(LOOK, **{side: grown})])


def test_waiting_for_a_stalled_one_shows_in_the_ratio() -> None:
    assert ratios({"frames": {WITHOUT: [1.0, 2.0, 1.0], WITH: [3.0, 6.0, 1.0]}}) == {"frames": 3.0}


def test_a_timeline_begins_with_the_first_chunk() -> None:
    computed = [(12.0, 256), (14.0, 300)]
    made = timeline(computed, 4.0, [(12.1, 12.2, 8)], [(12.2, 12.3, 6), (14.1, 14.2, 2)], 14.5, 15.0)
    assert made.computed == ((0.0, 2.0, 256), (2.0, 4.0, 44))
    assert (made.lag, made.hidden, made.token) == (0.5, 0.75, 5.0)


def test_the_timeline_that_is_drawn_is_the_median() -> None:
    of = [timeline([(1.0, 16)], 1.0, [], [(0.5, 0.6, 1)], 1.0 + lag, 9.0) for lag in (0.3, 0.1, 0.2)]
    assert typical(of) is of[2]


def test_what_a_split_adds_is_a_share_of_its_prefill() -> None:
    split: list[Seconds] = [
        {"seen": 1.25, "prefill": 1.0},
        {"seen": 2.5, "prefill": 2.0},
        {"seen": 1.125, "prefill": 1.0},
    ]
    single: list[Seconds] = [
        {"seen": 1.0, "prefill": 0.875},
        {"seen": 2.0, "prefill": 2.0},
        {"seen": 1.0, "prefill": 1.0},
    ]
    assert added(split, single) == 0.25  # of 0.25, 0.25 and 0.125
    assert beyond(split, single) == 0.125  # of 0.125, 0.25 and 0.125
