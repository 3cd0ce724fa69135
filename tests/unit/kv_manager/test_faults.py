"""Broken streams, fault by fault and by chance: an error or the right bytes, always an end, and every block back."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fault_kit import Fault, Plan, every_fault, random_faults
from leased_kit import TWO_HEADS
from transfer_kit import WAIT
from world_kit import MOST_BLOCKS, WAYS, World, world

from bifolio.kv_manager.wire import Kind
from bifolio.protos.errors import GeometryMismatch, InvalidRequest, StalePlacement, TransferFailed
from bifolio.protos.messages import Commit

SOON = 0.1  # a peer that says nothing for so long is given up
BLOCKS, TOKENS, LAST = 5, 18, 4  # of a stream of the matrix; in five frames
ONE_BY_ONE = {"steps": (4, 8, 12, 16), "window": 2, "max_frame": 96}
SCHEDULES = int(os.environ.get("BIFOLIO_FAULT_SCHEDULES", "500"))
ALLOWED = (TransferFailed, StalePlacement, GeometryMismatch, InvalidRequest)


@pytest.fixture(scope="module")
def hurried(request: pytest.FixtureRequest) -> Iterator[World]:
    """One that soon gives up who says nothing."""
    with world(500, copied=request.param == "copied", stall_s=SOON, **ONE_BY_ONE) as it:
        yield it


@pytest.fixture(scope="module")
def calm(request: pytest.FixtureRequest) -> Iterator[World]:
    """One that never gives up."""
    with world(50, copied=request.param == "copied", **ONE_BY_ONE) as it:
        yield it


def numbers(kind: Kind) -> tuple[int, ...]:
    return (0,) if kind in (Kind.START, Kind.COMMIT) else (0, LAST)


def harmless(fault: Fault) -> bool:
    """It comes late; or the other side needs it no more, or has nothing else that could come before it."""
    return fault.how == "delay" or fault in (
        Fault(Kind.ACK, 0, "drop"),  # the next one says as much
        Fault(Kind.ACK, LAST, "double"),
        Fault(Kind.ACK, LAST, "swap"),
        Fault(Kind.COMMIT, 0, "swap"),
    )


DIVIDED = "for divided heads"  # a start that asks for what a replica with two caches would: see below
MATRIX = [
    (way, Fault(kind, number, how))
    for way, comes in WAYS.items()
    for kind in (Kind.START, Kind.ACK, comes, Kind.COMMIT)
    for number in numbers(kind)
    for how in every_fault(kind)
    if how != DIVIDED
]


def named(value: object) -> str:
    return f"{value.kind.name} {value.number} {value.how}" if isinstance(value, Fault) else str(value)


@pytest.mark.parametrize(
    ("hurried", "fault"), [(way, f) for way, f in MATRIX if not harmless(f)], indirect=["hurried"], ids=named
)
def test_a_fault_is_an_error_and_the_blocks_come_back(hurried: World, fault: Fault, caplog: Any) -> None:
    happened: list[Fault] = []
    while not happened:  # a busy machine may be so slow that a stream is given up before
        plan = Plan([fault])
        end = hurried.pull(TOKENS, 0, plan)
        assert isinstance(end, ALLOWED), end
        happened = plan.happened
    assert happened == [fault]
    assert all(job.closed.wait(WAIT) for job in hurried.source.jobs)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("calm", "fault"), [(way, f) for way, f in MATRIX if harmless(f)], indirect=["calm"], ids=named
)
def test_a_message_that_is_late_or_needed_no_more_does_no_harm(calm: World, fault: Fault) -> None:
    plan = Plan([fault])
    assert isinstance(calm.pull(TOKENS, 0, plan), Commit)
    assert plan.happened == [fault]


@pytest.mark.parametrize(("calm", "ends"), [("sent", Commit), ("copied", TransferFailed)], indirect=["calm"])
def test_a_start_for_divided_heads_gets_the_same_bytes_or_is_refused(calm: World, ends: type, caplog: Any) -> None:
    end = calm.pull(TOKENS, 0, Plan([Fault(Kind.START, 0, DIVIDED)]))
    assert isinstance(end, ends), end
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("calm", WAYS, indirect=True)
def test_the_same_streams_without_a_fault_pass(calm: World) -> None:
    commit = calm.pull(TOKENS, 0, Plan())
    assert isinstance(commit, Commit)
    assert (commit.block_count, commit.frames) == (BLOCKS, BLOCKS)


WORLDS: Sequence[dict[str, Any]] = (
    {"window": 1},
    {"window": 2, "max_frame": 64},
    {"window": 8, "max_frame": 1000, "block_bytes": 320},
    {"window": 3, "copied": True},
    {"window": 1, "copied": True, "block_bytes": 4096},
    {"window": 4, "max_frame": 100, "ours_divided": True},
    {"window": 2, "max_frame": 30, "theirs_divided": True},
    {"window": 3, "ours_divided": True, "theirs_divided": True},
)


def scheduled(seed: int, it: World) -> str | None:
    """A random prompt with random faults; what went wrong beyond them."""
    rng = random.Random(seed)
    tokens = rng.randint(1, MOST_BLOCKS * TWO_HEADS.block_size)
    skip = rng.choice([0, 0, rng.randint(0, -(-tokens // TWO_HEADS.block_size))])
    faults = random_faults(rng, WAYS["copied" if it.source.store.memory else "sent"], MOST_BLOCKS)
    try:
        end = it.pull(tokens, skip, Plan(faults, seed))
    except Exception as error:
        return f"seed {seed}, {tokens} tokens, {skip} skipped, {', '.join(map(named, faults))}: {error!r}"
    if isinstance(end, (Commit, *ALLOWED)):
        return None
    return f"seed {seed}, {', '.join(map(named, faults))}: ended as {end!r}"


@pytest.mark.parametrize("number", range(len(WORLDS)), ids=[str(kind) for kind in WORLDS])
def test_random_faults_bring_an_error_or_the_right_bytes(number: int) -> None:
    seeds = range(number, SCHEDULES, len(WORLDS))
    with world(len(seeds), stall_s=SOON, **WORLDS[number]) as it, ThreadPoolExecutor(12) as threads:
        wrong = [end for end in threads.map(lambda seed: scheduled(seed, it), seeds) if end]
    assert not wrong, "\n".join(wrong)
