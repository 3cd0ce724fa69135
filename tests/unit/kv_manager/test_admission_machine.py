"""The queue against a cell of blocks, in any order of requests, releases, time and revocations: every request is placed
or refused once, and who may pass whom, the bound and the order are kept on the way."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.kv_manager.admission import MOST_PASSING, AdmissionQueue, Outcome
from bifolio.kv_manager.config import KvConfig
from bifolio.protos.errors import Overloaded
from bifolio.protos.messages import Ask, Generation, Lease, Placement, ReplicaId, RequestId

CONFIG = KvConfig(admission_wait_s=60, passing_s=2)


@dataclass
class Cell:
    """Blocks, a request takes as many as it has tokens; and what has become of everybody."""

    queue: AdmissionQueue
    free: int
    now: float = 0.0
    pushed: int = 0
    running: dict[RequestId, int] = field(default_factory=dict)
    ended: dict[RequestId, Placement | Exception] = field(default_factory=dict)
    waiting: dict[RequestId, Ask] = field(default_factory=dict)
    blocked: dict[RequestId, float] = field(default_factory=dict)  # heads, since when

    def place(self, ask: Ask, kept: Collection[ReplicaId] = ()) -> Placement | None:
        if ask.tokens > self.free:
            return None
        self.free -= ask.tokens
        self.running[ask.request] = ask.tokens
        return Placement(ask.request, Lease(ReplicaId("d"), Generation(1, 1), ()))

    def end(self, outcomes: list[Outcome]) -> None:
        for request, outcome in outcomes:
            assert request not in self.ended, "one outcome each"
            self.ended[request] = outcome
            del self.waiting[request]

    def push(self, tenant: str, tokens: int, priority: int, resumed: bool) -> None:
        self.pushed += 1
        id = RequestId(f"r{self.pushed}")
        ask = Ask(id, tokens, tokens, self.now, tenant=tenant, priority=priority, model="m" if resumed else None)
        self.waiting[ask.request] = ask
        self.end(self.queue.push(ask, self.now))
        self.pump(changed=False)

    def pump(self, *, changed: bool = True) -> None:
        before = list(self.queue._order)
        free = self.free
        outcomes = self.queue.pump(self.place, self.now, changed=changed)
        self.end(outcomes)
        placed = {request for request, _ in outcomes}
        for at, waiting in enumerate(before):
            if (
                waiting.ask.request not in placed
            ):  # the first that stays: did it have to, and was it not passed too long?
                assert waiting.ask.tokens > free, "what fits, and is first, is placed"
                since = self.blocked.setdefault(waiting.ask.request, self.now)
                if self.now - since >= CONFIG.passing_s:
                    assert not placed & {w.ask.request for w in before[at:]}, "nobody passes it any more"
                assert len(placed & {w.ask.request for w in before[at:]}) <= MOST_PASSING
                break
            free -= waiting.ask.tokens

    def release(self) -> None:
        if self.running:
            self.free += self.running.pop(next(iter(self.running)))
            self.pump()


moves = st.one_of(
    st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(1, 10), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("release")),
    st.tuples(st.just("wait"), st.floats(0.1, 3)),
    st.tuples(st.just("revoke"), st.integers(1, 40)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(moves, max_size=60), st.integers(1, 8))
def test_every_request_is_placed_or_refused_and_the_rules_hold_on_the_way(
    moves: list[tuple[object, ...]], bound: int
) -> None:
    queue = AdmissionQueue(CONFIG.model_copy(update={"admission_queue": bound}))
    cell = Cell(queue, free=10)
    for kind, *given_ in moves:
        if kind == "push":
            with_tokens = {id for id, ask in cell.waiting.items() if ask.model}
            cell.push(*given_)  # type: ignore[arg-type]
            if any(ask.model is None for ask in cell.waiting.values()):
                assert not any(isinstance(cell.ended.get(id), Overloaded) for id in with_tokens)
        elif kind == "release":
            cell.release()
        elif kind == "wait":
            cell.now += given_[0]  # type: ignore[operator]
            cell.end(queue.expire(cell.now))
            cell.pump()
        else:
            cell.end(queue.revoke(RequestId(f"r{given_[0]}"), "gone"))
        assert len(queue) == len(cell.waiting) <= bound
        assert {w.ask.request for w in queue._order} == set(cell.waiting)
    for _ in range(cell.pushed):
        cell.release()
    assert not cell.waiting, "with nothing running all fit, one after the other"
    assert len(cell.ended) == cell.pushed
    assert queue._order._clocks == {}


@settings(deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=20), st.integers(1, 10))
def test_a_large_request_is_placed_although_small_ones_keep_coming(small: list[int], large: int) -> None:
    """Of another tenant, whose clock is behind: from `passing_s` on all that comes free is the large one's."""
    cell = Cell(AdmissionQueue(CONFIG.model_copy(update={"admission_queue": 1000})), free=10)
    for tokens in small:
        cell.push("small", tokens, 0, False)
    cell.push("large", large, 0, False)
    request = RequestId(f"r{cell.pushed}")
    for turn in range(200):
        cell.push("small", small[turn % len(small)], 0, False)
        cell.now += 0.5
        cell.release()
        if request in cell.ended:
            assert isinstance(cell.ended[request], Placement)
            return
    raise AssertionError("it starved")
