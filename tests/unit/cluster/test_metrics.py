"""What Prometheus reads of a real ledger and queue."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bifolio.cluster.metrics import render
from bifolio.kv_manager.admission import AdmissionQueue
from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.snapshot import snapshot
from bifolio.kv_manager.tags import BlockTags
from bifolio.protos.messages import Ask, Geometry, ReplicaId, ReplicaInfo, RequestId

EPOCH = 1_796_045_543_970_481_913
GEOMETRY = Geometry("m", 1, 1, 8, 4, "float32")
CONFIG = KvConfig(admission_queue=2)


@pytest.fixture
def state() -> dict[str, Any]:
    """Of a decode replica with a lease of three blocks, and two that wait for more than there is."""
    ledger, queue = Ledger(EPOCH, CONFIG), AdmissionQueue(CONFIG)
    ledger.register(ReplicaInfo(ReplicaId("d"), "decode", GEOMETRY, 8), BlockTags(ReplicaId("d"), 8).report(0), 0)
    for name, tokens in (("a", 11), ("b", 28), ("c", 28), ("d", 28)):
        queue.push(Ask(RequestId(name), tokens, tokens + 1, 0.0, tenant=name), 0)
        queue.pump(lambda ask, kept: ledger.admit(ask, 0, kept), 0)
    return {
        **snapshot(ledger),
        "waiting": len(queue),
        "queue": queue.snapshot(3.5),
        "store": {"where": "memory", "answers": True},
        "model": "served",
    }


def values(text: bytes) -> dict[str, float]:
    return {
        sample.name + "".join(f"|{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_everything_is_there_by_its_name(state: dict[str, Any]) -> None:
    got = values(render(state))
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
        "bifolio_prefill_tokens_per_second|d|decode": 0,
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
    }


def test_the_states_of_blocks_add_up_to_all(state: dict[str, Any]) -> None:
    got = values(render(state))
    states = [value for name, value in got.items() if name.startswith("bifolio_kv_blocks|d")]
    assert sum(states) == got["bifolio_kv_blocks_all|d|decode"]


def test_no_tenant_and_no_request_is_named(state: dict[str, Any]) -> None:
    state["queue"]["tenants"]["somebody"] = 3
    assert b"somebody" not in render(state)


def test_every_metric_is_described_and_typed(state: dict[str, Any]) -> None:
    for family in text_string_to_metric_families(render(state).decode()):
        assert family.name.startswith("bifolio_")
        assert family.documentation.endswith(".")
        assert family.type in ("gauge", "counter")


def test_an_empty_cell_has_metrics_too() -> None:
    ledger, queue = Ledger(EPOCH), AdmissionQueue()
    state = {**snapshot(ledger), "waiting": 0, "queue": queue.snapshot(0), "store": {"where": "", "answers": False}}
    got = values(render(state))
    assert got["bifolio_waiting"] == got["bifolio_store_up"] == 0
