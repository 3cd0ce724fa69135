"""The ledger and the replicas' tags under every order of events, over a network that loses, delays and reorders.

Rules put messages on the wire and take any one off it. What must hold at all times: no block is in two places in the
ledger, no two open leases share a block at a replica. What must hold in the end, once the network is kind again and
everybody has left: every block is free on both sides. BIFOLIO_FUZZ_STEPS=100000 runs that many steps.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.tags import NEVER, BlockTags
from bifolio.protos.errors import DoesNotFit, Revoked, StalePlacement
from bifolio.protos.messages import (
    Ask,
    BlockId,
    Generation,
    Geometry,
    Lease,
    ReplicaId,
    ReplicaInfo,
    Reply,
    Report,
    RequestId,
    Role,
)

STEPS = 100
BLOCKS = 4  # so few that the same blocks are granted again and again
BLOCK_SIZE = 4
CONFIG = KvConfig(offer_ttl_s=10, silence_s=40)  # apart, so that offers expire at replicas that are well

requests = st.integers(0, 5)
picks = st.integers(0, 11)


@dataclass
class Replica:
    """A replica's process: its tags, and a second record of who owns what, kept the simplest way there is."""

    info: ReplicaInfo
    tags: BlockTags
    open: dict[Generation, set[BlockId]] = field(default_factory=dict)
    newest: dict[BlockId, Generation] = field(default_factory=dict)  # that opened with it


@dataclass(frozen=True)
class Opened:
    lease: Lease


@dataclass(frozen=True)
class Released:
    replica: ReplicaId
    generation: Generation
    beat: int


@dataclass(frozen=True)
class Answered:
    replica: ReplicaId
    reply: Reply


@dataclass(frozen=True)
class Registered:
    info: ReplicaInfo
    report: Report


@dataclass(frozen=True)
class ReportedDead:
    replica: ReplicaId


Message = Opened | Released | Answered | Registered | ReportedDead | Report | RequestId | Generation


