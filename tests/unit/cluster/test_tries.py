"""Attempts that ended early: the one place that says why, whom to avoid, and when it is enough."""

from __future__ import annotations

import pytest

from bifolio.cluster.tries import Ended, Tries
from bifolio.kv_manager.resumes import CAUSES
from bifolio.protos.errors import Unavailable
from bifolio.protos.messages import Generation, Lease, Placement, ReplicaId, RequestId

DECODE = Lease(ReplicaId("d"), Generation(1, 1), ())
PREFILL = Lease(ReplicaId("p"), Generation(1, 2), ())
SPLIT = Placement(RequestId("r"), DECODE, PREFILL)
LOCAL = Placement(RequestId("r"), DECODE)


@pytest.mark.parametrize(
    ("name", "replica", "placement", "cause"),
    [
        ("StalePlacement", None, SPLIT, "stale"),
        ("ReplicaGone", "p", SPLIT, "prefill lost"),
        ("ReplicaGone", "d", SPLIT, "decode lost"),
        ("ReplicaGone", "d", LOCAL, "decode lost"),
        ("ReplicaGone", "d", None, "decode lost"),
        ("TransferFailed", "p", SPLIT, "transfer failed"),
        ("EngineFailed", "d", SPLIT, "engine failed"),
        ("Preempted", None, SPLIT, "preempted"),
        ("Draining", "p", SPLIT, "drained"),
        ("Resumable", "d", SPLIT, "revoked"),
        ("GeometryMismatch", "p", SPLIT, "other"),
    ],
)
def test_each_end_has_a_cause(name: str, replica: str | None, placement: Placement | None, cause: str) -> None:
    assert Ended(name, "why", replica).cause(placement) == cause
    assert cause in CAUSES


def test_the_last_try_avoids_every_prefill_replica_that_was_used_and_the_one_after_is_an_error() -> None:
    tries = Tries(3)
    tries.failed(Ended("StalePlacement", "block 3", None), SPLIT, 1.0)
    assert (tries.avoid, tries.last, tries.pause_s) == ((), False, 0.05)
    tries.failed(Ended("EngineFailed", "nan", "d"), SPLIT, 2.0)
    assert (tries.avoid, tries.last) == (("d", "p"), True)
    with pytest.raises(Unavailable, match=r"3 attempts in a row .*; the last ended with StalePlacement: x"):
        tries.failed(Ended("StalePlacement", "x", None), SPLIT, 3.0)


def test_a_token_ends_the_row_and_the_pause() -> None:
    tries = Tries(2)
    assert tries.brought(5.0) == 0.0
    for at in (10.0, 20.0, 30.0):
        tries.failed(Ended("ReplicaGone", "died", "d"), SPLIT, at)
        assert tries.brought(at + 1.5) == 1.5
    assert tries.count == 0


def test_the_pause_is_as_long_as_all_attempts_together() -> None:
    tries = Tries(9)
    for at in (10.0, 11.0, 12.0):
        tries.failed(Ended("ReplicaGone", "died", "d"), SPLIT, at)
    assert tries.brought(14.0) == 4.0


def test_who_is_preempted_has_not_failed() -> None:
    tries = Tries(1)
    for at in range(10):
        tries.failed(Ended("Preempted", "no blocks", None), SPLIT, at)
    assert (tries.count, tries.cause) == (0, "preempted")
