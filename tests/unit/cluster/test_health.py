"""Each stage in turn: what is told of it, and whether requests would be served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from status_kit import status

from bifolio.cluster.health import OK, PARTS, Health, alive_of, health
from bifolio.protos.measures import Traffic

WANTED = {"prefill": 2, "decode": 2}
SILENCE_S = 10.0

Change = dict[str, Any]


def replica(id: str, **fields: Any) -> dict[str, Any]:
    role = "prefill" if id.startswith("p") else "decode"
    return {"id": id, "role": role, "state": "alive", "stalled": {}, "silent_s": 0.4, "active": 0} | fields


def stalled(id: str, stage: str, seconds: float = 6.2) -> dict[str, Any]:
    return replica(id, state="stalled", stalled={stage: seconds})


def lost(id: str, ago_s: float) -> dict[str, Any]:
    return {"id": id, "role": replica(id)["role"], "why": "it did not report for 10 s", "ago_s": ago_s}


def judged(
    *replicas: Mapping[str, Any], split: str = "always", silent_s: float = 0.2, lost: Any = (), **fields: Any
) -> Health:
    """Of these replicas and those of p1, p2, d1 and d2 that are not among them; a replica named "-d1" is not there."""
    given = {each["id"]: each for each in replicas}
    every = [given.pop(id, replica(id)) for id in ("p1", "p2", "d1", "d2") if f"-{id}" not in given]
    snapshot = {
        "replicas": every + [each for id, each in given.items() if not id.startswith("-")],
        "lost": list(lost),
        "waiting": 0,
        "queue": {"idle_s": 0.0},
        "store": {"where": "redis://here", "answers": True},
    }
    return health(snapshot | fields, WANTED, split, SILENCE_S, silent_s)


def gone(*ids: str) -> list[dict[str, Any]]:
    return [replica(f"-{id}") for id in ids]


def told(result: Health) -> dict[str, str]:
    return {stage: sentence for stage, sentence in result.stages.items() if sentence != OK}


def test_all_is_well() -> None:
    result = judged()
    assert (result.status, result.ready) == ("ok", True)
    assert result.stages == dict.fromkeys(PARTS, OK)


@pytest.mark.parametrize(
    ("replicas", "stage", "sentence"),
    [
        ([stalled("d1", "engine")], "decode", "1 of 2 decode replicas alive; d1: engine stands still for 6.2 s"),
        ([stalled("p2", "engine")], "prefill", "1 of 2 prefill replicas alive; p2: engine stands still for 6.2 s"),
        ([replica("d2", silent_s=10.0)], "decode", "1 of 2 decode replicas alive; d2 has not reported for 10.0 s"),
        ([replica("p1", state="draining")], "prefill", "1 of 2 prefill replicas alive; p1 is leaving"),
        (gone("p1"), "prefill", "1 of 2 prefill replicas alive"),
        (gone("d1"), "decode", "1 of 2 decode replicas alive"),
    ],
)
def test_of_several_replicas_one_is_missing(replicas: list[Change], stage: str, sentence: str) -> None:
    result = judged(*replicas)
    assert (result.status, told(result)) == ("degraded", {stage: sentence})


@pytest.mark.parametrize(
    "none",
    [
        [stalled("d1", "engine"), stalled("d2", "engine")],
        [stalled("d1", "engine"), replica("d2", silent_s=11)],
        [replica("d1", state="draining"), *gone("d2")],
        gone("d1", "d2"),
    ],
)
@pytest.mark.parametrize("split", ["always", "auto", "never"])
def test_without_a_decode_replica_nothing_is_served(none: list[Change], split: str) -> None:
    result = judged(*none, split=split)
    assert (result.status, result.ready, set(told(result))) == ("unhealthy", False, {"decode"})
    assert result.stages["decode"].startswith("0 of 2 decode replicas alive")


@pytest.mark.parametrize(("split", "status"), [("always", "unhealthy"), ("auto", "degraded"), ("never", "degraded")])
def test_without_prefill_replicas_decode_replicas_may_do_it_all(split: str, status: str) -> None:
    for none in (gone("p1", "p2"), [stalled("p1", "engine"), stalled("p2", "engine")]):
        result = judged(*none, split=split)
        assert (result.status, set(told(result))) == (status, {"prefill"})


def test_a_cell_without_a_prefill_pool_is_well() -> None:
    snapshot = status({("d", "decode"): Traffic()}) | {"waiting": 0}
    assert health(snapshot, {"prefill": 0, "decode": 1}, "auto", SILENCE_S, 0.0).status == "ok"


def test_a_lost_replica_is_named_until_its_place_is_taken() -> None:
    why = "1 of 2 decode replicas alive; d1 was lost 4.0 s ago: it did not report for 10 s"
    assert told(judged(*gone("d1"), lost=[lost("d1", 4.0)])) == {"decode": why}
    assert told(judged(*gone("d1"), lost=[lost("d1", 60.1)])) == {"decode": "1 of 2 decode replicas alive"}
    assert judged(*gone("d1"), replica("d3"), lost=[lost("d1", 4.0)]).status == "ok"


def test_who_leaves_beside_enough_others_is_none_of_it() -> None:
    assert judged(replica("d3", state="draining"), replica("p3", state="draining", silent_s=12)).status == "ok"


def test_what_stands_still_is_named_also_beside_enough_others() -> None:
    result = judged(stalled("d3", "engine"))
    assert result.status == "degraded"
    assert result.stages["decode"] == "2 of 2 decode replicas alive; d3: engine stands still for 6.2 s"


def test_a_transfer_that_stands_still() -> None:
    result = judged(stalled("p1", "transfer"))
    assert result.status == "degraded"
    assert result.stages["transfer"] == "prefill replica p1: a transfer has stood still for 6.2 s"
    assert result.stages["prefill"] == "1 of 2 prefill replicas alive; p1: transfer stands still for 6.2 s"


def test_the_manager_has_its_time_to_answer() -> None:
    assert judged(silent_s=9.9).status == "ok"
    result = judged(silent_s=10.0)
    assert (result.status, told(result)) == (
        "unhealthy",
        {"manager": "the KV manager has not answered for 10.0 s"},
    )


def test_a_manager_that_never_answered_leaves_nothing_known() -> None:
    result = health(None, WANTED, "auto", SILENCE_S, 1.5)
    assert result.status == "unhealthy"
    assert set(result.stages.values()) == {"not known: the KV manager has not answered yet, for 1.5 s"}


STUCK: Change = {"waiting": 3, "queue": {"idle_s": 10.1}}


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (STUCK, "unhealthy"),
        ({**STUCK, "queue": {"idle_s": 10.0}}, "ok"),
        ({**STUCK, "waiting": 0}, "ok"),
    ],
)
def test_who_waits_has_to_come_to_its_turn(fields: Change, status: str) -> None:
    result = judged(**fields)
    assert result.status == status
    if status != "ok":
        assert told(result) == {"admission": "3 requests wait; for 10.1 s none was admitted and none ended"}


def test_who_waits_behind_requests_that_go_on_is_served_in_time() -> None:
    assert judged(replica("d2", active=4), **STUCK).status == "degraded"
    assert judged(replica("d2", state="draining", active=4), **STUCK).status == "unhealthy"


def test_admission_is_not_blamed_for_what_decode_lacks() -> None:
    assert set(told(judged(*gone("d1", "d2"), **STUCK))) == {"decode"}


def test_serving_goes_on_without_redis() -> None:
    result = judged(store={"where": "redis://here", "answers": False})
    assert (result.status, set(told(result))) == ("degraded", {"redis"})
    assert result.stages["redis"].startswith("redis://here does not answer")


def test_alive_are_those_that_take_new_work() -> None:
    some = [stalled("d1", "engine"), replica("d2"), replica("d3", silent_s=10), replica("p1", state="draining")]
    assert alive_of(some, SILENCE_S) == {"decode": 1, "prefill": 0}


def test_a_real_snapshot_is_understood() -> None:
    snapshot = status({("p", "prefill"): Traffic(), ("d", "decode"): Traffic()})
    assert health(snapshot, {"prefill": 1, "decode": 1}, "auto", SILENCE_S, 0.0).status == "ok"
