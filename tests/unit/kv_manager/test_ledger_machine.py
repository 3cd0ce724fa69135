"""The ledger, the queue before it and the replicas' tags, under every order of events, over a network that loses,
delays, reorders and repeats.

Rules put messages on the wire and take any one off it. Prompts come from a few texts that begin alike, so that hits,
partial hits, equal prompts and blocks that are whole twice happen all the time. What must hold at every step: in the
ledger each block is in one place; at a replica what `recorded_replica.py` asserts. What must hold in the end, once the
network is kind again: both sides agree on leases and keys, every request was admitted or refused, no placement is
stale; a new ledger learns all that is cached; and when everybody has left, every block is back.
BIFOLIO_FUZZ_STEPS=20000 runs that many steps more.
"""

from __future__ import annotations

import os
from typing import Literal

import hypothesis.strategies as st
from cell_messages import Asked, CalledDead, Confirmed, GivenUp, Opened, Registered
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_kit import GEOMETRY, keys_of
from simulated_cell import BLOCKS, CONFIG, SHARED, SIZE, SimulatedCell, confirmed, text

from bifolio.protos.messages import Ask, Release, RequestId

STEPS = 100
requests = st.integers(0, 5)
picks = st.integers(0, 11)
prompts = st.tuples(st.integers(0, len(SHARED) - 1), st.integers(1, 5 * SIZE))
lengths = st.integers(0, 2 * SIZE)
choices = st.sampled_from([1, 1, 2, 3])