class Cell(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.epoch = 1
        self.ledger = Ledger(self.epoch, CONFIG)
        self.replicas: dict[ReplicaId, Replica] = {}
        self.wire: list[Message] = []
        self.born = 0

    # -- replicas and the manager come and go

    @initialize()
    def begin(self) -> None:
        self.start_replica("decode")
        self.start_replica("prefill")
        self.deliver_all()

    def start_replica(self, role: Role) -> None:
        self.born += 1
        geometry = Geometry("m", 1, 1, 8, BLOCK_SIZE, "float32")
        info = ReplicaInfo(ReplicaId(f"{role}{self.born}"), role, geometry, BLOCKS, "host:1", max_sequences=4)
        tags = BlockTags(info.id, info.blocks, grows=role == "decode")
        self.replicas[info.id] = Replica(info, tags)
        self.wire.append(Registered(info, tags.report(self.now)))

    @rule(what=st.sampled_from(["replica", "manager", "called dead", "draining", "silence"]), pick=picks)
    def disaster(self, what: str, pick: int) -> None:
        replica = self.some_replica(pick)
        match what:
            case "replica":  # another process takes its place; what the old one sent is still on its way
                del self.replicas[replica.info.id]
                self.start_replica(replica.info.role)
            case "manager":
                self.epoch += 1
                self.ledger = Ledger(self.epoch, CONFIG)
            case "called dead":
                self.wire.append(ReportedDead(replica.info.id))
            case "draining":
                self.ledger.report_state(replica.info.id, "draining", self.now)
            case "silence":
                self.time_passes(CONFIG.silence_s)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)

    # -- requests

    @rule(request=requests, tokens=st.integers(1, 9), more=st.integers(0, 7))
    def serve(self, request: int, tokens: int, more: int) -> None:
        """As nearly always in life: the placement is opened at once, and the next beat fills the reserve."""
        self.admit(request, tokens, more, None, prompt=True)
        self.beat_all()

    @rule(
        request=requests,
        tokens=st.integers(1, 9),
        more=st.integers(0, 7),
        pick=st.none() | picks,
        prompt=st.booleans(),
    )
    def admit(self, request: int, tokens: int, more: int, pick: int | None, prompt: bool) -> None:
        exclude = () if pick is None else (self.some_replica(pick).info.id,)
        ask = Ask(RequestId(f"r{request}"), tokens, tokens + more, 0.0, exclude)
        try:
            placement = self.ledger.admit(ask, self.now)
        except (DoesNotFit, Revoked):
            return
        if placement is not None:
            assert placement.prefill is None or placement.prefill.replica not in exclude
            for lease in placement.leases:
                self.send(Opened(lease), prompt)

    @rule(request=requests)
    def revoke(self, request: int) -> None:
        self.wire.append(RequestId(f"r{request}"))

    @rule(pick=picks, n=st.sampled_from([1, 1, 2]))
    def draw(self, pick: int, n: int) -> None:
        if leases := self.open_leases("decode"):
            replica, generation = leases[pick % len(leases)]
            drawn = replica.tags.draw(generation, n)
            assert drawn is None or len(drawn) == n
            self.owns(replica, generation, drawn or ())

    @rule(pick=picks)
    def close(self, pick: int) -> None:
        if leases := self.open_leases("decode") + self.open_leases("prefill"):
            self.close_lease(*leases[pick % len(leases)])

    @rule(pick=picks)
    def beat(self, pick: int) -> None:
        self.wire.append(self.some_replica(pick).tags.report(self.now))

    @rule(twice=st.booleans())
    def beat_all(self, twice: bool = False) -> None:
        for replica in list(self.replicas.values()):
            self.take(replica.tags.report(self.now))
            reply = self.wire.pop()
            self.take(reply)
            if twice:
                self.take(reply)

    # -- the network

    def send(self, message: Message, prompt: bool) -> None:
        if prompt:
            self.take(message)
        else:
            self.wire.append(message)

    @precondition(lambda self: self.wire)
    @rule(pick=picks)
    def deliver(self, pick: int) -> None:
        self.take(self.wire.pop(pick % len(self.wire)))

    @precondition(lambda self: self.wire)
    @rule()
    def deliver_all(self) -> None:
        while self.wire:
            self.take(self.wire.pop(0))

    @precondition(lambda self: self.wire)
    @rule(pick=picks)
    def repeat(self, pick: int) -> None:
        self.take(self.wire[pick % len(self.wire)])

    @precondition(lambda self: self.wire)
    @rule(pick=picks)
    def lose(self, pick: int) -> None:
        self.wire.pop(pick % len(self.wire))

    def take(self, message: Message) -> None:
        match message:
            case Opened(lease):
                self.open_lease(lease)
            case Released(replica, generation, beat):
                self.ledger.release(replica, generation, beat)
            case Registered(info, report):
                self.ledger.register(info, report, self.now)
            case ReportedDead(replica):
                self.ledger.report_state(replica, "dead", self.now)
            case Report():
                self.wire.append(Answered(message.replica, self.ledger.heartbeat(message, self.now)))
            case Answered(replica, reply):
                self.apply(replica, reply)
            case Generation():
                self.ledger.activate(message)
            case str():
                self.ledger.revoke(message, self.now)

    # -- what a replica does

    def some_replica(self, pick: int) -> Replica:
        return list(self.replicas.values())[pick % len(self.replicas)]

    def open_leases(self, role: Role) -> list[tuple[Replica, Generation]]:
        return [(r, g) for r in self.replicas.values() if r.info.role == role for g in r.open]

    def open_lease(self, lease: Lease) -> None:
        if (replica := self.replicas.get(lease.replica)) is None:
            return
        try:
            replica.tags.open(lease)
        except StalePlacement as error:
            assert error.replica == lease.replica
            if lease.generation not in replica.open:  # a repeated message must not end what it began
                self.wire.append(Released(lease.replica, lease.generation, replica.tags.beat))
            return
        for block in lease.blocks:
            assert replica.newest.get(block, NEVER) < lease.generation, "a lease opened twice, or after its time"
            replica.newest[block] = lease.generation
        replica.open[lease.generation] = set()
        self.owns(replica, lease.generation, lease.blocks)
        self.wire.append(lease.generation)

    def owns(self, replica: Replica, generation: Generation, blocks: tuple[BlockId, ...]) -> None:
        for other in replica.open.values():
            assert not other & set(blocks), "two open leases share a block"
        replica.open[generation].update(blocks)

    def close_lease(self, replica: Replica, generation: Generation) -> None:
        del replica.open[generation]
        beat = replica.tags.close(generation)
        assert beat is not None
        self.wire.append(Released(replica.info.id, generation, beat))

    def apply(self, id: ReplicaId, reply: Reply) -> None:
        if (replica := self.replicas.get(id)) is None:
            return
        if not reply.known:
            self.wire.append(Registered(replica.info, replica.tags.report(self.now)))
        for generation in replica.tags.apply(reply):
            self.close_lease(replica, generation)

    def calm(self) -> None:
        """Time enough for offers to expire and the dead to be missed, with every message delivered."""
        for _ in range(6):
            self.deliver_all()
            self.beat_all()
            self.deliver_all()
            self.time_passes(CONFIG.silence_s / 5)
        self.beat_all()

    # -- what must hold

    @invariant()
    def integrity(self) -> None:
        self.ledger.check_integrity()
        for info in self.ledger.replicas():
            counts = self.ledger.counts(info.id)
            assert counts.free + counts.cached + counts.leased == counts.total

    @invariant()
    def both_records_of_the_replica_agree(self) -> None:
        for replica in self.replicas.values():
            for generation, blocks in replica.open.items():
                assert all(replica.tags.owner(block) == generation for block in blocks)

    def teardown(self) -> None:
        """The network is kind again: both sides agree. Then everybody leaves: every block comes back."""
        self.calm()
        assert {info.id for info in self.ledger.replicas()} == set(self.replicas)
        for replica in self.replicas.values():
            assert self.ledger.counts(replica.info.id).leased == replica.tags.held
            for generation in list(replica.open):
                self.close_lease(replica, generation)
        self.calm()
        for replica in self.replicas.values():
            counts = self.ledger.counts(replica.info.id)
            assert counts.free == counts.total, (counts, self.ledger.snapshot())
            assert replica.tags.held == 0
        super().teardown()


fuzz_steps = int(os.environ.get("BIFOLIO_FUZZ_STEPS", "0"))
TestCell = Cell.TestCase
TestCell.settings = settings(
    max_examples=max(300, fuzz_steps // STEPS),
    stateful_step_count=STEPS,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
