"""The order of those who wait: by priority, fair between tenants, then by arrival."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.kv_manager.fair import FairOrder, Waiting
from bifolio.protos.messages import Ask, RequestId


class Line:
    """An order, and a short way to add to it and to place its first."""

    def __init__(self) -> None:
        self.order = FairOrder()
        self.pushes = 0

    def add(
        self,
        name: str,
        tenant: str = "",
        *,
        cost: int = 1,
        arrival: float = 0.0,
        priority: int = 0,
        model: str | None = None,
    ) -> Waiting:
        self.pushes += 1
        ask = Ask(RequestId(name), cost, cost, arrival, model=model, tenant=tenant, priority=priority)
        waiting = Waiting(ask, self.pushes, 0.0)
        self.order.add(waiting)
        return waiting

    def place(self, waiting: Waiting | None = None) -> Waiting:
        waiting = waiting or next(iter(self.order))
        self.order.charge(waiting)
        self.order.remove(waiting)
        return waiting

    @property
    def clocks(self) -> dict[str, float]:
        return self.order._clocks[0].of

    def names(self) -> list[str]:
        return [waiting.ask.request for waiting in self.order]


def test_priority_comes_before_arrival() -> None:
    line = Line()
    line.add("late", arrival=2, priority=1)
    line.add("later", arrival=3, priority=-1)
    line.add("early", arrival=1, priority=1)
    assert line.names() == ["later", "early", "late"]


def test_a_tie_goes_to_who_came_first() -> None:
    line = Line()
    for name in ("b", "a", "c"):
        line.add(name, arrival=5)
    assert line.names() == ["b", "a", "c"]


def test_who_has_tokens_goes_before_who_has_none_but_not_before_a_higher_priority() -> None:
    line = Line()
    line.add("new", arrival=1)
    line.add("resumed", arrival=2, model="m")
    line.add("urgent", arrival=3, priority=-1)
    assert line.names() == ["urgent", "resumed", "new"]


def test_tenants_take_turns_by_what_they_cost() -> None:
    line = Line()
    for i in range(4):
        line.add(f"small{i}", "small", cost=10, arrival=i)
    for i in range(3):
        line.add(f"large{i}", "large", cost=25, arrival=0.5 + i)
    assert line.names() == ["small0", "large0", "small1", "small2", "large1", "small3", "large2"]
    assert [line.place().ask.request for _ in range(7)] == [
        "small0",
        "large0",
        "small1",
        "small2",
        "large1",
        "small3",
        "large2",
    ]


def test_several_choices_cost_as_many_prompts() -> None:
    ask = Ask(RequestId("r"), 7, 9, 0.0, n=3)
    assert Waiting(ask, 1, 0.0).cost == 21
    assert Waiting(replace(ask, tokens=0), 1, 0.0).cost == 1


def test_idling_earns_nothing() -> None:
    line = Line()
    for i in range(20):
        line.add(f"busy{i}", "busy", arrival=i)
    for _ in range(10):
        line.place()
    for i in range(3):
        line.add(f"idle{i}", "idle", arrival=100 + i)
    assert line.names()[:6] == ["busy10", "idle0", "busy11", "idle1", "busy12", "idle2"]


def test_idling_pays_no_debts() -> None:
    line = Line()
    for i in range(20):
        line.add(f"many{i}", "many", arrival=1 + i)
    line.add("huge", "few", cost=5, arrival=0)
    assert line.place().ask.request == "huge"
    line.add("again", "few", cost=5, arrival=0)  # it did not wait in between
    assert line.names()[:6] == ["many0", "many1", "many2", "many3", "many4", "again"]


def test_debts_are_forgotten_when_the_time_has_caught_up_or_nobody_waits() -> None:
    line = Line()
    line.add("huge", "few", cost=3)
    many = [line.add(f"many{i}", "many", arrival=1) for i in range(4)]
    line.place()
    assert line.clocks == {"few": 3, "many": 0}
    line.place()
    assert line.clocks == {"few": 3, "many": 1}  # half of 3, and 1
    line.place()
    assert line.clocks == {"many": 2}
    line.order.remove(*many[2:])
    assert line.order._clocks == line.order._lines == {}


def test_what_leaves_without_a_placement_costs_nothing() -> None:
    line = Line()
    gone = line.add("gone", "a", cost=100)
    line.add("a", "a", arrival=1)
    line.add("b", "b", arrival=2)
    line.order.remove(gone)
    assert line.names() == ["a", "b"]


def test_the_last_is_of_whom_has_most_waiting() -> None:
    line = Line()
    for i in range(5):
        line.add(f"many{i}", "many", arrival=i)
    line.add("new", "few", arrival=100)
    assert line.order.last().ask.request == "many4"


def test_the_last_is_never_one_with_tokens_while_there_is_one_without() -> None:
    line = Line()
    line.add("resumed", priority=9, model="m", arrival=1)
    new = line.add("new", priority=-9, arrival=0)
    assert line.order.last() is new
    line.order.remove(new)
    assert line.order.last().ask.request == "resumed"


asks = st.tuples(
    st.sampled_from("abcd"), st.integers(1, 50), st.integers(0, 2), st.booleans(), st.floats(0, 10, allow_nan=False)
)


def fill(line: Line, rows: list[tuple[str, int, int, bool, float]]) -> list[Waiting]:
    return [
        line.add(f"r{i}", tenant, cost=cost, priority=priority, model="m" if resumed else None, arrival=arrival)
        for i, (tenant, cost, priority, resumed, arrival) in enumerate(rows)
    ]


@settings(deadline=None)
@given(st.lists(asks, max_size=30))
def test_the_order_shown_is_the_order_placed_within_a_rank(rows: list[tuple[str, int, int, bool, float]]) -> None:
    line = Line()
    fill(line, [(tenant, cost, 0, False, arrival) for tenant, cost, _, _, arrival in rows])
    shown = line.names()
    assert [line.place().ask.request for _ in shown] == shown


@settings(deadline=None)
@given(st.lists(asks, min_size=1, max_size=30))
def test_ranks_are_in_order_arrivals_of_a_tenant_too_and_the_last_is_last(
    rows: list[tuple[str, int, int, bool, float]],
) -> None:
    line = Line()
    all_of_them = fill(line, rows)
    order = list(line.order)
    assert sorted(w.number for w in order) == [w.number for w in all_of_them]
    assert [w.rank for w in order] == sorted(w.rank for w in order)
    of_tenant = defaultdict(list)
    for w in order:
        of_tenant[w.rank, w.ask.tenant].append(w.age)
    assert all(ages == sorted(ages) for ages in of_tenant.values())
    new = [w for w in order if not w.ask.resumed]
    assert line.order.last() is (new or order)[-1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 50)), min_size=1, max_size=60), st.data())
def test_tenants_that_keep_waiting_are_served_alike(rows: list[tuple[str, int]], data: st.DataObject) -> None:
    """Whatever comes meanwhile and whoever else leaves: what two tenants that waited all the time were given differs
    by one request of each at most."""
    line, given_, largest = Line(), Counter[str](), Counter[str]()
    everyone: dict[str, list[Waiting]] = defaultdict(list)

    def add(tenant: str, cost: int) -> None:
        largest[tenant] = max(largest[tenant], cost)
        everyone[tenant].append(line.add(f"r{line.pushes}", tenant, cost=cost, arrival=line.pushes))

    for tenant, cost in rows:
        add(tenant, cost)
    always = set(everyone)  # who has waited since the beginning
    for tenant, cost in rows:
        placed = line.place()
        everyone[placed.ask.tenant].remove(placed)
        given_[placed.ask.tenant] += placed.cost
        always = {each for each in always if everyone[each]}
        for one in always:
            for other in always:
                assert given_[one] - given_[other] <= largest[one] + largest[other]
        if data.draw(st.booleans()):
            add(tenant, cost)
    while any(everyone.values()):
        placed = line.place()
        everyone[placed.ask.tenant].remove(placed)
    assert line.order._clocks == {}


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 10)), min_size=1, max_size=8))
def test_new_tenants_without_end_starve_nobody(rows: list[tuple[str, int]]) -> None:
    line = Line()
    left = {line.add(f"r{i}", tenant, cost=cost, arrival=i) for i, (tenant, cost) in enumerate(rows)}
    turns = 10 * sum(w.cost for w in left)
    while left:
        assert turns, f"{len(left)} still wait"
        turns -= 1
        line.add(f"n{turns}", f"new{turns}", arrival=100)
        left.discard(line.place())


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_tenants_that_come_and_leave_earn_nothing_for_others(costs: list[int]) -> None:
    """Were the time to lag behind the clocks, a new tenant would be ahead of one that was always there."""
    line = Line()
    for i, cost in enumerate(costs):
        line.add(f"busy{i}", "busy", cost=cost, arrival=i)
    line.add("busy", "busy", arrival=100)
    for i, _ in enumerate(costs):
        leaves = line.add(f"leaves{i}", f"leaves{i}", arrival=1000)
        line.place(next(w for w in line.order if w.ask.tenant == "busy"))
        line.order.remove(leaves)
    line.add("new", "new", arrival=1000)
    assert line.names() == ["busy", "new"]
