"""A snapshot of the KV manager in Prometheus' text format. Translates, and knows only the snapshot's names.

Of counters the manager keeps the sums: they begin again with it. Those of transfers are each replica's own, and begin
again with that. Labels are replicas, roles and reasons, never tenants or requests, of which there is no end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bifolio.kv_manager.resumes import CAUSES
from bifolio.kv_manager.split import REASONS
from bifolio.protos.messages import Stage

from .health import OK

STATES = ("free", "cached", "leased")  # of blocks: they add up to all there are

# name -> (what of a replica, what it says)
_OF_REPLICAS = {
    "bifolio_kv_blocks_reserved": ("reserve", "Leased blocks that no sequence has drawn yet."),
    "bifolio_kv_blocks_all": ("total", "Blocks of the replica's KV cache."),
    "bifolio_kv_blocks_held": ("held", "Blocks under leases or in reserve, by the replica's own last report."),
    "bifolio_leases_revoked": ("revoked", "Leases that were taken back and are not closed yet."),
    "bifolio_queued_tokens": ("queued_tokens", "Prompt tokens placed on the replica and not computed yet."),
    "bifolio_prefill_tokens_per_second": ("prefill_tokens_per_s", "Prompt tokens it computes in a second."),
    "bifolio_replica_silent_seconds": ("silent_s", "Seconds since its last report."),
}

# bifolio_transfer_... -> (what of a replica's transfers, what it says)
_OF_TRANSFERS = {
    "streams": ("streams", "Transfers under way."),
    "frames_in_flight": ("in_flight", "Frames that were sent and are not acknowledged."),
}
_SUMS_OF_TRANSFERS = {
    "bytes": ("bytes", "Bytes of blocks that were moved: sent by prefill replicas, received by decode replicas."),
    "frames": ("frames", "Frames that carried blocks, or said that one can be copied."),
    "moving_seconds": ("moving_s", "Seconds of moving, added up over transfers; bytes by these is bandwidth."),
    "streams_done": ("done", "Transfers that ended with everything at its place."),
}
# and those that are told apart by a label
_SUMS_BY = {
    "streams_failed": ("failed", "error", "Transfers that failed."),
    "ways": ("ways", "way", "Transfers by how blocks travel: copied, or sent and why: see kv_manager/traffic.py."),
    "stalled_seconds": (
        "stalled_s",
        "wait",
        "Seconds of waiting, added up over transfers: for the peer's start, acks or frames.",
    ),
}


def render(snapshot: Mapping[str, Any], stages: Mapping[Any, str]) -> bytes:
    """`stages` is of the cell's health."""
    replicas = snapshot["replicas"]
    families = [*_replicas(replicas), *_transfers(replicas), *_cell(snapshot), *_health(stages)]
    return generate_latest(_Families(families))


def _replicas(replicas: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    who = ("replica", "role")
    alive = GaugeMetricFamily(
        "bifolio_replica_alive", "1: it takes new work; 0: it is leaving or stands still.", labels=who
    )
    blocks = GaugeMetricFamily(
        "bifolio_kv_blocks", "Blocks by state; the states add up to all there are.", labels=(*who, "state")
    )
    leases = GaugeMetricFamily("bifolio_leases", "Leases, offered or active.", labels=(*who, "state"))
    stalled = GaugeMetricFamily(
        "bifolio_replica_stalled_seconds", "How long a stage of it has stood still.", labels=(*who, "stage")
    )
    others = {name: GaugeMetricFamily(name, text, labels=who) for name, (_, text) in _OF_REPLICAS.items()}
    for replica in replicas:
        labels = (replica["id"], replica["role"])
        alive.add_metric(labels, replica["state"] == "alive")
        for state in STATES:
            blocks.add_metric((*labels, state), replica[state])
        for state in ("offered", "active"):
            leases.add_metric((*labels, state), replica[state])
        for stage in get_args(Stage):
            stalled.add_metric((*labels, stage), replica["stalled"].get(stage, 0))  # what is not there goes on
        for name, (key, _) in _OF_REPLICAS.items():
            others[name].add_metric(labels, replica[key])
    return iter((alive, blocks, leases, stalled, *others.values()))


def _transfers(replicas: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    who = ("replica", "role")
    every = [((replica["id"], replica["role"]), replica["transfer"]) for replica in replicas]
    for name, (key, text) in _OF_TRANSFERS.items():
        gauge = GaugeMetricFamily(f"bifolio_transfer_{name}", text, labels=who)
        for labels, transfer in every:
            gauge.add_metric(labels, transfer[key])
        yield gauge
    for name, (key, text) in _SUMS_OF_TRANSFERS.items():
        counter = CounterMetricFamily(f"bifolio_transfer_{name}", text, labels=who)
        for labels, transfer in every:
            counter.add_metric(labels, transfer[key])
        yield counter
    for name, (key, by, text) in _SUMS_BY.items():
        counter = CounterMetricFamily(f"bifolio_transfer_{name}", text, labels=(*who, by))
        for labels, transfer in every:
            for value, count in transfer[key].items():
                counter.add_metric((*labels, value), count)
        yield counter


def _cell(snapshot: Mapping[str, Any]) -> Iterator[Metric]:
    queue, cache = snapshot["queue"], snapshot["cache"]
    yield _gauge("bifolio_manager_start_time_seconds", "The KV manager's epoch, as a time.", snapshot["epoch"] / 1e9)
    yield _gauge("bifolio_store_up", "1: Redis answers the KV manager.", snapshot["store"]["answers"])
    yield _gauge("bifolio_waiting", "Requests that wait for blocks.", snapshot["waiting"])
    yield _gauge("bifolio_waiting_with_tokens", "Those that have part of their answer.", queue["with_tokens"])
    yield _gauge("bifolio_oldest_wait_seconds", "How long the one that waits longest has waited.", queue["oldest_s"])
    yield _counter("bifolio_admitted", "Requests placed, each time that they were.", queue["admitted"])
    refused = CounterMetricFamily("bifolio_refused", "Requests that left the queue without blocks.", labels=("error",))
    for error, count in queue["refused"].items():
        refused.add_metric((error,), count)
    yield refused
    splits = CounterMetricFamily(
        "bifolio_placements", "Placements by why they were split or not: see kv_manager/split.py.", labels=("reason",)
    )
    for reason in REASONS:
        splits.add_metric((reason,), snapshot["splits"].get(reason, 0))
    yield splits
    resumes = CounterMetricFamily(
        "bifolio_resumes", "Requests that were placed again, by why: see kv_manager/resumes.py.", labels=("cause",)
    )
    for cause in CAUSES:
        resumes.add_metric((cause,), snapshot["resumes"].get(cause, 0))
    yield resumes
    yield _counter("bifolio_prefix_asked_tokens", "Tokens of the histories placed.", cache["asked_tokens"])
    yield _counter("bifolio_prefix_hit_tokens", "Those that were cached where they are needed.", cache["hit_tokens"])
    yield _counter("bifolio_evicted_blocks", "Cached blocks given away to be written.", cache["evicted_blocks"])


def _health(stages: Mapping[Any, str]) -> Iterator[Metric]:
    well = GaugeMetricFamily(
        "bifolio_health", "1: the stage gets on; 0: see /health for what stands still there.", labels=("stage",)
    )
    for stage, sentence in stages.items():
        well.add_metric((stage,), sentence == OK)
    yield well


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