class Cell(SimulatedCell, RuleBasedStateMachine):
    def __init__(self) -> None:
        SimulatedCell.__init__(self)
        RuleBasedStateMachine.__init__(self)

    # -- replicas and the manager come and go

    @initialize(split=st.sampled_from(["auto", "auto", "always", "never"]))
    def begin(self, split: Literal["auto", "always", "never"]) -> None:
        self.config = CONFIG.model_copy(update={"split": split})
        self.start_manager()
        for role in ("decode", "decode", "prefill"):
            self.start_replica(role)
        self.deliver_all()

    @rule(what=st.sampled_from(["replica", "manager", "called dead", "draining", "silence"]), pick=picks)
    def disaster(self, what: str, pick: int) -> None:
        replica = self.some_replica(pick)
        self.undisturbed &= what != "manager"
        match what:
            case "replica":  # another process takes its place; what the old one sent is still on its way
                del self.replicas[replica.info.id]
                self.start_replica(replica.info.role)
            case "manager":  # its replies are still on their way too
                self.start_manager()
            case "called dead":
                self.wire.append(CalledDead(replica.info.id))
            case "draining":
                self.ledger.report_state(replica.info.id, "draining", self.now)
            case "silence":
                self.time_passes(CONFIG.silence_s)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.time_passes(seconds)

    # -- requests

    @rule(
        asks=st.lists(st.tuples(requests, prompts, lengths, choices), min_size=1, max_size=4),
        work=st.integers(0, 6 * SIZE),
        beats=st.booleans(),
        leave=st.lists(picks, max_size=4),
        late=st.sampled_from([False, False, True]),
    )
    def serve(
        self, asks: list[tuple[int, tuple[int, int], int, int]], work: int, beats: bool, leave: list[int], late: bool
    ) -> None:
        """As nearly always in life: what is placed is opened and computed at once, beats fill the reserve, and
        releases arrive. What was on its way before stays there; `late`: until its offer has ended."""
        late_ones = [m for m in self.wire if isinstance(m, Opened)] if late else []
        if late_ones:
            self.time_passes(CONFIG.offer_ttl_s)
        if beats or not self.models():
            self.beat_all()
            self.take_all(0, Registered)
        mark = len(self.wire)
        for ask in asks:
            self.ask(*ask)
        self.take_all(mark, Opened)
        for replica, generation in self.jobs("prefill", "decode"):
            replica.compute(generation, work)
            self.prefilled(replica, generation)
        for pick in leave:
            if self.jobs("decode", "prefill"):
                self.leave(pick)
        self.take_all(mark, Release)
        for message in late_ones:
            self.take(message)

    @rule(
        request=requests,
        prompt=prompts,
        more=lengths,
        n=choices,
        exclude=st.none() | picks,
        known=st.sampled_from([True, True, True, False]),
    )
    def ask(
        self,
        request: int,
        prompt: tuple[int, int],
        more: int,
        n: int = 1,
        exclude: int | None = None,
        known: bool = True,
    ) -> None:
        tokens = text(*prompt)
        ask = Ask(
            RequestId(f"r{request}"),
            len(tokens),
            len(tokens) + more,
            self.now,
            () if exclude is None else (self.some_replica(exclude).info.id,),
            n,
            {GEOMETRY.fingerprint: keys_of(tokens)} if known else {},
            tenant=f"t{request % 2}",
            priority=request % 3 // 2,
        )
        self.take_in(Asked(ask, tokens))

    @precondition(lambda self: self.jobs("decode"))
    @rule(pick=picks)
    def end_early(self, pick: int) -> None:
        """As when a sequence is preempted: it is placed again with the tokens it has, in the name of its choice."""
        replica, generation = self.some_job(pick, "decode")
        job = replica.jobs[generation]
        self.close(replica, generation)
        request = job.lease.request
        if job.waits is not None or job.computed < job.prompt or len(job.tokens) >= job.most:
            return
        keys = {GEOMETRY.fingerprint: keys_of(job.tokens)}
        ask = Ask(request, len(job.tokens), job.most, 0.0, (), 1, keys, GEOMETRY.fingerprint)
        self.take_in(Asked(ask, job.tokens, job.choice))
        self.seen["placed again"] += 1

    @rule(request=requests, choice=st.sampled_from(["", "", "#0", "#1"]), how=st.sampled_from(["revoke", "cancel"]))
    def give_up(self, request: int, choice: str, how: Literal["revoke", "cancel"]) -> None:
        self.wire.append(GivenUp(RequestId(f"r{request}{choice}"), how))

    @rule()
    def confirm(self) -> None:
        self.wire.append(Confirmed(tuple(filter(confirmed, self.open))))

    # -- what replicas do

    @precondition(lambda self: self.jobs("decode", "prefill"))
    @rule(pick=picks, positions=st.integers(1, 6 * SIZE))
    def compute(self, pick: int, positions: int) -> None:
        replica, generation = self.some_job(pick, "decode", "prefill")
        replica.compute(generation, positions)
        self.prefilled(replica, generation)

    @precondition(lambda self: self.jobs("decode", "prefill"))
    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        self.close(*self.some_job(pick, "decode", "prefill"))

    @precondition(lambda self: self.jobs("decode"))
    @rule(pick=picks, n=st.integers(2, 4))
    def draw(self, pick: int, n: int) -> None:
        """More at once than one sequence needs."""
        replica, generation = self.some_job(pick, "decode")
        replica.draw(generation, n)

    @rule(pick=picks)
    def beat(self, pick: int) -> None:
        self.wire.append(self.some_replica(pick).report(self.now))

    @rule(twice=st.booleans())
    def beat_at_once(self, twice: bool) -> None:
        self.beat_all(twice)

    # -- the network

    @precondition(lambda self: self.wire)
    @rule(pick=picks)
    def deliver(self, pick: int) -> None:
        self.take(self.wire.pop(pick % len(self.wire)))

    @precondition(lambda self: self.wire)
    @rule()
    def deliver_in_order(self) -> None:
        self.deliver_all()

    @precondition(lambda self: self.wire)
    @rule(pick=picks)
    def repeat(self, pick: int) -> None:
        self.take(self.wire[pick % len(self.wire)])

    @precondition(lambda self: self.wire)
    @rule(pick=picks)
    def lose(self, pick: int) -> None:
        self.wire.pop(pick % len(self.wire))

    # -- what must hold at every step

    @invariant()
    def each_block_is_in_one_place(self) -> None:
        self.seen["steps"] += 1
        self.ledger.check_integrity()
        for info in self.ledger.replicas():
            counts = self.ledger.counts(info.id)
            assert counts.free + counts.cached + counts.leased == counts.total == BLOCKS

    @invariant()
    def both_records_of_a_replica_agree(self) -> None:
        for replica in self.replicas.values():
            replica.check()

    @invariant()
    def the_queue_is_whom_nobody_answered(self) -> None:
        assert len(self.queue) == len(self.waiting) <= CONFIG.admission_queue
        assert all(request in self.queue for request in self.waiting)

    # -- what must hold in the end

    def teardown(self) -> None:
        if self.replicas:
            self.seen["forgotten"] += self.ledger.evicted
            self.calm()
            self.both_sides_agree()
            self.hits_are_found_and_nothing_is_stale(always=False)
            self.a_new_ledger_learns_all_that_is_cached()
            self.hits_are_found_and_nothing_is_stale(always=True)
            self.everybody_leaves()
        super().teardown()


fuzz_steps = int(os.environ.get("BIFOLIO_FUZZ_STEPS", "0"))


class TestCell(Cell.TestCase):  # type: ignore[misc]
    @classmethod
    def tearDownClass(cls) -> None:
        """What never happened was not tested."""
        print(dict(Cell.seen))
        assert Cell.seen["steps"] >= 1000
        for event in (
            "placed",
            "hit",
            "forked",
            "split",
            "waits",
            "placed again",
            "stale",
            "revoked",
            "forgotten",
            "whole twice",
        ):
            assert Cell.seen[event], event


TestCell.settings = settings(
    max_examples=100 + fuzz_steps // STEPS,
    stateful_step_count=STEPS,
    deadline=None,
    database=None,
    derandomize=not fuzz_steps,  # else one run in many lacks an event, and nothing is wrong
    suppress_health_check=list(HealthCheck),
)
