"""The queue of those who wait for blocks: who may pass whom, bounds, and who is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from bifolio.kv_manager.admission import MOST_PASSING, AdmissionQueue, Outcome, Pace
from bifolio.kv_manager.config import KvConfig
from bifolio.protos.errors import DoesNotFit, Overloaded, Revoked, Unavailable
from bifolio.protos.messages import Ask, Generation, Lease, Placement, ReplicaId, RequestId

CONFIG = KvConfig(admission_queue=3, admission_wait_s=60, passing_s=2)


def ask(name: str, arrival: float = 0.0, tenant: str = "", *, tokens: int = 4, model: str | None = None) -> Ask:
    return Ask(RequestId(name), tokens, 8, arrival, tenant=tenant, model=model)


def place(ask: Ask, kept: Collection[ReplicaId] = ()) -> Placement:
    return Placement(ask.request, Lease(ReplicaId("d"), Generation(1, 1), ()))


def nothing(ask: Ask, kept: Collection[ReplicaId]) -> None:
    return None


def only(*fitting: str) -> Callable[[Ask, Collection[ReplicaId]], Placement | None]:
    return lambda ask, kept: place(ask) if ask.request in fitting else None


def names(outcomes: list[Outcome]) -> list[str]:
    return [request for request, _ in outcomes]


@pytest.fixture
def queue() -> AdmissionQueue:
    return AdmissionQueue(CONFIG)


@pytest.fixture
def long_queue() -> AdmissionQueue:
    """With one that does not fit at its head, and 20 behind it."""
    queue = AdmissionQueue(CONFIG.model_copy(update={"admission_queue": 100}))
    queue.push(ask("large", 0), 0)
    for i in range(20):
        queue.push(ask(f"r{i}", 1 + i), 0)
    return queue


def test_placed_in_order(queue: AdmissionQueue) -> None:
    for name, arrival in (("late", 2.0), ("resumed", 0.5), ("tied", 2.0)):
        assert queue.push(ask(name, arrival), 3) == []
    assert names(queue.pump(place, 3)) == ["resumed", "late", "tied"]
    assert len(queue) == 0


def test_tenants_take_turns_from_one_pump_to_the_next(queue: AdmissionQueue) -> None:
    for i in range(2):
        queue.push(ask(f"a{i}", i, "a"), 0)
    queue.push(ask("b", 9, "b"), 0)
    assert names(queue.pump(only("a0"), 0)) == ["a0"]
    assert names(queue.pump(place, 0)) == ["b", "a1"]


def test_an_error_belongs_to_its_request_alone(queue: AdmissionQueue) -> None:
    def picky(ask: Ask, kept: Collection[ReplicaId]) -> Placement:
        if ask.request == "huge":
            raise DoesNotFit("too long")
        return place(ask)

    queue.push(ask("huge", 1), 0)
    queue.push(ask("small", 2), 0)
    (_, error), (_, placement) = queue.pump(picky, 0)
    assert isinstance(error, DoesNotFit)
    assert isinstance(placement, Placement)


def test_what_fits_passes_the_head_for_a_while(queue: AdmissionQueue) -> None:
    queue.push(ask("large", 1), 0)
    assert queue.pump(nothing, 10) == []
    queue.push(ask("small", 2), 11)
    assert names(queue.pump(only("small"), 11.9)) == ["small"]
    queue.push(ask("late", 3), 12)
    assert queue.pump(only("late"), 12) == []
    assert names(queue.pump(place, 12)) == ["large", "late"]


def test_the_while_begins_when_the_head_is_first_found_not_to_fit(queue: AdmissionQueue) -> None:
    queue.push(ask("first", 0), 0)
    queue.push(ask("large", 1), 0)
    queue.push(ask("small", 2), 0)
    assert queue.pump(only("none"), 1) == []
    assert names(queue.pump(only("first"), 10)) == ["first"]  # large is the head only now
    assert names(queue.pump(only("small"), 11)) == ["small"]


def test_without_a_while_nobody_passes() -> None:
    queue = AdmissionQueue(KvConfig(passing_s=0))
    queue.push(ask("large", 1), 0)
    queue.push(ask("small", 2), 0)
    assert queue.pump(only("small"), 0) == []


def test_another_head_does_not_reopen_the_way_past_one_whose_while_is_over(queue: AdmissionQueue) -> None:
    queue.push(ask("large", 1), 0)
    queue.pump(nothing, 0)
    queue.push(ask("resumed", 2, model="m"), 5)
    queue.push(ask("small", 3), 5)
    assert queue.pump(only("small"), 5) == []
    assert names(queue.pump(only("large"), 5)) == ["large"]  # it may still pass the new head


def test_only_a_few_are_tried_behind_the_head(long_queue: AdmissionQueue) -> None:
    tried: list[str] = []
    long_queue.pump(lambda ask, kept: tried.append(ask.request), 0)
    assert tried == ["large", *(f"r{i}" for i in range(MOST_PASSING))]
    assert names(long_queue.pump(only(*(f"r{i}" for i in range(20))), 0)) == [f"r{i}" for i in range(MOST_PASSING)]


def test_who_does_not_fit_is_not_tried_again_until_something_changes(queue: AdmissionQueue) -> None:
    tried: list[str] = []

    def note(ask: Ask, kept: Collection[ReplicaId]) -> None:
        tried.append(ask.request)

    queue.push(ask("a", 1), 0)
    queue.pump(note, 0, changed=False)
    queue.push(ask("b", 2), 0)
    queue.pump(note, 0, changed=False)
    assert tried == ["a", "b"]
    queue.pump(note, 0)
    assert tried == ["a", "b", "a", "b"]


def test_nothing_is_kept_for_a_model_without_a_replica(queue: AdmissionQueue) -> None:
    queue.push(ask("resumed", 1, model="gone"), 0)
    for now in (0, 100):
        queue.push(ask(f"new{now}", 2), now)
        assert names(queue.pump(only(f"new{now}"), now, models={"m"})) == [f"new{now}"]
    ((_, error),) = queue.expire(100, models={"m"})
    assert isinstance(error, Unavailable)


def test_over_the_bound_the_last_in_order_is_refused(queue: AdmissionQueue) -> None:
    for i in range(3):
        queue.push(ask(f"r{i}", i), 10.0)
    ((request, error),) = queue.push(ask("new", 9), 14.0)
    assert request == "new"
    assert isinstance(error, Overloaded)
    assert "3 requests wait" in error.message
    assert names(queue.push(ask("early", -1), 14.0)) == ["r2"]


def test_over_the_bound_a_flood_costs_its_own_tenant(queue: AdmissionQueue) -> None:
    for i in range(3):
        queue.push(ask(f"r{i}", i, "flood"), 0)
    assert names(queue.push(ask("new", 9, "other"), 1)) == ["r2"]


def test_over_the_bound_a_resumed_request_takes_the_place_of_a_new_one(queue: AdmissionQueue) -> None:
    for i in range(3):
        queue.push(ask(f"r{i}", 5.0 + i), 10.0)
    assert names(queue.push(ask("resumed", 99, model="m"), 10.0)) == ["r2"]
    assert names(queue.pump(place, 10)) == ["resumed", "r0", "r1"]


def test_retry_after_is_how_long_those_who_wait_will_take_at_the_pace_of_late(queue: AdmissionQueue) -> None:
    for i in range(100):  # 8 tokens a second
        queue.push(ask(f"done{i}", i, tokens=8), i)
        queue.pump(place, i)
    for i in range(2):
        queue.push(ask(f"r{i}", i, tokens=40), 100)
    assert queue.push(ask("r2", 9, tokens=40), 100) == []
    ((_, error),) = queue.push(ask("new", 10, tokens=1), 100)
    assert isinstance(error, Overloaded)
    assert error.retry_after == pytest.approx(120 / 8, rel=0.1)
    assert "retry in 15 s" in error.message


def test_retry_after_is_the_longest_wait_when_nothing_was_placed(queue: AdmissionQueue) -> None:
    for i in range(3):
        queue.push(ask(f"r{i}", i), 0)
    ((_, error),) = queue.push(ask("new", 9), 0)
    assert isinstance(error, Overloaded)
    assert error.retry_after == 60


def test_the_pace_is_that_of_late() -> None:
    pace = Pace()
    assert pace.per_second(0) == 0
    pace.add(10, 5)
    assert pace.per_second(5) == pytest.approx(10, rel=0.02)  # as if in a second
    for i in range(1, 200):
        pace.add(10, 5 + i)
    assert pace.per_second(205) == pytest.approx(10, rel=0.1)
    for i in range(200):
        pace.add(1, 205 + i)
    assert pace.per_second(405) == pytest.approx(1, rel=0.1)
    assert pace.per_second(1000) < 1e-6


def test_waiting_is_bounded_by_time_here_not_by_arrival(queue: AdmissionQueue) -> None:
    queue.push(ask("resumed", arrival=0), 1000)
    queue.push(ask("new", arrival=1030), 1030)
    assert queue.expire(1059.9) == []
    ((request, error),) = queue.expire(1060)
    assert request == "resumed"
    assert isinstance(error, Overloaded)
    assert RequestId("new") in queue


def test_without_any_replica_waiting_ends_as_unavailable(queue: AdmissionQueue) -> None:
    queue.push(ask("a"), 0)
    ((_, error),) = queue.expire(60, models=())
    assert isinstance(error, Unavailable)


def test_revoke_takes_a_request_out_and_its_choices(queue: AdmissionQueue) -> None:
    for name in ("a", "a#1", "ab"):
        queue.push(ask(name), 0)
    outcomes = queue.revoke(RequestId("a"), "it was cancelled")
    assert names(outcomes) == ["a", "a#1"]
    assert all(isinstance(error, Revoked) for _, error in outcomes)
    assert queue.revoke(RequestId("a"), "it was cancelled") == []
    assert RequestId("ab") in queue


def test_one_choice_can_be_revoked_alone_and_so_can_the_whole(queue: AdmissionQueue) -> None:
    for name in ("a", "a#1", "a#2"):
        queue.push(ask(name), 0)
    assert names(queue.revoke(RequestId("a#1"), "gone")) == ["a#1"]
    assert names(queue.revoke(RequestId("a"), "admitted again", choices=False)) == ["a"]
    assert RequestId("a#2") in queue


def test_the_snapshot_counts(queue: AdmissionQueue) -> None:
    queue.push(ask("placed"), 0)
    queue.pump(place, 0)
    queue.push(ask("a", 1, "x"), 10)
    queue.push(ask("b", 2, "x", model="m"), 12)
    queue.push(ask("c", 3, "y"), 13)
    queue.revoke(RequestId("c"), "gone")
    assert queue.snapshot(15) == {
        "tenants": {"x": 2},
        "with_tokens": 1,
        "oldest_s": 5,
        "admitted": 1,
        "refused": {"Revoked": 1},
    }


def test_what_the_head_waits_for_is_kept_and_everything_else_goes_on(queue: AdmissionQueue) -> None:
    queue.push(ask("large", 0), 0)
    seen: dict[str, set[str]] = {}

    def note(ask: Ask, kept: Collection[ReplicaId]) -> Placement | None:
        seen[ask.request] = set(kept)
        return None if ask.request == "large" else place(ask)

    assert queue.pump(note, 0, waits_for=lambda ask: ReplicaId("d")) == []
    queue.push(ask("early", 1), 1)
    assert names(queue.pump(note, 1, waits_for=lambda ask: ReplicaId("d"))) == ["early"]
    queue.push(ask("late", 2), 2)
    assert names(queue.pump(note, 2, waits_for=lambda ask: ReplicaId("d"))) == ["late"]
    assert seen == {"large": set(), "early": set(), "late": {"d"}}


def test_whose_answer_has_begun_has_no_deadline_while_its_model_is_served(queue: AdmissionQueue) -> None:
    queue.push(ask("new"), 0)
    queue.push(ask("resumed", model="m"), 0)
    queue.push(ask("r#1"), 0)
    assert names(queue.expire(60, models={"m"})) == ["new"]
    ((request, error), *_) = queue.expire(61, models=())
    assert request == "resumed"
    assert isinstance(error, Unavailable)
