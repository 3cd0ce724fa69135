"""What is shown of the transfers that replicas report. The rest of the snapshot is tested where it comes from."""

from __future__ import annotations

import json
from dataclasses import replace

from ledger_kit import Side, info

from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.snapshot import snapshot
from bifolio.protos.measures import Traffic

NOTHING = {
    "streams": 0,
    "in_flight": 0,
    "done": 0,
    "failed": {},
    "ways": {},
    "frames": 0,
    "bytes": 0,
    "moving_s": 0,
    "bandwidth": 0,
    "stalled_s": {},
}
MOVED = Traffic(1, 3, 12, {"StalePlacement": 1}, {"copied": 9, "sent: gone": 5}, 40, 3_000_000, 0.5, {"acks": 1.25})


def report(side: Side, traffic: Traffic, now: float) -> None:
    side.ledger.heartbeat(replace(side.tags.report(now), traffic=traffic), now)


def test_a_replica_that_reports_nothing_has_moved_nothing(decode: Side) -> None:
    assert decode.status("transfer") == NOTHING


def test_a_report_is_shown(decode: Side) -> None:
    report(decode, MOVED, 1)
    assert decode.status("transfer") == {
        "streams": 1,
        "in_flight": 3,
        "done": 12,
        "failed": {"StalePlacement": 1},
        "ways": {"copied": 9, "sent: gone": 5},
        "frames": 40,
        "bytes": 3_000_000,
        "moving_s": 0.5,
        "bandwidth": 6_000_000,
        "stalled_s": {"acks": 1.25},
    }


def test_the_newest_report_alone_is_shown(decode: Side) -> None:
    late = replace(decode.tags.report(1), traffic=Traffic(done=1))
    report(decode, MOVED, 2)
    decode.ledger.heartbeat(late, 3)
    assert decode.status("transfer") != NOTHING
    report(decode, Traffic(), 4)
    assert decode.status("transfer") == NOTHING


def test_a_registration_tells_of_transfers_too(ledger: Ledger) -> None:
    """As after a restart of the manager: the counts are the replica's."""
    side = Side(ledger, info("p", "prefill"))
    ledger.register(side.info, replace(side.tags.report(1, complete=True), traffic=MOVED), 1)
    assert ledger.books()[0].traffic == MOVED


def test_each_replica_has_its_own(ledger: Ledger, decode: Side) -> None:
    prefill = Side(ledger, info("p", "prefill"))
    report(prefill, MOVED, 1)
    assert prefill.status("transfer") != NOTHING
    assert decode.status("transfer") == NOTHING


def test_the_snapshot_is_json_and_nobody_elses(decode: Side) -> None:
    report(decode, MOVED, 1)
    shown = snapshot(decode.ledger, 0)["replicas"][0]["transfer"]
    assert json.loads(json.dumps(shown)) == shown
    for name in ("failed", "ways", "stalled_s"):
        shown[name].clear()
    assert (MOVED.failed, MOVED.ways, MOVED.stalled_s) == (
        {"StalePlacement": 1},
        {"copied": 9, "sent: gone": 5},
        {"acks": 1.25},
    )
