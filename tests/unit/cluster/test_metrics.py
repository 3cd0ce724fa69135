"""What Prometheus reads of a real ledger and queue."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families
from status_kit import EPOCH, RECEIVED, SENT, status

from bifolio.cluster.health import OK
from bifolio.cluster.metrics import render
from bifolio.kv_manager.admission import AdmissionQueue
from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.snapshot import snapshot
from bifolio.protos.measures import Traffic
from bifolio.protos.messages import Cause


@pytest.fixture
def state() -> dict[str, Any]:
    """Of a decode replica that has moved nothing."""
    return status({("d", "decode"): Traffic()})


STAGES = {"manager": OK, "decode": "0 of 1 decode replicas alive"}


def values(text: bytes) -> dict[str, float]:
    return {
        sample.name + "".join(f"|{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_everything_is_there_by_its_name(state: dict[str, Any]) -> None:
    got = values(render(state, STAGES))
    assert got == {
        "bifolio_replica_alive|d|decode": 1,
        "bifolio_kv_blocks|d|decode|free": 5,
        "bifolio_kv_blocks|d|decode|cached": 0,
        "bifolio_kv_blocks|d|decode|leased": 3,
        "bifolio_kv_blocks_reserved|d|decode": 0,
        "bifolio_kv_blocks_all|d|decode": 8,
        "bifolio_kv_blocks_held|d|decode": 0,
        "bifolio_leases|d|decode|offered": 1,
        "bifolio_leases|d|decode|active": 0,
        "bifolio_leases_revoked|d|decode": 0,
        "bifolio_queued_tokens|d|decode": 0,
        "bifolio_replica_silent_seconds|d|decode": 0,
        "bifolio_replica_stalled_seconds|d|decode|engine": 0,
        "bifolio_replica_stalled_seconds|d|decode|transfer": 0,
        "bifolio_prefill_tokens_per_second|d|decode": 0,
        "bifolio_transfer_streams|d|decode": 0,
        "bifolio_transfer_frames_in_flight|d|decode": 0,
        "bifolio_transfer_bytes_total|d|decode": 0,
        "bifolio_transfer_frames_total|d|decode": 0,
        "bifolio_transfer_moving_seconds_total|d|decode": 0,
        "bifolio_transfer_streams_done_total|d|decode": 0,
        "bifolio_manager_start_time_seconds": pytest.approx(EPOCH / 1e9),
        "bifolio_store_up": 1,
        "bifolio_waiting": 2,
        "bifolio_waiting_with_tokens": 0,
        "bifolio_oldest_wait_seconds": 3.5,
        "bifolio_admitted_total": 1,
        "bifolio_refused_total|Overloaded": 1,
        "bifolio_placements_total|always": 0,
        "bifolio_placements_total|never": 0,
        "bifolio_placements_total|no_prefill": 1,
        "bifolio_placements_total|long": 0,
        "bifolio_placements_total|short": 0,
        "bifolio_placements_total|quick": 0,
        "bifolio_prefix_asked_tokens_total": 11,
        "bifolio_prefix_hit_tokens_total": 0,
        "bifolio_evicted_blocks_total": 0,
        "bifolio_health|manager": 1,
        "bifolio_health|decode": 0,
    } | {f"bifolio_resumes_total|{cause}": 0 for cause in get_args(Cause)}


def test_transfers_are_told_of_both_sides() -> None:
    got = values(render(status({("p", "prefill"): SENT, ("d", "decode"): RECEIVED}), STAGES))
    prefix = "bifolio_transfer_"
    assert {name.removeprefix(prefix): value for name, value in got.items() if name.startswith(prefix)} == {
        "streams|p|prefill": 1,
        "streams|d|decode": 0,
        "frames_in_flight|p|prefill": 3,
        "frames_in_flight|d|decode": 0,
        "bytes_total|p|prefill": 51_086_622_720,
        "bytes_total|d|decode": 613_000_000,
        "frames_total|p|prefill": 48_720,
        "frames_total|d|decode": 615,
        "moving_seconds_total|p|prefill": 20,
        "moving_seconds_total|d|decode": 0.25,
        "streams_done_total|p|prefill": 1214,
        "streams_done_total|d|decode": 15,
        "streams_failed_total|StalePlacement|p|prefill": 1,
        "streams_failed_total|cancelled|p|prefill": 2,
        "ways_total|p|prefill|copied": 1100,
        "ways_total|p|prefill|sent": 118,
        "ways_total|d|decode|copied": 12,
        "ways_total|d|decode|sent: hidden": 3,
        "stalled_seconds_total|p|prefill|start": 0.25,
        "stalled_seconds_total|p|prefill|acks": 12.5,
        "stalled_seconds_total|d|decode|frames": 31.5,
    }


def test_the_states_of_blocks_add_up_to_all(state: dict[str, Any]) -> None:
    got = values(render(state, STAGES))
    states = [value for name, value in got.items() if name.startswith("bifolio_kv_blocks|d")]
    assert sum(states) == got["bifolio_kv_blocks_all|d|decode"]


def test_no_tenant_and_no_request_is_named(state: dict[str, Any]) -> None:
    state["queue"]["tenants"]["somebody"] = 3
    assert b"somebody" not in render(state, STAGES)


def test_every_metric_is_described_and_typed(state: dict[str, Any]) -> None:
    for family in text_string_to_metric_families(render(state, STAGES).decode()):
        assert family.name.startswith("bifolio_")
        assert family.documentation.endswith(".")
        assert family.type in ("gauge", "counter")


def test_an_empty_cell_has_metrics_too() -> None:
    ledger, queue = Ledger(EPOCH), AdmissionQueue()
    state = {
        **snapshot(ledger, 0.0),
        "waiting": 0,
        "queue": queue.snapshot(0),
        "store": {"where": "", "answers": False},
    }
    got = values(render(state, STAGES))
    assert got["bifolio_waiting"] == got["bifolio_store_up"] == 0


def test_what_stands_still_is_told_in_seconds(state: dict[str, Any]) -> None:
    (replica,) = state["replicas"]
    replica |= {"state": "stalled", "stalled": {"engine": 6.5}, "silent_s": 0.4}
    state["resumes"] = {"decode lost": 3}
    got = values(render(state, STAGES))
    assert got["bifolio_replica_alive|d|decode"] == 0
    assert got["bifolio_replica_stalled_seconds|d|decode|engine"] == 6.5
    assert got["bifolio_replica_silent_seconds|d|decode"] == 0.4
    assert got["bifolio_resumes_total|decode lost"] == 3
