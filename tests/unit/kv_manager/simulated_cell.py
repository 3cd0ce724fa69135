"""A cell for tests, without processes: a ledger, the queue before it, replicas with their tags, and a wire.

What is sent lies on the wire until somebody takes it: in any order, twice, or never. Knows nothing about the order of
events; `test_ledger_machine.py` has the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import ClassVar

from cell_messages import Answered, Asked, CalledDead, Confirmed, GivenUp, Message, Opened, Registered
from ledger_kit import GEOMETRY, keys_of, known
from recorded_replica import RecordedReplica, Tokens

from bifolio.kv_manager.admission import AdmissionQueue, Outcome
from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.ledger import Ledger
from bifolio.protos.errors import DoesNotFit, Overloaded, Revoked, StalePlacement, Unavailable
from bifolio.protos.messages import (
    Ask,
    Generation,
    Lease,
    Placement,
    Release,
    ReplicaId,
    ReplicaInfo,
    Reply,
    Report,
    RequestId,
    Role,
    family,
)

SIZE = GEOMETRY.block_size
BLOCKS = 8  # so few that the same blocks are granted, and what they hold is forgotten, again and again
CONFIG = KvConfig(
    offer_ttl_s=10,  # apart, so that offers expire at replicas that are well
    silence_s=40,
    confirm_s=15,
    tombstone_s=15,
    local_blocks=1,
    admission_queue=4,
    admission_wait_s=20,
)
SHARED = (0, 2 * SIZE, 2 * SIZE + 1, 4 * SIZE)  # tokens that a text has in common with the first


def text(which: int, length: int) -> Tokens:
    return tuple(0 if i < SHARED[which] else which for i in range(length))


def confirmed(request: RequestId) -> bool:
    """The ingress of the others dies as soon as it has asked: they are never confirmed."""
    return int(family(request)[1:]) % 3 > 0


class SimulatedCell:
    seen: ClassVar[Counter[str]] = Counter()  # what happened, over all cells

    def __init__(self) -> None:
        self.now = 1000.0
        self.config = CONFIG
        self.epoch = 0
        self.replicas: dict[ReplicaId, RecordedReplica] = {}
        self.wire: list[Message] = []
        self.open: dict[RequestId, None] = {}  # families that an ingress waits for, or hears tokens of
        self.born = 0
        self.closed_by_revoking = 0
        self.undisturbed = True  # the ledger has never forgotten a replica
        self.start_manager()

    # -- replicas and the manager come and go

    def start_manager(self) -> None:
        """Those who waited are told by their broken calls."""
        self.epoch += 1
        self.ledger = Ledger(self.epoch, self.config)
        self.queue = AdmissionQueue(self.config)
        self.waiting: dict[RequestId, Asked] = {}

    def start_replica(self, role: Role) -> None:
        self.born += 1
        info = ReplicaInfo(ReplicaId(f"{role}{self.born}"), role, GEOMETRY, BLOCKS, "host:1", max_sequences=4)
        replica = self.replicas[info.id] = RecordedReplica.of(info)
        self.wire.append(Registered(info, replica.report(self.now, complete=True)))

    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)
        self.settle(self.queue.expire(self.now, models=self.models()))
        self.pump()

    # -- requests

    def take_in(self, asked: Asked) -> None:
        request = asked.ask.request
        self.open[family(request)] = None
        try:
            self.ledger.check(asked.ask, self.now)
        except (DoesNotFit, Revoked) as error:
            self.seen[type(error).__name__] += 1
            return
        self.settle(self.queue.revoke(request, "it is asked again", choices=False))
        self.waiting[request] = asked
        self.settle(self.queue.push(asked.ask, self.now))
        self.pump(changed=False)
        self.seen["waits"] += request in self.waiting

    def pump(self, *, changed: bool = True) -> None:
        self.settle(
            self.queue.pump(
                self.place, self.now, waits_for=self.ledger.waits_for, models=self.models(), changed=changed
            )
        )

    def place(self, ask: Ask, kept: Collection[ReplicaId]) -> Placement | None:
        placement = self.ledger.admit(ask, self.now, kept)
        assert placement is None or not {lease.replica for lease in placement.leases} & set(kept)
        return placement

    def models(self) -> set[str]:
        return {book.model for book in self.ledger.books() if book.info.role == "decode" and book.state == "alive"}

    def settle(self, outcomes: list[Outcome]) -> None:
        for request, outcome in outcomes:
            asked = self.waiting.pop(request)
            if isinstance(outcome, Placement):
                self.check_placement(outcome, asked)
                self.seen["placed"] += 1
                self.seen["hit"] += any(lease.cached for lease in (outcome.decode, outcome.prefill) if lease)
                self.seen["forked"] += bool(outcome.forks)
                self.seen["split"] += outcome.prefill is not None
                self.wire.append(Opened(outcome.decode, asked, outcome.forks))
                if outcome.prefill is not None:
                    self.wire.append(Opened(outcome.prefill, asked))
            else:
                assert isinstance(outcome, DoesNotFit | Revoked | Unavailable | Overloaded), outcome
                self.seen[type(outcome).__name__] += 1

    def check_placement(self, placement: Placement, asked: Asked) -> None:
        ask, most_hit = asked.ask, (len(asked.tokens) - 1) // SIZE
        assert (placement.request, placement.model) == (ask.request, GEOMETRY.fingerprint)
        assert len(placement.forks) == ask.n - 1
        choices = [f"{ask.request}#{k}" for k in range(ask.n)] if ask.n > 1 else [ask.request]
        assert [lease.request for lease in (placement.decode, *placement.forks)] == choices
        full = ask.tokens // SIZE
        for fork in placement.forks:
            assert fork.replica == placement.decode.replica
            assert (fork.cached, fork.blocks[:full]) == (full, placement.decode.blocks[:full])
        for lease in placement.leases:
            assert lease.replica.startswith("prefill" if lease is placement.prefill else "decode")
            assert len(lease.blocks) == len(set(lease.blocks)) >= -(-ask.tokens // SIZE)
        for lease in (placement.decode, placement.prefill):
            assert lease is None or lease.cached <= (most_hit if ask.keys else 0)
        if placement.prefill is not None:
            assert self.config.split == "always" or placement.prefill.replica not in ask.exclude
            assert self.config.split != "never"

    # -- what replicas do

    def beat_all(self, twice: bool = False) -> None:
        self.take(Confirmed(tuple(filter(confirmed, self.open))))
        for replica in list(self.replicas.values()):
            self.take(replica.report(self.now))
            reply = next(m for m in reversed(self.wire) if isinstance(m, Answered))
            self.wire.remove(reply)
            self.take(reply)
            if twice:
                self.take(reply)

    def some_replica(self, pick: int) -> RecordedReplica:
        return list(self.replicas.values())[pick % len(self.replicas)]

    def jobs(self, *roles: Role) -> list[tuple[RecordedReplica, Generation]]:
        return [(r, g) for role in roles for r in self.replicas.values() if r.info.role == role for g in r.jobs]

    def some_job(self, pick: int, *roles: Role) -> tuple[RecordedReplica, Generation]:
        jobs = self.jobs(*roles)
        return jobs[pick % len(jobs)]

    def prefilled(self, replica: RecordedReplica, generation: Generation) -> None:
        job = replica.jobs[generation]
        if replica.info.role == "prefill" and job.computed == job.prompt:
            self.close(replica, generation)

    def open_lease(self, opened: Opened) -> None:
        lease, asked = opened.lease, opened.asked
        replica = self.replicas.get(lease.replica)
        if replica is None or lease.generation in replica.jobs:  # a repeated message must not end what it began
            return
        begun: list[Lease] = []
        try:
            replica.open(lease, asked.tokens, asked.ask.most_tokens, asked.choice)
            begun.append(lease)
            for choice, fork in enumerate(opened.forks, 1):
                replica.fork(fork, lease.generation, choice)
                begun.append(fork)
        except StalePlacement as error:
            assert error.replica == lease.replica
            self.seen["stale"] += 1
            for each in (lease, *opened.forks):
                if each in begun:
                    self.close(replica, each.generation)
                else:
                    self.wire.append(Release(lease.replica, each.generation, replica.tags.beat))

    def close(self, replica: RecordedReplica, generation: Generation) -> None:
        """Forks that wait for it go first: nobody computes their prompt any more."""
        for other in [g for g, job in replica.jobs.items() if job.waits == generation]:
            self.wire.append(replica.close(other))
        if generation in replica.jobs:
            self.wire.append(replica.close(generation))

    def apply(self, id: ReplicaId, reply: Reply) -> None:
        if (replica := self.replicas.get(id)) is None:
            return
        revoked = replica.apply(reply)
        if not reply.known:
            self.undisturbed = False
            self.wire.append(Registered(replica.info, replica.report(self.now, complete=True)))
        for generation in revoked:
            self.closed_by_revoking += 1
            self.seen["revoked"] += 1
            self.close(replica, generation)

    # -- the wire

    def deliver_all(self) -> None:
        while self.wire:
            self.take(self.wire.pop(0))

    def take_all(self, since: int, kind: type[Opened] | type[Release] | type[Registered]) -> None:
        for message in [m for m in self.wire[since:] if isinstance(m, kind)]:
            self.wire.remove(message)
            self.take(message)

    def take(self, message: Message) -> None:
        match message:
            case Opened():
                self.open_lease(message)
                return
            case Answered(replica, reply):
                self.apply(replica, reply)
                return
            case Release():
                self.ledger.release(message)
            case Registered(info, report):
                self.ledger.register(info, report, self.now)
            case CalledDead(replica):
                self.ledger.report_state(replica, "dead", self.now)
            case Report():
                self.wire.append(Answered(message.replica, self.ledger.heartbeat(message, self.now)))
            case Confirmed(requests):
                self.ledger.confirm(requests, self.now)
            case GivenUp(request, how):
                self.open.pop(request, None)
                waited = self.queue.revoke(request, "it was given up")
                self.settle(waited)
                if how == "revoke":
                    self.ledger.revoke(request, self.now, known=bool(waited))
                else:
                    self.ledger.cancel(request, self.now)
        self.pump()

    # -- what must hold in the end

    def calm(self) -> None:
        """Time enough for offers and waiting to end and the dead to be missed, with every message delivered. Prompts
        are computed to their end, and where somebody still waits, answers end: one that has begun is never refused."""
        for turn in range(40):
            self.deliver_all()
            self.beat_all()
            self.deliver_all()
            self.time_passes(CONFIG.silence_s / 5)
            if turn >= 5:
                if not self.waiting and not self.kept_for_nobody():
                    break
                for replica, generation in self.jobs("prefill"):
                    replica.compute(generation, BLOCKS * SIZE)
                    self.prefilled(replica, generation)
                if self.waiting and self.jobs("decode"):
                    self.close(*self.some_job(0, "decode"))
        self.deliver_all()
        self.beat_all()
        self.deliver_all()
        assert not self.waiting, "neither admitted nor refused"
        self.closed_by_revoking = 0
        self.beat_all()
        self.deliver_all()
        assert not self.closed_by_revoking, "revoked without a reason"
        assert not self.kept_for_nobody(), "kept for nobody"

    def kept_for_nobody(self) -> bool:
        return any(not confirmed(r.jobs[g].lease.request) for r, g in self.jobs("decode", "prefill"))

    def both_sides_agree(self) -> None:
        assert {info.id for info in self.ledger.replicas()} == set(self.replicas)
        for book in self.ledger.books():
            replica = self.replicas[book.info.id]
            leases = {generation: list(lease.blocks) for generation, lease in book.leases.items()}
            assert leases == {generation: job.blocks for generation, job in replica.jobs.items()}
            assert book.blocks.reserve == replica.reserve
            assert self.ledger.counts(book.info.id).leased == replica.tags.held
            there = replica.cached()
            if self.undisturbed:
                assert len({job.lease.request for job in replica.jobs.values()}) == len(replica.jobs), "placed twice"
            assert known(self.ledger, book.info.id).items() <= there.items(), "the ledger believes what is not there"

    def hits_are_found_and_nothing_is_stale(self, *, always: bool) -> None:
        """`always`: what can be placed must be, all that is there must be hit."""
        for which in range(len(SHARED)):
            tokens = text(which, 3 * SIZE + 1)
            keys = keys_of(tokens)
            ask = Ask(RequestId("r1"), len(tokens), len(tokens), self.now, keys={GEOMETRY.fingerprint: keys})
            try:
                placement = self.ledger.admit(ask, self.now)
            except (Revoked, Unavailable):
                return
            if placement is None:
                continue
            for lease in (placement.decode, placement.prefill):
                if lease is not None:
                    replica = self.replicas[lease.replica]
                    there = known(self.ledger, lease.replica).values()
                    if always:
                        there = replica.cached().values()
                    hit = next((i for i, key in enumerate(keys[:3]) if key not in there), 3)
                    assert lease.cached == hit
                    replica.open(lease, tokens, len(tokens))
            for lease in (placement.decode, placement.prefill):
                if lease is not None:
                    self.ledger.release(self.replicas[lease.replica].close(lease.generation))

    def a_new_ledger_learns_all_that_is_cached(self) -> None:
        self.start_manager()
        for _ in range(2):
            self.beat_all()
            self.deliver_all()
        self.both_sides_agree()
        for replica in self.replicas.values():
            there = replica.cached()
            self.seen["whole twice"] += len(replica.copies)
            learnt = known(self.ledger, replica.info.id)
            assert set(learnt.values()) == set(there.values())
            assert set(there) - set(learnt) <= replica.copies | {
                block for block, key in there.items() if key in {there[copy] for copy in replica.copies & set(there)}
            }

    def everybody_leaves(self) -> None:
        for replica in self.replicas.values():
            for generation in list(replica.jobs):
                self.close(replica, generation)
        self.calm()
        self.both_sides_agree()
        for replica in self.replicas.values():
            counts = self.ledger.counts(replica.info.id)
            assert (counts.leased, replica.tags.held) == (0, 0), counts
            assert counts.free + counts.cached == counts.total
            assert counts.cached == len(known(self.ledger, replica.info.id))
