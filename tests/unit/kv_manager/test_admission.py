"""The queue of those who wait for blocks: order, bounds and who is refused."""

from __future__ import annotations

import pytest

from bifolio.kv_manager.admission import AdmissionQueue, Outcome
from bifolio.kv_manager.config import KvConfig
from bifolio.protos.errors import DoesNotFit, Overloaded, Revoked
from bifolio.protos.messages import Ask, Generation, Lease, Placement, ReplicaId, RequestId


def ask(name: str, arrival: float = 0.0) -> Ask:
    return Ask(RequestId(name), 4, 8, arrival)


def place(ask: Ask) -> Placement:
    return Placement(ask.request, Lease(ReplicaId("d"), Generation(1, 1), ()))


def names(outcomes: list[Outcome]) -> list[str]:
    return [request for request, _ in outcomes]


@pytest.fixture
def queue() -> AdmissionQueue:
    return AdmissionQueue(KvConfig(admission_queue=3, admission_wait_s=60))


def test_order_is_of_arrival_and_ties_are_of_coming(queue: AdmissionQueue) -> None:
    for name, arrival in (("late", 2.0), ("resumed", 0.5), ("tied", 2.0)):
        assert queue.push(ask(name, arrival), 3) == []
    assert names(queue.pump(place)) == ["resumed", "late", "tied"]
    assert len(queue) == 0


def test_nobody_passes_the_head(queue: AdmissionQueue) -> None:
    queue.push(ask("large", 1), 0)
    queue.push(ask("small", 2), 0)
    assert queue.pump(lambda ask: None if ask.request == "large" else place(ask)) == []
    assert len(queue) == 2


def test_an_error_belongs_to_its_request_alone(queue: AdmissionQueue) -> None:
    def picky(ask: Ask) -> Placement:
        if ask.request == "huge":
            raise DoesNotFit("too long")
        return place(ask)

    queue.push(ask("huge", 1), 0)
    queue.push(ask("small", 2), 0)
    (_, error), (_, placement) = queue.pump(picky)
    assert isinstance(error, DoesNotFit)
    assert isinstance(placement, Placement)


def test_over_the_bound_the_newcomer_is_refused(queue: AdmissionQueue) -> None:
    for i in range(3):
        queue.push(ask(f"r{i}", i), 10.0)
    ((request, error),) = queue.push(ask("new", 9), 14.0)
    assert request == "new"
    assert isinstance(error, Overloaded)
    assert error.retry_after == 4  # as long as the head has waited


def test_over_the_bound_a_resumed_request_takes_the_place_of_the_latest(queue: AdmissionQueue) -> None:
    for i in range(3):
        queue.push(ask(f"r{i}", 5.0 + i), 10.0)
    assert names(queue.push(ask("resumed", 1), 10.0)) == ["r2"]
    assert names(queue.pump(place)) == ["resumed", "r0", "r1"]


def test_waiting_is_bounded_by_time_here_not_by_arrival(queue: AdmissionQueue) -> None:
    queue.push(ask("resumed", arrival=0), 1000)
    queue.push(ask("new", arrival=1030), 1030)
    assert queue.expire(1059.9) == []
    ((request, error),) = queue.expire(1060)
    assert request == "resumed"
    assert isinstance(error, Overloaded)
    assert RequestId("new") in queue


def test_revoke_takes_it_out(queue: AdmissionQueue) -> None:
    queue.push(ask("a"), 0)
    ((_, error),) = queue.revoke(RequestId("a"), "it was cancelled")
    assert isinstance(error, Revoked)
    assert queue.revoke(RequestId("a"), "it was cancelled") == []
